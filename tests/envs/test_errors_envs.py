"""Damaged files of shops, questions and corpora, which others may have written: one sentence."""

import codecs
import json
from functools import partial
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.search import env
from paw_min.envs.search.questions import load_questions
from paw_min.envs.webshop import Shop
from paw_min.retrieval import open_retriever
from tests.shops import annotation, product

MISSING = None
DEEP = "[" * 100_000
PRODUCTS = "items_shuffle.json"
ANNOTATIONS = "items_ins_v2.json"
INSTRUCTIONS = "items_human_ins.json"
SIZES = {"size": [{"value": "s", "image": None}, {"value": "m", "image": None}]}
MANY = {f"option {i}": [{"value": str(k), "image": None} for k in range(10)] for i in range(9)}
ASKED = {"instruction": "a bench", "instruction_attributes": ["solid wood"],
         "instruction_options": []}
QUESTION = {"question": "who?", "golden_answers": ["me"], "data_source": "nq", "env_kwargs": None}
VERL = {"question": "who?", "ground_truth": {"target": ["me"]}, "data_source": "nq"}
PASSAGE = {"id": "0", "contents": '"Title"\nwho'}

SHOP = {PRODUCTS: [product(customization_options=SIZES)], ANNOTATIONS: {"B000000001": annotation()}}
GOOD = {  # the files of each reader: a JSON value, or the rows of a .jsonl file
    "shop": SHOP,
    "human shop": SHOP | {INSTRUCTIONS: {"B000000001": [ASKED]}},
    "questions": {"q.jsonl": [QUESTION, {"env_kwargs": VERL}]},
    "corpus": {"corpus.jsonl": [PASSAGE, PASSAGE | {"id": "1"}]},
}


def write(path: Path, content) -> None:
    """A text as it is."""
    if isinstance(content, list) and path.suffix == ".jsonl":
        rows = [row if isinstance(row, str) else json.dumps(row) for row in content]
        content = "".join(f"{row}\n" for row in rows)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def use_shop(folder: Path, human_goals: bool = False) -> Shop:
    """Uses what it has read, so that a wrong type cannot hide."""
    shop = Shop.load(folder, human_goals)
    for index in range(shop.n_goals):
        shop.reward(index, "B000000001", {})
    shop.search("bench")
    return shop


READERS = {
    "shop": use_shop,
    "human shop": partial(use_shop, human_goals=True),
    "questions": lambda folder: load_questions(folder / "q.jsonl"),
    "corpus": lambda folder: open_retriever(folder).search(["who"], 2),
}


def annotated(**fields):
    return {"B000000001": annotation(**fields)}


ROWS = [  # a reader, one of its files, what is in it, a part of the sentence
    ("shop", PRODUCTS, MISSING,
     "has no items_shuffle.json or items_shuffle_1000.json; .* as in RUNNING.md, \"WebShop\""),
    ("shop", PRODUCTS, json.dumps([product()])[:-20], "JSONDecodeError"),
    ("shop", PRODUCTS, ["B000000001"], "^Row 0 of .*TypeError.* fix or remove the row"),
    ("shop", PRODUCTS, [product(pricing="12.99")], r"'12.99' is not a number after a '\$'"),
    ("shop", PRODUCTS, [product(query=None)], "^Product B000000001 of .*AttributeError"),
    ("shop", PRODUCTS, [product(name=5)], "^Product B000000001 of .*5 is not a text"),
    ("shop", PRODUCTS, [product(customization_options=MANY)], "B000000001 has 1000000000 of them"),
    ("shop", ANNOTATIONS, annotated(attributes="wood"), "'wood' is not a list"),
    ("shop", ANNOTATIONS, annotated(instruction=5), "instruction of product B0.* 5 is not a text"),
    ("human shop", INSTRUCTIONS, {"B000000001": [ASKED | {"instruction_options": [5]}]},
     "instruction of product B0.* 5 is not a text"),
    ("shop", ANNOTATIONS, "[]", "not a JSON object"),
    ("shop", ANNOTATIONS, {"B000000009": {}}, "B000000001 is not in items_ins_v2"),
    ("shop", ANNOTATIONS, annotated(instruction=None), "no synthetic goal .*human_goals=True"),
    ("human shop", INSTRUCTIONS, MISSING, "no items_human_ins.json"),
    ("human shop", INSTRUCTIONS, {"B000000001": None}, "product B000000001 .* cannot be read"),
    ("questions", "q.jsonl", MISSING, "does not exist"),
    ("questions", "q.jsonl", "", "has no questions"),
    ("questions", "q.jsonl", [QUESTION, DEEP], "line 2 cannot be read .RecursionError"),
    ("questions", "q.jsonl", [QUESTION, {"q": "?"}], "row 2 .*KeyError: 'question'.*a row needs"),
    ("questions", "q.jsonl", [QUESTION | {"golden_answers": [1990]}], "1990 instead of a text"),
    ("corpus", "corpus.jsonl", MISSING, "does not exist"),
    ("corpus", "corpus.jsonl", "\n\n", "is empty"),
    ("corpus", "corpus.jsonl", [PASSAGE, '{"id": "1", "conte'], "passage 2 cannot be read"),
    ("corpus", "corpus.jsonl", [PASSAGE | {"id": "x"}] * 2, "the id 'x' twice"),
]


@pytest.mark.parametrize("name, file, content, sentence", ROWS, ids=range(len(ROWS)))
def test_a_damaged_file_is_one_sentence(tmp_path, name, file, content, sentence):
    read = READERS[name]
    for good, value in GOOD[name].items():
        write(tmp_path / good, value)
    assert read(tmp_path)
    if content is MISSING:
        (tmp_path / file).unlink()
    else:
        write(tmp_path / file, content)
    with pytest.raises((UserError, ValueError, FileNotFoundError), match=sentence) as raised:
        read(tmp_path)
    text = str(raised.value)
    # A deep or long value is not repeated.
    assert "\n" not in text and len(text) < 500 + len(str(tmp_path))
    # Goals come from several files.
    assert file.split(".")[0] in text or "goal" in text


@pytest.mark.parametrize("name", GOOD)
def test_files_with_a_byte_order_mark(tmp_path, name):
    for good, value in GOOD[name].items():
        write(tmp_path / good, value)
        (tmp_path / good).write_bytes(codecs.BOM_UTF8 + (tmp_path / good).read_bytes())
    assert READERS[name](tmp_path)


def test_one_file_for_training_and_test_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", [QUESTION])
    with pytest.raises(ValueError, match="a.jsonl is one file, so training and test"):
        env.load(Config(env="search", retriever="http://localhost:1"), str(tmp_path / "a.jsonl"))
