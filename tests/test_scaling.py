"""Scaling and coverage of world models: which models are trained, on what, and the figure."""

import json
from collections import Counter
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.world_models import word2world
from paw_min.world_models.trajectories import Trajectory, said, write_trajectories
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
        job = word2world.parse("", argv)
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
    assert found["models"][3]["parameters"] == 640 and found["models"][3]["steps"] == 4
    assert found["command"].startswith("scaling alfworld --trajectories ")


def test_the_figure_shows_the_numbers(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(scaling.plt, "close", kept.append)
    pale = {"em_observation": {"seen": 0.9, "unseen": 0.8}}
    rows = [
        {"data": "all", "limit": 4, "width": 32, "em": {"seen": 0.4, "unseen": 0.2}, **pale},
        {"data": "all", "limit": 2, "width": 32, "em": {"seen": 0.2, "unseen": 0.2}, **pale},
        {"data": "teacher", "limit": 4, "width": 32, "em": {"seen": 0.6, "unseen": 0.1}, **pale},
    ]
    scaling.draw(rows, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    left, right = kept[0].axes
    line, pale_line = left.lines
    assert line.get_xydata().tolist() == [[2, 0.2], [4, pytest.approx(0.3)]]
    assert pale_line.get_ydata().tolist() == [pytest.approx(0.85)] * 2
    # Two groups of two bars, each with a pale one: all, then the teacher alone.
    heights = [bar.get_height() for bar in right.patches]
    assert heights == [0.4, 0.2, 0.9, 0.8, 0.6, 0.1, 0.9, 0.8]
    assert [label.get_text() for label in right.get_xticklabels()] == ["seen", "unseen"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--limits", "5"], "has 4 trajectories, --limits asks for 5"),
        (["--limits", "0"], "--limits 0 is out of range"),
        (["--widths", "32", "50"], "--widths 50 is not a multiple of 32 up to 4096"),
        (["--widths", "32", "32000000"], "--widths 32000000 is not a multiple of 32 up to 4096"),
        (["--held-out", "no.json"], "no.json does not exist"),
        (["--limit", "1"], "--limit: the plan decides it"),
        (["--width=64"], "--width=64: the plan decides it"),
        (["--start", "x"], "--start: the plan decides it"),
        (["--held-out", "a/t.json", "b/a/t.json"], "folders are named a, a: use names"),
        (["--trajectories", "all/t.json"], "folders are named all: use names"),
    ],
)
def test_errors_are_one_sentence(files, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        scaling.main(words(files, tmp_path / "out", *change))


def test_what_it_cannot_do_without(files, tmp_path):
    with pytest.raises(UserError, match="^scaling needs --limits: add it.$"):
        scaling.main(words(files, tmp_path / "out")[:-8] + ["--out", str(tmp_path / "out")])


@pytest.mark.slow
def test_a_small_run_and_its_rerun(files, tmp_path, monkeypatch, capsys):
    argv = words(files, tmp_path / "out", "--widths", "32", "--limits", "2", "4", "--epochs", "30",
                 "--batch", "2", "--lr", "1e-2", "--preset", "tiny")
    scaling.main(argv)
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert [row["steps"] for row in found["models"]] == [30, 60, 60, 60]
    # The one sentence of all trajectories has been learned.
    assert found["models"][1]["em"] == {"teacher": 1.0, "random": 1.0}
    monkeypatch.setattr(word2world, "FUNCTIONS", {})
    scaling.main(argv)
    assert json.loads((tmp_path / "out" / "scaling.json").read_text()) == found
    last = capsys.readouterr().out.splitlines()[-5:]
    assert last[0].split() == ["data", "limit", "width", "parameters", "steps", "teacher", "random"]
    size = str(found["models"][1]["parameters"])
    assert last[2].split() == ["all", "4", "32", size, "60", "100.0", "100.0"]
    with pytest.raises(UserError, match="scaling.json was made with command .scaling alfworld"):
        scaling.main([*argv, "--seed", "1"])
