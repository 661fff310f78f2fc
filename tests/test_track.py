"""Trackers: what they have of a run, of a resumed one, and without the package.

With the real packages; wandb offline.
"""

import sys

import pytest

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.running import session, track
from paw_min.running.runs import read_metrics
from tests.helpers import numbers

LINES = [{"update": k, "success": k / 10, "eval_success_types/pick": 1.0} for k in range(4)]


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


@pytest.fixture
def in_wandb(monkeypatch) -> list[dict]:
    """The lines that the real wandb is given, offline."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    lines = []
    log = wandb.Run.log

    def spy(run, metrics, step):
        assert step == metrics["update"]
        lines.append(metrics)
        log(run, metrics, step=step)

    monkeypatch.setattr(wandb.Run, "log", spy)
    return lines


@pytest.fixture
def tracker(tmp_path):
    """A function that opens the tracker of a run in tmp_path."""
    return lambda name, done: track.Tracker(Config(track=name, name="r"), tmp_path, done)


def close(numbers) -> list:
    return [(step, pytest.approx(value)) for step, value in numbers]  # TensorBoard has fp32


@pytest.mark.slow
def test_tensorboard_without_points_twice(tracker, tmp_path):
    """A run killed after update 3, whose checkpoint is of update 1, repeats 2 and 3."""
    first = tracker("tensorboard", [])
    for line in LINES:
        first.log(line)
    assert curves(tmp_path)["success"] == close((k, k / 10) for k in range(4))  # without close()
    again = tracker("tensorboard", LINES[:2])
    for line in LINES[2:]:
        again.log(line | {"success": 0.9})
    again.close()
    shown = curves(tmp_path)
    assert shown["success"] == close([(0, 0.0), (1, 0.1), (2, 0.9), (3, 0.9)])
    assert shown["eval_success_types/pick"] == [(k, 1.0) for k in range(4)]


@pytest.mark.slow
def test_tensorboard_has_the_updates_of_a_time_without_it(tracker, tmp_path):
    for done in ([], LINES[:3]):  # the second start: updates 1 and 2 were made without --track
        opened = tracker("tensorboard", done)
        opened.log(LINES[len(done)])
        opened.close()
    assert curves(tmp_path)["success"] == close((k, k / 10) for k in range(4))


@pytest.mark.slow
def test_a_tracker_that_is_new_to_a_run_gets_its_earlier_lines(tracker, in_wandb, tmp_path):
    for name in ("tensorboard", "wandb"):
        opened = tracker(name, LINES[:3])
        opened.log(LINES[3])
        opened.close()
    assert curves(tmp_path)["success"] == close((k, k / 10) for k in range(4))
    assert in_wandb == LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_and_its_resumption(config, one_update, tmp_path, in_wandb, name):
    train.train(config(track=name, updates=1))
    assert numbers(tmp_path / "r") == numbers(one_update)  # it changes no number
    train.train(config(track=name, updates=2))
    lines = read_metrics(tmp_path / "r")
    if name == "wandb":
        assert in_wandb == lines
        run_id = (tmp_path / "r" / "wandb-id").read_text()
        files = (tmp_path / "r").glob("wandb/offline-run-*/*.wandb")
        assert [path.name for path in files] == 2 * [f"run-{run_id}.wandb"]
    else:
        shown = curves(tmp_path / "r")
        assert set(shown) == {key for line in lines for key in line}
        for key, points in shown.items():
            assert points == close((m["update"], m[key]) for m in lines if key in m)


@pytest.mark.parametrize("named", ["", "mine"])
def test_the_environment_names_wandbs_project(tracker, monkeypatch, named):
    import wandb

    if named:
        monkeypatch.setenv("WANDB_PROJECT", named)
    opened = []
    monkeypatch.setattr(wandb, "init", lambda **settings: opened.append(settings["project"]))
    tracker("wandb", [])
    assert opened == [named or "paw_min"]


def test_a_tracker_that_cannot_start(config, tracker, tmp_path, monkeypatch):
    import wandb

    def fail(**settings):
        raise wandb.errors.UsageError("No API key\nconfigured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"\(No API key configured\): run wandb login, or set"):
        tracker("wandb", [])
    monkeypatch.setitem(sys.modules, "wandb", None)
    for start in (train.train, session.dry_run):
        with pytest.raises(UserError, match="--track wandb needs wandb: pip install wandb, or"):
            start(config(track="wandb"))
    assert not (tmp_path / "r").exists()
