"""The records of WebShop's files: a product and its annotation."""


def product(asin="B000000001", **fields):
    return {"asin": asin, "name": "Red Oak Bench", "category": "garden", "query": " Bench ",
            "product_category": "Home › Benches", "pricing": "$20.00", "full_description": "good",
            "small_description": ["one", "two"], "customization_options": None,
            "images": ["x.jpg"], **fields}


def annotation(**fields):
    return {"attributes": ["solid wood"], "instruction": "Find me a bench",
            "instruction_attributes": ["solid wood"], **fields}
