"""research/bench/smoke.py with the stand-in model and vLLM's CPU build, and what it finds wrong."""

import re

import pytest

from research.bench import smoke

LINE = {
    "update": 1, "sampler_gap": 0.01, "tokens_generated": 9, "tokens_per_s_generate": 9.0,
    "seconds_sync": 1.0, "grad_norm": 1.0, "tokens_per_s_update": 9.0, "approx_kl": 0.1,
    "memory_gb": 1.0, "asleep_gb": 1.0, "mfu": 0.3,
}
START = {"update": 0, "eval_success": 0.5}
SAID = "vLLM: keys and values of 9 tokens, attention by FLASH_ATTN\n"


@pytest.mark.slow
def test_every_part_of_two_runs_works(capsys):
    with pytest.raises(SystemExit) as end:
        smoke.main(["--tiny"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "WRONG" not in out
    for training in smoke.TRAINING:
        lines = [line for line in out.splitlines() if f"  {training}  " in line]
        assert len(lines) == 9 and "CPU_ATTN" in lines[0] and "exit code 0" in lines[-1]
        # The policy has moved, and the engine with it.
        assert float(re.search("update 1.* KL (.*), ", lines[4])[1]) > 1e-3


def test_a_run_that_does_not_start_is_wrong(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "TRAINING", {"full": (1, "")})
    with pytest.raises(SystemExit) as end:
        smoke.main(["--model", str(tmp_path)])
    assert end.value.code == 1
    out = capsys.readouterr().out
    start, last = [line for line in out.splitlines() if "WRONG" in line]
    assert "VLLM_LOGGING_LEVEL=INFO" in start and "exit code 1" in last and "error: " in last


@pytest.mark.parametrize("fault, part", [
    ({}, None), ({"sampler_gap": 0.2}, "sync 1"), ({"sampler_gap": float("nan")}, "sync 1"),
    ({"asleep_gb": 9.0}, "sleep"), ({"grad_norm": float("nan")}, "update 1"),
])
def test_a_part_that_is_wrong(fault, part):
    found = smoke.parts(0, SAID, [START, LINE | fault])
    assert [one.name for one in found if not one.right] == ([part] if part else [])
