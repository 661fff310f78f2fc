"""Readers of files that somebody else may have written, each with good files for it.

test_errors_envs.py damages them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paw_min.envs.search.questions import load_questions
from paw_min.envs.webshop import Shop
from paw_min.retrieval import open_retriever

# ---- records of shops ----


def product(asin="B000000001", **fields):
    return {"asin": asin, "name": "Red Oak Bench", "category": "garden", "query": " Bench ",
            "product_category": "Home › Benches", "pricing": "$20.00", "full_description": "good",
            "small_description": ["one", "two"], "customization_options": None,
            "images": ["x.jpg"], **fields}


def annotation(**fields):
    return {"attributes": ["solid wood"], "instruction": "Find me a bench",
            "instruction_attributes": ["solid wood"], **fields}


def instruction(**fields):
    return {"instruction": "a bench", "instruction_attributes": ["solid wood"],
            "instruction_options": [], **fields}


def options(**groups):
    return {name: [{"value": value, "image": None} for value in values]
            for name, values in groups.items()}


# ---- readers ----


@dataclass
class Reader:
    """files: name -> content, a JSON value or, of a .jsonl file, a list of rows. load: of a folder.

    load also uses what it has read, so that a wrong type cannot hide.
    """

    files: dict[str, object]
    load: Callable[[Path], object]

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            write_content(folder / name, content)


def write_content(path: Path, content) -> None:
    """Write a JSON value, or the rows of a .jsonl file; a text or bytes as they are."""
    if isinstance(content, list) and path.suffix == ".jsonl":
        content = "".join(as_json(row) + "\n" for row in content)
    elif not isinstance(content, str | bytes):
        content = as_json(content)
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogatepass")
    path.write_bytes(content)


def as_json(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def use_shop(folder: Path, human_goals: bool = False) -> Shop:
    shop = Shop.load(folder, human_goals)
    asin = next(iter(shop.products))
    for index in range(min(shop.n_goals, 5)):
        shop.reward(index, asin, {})
    shop.search("bench")
    return shop


SHOP = {
    "items_shuffle.json": [product(customization_options=options(size=["s", "m"]))],
    "items_ins_v2.json": {"B000000001": annotation()},
}
HUMAN = SHOP | {"items_human_ins.json": {"B000000001": [instruction()]}}
QUESTION = {"question": "who?", "golden_answers": ["me"], "data_source": "nq", "env_kwargs": None}
VERL = {"question": "who?", "ground_truth": {"target": ["me"]}, "data_source": "nq"}
PASSAGE = {"id": "0", "contents": '"Title"\nwho'}

READERS = {
    "shop": Reader(SHOP, use_shop),
    "human shop": Reader(HUMAN, lambda folder: use_shop(folder, human_goals=True)),
    "questions": Reader(
        {"q.jsonl": [QUESTION, {"env_kwargs": VERL}]},
        lambda folder: load_questions(folder / "q.jsonl"),
    ),
    "corpus": Reader(
        {"corpus.jsonl": [PASSAGE, PASSAGE | {"id": "1"}]},
        lambda folder: open_retriever(folder).search(["who"], 2),
    ),
}
