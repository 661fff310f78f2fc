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
    for name in re.findall(r"^(\S+) ", tree, flags=re.M) + re.findall(r"(?<= )(\w+\.py):", tree):
        assert (ROOT / name).exists() or (ROOT / "bench" / name).exists(), name
    named = re.findall(r"^  (\S+\.py) ", tree, flags=re.M)
    there = [p.relative_to(ROOT / "paw_min").as_posix() for p in ROOT.glob("paw_min/**/*.py")]
    assert sorted(named) == sorted(p for p in there if not p.endswith("__init__.py"))


def test_modules_are_short_and_equations_stand_alone():
    for path in ROOT.glob("paw_min/**/*.py"):
        assert len(path.read_text().splitlines()) <= 300, path
    for name in ("advantages", "select", "cmae", "balance", "losses"):
        assert "paw_min" not in (ROOT / f"paw_min/{name}.py").read_text(), name


def test_results_are_in_the_files():
    row = r"^\| (\w+)(-\S+seed\d) \| ([\d.]+) \| ([\d.]+) \|(?: ([\d.]+) \| ([\d.]+) \|)?"
    rows = re.findall(row, README, flags=re.M)
    rises = {}
    for env, name, *shown in rows:
        lines = [m for m in read_metrics(ROOT / "results" / (env + name)) if "eval_success" in m]
        ends = lines[0], lines[-1]
        assert [f"{100 * m['eval_success']:.1f}" for m in ends] == shown[:2], name
        if shown[2]:
            assert [f"{m['eval_score']:.1f}" for m in ends] == shown[2:], name
        rise = 100 * (ends[1]["eval_success"] - ends[0]["eval_success"])
        rises.setdefault(env, {True: [], False: []})["-paw-" in name].append(rise)
    assert set(rises) == {"alfworld", "webshop", "search"}
    for env, values in rises.items():
        assert len(values[True]) == len(values[False]) == 3
        mean = {paw: sum(v) / 3 for paw, v in values.items()}
        assert f"| {env} | {mean[True]:.1f} | {mean[False]:.1f} |" in README


def test_engine_ratios_are_in_the_file():
    cpu = json.loads((ROOT / "bench/results/engine.json").read_text())["cpu_ms"]
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.M)
    rows = [row for row in rows if row[0] in cpu]
    assert len(rows) == len(cpu)
    for name, stock, fast, ratio in rows:
        assert f"{cpu[name]['stock']['mean']:.3g}" == stock
        assert f"{cpu[name]['fast']['mean']:.3g}" == fast
        assert f"{cpu[name]['ratio']:g}" == ratio


def test_bench_figures_are_in_the_files():
    bench = json.loads((ROOT / "bench/results/webshop.json").read_text())
    figures = bench["steps"]["figures"]
    rows = re.findall(r"^\| (\S.*?) \| ([\d.]+) \| (\d+)-(\d+) \| (\d+)-(\d+) \|$", README, re.M)
    assert len(rows) == 4
    for name, ms, low, high, least, most in rows:
        assert f"{figures[name]['ms']:.3g}" == ms
        assert figures[name]["recorded_ms"] == [int(low), int(high)]
        assert figures[name]["ratio"] == [int(least), int(most)]
        assert name == "buy" or int(least) > 100
    assert figures["all steps"]["ratio"][0] > 100
    anchors = json.loads((ROOT / "bench/results/anchors.json").read_text())
    text = f"{anchors['plain_cpu_s']:.0f} s plain, {anchors['ours_cpu_s']:.1f} s here"
    assert text in " ".join(README.split()) and anchors["same_clusters"]
    bm25 = json.loads((ROOT / "bench/results/retrievers.json").read_text())
    assert f"| {bm25['resident_mb']} MB, {bm25['peak_mb']} MB while it loads |" in README


def test_speed_figures_are_in_the_files():
    text = " ".join(README.split())

    def load(name):
        return json.loads((ROOT / f"bench/results/{name}.json").read_text())

    overhead = load("overhead")
    for env, name in (("alfworld", "ALFWorld"), ("webshop", "WebShop")):
        p = overhead[env]["percent"]
        shown = f"{p['observation_tokens']:.1f} | {p['aim']:.1f} | {p['time']:+.1f} | "
        assert f"| {name} | {shown}{p['operations']:+.1f} | {p['memory']:+.1f} |" in text
    draws = overhead["webshop"]["memory_draws"]
    assert f"({min(draws):+.1f} to {max(draws):+.1f} % on WebShop's rows)" in text
    for which, name in (("grpo", "GRPO"), ("paw", "with PaW")):
        seconds = overhead["alfworld"]["seconds"][which].values()
        assert f"| {name} | {' | '.join(f'{s:.2f}' for s in seconds)} |" in text
    update = load("update")
    assert f"{update['speed_ratio']:.2f} times the tokens per second" in text
    assert f"{update['memory_ratio']:.2f} of the peak memory" in text
    assert f"gradients equal to {update['gradient_difference']:g}" in text
    for row in load("rollout")["results"]:
        speed, idle = row["steps_per_s"], row["idle"]
        shown = f"{speed['lock-step']:.1f} | {speed['ours']:.1f} | {row['ratio']:.2f} | "
        shown += f"{100 * idle['lock-step']:.0f} % | {100 * idle['ours']:.0f} % |"
        assert shown in text
    scaling = load("scaling")
    whole, rollout, update = (scaling[f"{part}_ratio"] for part in ("whole", "rollout", "update"))
    shown = f"{whole:.2f} times as fast ({rollout:.2f} in the rollout, {update:.2f} in the update"
    assert shown in text
    assert "gave {:.2f} and {:.2f})".format(*scaling["whole_ratios"]) in text
    assert scaling["rows"]["1"] == scaling["rows"]["2"]
    repeats = load("repeats")
    ratios = [f"{repeats[env]['ratio']:.2f}" for env in ("alfworld", "webshop", "search")]
    assert "{} (ALFWorld), {} (WebShop) and {} times (search)".format(*ratios) in text


def test_every_metric_is_explained():
    table = README.partition("## Metrics")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`(\w+)[`/]", table))
    for folder in (ROOT / "results").glob("*seed*"):
        for line in read_metrics(folder):
            for key in line:
                base = key.split("/")[0]
                short = base.replace("seconds_generate", "_generate").replace("seconds_env", "_env")
                assert base in explained or short in explained or base == "update", key
