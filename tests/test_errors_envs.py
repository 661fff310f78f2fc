"""Damaged files of shops, questions, corpora, triplets and trajectories: one sentence for each.

A row of ROWS: a reader of readers.py, one of its files, what is in it, a part of the sentence.
"""

import json
from dataclasses import asdict

import pytest

from paw_min.base.errors import UserError
from tests.readers import (
    EPISODE,
    PASSAGE,
    QUESTION,
    READERS,
    TRIPLET,
    annotation,
    instruction,
    options,
    product,
    write_content,
)

MISSING = None
DEEP = "[" * 100_000
PRODUCTS = "items_shuffle.json"
ANNOTATIONS = "items_ins_v2.json"
INSTRUCTIONS = "items_human_ins.json"


def a_product(**fields):
    return [product(**fields)]


def annotated(**fields):
    return {"B000000001": annotation(**fields)}


def instructed(**fields):
    return {"B000000001": [instruction(**fields)]}


def question(**fields):
    """A good row, and one with these fields."""
    return [QUESTION, QUESTION | fields]


def triplet(**fields):
    return [asdict(TRIPLET) | fields]


def episode(**fields):
    return [asdict(EPISODE) | fields]


ROWS = [
    ("shop", PRODUCTS, MISSING, "has no items_shuffle.json or items_shuffle_1000.json"),
    ("shop", PRODUCTS, json.dumps(a_product())[:-20], "JSONDecodeError"),
    ("shop", PRODUCTS, ["B000000001"], "^Row 0 of .*TypeError.* fix or remove the row"),
    ("shop", PRODUCTS, a_product(pricing="12.99"), r"'12.99' is not a number after a '\$'"),
    ("shop", PRODUCTS, a_product(query=None), "^Product B000000001 of .*AttributeError"),
    ("shop", PRODUCTS, a_product(customization_options=options(size=["\udfff"])), "surrogates not"),
    ("shop", ANNOTATIONS, "[]", "not a JSON dict from asin"),
    ("shop", ANNOTATIONS, {"B000000009": {}}, "B000000001 is not in items_ins_v2"),
    ("shop", ANNOTATIONS, annotated(instruction="\ud800"), "items_ins_v2.json cannot be read"),
    ("shop", ANNOTATIONS, annotated(instruction_attributes=None), "no synthetic goal"),
    ("shop", ANNOTATIONS, annotated(instruction=None), "no synthetic goal .*human_goals=True"),
    ("human shop", INSTRUCTIONS, MISSING, "no items_human_ins.json"),
    ("human shop", INSTRUCTIONS, {"B000000001": None}, "product B000000001 .* cannot be read"),
    ("human shop", INSTRUCTIONS, instructed(instruction=None), "AttributeError.* get the file"),
    ("questions", "q.jsonl", MISSING, "does not exist"),
    ("questions", "q.jsonl", "", "has no questions"),
    ("questions", "q.jsonl", [QUESTION, DEEP], "line 2 cannot be read .RecursionError"),
    ("questions", "q.jsonl", [QUESTION, {"q": "?"}], "row 2 .*KeyError: 'question'.*a row needs"),
    ("questions", "q.jsonl", question(question="\ud800"), "surrogates not allowed"),
    ("questions", "q.jsonl", question(golden_answers=[1990]), "1990 in place of a text"),
    ("corpus", "corpus.jsonl", MISSING, "does not exist"),
    ("corpus", "corpus.jsonl", "\n\n", "is empty"),
    ("corpus", "corpus.jsonl", [PASSAGE, '{"id": "1", "conte'], "passage 2 cannot be read"),
    ("corpus", "corpus.jsonl", [PASSAGE | {"id": "x"}] * 2, "the id 'x' twice"),
    ("triplets", "triplets.jsonl", [{}], "instruction: Field required"),
    ("triplets", "triplets.jsonl", [*triplet(), '{"action"'], "the whole: Invalid JSON"),
    ("trajectories", "t.json", MISSING, "it is missing"),
    ("trajectories", "t.json", "[{", "cannot be read"),
    ("trajectories", "t.json", episode(messages=3), "0.messages"),
]


IDS = [f"{name} {number}" for number, (name, *_) in enumerate(ROWS)]


@pytest.mark.parametrize("name, file, content, sentence", ROWS, ids=IDS)
def test_a_damaged_file_is_one_sentence(tmp_path, name, file, content, sentence):
    reader = READERS[name]
    reader.write(tmp_path)
    assert reader.load(tmp_path)  # the file is good before
    if content is MISSING:
        (tmp_path / file).unlink()
    else:
        write_content(tmp_path / file, content)
    with pytest.raises((UserError, ValueError, FileNotFoundError), match=sentence) as raised:
        reader.load(tmp_path)
    text = str(raised.value)
    # A deep or long value is not repeated.
    assert "\n" not in text and len(text) < 500 + len(str(tmp_path))
    # Goals come from several files.
    assert file.split(".")[0] in text or "goal" in text
