"""Trackers: what they have of a run, of a resumed one, and without the package.

    python -m pytest tests/test_track.py

With the real packages; wandb offline, Trackio without a connection.
"""

import socket
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
def local(tmp_path, monkeypatch):
    """Trackers that store in tmp_path; whoever opens a connection to elsewhere fails."""
    connect = socket.socket.connect

    def only_here(self, address):
        assert self.family == socket.AF_UNIX or address[0] == "127.0.0.1", address
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    # Trackio reads the environment variable when it is imported, which TRL may have done.
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")


@pytest.fixture
def in_wandb(monkeypatch) -> list[dict]:
    """The lines that the real wandb is given, offline."""
    import wandb

    lines = []
    log = wandb.Run.log

    def spy(run, metrics, step):
        assert step == metrics["update"]
        lines.append(metrics)
        log(run, metrics, step=step)

    monkeypatch.setattr(wandb.Run, "log", spy)
    return lines


@pytest.fixture
def tracker(tmp_path, local):
    """A function that opens the tracker of a run in tmp_path."""
    return lambda name, done: track.Tracker(Config(track=name, name="r"), tmp_path, done)


def in_trackio(folder) -> list[dict]:
    """The stored lines of the run in `folder`, in their order, as they are in metrics.jsonl."""
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("paw_min", (folder / "trackio-name").read_text())
    assert [log["step"] for log in logs] == [log["update"] for log in logs]
    return [{k: v for k, v in log.items() if k not in ("step", "timestamp")} for log in logs]


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
def test_trackio_without_steps_twice(tracker, tmp_path):
    """The same; Trackio keeps what it has."""
    first = tracker("trackio", [])
    for line in LINES[:3]:
        first.log(line)
    first.close()
    again = tracker("trackio", LINES[:2])
    for line in LINES[2:]:
        again.log(line | {"success": 0.9})
    again.close()
    assert in_trackio(tmp_path) == LINES[:3] + [LINES[3] | {"success": 0.9}]


@pytest.mark.slow
def test_a_tracker_that_is_new_to_a_run_gets_its_earlier_lines(tracker, in_wandb, tmp_path):
    for name in ("tensorboard", "wandb", "trackio"):
        opened = tracker(name, LINES[:3])
        opened.log(LINES[3])
        opened.close()
    assert curves(tmp_path)["success"] == close((k, k / 10) for k in range(4))
    assert in_wandb == LINES
    assert in_trackio(tmp_path) == LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_run_and_its_resumption(config, one_update, tmp_path, local, in_wandb, name):
    files = {path.name for path in one_update.iterdir()}
    assert not {"tensorboard", "wandb", "wandb-id", "trackio-name"} & files
    train.train(config(track=name, updates=1))
    assert numbers(tmp_path / "r") == numbers(one_update)  # it changes no number
    train.train(config(track=name, updates=2))
    lines = read_metrics(tmp_path / "r")
    if name == "wandb":
        assert in_wandb == lines
        run_id = (tmp_path / "r" / "wandb-id").read_text()
        files = (tmp_path / "r").glob("wandb/offline-run-*/*.wandb")
        assert [path.name for path in files] == 2 * [f"run-{run_id}.wandb"]
    elif name == "trackio":
        assert in_trackio(tmp_path / "r") == lines
    else:
        shown = curves(tmp_path / "r")
        assert set(shown) == {key for line in lines for key in line}
        for key, points in shown.items():
            assert points == close((m["update"], m[key]) for m in lines if key in m)


def test_without_the_package(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    for start in (train.train, session.dry_run):
        with pytest.raises(UserError, match="--track trackio needs trackio: pip install trackio"):
            start(config(track="trackio"))
    assert not (tmp_path / "r").exists()


def test_wandb_that_cannot_start(tracker, monkeypatch):
    import wandb

    def fail(**settings):
        raise wandb.errors.UsageError("No API key\nconfigured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"\(No API key configured\): run wandb login, or set"):
        tracker("wandb", [])
