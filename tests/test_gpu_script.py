"""research/bench/gpu.sh at small sizes on a CPU (--tiny): its own parts, and its table of all.

    python -m pytest tests/test_gpu_script.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
# Of these, the test has recorded results; the others run.
DONE = {"rollout": "rollout", "overhead-alfworld": "overhead", "update-alfworld": "update"}


def gpu_script(*arguments, code: int = 0) -> str:
    env = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "research/bench/gpu.sh", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_parts_that_are_not_done_run_and_all_have_rows(tmp_path):
    for part, file in DONE.items():
        shutil.copy(ROOT / f"research/bench/results/{file}.json", tmp_path / f"{part}.json")
    printed = gpu_script(tmp_path, "--tiny")
    assert re.findall(r"^(\S+): done before$", printed, re.M) == list(DONE)
    table = (tmp_path / "table.md").read_text()
    assert printed.endswith(table)
    rows = [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]
    assert set(rows) == {"rollout", "overhead", "update", "correctness", "roofline", "lora"}
    gap, checkpoint = (
        float(value)
        for what in ("transformers against", "checkpoint")
        for value in re.findall(rf"{what}.*? \| (\S+) \|", table)
    )
    assert 0 < gap < 0.01 and checkpoint == 0
    assert 0 < json.loads((tmp_path / "lora.json").read_text())["peak_gib"] < 0.1


def test_without_a_gpu_it_says_so(tmp_path):
    assert "torch sees no GPU here" in gpu_script(tmp_path, code=1)
    assert not list(tmp_path.iterdir())
