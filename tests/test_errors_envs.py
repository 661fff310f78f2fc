"""Damaged files of shops, questions and corpora: one sentence for each.

A row of ROWS: a reader of readers.py, one of its files, what is in it, a part of the sentence.
"""

import json

import pytest

from paw_min.base.errors import UserError
from tests.readers import (
    PASSAGE,
    QUESTION,
    READERS,
    annotation,
    instruction,
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


ROWS = [
    ("shop", PRODUCTS, MISSING, "has no items_shuffle.json or items_shuffle_1000.json"),
    ("shop", PRODUCTS, json.dumps(a_product())[:-20], "JSONDecodeError"),
    ("shop", PRODUCTS, ["B000000001"], "^Row 0 of .*TypeError.* fix or remove the row"),
    ("shop", PRODUCTS, a_product(pricing="12.99"), r"'12.99' is not a number after a '\$'"),
    ("shop", PRODUCTS, a_product(query=None), "^Product B000000001 of .*AttributeError"),
    ("shop", ANNOTATIONS, "[]", "not a JSON dict from asin"),
    ("shop", ANNOTATIONS, {"B000000009": {}}, "B000000001 is not in items_ins_v2"),
    ("shop", ANNOTATIONS, annotated(instruction_attributes=None), "no synthetic goal"),
    ("shop", ANNOTATIONS, annotated(instruction=None), "no synthetic goal .*human_goals=True"),
    ("human shop", INSTRUCTIONS, MISSING, "no items_human_ins.json"),
    ("human shop", INSTRUCTIONS, {"B000000001": None}, "product B000000001 .* cannot be read"),
    ("human shop", INSTRUCTIONS, instructed(instruction=None), "AttributeError.* get the file"),
    ("questions", "q.jsonl", MISSING, "does not exist"),
    ("questions", "q.jsonl", "", "has no questions"),
    ("questions", "q.jsonl", [QUESTION, DEEP], "line 2 cannot be read .RecursionError"),
    ("questions", "q.jsonl", [QUESTION, {"q": "?"}], "row 2 .*KeyError: 'question'.*a row needs"),
    ("questions", "q.jsonl", [QUESTION, QUESTION | {"golden_answers": [1990]}], "1990 in place of"),
    ("corpus", "corpus.jsonl", MISSING, "does not exist"),
    ("corpus", "corpus.jsonl", "\n\n", "is empty"),
    ("corpus", "corpus.jsonl", [PASSAGE, '{"id": "1", "conte'], "passage 2 cannot be read"),
    ("corpus", "corpus.jsonl", [PASSAGE | {"id": "x"}] * 2, "the id 'x' twice"),
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
