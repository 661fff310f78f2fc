"""Scaling and coverage of world models: which models are trained, on what, and the figure."""

import json

import pytest

from paw_min.base.errors import UserError
from research.word2world import scaling
from research.word2world.scaling import Cell
from world_models.word2world import commands
from world_models.word2world.trajectories import Trajectory, said, write_trajectories


@pytest.fixture
def files(tmp_path):
    """The trajectories of two agents, each in a folder of its name: four, each with one answer."""
    paths = []
    for agent, answer in (("teacher", "You nap."), ("random", "You rest.")):
        paths.append(tmp_path / agent / "trajectories.json")
        paths[-1].parent.mkdir()
        messages = [said("system", "A bed."), said("user", agent), said("assistant", answer)]
        write_trajectories(paths[-1], [Trajectory(messages=messages)] * 4)
    return paths


def words(files, out, *others):
    teacher, chance = map(str, files)
    return ["alfworld", "--trajectories", teacher, chance, "--held-out", teacher, chance,
            "--limits", "2", "4", "--widths", "32", "64", "--out", str(out), *others]


@pytest.mark.parametrize(("change", "message"), [
    (["--limits", "5"], "has 4 trajectories, --limits asks for 5"),
    (["--widths", "32", "50"], "--widths 50 is not a multiple of 32 up to 4096"),
    (["--limit", "1"], "--limit: the plan decides it"),
    (["--held-out", "a/t.json", "b/a/t.json"], "folders are named a, a: use names"),
])
def test_errors_are_one_sentence(files, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        scaling.main(words(files, tmp_path / "out", *change))


@pytest.mark.slow
def test_a_small_run_and_its_rerun(files, tmp_path, monkeypatch, capsys):
    """Every limit and width on all files; each file alone at the largest, which knows no other."""
    argv = words(files, tmp_path / "out", "--epochs", "40", "--batch", "2", "--lr", "1e-2",
                 "--preset", "tiny")
    scaling.main(argv)
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    models = found["models"]
    assert [Cell(row["data"], row["limit"], row["width"]) for row in models] == [
        Cell("all", 2, 32), Cell("all", 2, 64), Cell("all", 4, 32), Cell("all", 4, 64),
        Cell("teacher", 4, 64), Cell("random", 4, 64),
    ]
    assert [row["steps"] for row in models] == [40, 40, 80, 80, 80, 80]
    assert models[0]["parameters"] < models[1]["parameters"]
    assert [row["em"] for row in models[3:]] == [
        {"teacher": 1.0, "random": 1.0}, {"teacher": 1.0, "random": 0.0},
        {"teacher": 0.0, "random": 1.0},
    ]
    monkeypatch.setattr(commands, "FUNCTIONS", {})
    scaling.main(argv)
    assert json.loads((tmp_path / "out" / "scaling.json").read_text()) == found
    size = str(models[-1]["parameters"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["random", "4", "64", size, "80", "0.0", "100.0"]
