"""research/bench/smoke.py with the stand-in model and vLLM's CPU build, and what it finds wrong."""

import re

import pytest

from paw_min import train
from paw_min.config import Config
from paw_min.model import lora
from paw_min.running import runs
from paw_min.toy import default_model
from research.bench import smoke

LINE = {
    "update": 2, "sampler_gap": 0.01, "tokens_generated": 9, "tokens_per_s_generate": 9.0,
    "seconds_sync": 1.0, "grad_norm": 1.0, "tokens_per_s_update": 9.0, "approx_kl": 0.1,
    "memory_gb": 1.0, "asleep_gb": 1.0, "mfu": 0.3,
}


def printed(capsys, *words: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    with pytest.raises(SystemExit) as end:
        smoke.main(list(words))
    return end.value.code, capsys.readouterr().out


@pytest.mark.slow
def test_every_part_of_the_runs_works(capsys):
    code, out = printed(capsys, "--tiny")
    assert code == 0 and "WRONG" not in out
    lines = {part: [line for line in out.splitlines() if f"  {part}  " in line]
             for part in smoke.PARTS}
    assert [len(lines[part]) for part in ("full", "LoRA", "pass")] == [9 + 6, 11, 1]
    assert "CPU_ATTN" in lines["full"][0] and "exit code 0" in lines["full"][8]
    assert "steps of the optimizer before" in lines["full"][-1]
    assert "skipped: needs 2 GPUs  two-ranks" in out
    for part in ("full", "LoRA"):  # The policy has moved, and the engine with it.
        assert float(re.search("update 1.* KL (.*), ", lines[part][4])[1]) > 1e-3


def test_a_run_that_does_not_start_is_wrong(capsys, tmp_path):
    code, out = printed(capsys, "--model", str(tmp_path), "--only", "full")
    start, last = [line for line in out.splitlines() if "WRONG" in line]
    assert code == 1
    assert "VLLM_LOGGING_LEVEL=INFO" in start and "exit code 1" in last and "error: " in last


@pytest.mark.parametrize("fault, part", [
    ({}, None), ({"sampler_gap": 0.2}, "sync 2"), ({"sampler_gap": float("nan")}, "sync 2"),
    ({"sampler_gap": 0.05}, "sync 2"),  # more than twice that of the first
    ({"sampler_gap": 0.03}, None),
    ({"asleep_gb": 9.0}, "sleep"),  # a sleep that keeps memory
    ({"grad_norm": float("nan")}, "update 2"),
])
def test_a_part_that_is_wrong(fault, part):
    found = smoke.parts_of_update(LINE | fault, first_gap=0.02, small=0.01)
    assert [one.name for one in found if not one.right] == ([part] if part else [])


@pytest.mark.parametrize("gap, right", [(0.015, True), (0.03, False)])
def test_a_first_gap_of_nothing_leaves_room_for_rounding(gap, right):
    first, *_ = smoke.parts_of_update(LINE | {"sampler_gap": gap}, first_gap=1e-6, small=0.02)
    assert first.right == right


def test_adapters_that_vanish_in_the_merge_are_found(monkeypatch):
    model = default_model("alfworld")
    assert smoke.adapters_arrive(model, "cpu").right
    monkeypatch.setattr(lora, "round_bf16", lambda weight, name: weight.bfloat16())
    lost = smoke.adapters_arrive(model, "cpu")
    assert not lost.right and float(lost.said.split("%")[0]) < 50


@pytest.mark.parametrize("planted", [False, True])
def test_a_resume_without_the_optimizer_is_found(planted, finished, config, monkeypatch):
    if planted:
        monkeypatch.setattr(runs.Run, "load", lambda self, policy, optimizer: None)
    before = smoke.optimizer_steps(finished)
    train.train(config(updates=2))
    assert smoke.resumed(before, smoke.optimizer_steps(finished)).right != planted


def test_lines_come_while_a_run_goes_on(tmp_path):
    """The process ends only after the first line has been read."""
    wait = tmp_path / "go"
    code = f"""if True:
        import pathlib, time
        print("vLLM: here", flush=True)
        while not pathlib.Path({str(wait)!r}).exists():
            time.sleep(0.1)
    """
    lines = smoke.run(["-c", code], tmp_path, "tiny")
    assert next(lines).said == "here"
    wait.touch()
    assert [part.name for part in lines] == ["exit code 0"]


@pytest.mark.parametrize("part, gigabytes, gpus, missing", [
    ("full", 24, 1, "28 GB"), ("pass", 24, 1, "25 GB"), ("LoRA", 24, 1, ""), ("full", 40, 1, ""),
    ("two-ranks", 80, 1, "2 GPUs"), ("two-ranks", 80, 2, ""), ("full", 0, 0, ""),
])
def test_a_part_that_does_not_fit_is_skipped(part, gigabytes, gpus, missing, monkeypatch):
    from research.bench.memory import QWEN

    monkeypatch.setattr(smoke.memory, "load_config", lambda folder: QWEN["1.5B"])
    cfg = Config(model="1.5B", vllm_memory=0.4, lora_rank=16 if part == "LoRA" else 0)
    machine = smoke.Machine(gpus, gigabytes * 1e9)
    assert smoke.lacking(part, cfg, machine) == missing


def test_a_skipped_part_leaves_the_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(smoke, "lacking", lambda part, cfg, machine: "30 GB")
    assert printed(capsys, "--tiny") == (0, "".join(
        f"skipped: needs 30 GB  {part}\n" for part in smoke.PARTS
    ))
