"""Invented shops in the file formats of WebShop.

What it computes: a folder with
    items_shuffle.json      the products, a list of records
    items_ins_v2.json       asin -> attributes, and the instruction of the synthetic goals
    items_human_ins.json    asin -> instructions as a person might put them, for every third asin
that loads wherever the official data do. Source: the formats of princeton-nlp/WebShop. Its own data
are scraped pages of unclear licence, not ours to pass on; here every product is invented.

The words are few, so that a word-level language model of a million parameters can learn them:
twenty kinds of products with five attributes each, options and prices from short lists. More
products do not bring more words, except their asins. As in WebShop's pages, asins and the
upper-case brands tell nothing about the product: they are the noise of PaW A.4.

What makes shopping a task: products of one kind differ in attributes, price and options. The title
names every attribute that the instruction asks for, so that a reader can choose; only the product's
own page shows the options. Every goal can be won with a score of 1: by its own product.

One product in nine has an oddity of the official data: no options, an option group that is null, no
price, a price over all limits, a price range in two spellings, no description, bullets as one
string, no instruction, a human instruction without attributes.

    python -m paw_min.envs.shops --out DIR --products N --seed S

The same (n_products, seed) gives the same bytes everywhere; a shop of n products begins with the
products of every smaller one of its seed.
"""

import argparse
import json
import os
import random
import string
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

VERSION = 1  # raise it with every change that changes the bytes of a shop
DEFAULT_PRODUCTS = 100  # 1,250 synthetic goals with seed 0
FILES = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")


# name | where its prices begin in DOLLARS | option groups | attributes
KINDS_TABLE = """
# grocery: Grocery & Gourmet Food › Pantry
herbal tea       | 0 | flavor, pack   | caffeine free, loose leaf, organic, hand picked, calming
granola bars     | 0 | flavor, pack   | gluten free, high protein, chewy, nut safe, crunchy
potato chips     | 0 | flavor, pack   | kettle cooked, low sodium, baked, thick cut, spicy
pasta sauce      | 0 | flavor, jar    | slow simmered, vegan, no sugar, chunky, fire roasted
# beauty: Beauty & Personal Care › Skin & Hair
face cream       | 1 | scent, jar     | cruelty free, fast absorbing, soothing, anti aging, rich
hair mask        | 1 | scent, jar     | deep repair, sulfate free, silky, color safe, nourishing
body wash        | 0 | scent, bottle  | doctor tested, foaming, dry skin, gentle, ph neutral
makeup brush     | 1 | color, bristle | easy clean, soft touch, tapered, travel ready, dense
# electronics: Electronics › Accessories
power cord       | 1 | color, length  | heavy duty, braided, quick charge, tangle proof, grounded
wireless speaker | 4 | color, plug    | water resistant, loud, long lasting, hands free, portable
phone case       | 1 | color, finish  | shock absorbing, slim fit, scratch proof, clear, rugged
desk lamp        | 3 | color, plug    | eye caring, dimmable, flexible, energy saving, clamp on
# garden: Home & Kitchen › Furniture & Textiles
coffee table     | 6 | color, shape   | solid wood, mid century, foldable, space saving, sturdy
area rug         | 5 | color, shape   | machine washable, non slip, plush, stain proof, woven
shower curtain   | 2 | color, liner   | mildew proof, quick dry, weighted, easy hang, opaque
throw pillow     | 1 | color, cover   | memory foam, feather filled, firm, double sided, cozy
# fashion: Clothing & Shoes › Outdoor
rain jacket      | 5 | color, fit     | wind proof, breathable, full zip, packable, seam sealed
yoga pants       | 3 | color, fit     | high waist, stretchy, tummy control, squat proof, seamless
walking shoes    | 5 | color, width   | arch support, lightweight, rubber sole, cushioned, lace up
wool socks       | 0 | color, fit     | moisture wicking, thick, ankle length, itch less, warm
"""


class Kind(NamedTuple):
    name: str  # two words; also the query of the record
    category: str
    path: str  # product_category; products with two common elements count as comparable
    level: int
    groups: list[str]
    attributes: list[str]


