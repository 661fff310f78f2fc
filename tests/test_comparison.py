"""The comparison of ways to use next observations: its runs and their list.

python -m pytest tests/test_comparison.py
"""

import json
from dataclasses import asdict

import pytest

from paw_min.base.errors import UserError
from research.comparison import run as comparison
from research.comparison.run import ARMS, STAGES, Begun, Entry, job_of, record

FLAGS = ["--preset", "open", "--updates", "16"]


def test_every_arm_has_a_run_of_its_own_from_the_checkpoint_of_its_stage(tmp_path):
    names = set()
    for arm in ARMS:
        begun = Begun("x/checkpoint-000009", 700) if arm.stage else Begun("", 0)
        cfg = job_of(arm, begun, "alfworld", 3, tmp_path, FLAGS).cfg
        assert (cfg.model, cfg.paw, cfg.updates) == (begun.model or "open", arm.paw, 16)
        names.add(cfg.name)
    assert len(names) == len(ARMS) and {arm.stage for arm in ARMS} > {"", *STAGES}
    # Without a stage, it is a run of research/fair, which is not repeated.
    assert names > {"alfworld-open-grpo-seed3", "alfworld-open-grpo-paw-seed3"}


def test_the_list_has_all_seeds_in_the_order_of_the_arms(tmp_path):
    path = tmp_path / "comparison-alfworld.json"
    record(path, Entry("GRPO w/ PaW", 1, "b", 0))
    record(path, Entry("GRPO", 1, "a", 0))
    record(path, Entry("RWML, then GRPO", 0, "c", 900))
    record(path, Entry("GRPO", 1, "a", 0))  # a rerun
    entries = json.loads(path.read_text())
    assert [(e["seed"], e["folder"], e["steps_before"]) for e in entries] == [
        (0, "c", 900), (1, "a", 0), (1, "b", 0),
    ]


def test_the_steps_of_a_stage(tmp_path, monkeypatch):
    """Collecting, and for early experience the steps in the demonstrated states, too."""
    folder = tmp_path / "alfworld-world-seed0"
    for stage in ("rwml", "early-experience", "imitation"):
        (folder / stage / "checkpoint-000003").mkdir(parents=True)
    for stage, taken in (("early-experience", 2500.0), ("imitation", 300.0)):
        text = json.dumps({"update": 3, "branch_steps": taken})
        (folder / stage / "metrics.jsonl").write_text(text + "\n")
    collected = dict(triplets=5, counts={"steps": 1400}, panel={})
    (folder / "collected.json").write_text(json.dumps(collected))
    # Also with a checkpoint: only rwml.py knows whether the stage is complete, and of these flags.
    called = []
    monkeypatch.setattr(comparison, "call", lambda command, log: called.append(command))
    found = comparison.run_stage("rwml", "alfworld", 0, tmp_path, FLAGS)
    assert found == Begun(str(folder / "rwml" / "checkpoint-000003"), 1400)
    found = comparison.run_stage("early-experience", "alfworld", 0, tmp_path, FLAGS)
    assert found.steps == 3900
    assert comparison.run_stage("imitation", "alfworld", 0, tmp_path, FLAGS).steps == 1700
    # What RWML's stages begin with.
    found = comparison.run_stage("format", "alfworld", 0, tmp_path, FLAGS)
    assert found == Begun(str(folder / "start"), 1400)
    assert len(called) == 4
    for command in list(called):
        assert set(FLAGS) | {"paw_min.world_models.rwml", str(folder)} <= set(command)
    assert called[1][-2:] == ["--seed", "0"] and "early-experience" in called[1]


def test_bad_input_is_refused_before_an_arm_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "run_all", None)
    with pytest.raises(UserError, match="--no-pa.* after --: use the options before"):
        comparison.main("alfworld", 0, tmp_path, ["--no-paw"])
    path = tmp_path / "comparison-alfworld.json"
    for content, message in (
        ("[{", "cannot be read"),
        (json.dumps([asdict(Entry("mine", 0, "a"))]), "has the unknown arm 'mine'"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"comparison-alfworld.json {message}"):
            comparison.main("alfworld", 0, tmp_path, FLAGS)
        assert path.read_text() == content
