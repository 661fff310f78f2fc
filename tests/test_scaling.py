"""Scaling and coverage of world models: which models are trained, on what, and the figure."""

import json
from collections import Counter
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.world_models import word2world
from paw_min.world_models.word2world import commands
from paw_min.world_models.word2world.settings import parse
from paw_min.world_models.word2world.trajectories import Trajectory, said, write_trajectories
from research.word2world import scaling
from research.word2world.scaling import Cell


@pytest.fixture
def files(tmp_path):
    """The trajectories of two agents, each in a folder of its name: four, each with one answer."""
    paths = []
    for agent in ("teacher", "random"):
        paths.append(tmp_path / agent / "trajectories.json")
        paths[-1].parent.mkdir()
        messages = [said("system", "A bed."), said("user", agent), said("assistant", "You nap.")]
        write_trajectories(paths[-1], [Trajectory(messages=messages)] * 4)
    return paths


def words(files, out, *others):
    teacher, chance = map(str, files)
    return ["alfworld", "--trajectories", teacher, chance, "--held-out", teacher, chance,
            "--limits", "2", "4", "--widths", "32", "64", "--out", str(out), *others]


def test_plan_and_calls(files, tmp_path, monkeypatch):
    """Every limit and width on all files; each file alone at the largest."""
    trained = []
    measured = []

    def fake(argv):
        job = parse("", argv)
        files = [file.parent.name for file in job.settings.trajectories]
        if job.command == "train":
            chosen = job.settings
            trained.append((len(files), chosen.limit, chosen.width, chosen.epochs))
            return {"parameters": 10 * chosen.width, "steps": chosen.limit}
        measured.append(files)
        own = Path(job.settings.world_model).name.startswith(files[0])
        return {"em": 0.9 if own else 0.5 if files[0] == "teacher" else 0.1, "em_observation": 1.0}

    monkeypatch.setattr(word2world, "main", fake)
    out = tmp_path / "out"
    scaling.main(words(files, out, "--epochs", "3"))
    found = json.loads((out / "scaling.json").read_text())
    cells = [Cell(row["data"], row["limit"], row["width"]) for row in found["models"]]
    assert cells == [
        Cell("all", 2, 32), Cell("all", 2, 64), Cell("all", 4, 32), Cell("all", 4, 64),
        Cell("teacher", 4, 64), Cell("random", 4, 64),
    ]
    assert Counter(trained) == {
        (2, 2, 32, 3): 1, (2, 2, 64, 3): 1, (2, 4, 32, 3): 1, (2, 4, 64, 3): 1, (1, 4, 64, 3): 2,
    }
    assert measured == [["teacher"], ["random"]] * 6
    assert [row["em"] for row in found["models"][3:]] == [
        {"teacher": 0.5, "random": 0.1}, {"teacher": 0.9, "random": 0.1},
        {"teacher": 0.5, "random": 0.9},
    ]
    assert found["models"][0]["em_observation"] == {"teacher": 1.0, "random": 1.0}


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
    argv = words(files, tmp_path / "out", "--widths", "32", "--limits", "4", "--epochs", "30",
                 "--batch", "2", "--lr", "1e-2", "--preset", "tiny")
    scaling.main(argv)
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert [row["steps"] for row in found["models"]] == [60, 60, 60]
    # The one sentence of all trajectories has been learned.
    assert found["models"][0]["em"] == {"teacher": 1.0, "random": 1.0}
    monkeypatch.setattr(commands, "FUNCTIONS", {})
    scaling.main(argv)
    assert json.loads((tmp_path / "out" / "scaling.json").read_text()) == found
    size = str(found["models"][0]["parameters"])
    last = capsys.readouterr().out.splitlines()[-3]
    assert last.split() == ["all", "4", "32", size, "60", "100.0", "100.0"]
