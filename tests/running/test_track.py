"""Trackers have the lines of metrics.jsonl, also of a resumed run. The real ones; wandb offline."""

import sys
from types import SimpleNamespace

import pytest
import wandb

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.running import plan, track
from paw_min.running.runs import newest_checkpoint, read_metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_and_its_resumption(config, tmp_path, monkeypatch, name):
    """Killed after update 2, whose checkpoint is of update 1."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = []
    monkeypatch.setattr(wandb.Run, "log", lambda run, metrics, step: logged.append(metrics))
    train.train(config(track=name, updates=1))
    killed = track.Tracker(Config(track=name, name="r"), tmp_path / "r", start=2)
    killed.log({"update": 2, "success": 0.123})
    killed.close()
    train.train(config(track=name, updates=2))
    lines = read_metrics(tmp_path / "r")
    if name == "wandb":
        assert logged == [*lines[:2], {"update": 2, "success": 0.123}, lines[2]]
        run_id = (tmp_path / "r" / "wandb-id").read_text()
        assert len(list((tmp_path / "r").glob(f"wandb/offline-run-*/run-{run_id}.wandb"))) == 3
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "r" / "tensorboard")).Reload()
        assert set(events.Tags()["scalars"]) == {key for line in lines for key in line}
        for key in events.Tags()["scalars"]:
            shown = [(e.step, e.value) for e in events.Scalars(key)]  # in fp32
            assert shown == [(m["update"], pytest.approx(m[key])) for m in lines if key in m]


@pytest.mark.parametrize("error", [
    BrokenPipeError("pipe"), ConnectionResetError("lost"), SystemExit(3), RuntimeError("a\nb"),
])
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_goes_on_without_a_tracker_that_fails(
    name, error, tmp_path, monkeypatch, capsys
):
    """In a line, then at the end of another run."""
    from torch.utils.tensorboard import SummaryWriter

    asked = []

    def fail(*_, **__):
        asked.append(name)
        raise error

    fake = SimpleNamespace(log=fail, finish=fail)
    cfg = Config(track=name, name="r", out=str(tmp_path))
    (tmp_path / "r").mkdir()
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    monkeypatch.setattr(SummaryWriter, "close", fail)
    tracker = track.Tracker(cfg, tmp_path / "r", 0)
    for update in range(3):
        tracker.log({"update": update})
    tracker.close()
    assert len(asked) == 1  # it was not asked again
    track.Tracker(cfg, tmp_path / "r", 0).close()
    said = capsys.readouterr().out
    assert said.count("the tracker failed") == 2 and len(said.splitlines()) == 2


def test_the_tracker_comes_after_the_checkpoint(config, tmp_path, monkeypatch):
    saved = []

    def log(tracker, metrics):
        saved.append(newest_checkpoint(tmp_path / "r"))

    monkeypatch.setattr(track.Tracker, "log", log)
    train.train(config(track="tensorboard", updates=1))
    assert saved == [None, tmp_path / "r" / "checkpoint-000001"]


def test_a_tracker_that_cannot_start(config, tmp_path, monkeypatch):
    def fail(**settings):
        raise wandb.errors.UsageError("No API key\nconfigured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"\(No API key configured\): run wandb login, or set"):
        track.Tracker(Config(track="wandb"), tmp_path, [])
    monkeypatch.setitem(sys.modules, "wandb", None)
    for start in (train.train, plan.dry_run):
        with pytest.raises(UserError, match="--track wandb needs wandb: pip install wandb, or"):
            start(config(track="wandb"))
    assert not (tmp_path / "r").exists()
