"""The tables of the pages are those of the recorded files; studies draw pictures of them."""

import json

import pytest

from research import tables
from research.hidden import study as hidden
from research.locks import study as locks
from research.locks import worlds
from research.study import KEY, read_lines, read_runs

ROOT = tables.ROOT


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = page.read_text()
    assert tables.with_new_tables(text) == text, "run python -m research.tables"


def test_a_seed_that_an_arm_lacks_is_named_in_its_cell(tmp_path, monkeypatch):
    """The seeds of a row are those of GRPO."""
    lines = read_lines(locks.RUNS)
    left = [line for line in lines if (line["arm"], line["seed"]) != ("ce 0.05", locks.SEEDS[-1])]
    monkeypatch.setattr(locks, "RUNS", tmp_path / "runs.jsonl")
    locks.RUNS.write_text("".join(json.dumps(line) + "\n" for line in left))
    row = tables.front().splitlines()[2]
    assert "(15 seeds)" in row and "| [16](" in row


def test_an_arm_of_hidden_that_lacks_a_seed_says_how_many_it_has():
    runs = read_runs(hidden.RUNS)
    del runs["ce-kl", hidden.SEEDS[-1]]
    means = hidden.tables(runs, "-kl")["means"]
    assert "| ce-kl (7 seeds) |" in means and "| echo-kl |" in means


@pytest.mark.slow
@pytest.mark.parametrize("study, which, picture", [
    (hidden, ["-kl"], "curves-kl.png"), (locks, [], "curves.png"), (worlds, [], "worlds.png"),
])
def test_the_picture_of_the_runs(study, which, picture, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    key = worlds.KEY if study is worlds else KEY
    study.draw(read_runs(study.RUNS, key), *which)
    assert (tmp_path / picture).stat().st_size > 5000
