"""The comparison of ways to use next observations: its runs and their list.

python -m pytest tests/test_comparison.py
"""

import json
import runpy
import sys
from dataclasses import asdict

import pytest

from paw_min.base.errors import UserError
from research.comparison import run as comparison
from research.comparison.run import ARMS, STAGES, Arm, Begun, Entry, job_of, record

FLAGS = ["--preset", "open", "--updates", "16"]


def test_a_run_without_a_stage_is_the_one_of_the_sweep(tmp_path):
    """So the runs of research/fair are not repeated."""
    names = []
    for arm in ARMS[:2]:
        job = job_of(arm, Begun("", 0), "alfworld", 3, tmp_path, FLAGS)
        names.append(job.cfg.name)
        assert job.cfg.model == "open"
    assert names == ["alfworld-open-grpo-seed3", "alfworld-open-grpo-paw-seed3"]


def test_a_run_after_a_stage_starts_from_its_checkpoint(tmp_path):
    begun = Begun("runs/world/rwml/checkpoint-000009", 700)
    plain = job_of(Arm("a", "rwml"), begun, "alfworld", 0, tmp_path, FLAGS).cfg
    co_trained = job_of(Arm("b", "rwml", paw=True), begun, "alfworld", 0, tmp_path, FLAGS).cfg
    assert plain.model == co_trained.model == begun.model
    assert (plain.paw, co_trained.paw) == (False, True)
    assert plain.name != co_trained.name
    assert plain.updates == 16


def test_every_arm_has_a_run_of_its_own(tmp_path):
    names = {job_of(arm, Begun("m", 0), "alfworld", 0, tmp_path, FLAGS).cfg.name for arm in ARMS}
    assert len(names) == len(ARMS)
    assert {arm.stage for arm in ARMS} == {"", "actobs", "format", *STAGES}


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
    (folder / "early-experience" / "metrics.jsonl").write_text('{"update": 0}\n')
    with pytest.raises(UserError, match="metrics.jsonl cannot be read .*branch_steps"):
        comparison.run_stage("early-experience", "alfworld", 0, tmp_path, FLAGS)
    (folder / "collected.json").write_text(json.dumps(collected | {"counts": {}}))
    with pytest.raises(UserError, match="collected.json cannot be read .*steps"):
        comparison.run_stage("rwml", "alfworld", 0, tmp_path, FLAGS)
    assert called[1][-2:] == ["--seed", "0"] and "early-experience" in called[1]


def test_bad_input_is_refused_before_an_arm_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "run_all", None)
    for flags in (["--no-paw"], ["--name", "x"], ["--seed=3"], ["--eval-only"]):
        with pytest.raises(UserError, match=f"{flags[0][:6]}.* after --: use the options before"):
            comparison.main("alfworld", 0, tmp_path, flags)
    path = tmp_path / "comparison-alfworld.json"
    for content, message in (
        ("[{", "cannot be read"),
        (json.dumps([asdict(Entry("mine", 0, "a"))]), "has the unknown arm 'mine'"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"comparison-alfworld.json {message}"):
            comparison.main("alfworld", 0, tmp_path, FLAGS)
        assert path.read_text() == content


def test_a_kill_while_the_list_is_written_loses_no_run(tmp_path, monkeypatch):
    path = tmp_path / "comparison-alfworld.json"
    record(path, Entry("GRPO", 0, "a"))
    before = path.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record(path, Entry("GRPO", 1, "b"))
    assert path.read_text() == before


def test_a_stage_that_fails_says_why_in_one_sentence(tmp_path):
    log = tmp_path / "stage.log"
    with pytest.raises(UserError, match="exit code 3: no output"):
        comparison.call(["sh", "-c", "exit 3"], log)
    with pytest.raises(UserError, match="exit code 1: wrong .*stage.log"):
        comparison.call(["sh", "-c", "echo first; echo wrong >&2; exit 1"], log)


def test_a_home_folder_that_does_not_exist(monkeypatch):
    argv = ["comparison", "alfworld", "--seed", "0", "--out", "~nobodyx/y"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="^error: ~nobodyx/y begins with a home folder that does"):
        runpy.run_path(comparison.__file__, run_name="__main__")


def test_actobs_is_compared_with_the_open_start_only(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "run_all", None)
    with pytest.raises(UserError, match="add --preset open"):
        comparison.main("alfworld", 0, tmp_path, ["--preset", "tiny"])
