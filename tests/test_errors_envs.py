"""Damaged files of shops, questions, corpora, triplets and trajectories: one sentence for each.

A row of ROWS: a reader of readers.py, one of its files, what is in it, a part of the sentence.
"""

import json
from dataclasses import asdict

import pytest

from paw_min.base.errors import UserError
from paw_min.envs.search.questions import load_questions
from paw_min.envs.webshop import Shop
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
    said,
    write_content,
)

MISSING = None
DEEP = "[" * 100_000
PRODUCTS = "items_shuffle.json"
ANNOTATIONS = "items_ins_v2.json"
INSTRUCTIONS = "items_human_ins.json"
MANY = options(**{f"group {i}": map(str, range(10)) for i in range(20)})


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
    ("shop", PRODUCTS, [{"asin": "nan"}], "has no usable product"),
    ("shop", PRODUCTS, json.dumps(a_product())[:-20], "JSONDecodeError"),
    ("shop", PRODUCTS, ["B000000001"], "^Row 0 of .*TypeError.* fix or remove the row"),
    ("shop", PRODUCTS, a_product(images=[]), "^Product B000000001 of .* it has no images"),
    ("shop", PRODUCTS, a_product(pricing="12.99"), r"'12.99' is not a number after a '\$'"),
    ("shop", PRODUCTS, a_product(name=None), "'name' is not a text"),
    ("shop", PRODUCTS, a_product(customization_options=options(size=["\udfff"])), "surrogates not"),
    ("shop", PRODUCTS, a_product(customization_options=MANY),
     "10{20} goals are .* product B000000001 has 10{20} of"),
    ("shop", ANNOTATIONS, "[]", "not a JSON dict from asin"),
    ("shop", ANNOTATIONS, {"B000000009": {}}, "B000000001 is not in items_ins_v2"),
    ("shop", ANNOTATIONS, annotated(attributes="solid wood"), "the attributes are not a list"),
    ("shop", ANNOTATIONS, annotated(instruction="\ud800"), "items_ins_v2.json cannot be read"),
    ("shop", ANNOTATIONS, annotated(instruction_attributes=None), "no list of texts"),
    ("shop", ANNOTATIONS, annotated(instruction=None), "no synthetic goal .*human_goals=True"),
    ("human shop", INSTRUCTIONS, MISSING, "no items_human_ins.json"),
    ("human shop", INSTRUCTIONS, {"B000000001": None}, "product B000000001 .* is not a list"),
    ("human shop", INSTRUCTIONS, instructed(instruction=None), "no text 'instruction'"),
    ("questions", "q.jsonl", MISSING, "does not exist"),
    ("questions", "q.jsonl", "", "has no questions"),
    ("questions", "q.jsonl", [QUESTION, DEEP], "line 2 cannot be read .RecursionError"),
    ("questions", "q.jsonl", [QUESTION, {"q": "?"}], "row 2 .*KeyError: 'question'.*a row needs"),
    ("questions", "q.jsonl", question(question="  "), "' ' in place of a text"),
    ("questions", "q.jsonl", question(question="\ud800"), "surrogates not allowed"),
    ("questions", "q.jsonl", question(golden_answers=[1990]), "1990 in place of a text"),
    ("questions", "q.jsonl", question(golden_answers=[]), "KeyError: 'reward_model'"),
    ("corpus", "corpus.jsonl", MISSING, "does not exist"),
    ("corpus", "corpus.jsonl", "\n\n", "is empty"),
    ("corpus", "corpus.jsonl", [PASSAGE, '{"id": "1", "conte'], "passage 2 cannot be read"),
    ("corpus", "corpus.jsonl", [PASSAGE | {"contents": 5}], "contents is not a text"),
    ("corpus", "corpus.jsonl", [PASSAGE | {"id": "x"}] * 2, "the id 'x' twice"),
    ("triplets", "triplets.jsonl", MISSING, "is missing: restore it, or delete .* collect again"),
    ("triplets", "triplets.jsonl", [{}], "line 1: instruction: Field required; .*collect again"),
    ("triplets", "triplets.jsonl", [*triplet(), '{"action"'], "line 2: the whole: Invalid JSON"),
    ("trajectories", "t.json", MISSING, "does not exist"),
    ("trajectories", "t.json", "[{", "cannot be read"),
    ("trajectories", "t.json", episode(messages=3), "0.messages"),
    ("trajectories", "t.json", episode(messages=[said("user", "x")]), "has the roles user"),
    ("trajectories", "t.json", episode(task="b.z8"), "has episodes of textworld, not of alfworld"),
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


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="~nobodyx/y begins with a home folder that does not"):
        Shop.load("~nobodyx/y")
    with pytest.raises(FileNotFoundError, match="neither dev.parquet nor dev.jsonl"):
        load_questions(tmp_path, "dev")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match="a.csv is neither .parquet nor .jsonl"):
        load_questions(tmp_path / "a.csv")


def test_a_damaged_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("PAR1 but not really")
    with pytest.raises(ValueError, match="a.parquet cannot be read .*: download it") as raised:
        load_questions(path)
    assert "\n" not in str(raised.value)
