"""research/bench/gpu.sh on a CPU (--tiny): its part `correctness`, and its table of all parts.

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
# Of these, the test has recorded results, and of two more, numbers of its own.
RECORDED = {"rollout": "rollout", "overhead-alfworld": "overhead", "update-alfworld": "update"}
INVENTED = {
    "roofline": {"alfworld": {"tokens_per_s": 5.0, "fraction": 0.5}},
    "lora": {"peak_gib": 18.0, "card_gib": 24.0},
}


def gpu_script(*arguments, code: int = 0) -> str:
    env = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "research/bench/gpu.sh", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_part_that_is_not_done_runs_and_all_have_rows(tmp_path):
    for part, file in RECORDED.items():
        shutil.copy(ROOT / f"research/bench/results/{file}.json", tmp_path / f"{part}.json")
    for part, numbers in INVENTED.items():
        (tmp_path / f"{part}.json").write_text(json.dumps(numbers))
    printed = gpu_script(tmp_path, "--tiny")
    done = re.findall(r"^(\S+): done before$", printed, re.M)
    assert set(done) == RECORDED.keys() | INVENTED.keys()
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


@pytest.mark.parametrize(
    "command", ["gpu.py correctness --tiny", "overhead.py --shape alfworld --quick --tiny"]
)
def test_a_machine_with_torch_and_transformers_only(command, tmp_path):
    """What gpu.sh needs; it skips the parts that need more."""
    script, *flags = command.split()
    argv = [f"research/bench/{script}", *flags, "--out", str(tmp_path / "out.json")]
    absent = "alfworld textworld matplotlib nltk rapidfuzz urllib3 fastapi uvicorn trl vllm peft"
    code = (
        f"import runpy, sys; sys.modules |= dict.fromkeys({absent.split()!r}); "
        f"sys.argv = {argv!r}; sys.path.insert(0, 'research/bench'); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.json").exists()


def test_without_a_gpu_it_says_so(tmp_path):
    assert "torch sees no GPU here" in gpu_script(tmp_path, code=1)
    assert not list(tmp_path.iterdir())
