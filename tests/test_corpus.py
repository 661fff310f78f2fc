"""The generated world of search QA: its bytes, its facts, its splits, searches in it.

    python -m pytest tests/test_corpus.py
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections import Counter

import pytest

from paw_min.envs.search.questions import load_questions
from paw_min.toy import search_world

SMALL = {"n_entities": 500, "n_train": 80, "n_test": 20}
FILES = ["corpus.jsonl", "manifest.json", "test.jsonl", "train.jsonl"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The default world; read only."""
    return search_world.generate(tmp_path_factory.mktemp("corpus") / "search")


def passages(folder):
    rows = map(json.loads, (folder / "corpus.jsonl").read_text().splitlines())
    return {row["id"]: row["contents"] for row in rows}


def digest(folder):
    assert sorted(path.name for path in folder.iterdir()) == FILES
    content = b"".join((folder / name).read_bytes() for name in FILES)
    return hashlib.sha256(content).hexdigest()


def names(text):
    return re.findall(search_world.NAME, text)


def read_facts(folder):
    """{(name, words before the value): value}, parsed from the passages."""
    found = {}
    marks = ("born in the town", "has the spouse", "in the country", "on the river",
             "by the author", "by the founder", "sits in the town", "capital in the town")
    for contents in passages(folder).values():
        title, text = contents.split("\n")
        for mark in marks:
            if value := re.search(f"{mark} ({search_world.NAME})", text):
                found[title.strip('"'), mark] = value[1]
    return found


# Question without its name -> the words before the value of each fact, in order.
REFERENCES = {
    "the capital of {}": "capital in the town",
    "the country where {} rises": "in the country",
    "the country of {}": "in the country",
    "the river at {}": "on the river",
    "the town where {} was born": "born in the town",
    "the spouse of {}": "has the spouse",
    "the author of {}": "by the author",
    "the founder of {}": "by the founder",
    "the seat of {}": "sits in the town",
}
QUESTIONS = {
    "Which town is the capital of {}?": "capital in the town",
    "In which country does {} rise?": "in the country",
    "In which country lies {}?": "in the country",
    "Which river runs through {}?": "on the river",
    "Where was {} born?": "born in the town",
    "Whom did {} marry?": "has the spouse",
    "Who wrote {}?": "by the author",
    "Who founded {}?": "by the founder",
    "In which town sits {}?": "sits in the town",
}
CHAINS = {question: [mark] for question, mark in QUESTIONS.items()} | {
    question.format(reference): [first, second]
    for question, second in QUESTIONS.items()
    for reference, first in REFERENCES.items()
}


def supporting_facts(question, facts):
    """[(name, words before the value)] of the facts behind a question, and the answer."""
    (name,) = names(question)
    chain = []
    for mark in CHAINS[question.replace(name, "{}")]:
        chain.append((name, mark))
        name = facts[name, mark]
    return chain, name


def test_same_arguments_same_bytes(tmp_path):
    (tmp_path / "b").mkdir()  # an empty folder is filled
    first, second = (search_world.generate(tmp_path / name, **SMALL) for name in ("a", "b"))
    assert digest(first) == digest(second)
    # These bytes may change only with VERSION: results of different machines are compared.
    assert digest(first)[:16] == "c2416f5b9e3b62cd"
    assert digest(search_world.generate(tmp_path / "c", **SMALL, seed=1)) != digest(first)


def test_sizes_kinds_and_order(folder):
    assert len(passages(folder)) == 3000
    assert list(passages(folder)) == [str(i) for i in range(3000)]
    for split, n in (("train", 2000), ("test", 300)):
        rows = load_questions(folder, split)
        half = n // 2
        assert [row.source for row in rows] == ["single"] * half + ["two_hop"] * half
        assert len({row.question for row in rows}) == n
        ids = [json.loads(line)["id"] for line in (folder / f"{split}.jsonl").open()]
        assert ids == [f"{split}-{i}" for i in range(n)]
        # Every kind of question occurs, and none much more often than the others.
        asked = Counter(re.sub(search_world.NAME, "{}", row.question) for row in rows)
        assert len(asked) == 22 and min(asked.values()) * 2.5 > max(asked.values())


def test_every_answer_follows_from_the_passages(folder):
    facts = read_facts(folder)
    for split in ("train", "test"):
        for row in load_questions(folder, split):
            chain, answer = supporting_facts(row.question, facts)
            assert row.answers == (answer,)
            assert len(chain) == {"single": 1, "two_hop": 2}[row.source]
            assert answer not in row.question


def test_no_fact_behind_a_test_question_is_behind_a_training_question(folder):
    facts = read_facts(folder)
    behind, entities = {}, {}
    for split in ("train", "test"):
        rows = [supporting_facts(row.question, facts) for row in load_questions(folder, split)]
        behind[split] = {fact for chain, _ in rows for fact in chain}
        entities[split] = {name for name, _ in behind[split]} | {answer for _, answer in rows}
    assert len(behind["test"]) > 200
    assert not behind["train"] & behind["test"]
    assert not entities["train"] & entities["test"]  # nor an answer


def test_a_finished_folder_is_reused_and_another_is_refused(tmp_path):
    folder = search_world.generate(tmp_path / "a", **SMALL)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert search_world.generate(folder, **SMALL) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match="another folder or delete this one"):
        search_world.generate(folder, **SMALL, seed=1)
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match="another folder or delete this one"):
        search_world.generate(folder, **SMALL)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text("notes")
    with pytest.raises(ValueError, match="holds something else"):
        search_world.generate(foreign, **SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="holds something else"):
        search_world.generate(tmp_path / "file", **SMALL)


def test_an_interrupted_call_leaves_no_folder_and_the_next_completes_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            search_world.generate(tmp_path / "a", **SMALL)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"a.partial-{os.getpid()}").mkdir()  # left by a process that was killed
    (tmp_path / f"a.partial-{os.getpid()}" / "rest").write_text("")
    assert digest(search_world.generate(tmp_path / "a", **SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_another_process_may_make_the_same_folder_first(tmp_path, monkeypatch):
    replace = os.replace

    def late(source, target):
        shutil.copytree(source, target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    folder = search_world.generate(tmp_path / "a", **SMALL)
    assert digest(folder)[:16] == "c2416f5b9e3b62cd"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"n_entities": 499}, "n_entities is 499"),
        ({"n_entities": 82945}, "from 500 to 82944"),
        ({"n_train": 81}, "n_train 81"),
        ({"n_test": 0}, "n_test 0"),
        ({"n_train": 5000}, "2500 questions of one source .* only [0-9]+: choose"),
    ],
)
def test_wrong_numbers_are_named_and_nothing_is_written(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        search_world.generate(tmp_path / "a", **(SMALL | wrong))
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(tmp_path, monkeypatch, capsys):
    argv = f"search_world --out {tmp_path}/a --n-entities 500 --n-train 80 --n-test 20 --seed 0"
    monkeypatch.setattr("sys.argv", argv.split())
    search_world.main()
    assert "500 passages, 80 training and 20 test questions" in capsys.readouterr().out
    assert digest(tmp_path / "a") == digest(search_world.generate(tmp_path / "b", **SMALL))