def _read_kinds():
    for row in KINDS_TABLE.strip().splitlines():
        if row.startswith("# "):
            category, path = row[2:].split(": ")
            continue
        name, level, groups, attributes = (cell.strip() for cell in row.split("|"))
        shelf = f"{path} › {name.split()[-1].title()} › {name.title()}"
        yield Kind(name, category, shelf, int(level), groups.split(", "), attributes.split(", "))


KINDS = list(_read_kinds())

# The reward compares values fuzzily: none contains another of its group, nor by accident one of the
# reward's colour words (`standard` would be read as `tan`). No value occurs in two groups of a
# kind, and none is the name of a button.
OPTIONS = {
    "color": ("black", "white", "navy", "rose gold", "army green", "purple", "orange", "brown"),
    "flavor": ("mint", "lemon", "cinnamon", "sea salt", "vanilla", "garlic"),
    "scent": ("lavender", "coconut", "unscented", "rose petal", "citrus"),
    "pack": ("single", "pack of 3", "family box", "dozen"),
    "jar": ("2 ounce", "tub", "half pound", "refill pouch"),
    "bottle": ("pump", "squeeze tube", "mini", "one liter"),
    "bristle": ("horse", "synthetic", "bamboo mix", "sponge"),
    "length": ("3 foot", "half meter", "extended", "coiled"),
    "plug": ("usb", "wall socket", "battery", "solar"),
    "finish": ("matte", "glossy", "carbon look", "cork/leather"),  # read as "cork | leather"
    "shape": ("round", "square", "oval", "runner"),
    "liner": ("fabric", "vinyl", "no liner", "hookless"),
    "cover": ("velvet", "linen", "faux fur", "corduroy"),
    "fit": ("petite", "regular", "tall", "plus size"),
    "width": ("narrow", "medium", "wide", "orthopedic"),
}
BRANDS = ("VELTOR", "KASMIRO", "ORDANE7", "BRUVIO", "TENZAK", "LUMERRA", "QUOVIS", "FENDARO88",
          "HELVIQ", "MARUNO", "PELTRIX", "SORVAY", "ZIMBRA3", "DOVENTA", "GRAVIL", "NELUXO",
          "WYNDRIL", "CALVEMO5", "JAXORI", "UBERIA", "RIVOSKA", "TOLMEK", "YENDRA", "EXOVAL24")
DOLLARS = (5, 11, 18, 26, 35, 45, 56, 68, 81, 95, 112, 130)
CENTS = ("99", "49", "25")
PLACES = ("home", "office", "travel", "daily use", "a friend", "the whole year")
ODDITIES = ("no options", "null group", "no price", "high price", "range", "dashed range",
            "no description", "one string", "no instruction", "no human attributes")
# Fields that every official record has and that the environment never reads.
UNREAD = {"product_information": {}, "brand_url": "", "list_price": "", "seller_id": None,
          "availability_status": "In Stock.", "average_rating": None, "aplus_present": ""}


