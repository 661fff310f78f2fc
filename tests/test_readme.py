"""The README tells the truth: its code runs, its tree exists, its numbers are in the files.

    python -m pytest tests/test_readme.py
"""

import json
import re
from pathlib import Path

from paw_min.runs import read_metrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_paw_in_40_lines_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names = {}
    exec(code, names)
    assert len(code.splitlines()) <= 45
    # egg failed twice, mug once: lambda 1 and 0.5; three of four rows teach.
    assert [float(names["lam"][g]) for g in ("mug", "egg")] == [0.5, 1.0]
    assert names["selected"].sum() == 3
    assert names["logits_o"].grad.abs().sum() > 0 and names["logits_a"].grad.abs().sum() > 0


def test_the_tree_is_the_tree():
    (tree,) = re.findall(r"```\n(run_alfworld.py .*?)```", README, flags=re.S)
    named = re.findall(r"^  (\S+\.py) ", tree, flags=re.M)
    there = [p.relative_to(ROOT / "paw_min").as_posix() for p in ROOT.glob("paw_min/**/*.py")]
    assert sorted(named) == sorted(p for p in there if not p.endswith("__init__.py"))


def test_modules_are_short_and_equations_stand_alone():
    for path in ROOT.glob("paw_min/**/*.py"):
        assert len(path.read_text().splitlines()) <= 300, path
    for name in ("advantages", "select", "cmae", "balance", "losses"):
        assert "paw_min" not in (ROOT / f"paw_min/{name}.py").read_text(), name


def test_results_are_in_the_files():
    rows = re.findall(r"^\| (\S+seed\d) \| ([\d.]+) \| ([\d.]+) \|", README, flags=re.M)
    assert len(rows) >= 3
    rises = []
    for name, before, after in rows:
        lines = [m for m in read_metrics(ROOT / "results" / name) if "eval_success" in m]
        assert f"{100 * lines[0]['eval_success']:.1f}" == before, name
        assert f"{100 * lines[-1]['eval_success']:.1f}" == after, name
        if "-paw-" in name:
            rises.append(100 * (lines[-1]["eval_success"] - lines[0]["eval_success"]))
    assert f"by {sum(rises) / len(rises):.1f} points" in README


def test_engine_ratios_are_in_the_file():
    cpu = json.loads((ROOT / "bench/results/engine.json").read_text())["cpu_ms"]
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.M)
    rows = [row for row in rows if row[0] in cpu]
    assert len(rows) == len(cpu)
    for name, stock, fast, ratio in rows:
        assert f"{cpu[name]['stock']['mean']:.3g}" == stock
        assert f"{cpu[name]['fast']['mean']:.3g}" == fast
        assert f"{cpu[name]['ratio']:g}" == ratio


def test_every_metric_is_explained():
    table = README.partition("## Metrics")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`(\w+)[`/]", table))
    for folder in (ROOT / "results").glob("*seed*"):
        for line in read_metrics(folder):
            for key in line:
                base = key.split("/")[0]
                short = base.replace("seconds_generate", "_generate").replace("seconds_env", "_env")
                assert base in explained or short in explained or base == "update", key
