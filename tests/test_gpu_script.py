"""research/bench/gpu.sh on a CPU (--tiny): parts with vLLM and LoRA, and its table of all parts."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT, python

pytestmark = pytest.mark.slow
# The test has numbers of its own for these.
PARITY = {
    "runner": "vLLM V2", "gaps": {"vllm, LoRA": 1e-6}, "gradients": {"Eq. 5": 2e-7},
    "checkpoint": 0.0,
}
UPDATE = {
    "runner": "vLLM V2", "gap": 0.01, "seconds": {"sync": 0.5, "learn": 3.0}, "mfu": 0.31,
    "tokens_per_s": {"generate": 9000.0}, "peak_gb": 40.0,
    "paw_over_grpo_percent": {"webshop": {"time": 2.5, "memory": 1.0}},
}
INVENTED = {"parity-fp32": PARITY, "update-smollm2": UPDATE, "update-1.5b": UPDATE}


def gpu_script(*arguments, code: int = 0) -> str:
    env = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "research/bench/gpu.sh", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_part_that_is_not_done_runs_and_all_have_rows(tmp_path):
    for part, numbers in INVENTED.items():
        (tmp_path / f"{part}.json").write_text(json.dumps(numbers | {"device": "a card"}))
    printed = gpu_script(tmp_path, "--tiny")
    done = re.findall(r"^(\S+): done before$", printed, re.M)
    assert set(done) == INVENTED.keys()
    table = (tmp_path / "table.md").read_text()
    assert printed.endswith(table) and table.startswith("x86_64, 1 thread, a card\n")
    columns = {}
    for block in table.strip().split("\n\n")[1:]:
        (kind, *parts), _, *lines = (re.split(r" *\| *", line)[1:-1] for line in block.split("\n"))
        for name, numbers in zip(parts, zip(*(line[1:] for line in lines)), strict=True):
            columns[f"{kind}-{name}"] = dict(zip((line[0] for line in lines), numbers))
    assert len(columns) == len(done) + 2
    assert columns["update-1.5b, vLLM V2"]["peak of the trainer, GB"] == "40.00"
    assert columns["update-1.5b, vLLM V2"]["PaW over GRPO, webshop, time in %"] == "+2.5"
    assert columns["update-1.5b-lora, vLLM V1"].keys() > {"learn, MFU in %"}
    parity = columns["parity-bf16, vLLM V1"]
    states = ("start", "other weights", "LoRA")
    gaps = {f"gap, {name}, {state}" for name in ("vllm", "transformers") for state in states}
    equations = {name for name, value in parity.items() if name.startswith("gradient, ") and value}
    assert gaps < parity.keys() and len(equations) == 7
    assert all(0 < float(parity[name]) < 0.2 for name in gaps | equations)


def test_a_machine_with_torch_and_transformers_only(tmp_path):
    """What gpu.sh needs; it skips the parts that need more."""
    argv = ["gpu", "update", "smollm2", "--tiny", "--out", str(tmp_path / "out.json")]
    absent = "alfworld textworld matplotlib nltk rapidfuzz requests fastapi uvicorn trl vllm peft"
    code = (
        f"import runpy, sys; sys.modules |= dict.fromkeys({absent.split()!r}); "
        f"sys.argv = {argv!r}; runpy.run_module('research.bench.gpu', run_name='__main__')"
    )
    python("-c", code)
    assert (tmp_path / "out.json").exists()


def test_without_a_gpu_it_says_so(tmp_path):
    assert "torch sees no GPU here" in gpu_script(tmp_path, code=1)
    assert not list(tmp_path.iterdir())