def make_product(rng: random.Random, index: int, asin: str) -> tuple[dict, dict, list[dict]]:
    """Product number `index` -> its records in the three files (the last may be empty)."""
    odd = ODDITIES[index // 9 % len(ODDITIES)] if index % 9 == 8 else None
    kind = KINDS[index % len(KINDS)]  # 9 and 20 have no common divisor: any kind can be odd
    titled = rng.sample(kind.attributes[:4], 2)  # the fewer there are, the more look alike
    attributes = [*titled, rng.choice([a for a in kind.attributes if a not in titled])]
    asked = titled[:1 + (rng.random() < 0.8)]
    brand, place = rng.choice(BRANDS), rng.choice(PLACES)

    options = {}
    for group in kind.groups[:1 if rng.random() < 0.1 else 2]:
        values = rng.sample(OPTIONS[group], rng.randint(3, min(5, len(OPTIONS[group]))))
        options[group.title()] = [{"value": value.title(), "image": None} for value in values]
    if odd == "no options":
        options = None
    elif odd == "null group":
        options["Style"] = None

    low = kind.level + rng.randrange(4)
    price, more = (f"${DOLLARS[i]}.{rng.choice(CENTS)}" for i in (low, low + 2))
    pricing = {"no price": rng.choice(("", None)), "high price": "$1,099.99",
               "range": price + more, "dashed range": f"{price} - {more}"}.get(odd, price)
    bullets = [f"{attributes[2]} {kind.name}", f"{' and '.join(titled)}", f"for {place}"]
    product = {
        "asin": asin,
        "name": f"{brand} {' '.join([*titled, kind.name]).title()}",
        "category": kind.category,
        "query": kind.name,
        "product_category": kind.path,
        "pricing": pricing,
        "full_description": "" if odd == "no description" else
                            f"{brand} makes this {titled[0]} {kind.name} for {place}.",
        "small_description": bullets[0] if odd == "one string" else bullets,
        "customization_options": options,
        "images": [f"https://img.example/{asin}.jpg"],
        "brand": brand,
        **UNREAD,
    }
    instruction = None if odd == "no instruction" else f"Find me {', '.join(asked)} {kind.name}"
    goal = {"attributes": attributes, "instruction": instruction, "instruction_attributes": asked}
    human = []
    if index % 3 == 2:
        chosen = [rng.choice(values)["value"].lower().replace("/", " | ")
                  for values in (options or {}).values() if values]
        text = rng.choice(("i need some {0}, {1}", "i am looking for {1} {0}", "get me {1} {0}"))
        text = text.format(kind.name, " and ".join(asked)) + " in " * bool(chosen)
        names = [name.lower() for name in options or ()]
        human = [{"asin": asin, "instruction": text + ", ".join(chosen) + ".",
                  "attributes": attributes,
                  "options": [f"{name}: {value}" for name, value in zip(names, chosen)],
                  "instruction_attributes": [] if odd == "no human attributes" else asked,
                  "instruction_options": chosen, "assignment_id": "", "worker_id": ""}]
    return product, goal, human


def generate(folder, n_products: int = DEFAULT_PRODUCTS, seed: int = 0,
             progress: bool = False) -> Path:
    """Make a shop, or find it there; returns the folder.

    A folder that holds another shop is a ValueError. Files appear whole; an interrupted call is
    completed by the same call.
    """
    if n_products < 1:
        raise ValueError(f"n_products is {n_products}; choose 1 or more.")
    folder = Path(folder).expanduser()
    manifest = folder / "manifest.json"
    asked = {"generator": VERSION, "n_products": n_products, "seed": seed}
    if manifest.exists():
        found = json.loads(manifest.read_text(encoding="utf-8"))
        complete = found.pop("complete", False)
        if found != asked:
            raise ValueError(f"{folder} holds a shop made with {found}, and {asked} was asked for; "
                             f"choose another folder or delete this one.")
        if complete and all((folder / name).is_file() for name in FILES):
            return folder
    elif any((folder / name).exists() for name in FILES):
        raise ValueError(f"{folder} holds a shop from elsewhere; choose another folder.")
    _write(manifest, [json.dumps(asked)])

    rng, asins = random.Random(f"shop {seed}"), set()
    products, goals, humans = [], [], []  # lines of JSON: much smaller than what they describe
    for index in tqdm(range(n_products), "products", disable=None if progress else True):
        while True:
            asin = "B0" + "".join(rng.choices(string.digits + string.ascii_uppercase, k=8))
            if asin not in asins:
                break
        asins.add(asin)
        product, goal, human = make_product(rng, index, asin)
        products.append(json.dumps(product))
        goals.append(f'"{asin}": {json.dumps(goal)}')
        if human:
            humans.append(f'"{asin}": {json.dumps(human)}')
    for name, lines, (start, end) in zip(FILES, (products, goals, humans), ("[]", "{}", "{}")):
        _write(folder / name, [start, ",\n".join(lines), end])
    _write(manifest, [json.dumps(asked | {"complete": True})])
    return folder


def _write(path: Path, lines: list[str]):
    """Write ASCII lines so that the file is whole or absent, the same bytes on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(("\n".join(lines) + "\n").encode("ascii"))
    os.replace(partial, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--products", type=int, default=DEFAULT_PRODUCTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = generate(args.out, args.products, args.seed, progress=True)
    print(f"{args.products} products in {folder}")


if __name__ == "__main__":
    main()
