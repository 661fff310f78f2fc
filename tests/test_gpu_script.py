"""research/bench/gpu.sh, run at small sizes on a CPU (--tiny).

    python -m pytest tests/test_gpu_script.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PARTS = ("correctness", "rollout", "overhead-alfworld", "update-alfworld", "roofline", "lora")


def gpu_script(*arguments, code: int = 0) -> str:
    env = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "research/bench/gpu.sh", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_every_part_runs_once_and_has_its_rows(tmp_path):
    first = gpu_script(tmp_path, "--tiny")
    assert {path.stem for path in tmp_path.glob("*.json")} == set(PARTS)
    table = (tmp_path / "table.md").read_text()
    assert first.endswith(table)
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert {row[0].strip("| ") for row in rows} == {name.split("-")[0] for name in PARTS}
    gap, checkpoint = (
        float(value)
        for what in ("transformers against", "checkpoint")
        for value in re.findall(rf"{what}.*? \| (\S+) \|", table)
    )
    assert 0 < gap < 0.01 and checkpoint == 0

    assert 0 < json.loads((tmp_path / "lora.json").read_text())["peak_gib"] < 0.1

    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    second = gpu_script(tmp_path, "--tiny")
    assert re.findall(r"^(\S+): done before$", second, re.M) == list(PARTS)
    assert second.endswith(table)
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_without_a_gpu_it_says_so(tmp_path):
    assert "torch sees no GPU here" in gpu_script(tmp_path, code=1)
    assert not list(tmp_path.iterdir())
