"""The READMEs are true: their code runs, their trees exist, their numbers are in the files.

    python -m pytest tests/test_readme.py

bench/README.md has a test of its own, test_bench_readme.py.
"""

import ast
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from paw_min import train
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.experiments import study, table
from paw_min.running.runs import read_metrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "results" / "README.md").read_text()


def test_paw_in_40_lines_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names = {}
    exec(code, names)
    assert len(code.splitlines()) <= 45
    # egg failed twice, mug once: lambda is 1 and 0.5; three of four rows train the world model.
    assert [float(names["lam"][g]) for g in ("mug", "egg")] == [0.5, 1.0]
    assert names["selected"].sum() == 3
    assert names["logits_o"].grad.abs().sum() > 0 and names["logits_a"].grad.abs().sum() > 0


def test_the_environment_in_30_lines_trains(config, monkeypatch, tmp_path):
    page = (ROOT / "paw_min/envs/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names = {}
    exec(code, names)
    monkeypatch.setitem(BENCHMARKS, "guess", names["BENCHMARK"])
    train.train(config(env="guess", updates=1))
    assert read_metrics(tmp_path / "r")[1]["rows"] == 2 * 2 * 3  # random weights never guess it
    env = names["Guess"]()
    assert not env.reset("3").done and env.step("2").observation == "Higher."
    assert env.step("3").won and env.step("4").observation == "Lower."


def test_the_tree_is_the_tree():
    (tree,) = re.findall(r"```\n(run_alfworld.py.*?)```", README, flags=re.S)
    inside = tree.partition("paw_min/ ")[2].partition("\nbench/")[0]
    named = {*re.findall(r"(?<= )(\w+\.py)\b", inside), *re.findall(r"(?<= )(\w+/) ", inside)}
    package = ROOT / "paw_min"
    folders = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert named == {p.name for p in package.glob("*.py") if p.name != "__init__.py"} | folders
    for name in re.findall(r"^(\S+?)[,/]? ", tree.partition("paw_min/ ")[0], flags=re.M):
        assert (ROOT / name).exists(), name


def test_the_paper_to_code_table_names_what_exists():
    table = README.partition("## From the paper to the code")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w[\w/]*\.py): (\w+)`((?:, `\w+`)*)", table)
    assert len(named) > 10
    for file, first, others in named:
        tree = ast.parse((ROOT / "paw_min" / file).read_text())
        defined = {node.name for node in tree.body if hasattr(node, "name")}
        assert {first, *re.findall(r"\w+", others)} <= defined, (file, first, others)


def test_equations_stand_alone():
    """Importing them loads no other module of the project."""
    names = ("advantages", "select", "cmae", "balance", "losses")
    code = f"import sys; from paw_min import {', '.join(names)}; "
    code += "print(*sorted(m for m in sys.modules if m.startswith('paw_min.')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.split() == [f"paw_min.{name}" for name in sorted(names)], out.stderr
    for name in names:
        assert "paw_min" not in (ROOT / f"paw_min/{name}.py").read_text(), name


EXTRAS = ("critic", "targets", "conflict", "memory", "track", "model/lora")


def test_the_core_stays_small():
    """Lines of the core (all but envs, retrieval, toy), and of the eight files of Algorithm 1."""

    def lines(*paths):
        return sum(len(path.read_text().splitlines()) for path in paths)

    package = ROOT / "paw_min"
    extras = {package / f"{name}.py" for name in EXTRAS}
    core = {*package.glob("*.py"), *package.glob("model/*.py")} - extras
    assert lines(*core) < 2970
    eight = "train update rollout advantages select cmae balance losses".split()
    assert lines(*(package / f"{name}.py" for name in eight)) < 990


def test_ruff_is_clean():
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "."]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ci_runs_the_readmes_test_command():
    (command,) = re.findall(r"^    (.*-m pytest)$", README, flags=re.M)
    pattern = re.search(r"sed -n '(s/.*?/p)'", (ROOT / ".ci/run").read_text())[1]
    found = subprocess.run(["sed", "-n", pattern, "README.md"], capture_output=True, cwd=ROOT)
    assert found.stdout.decode() == command + "\n"
    for file in re.findall(r"requirements\S*txt", README):
        assert (ROOT / file).is_file()


def test_the_run_on_display_is_in_the_results():
    (shown,) = re.findall(r"```\n(run runs/.*?)```", README, flags=re.S)
    folder = re.search(r"run runs/(\S+):", shown)[1]
    lines = read_metrics(ROOT / "results" / folder)
    table = [line.split() for line in shown.splitlines() if line[:7].strip().isdigit()]
    assert [int(row[0]) for row in table] == [m["update"] for m in lines]
    for row, m in zip(table, lines):
        if m["update"]:
            assert row[1] == f"{m['success']:.3f}" and row[6] == f"{m['wm_loss']:.4f}"
        if "eval_success" in m:
            assert row[-1] == f"{m['eval_success']:.3f}"
    ends = f"{lines[0]['eval_success']:.3f} before, {lines[-1]['eval_success']:.3f} after"
    assert f"held-out success: {ends} {lines[-1]['update']} updates" in shown


def rises() -> dict:
    """{benchmark: points gained, per seed}, checked against the tables."""
    row = r"^\| (\w+)(-\S+seed\d) \| ([\d.]+) \| ([\d.]+) \|(?: ([\d.]+) \| ([\d.]+) \|)?"
    found = {}
    for env, name, *shown in re.findall(row, RESULTS, flags=re.M):
        lines = [m for m in read_metrics(ROOT / "results" / (env + name)) if "eval_success" in m]
        ends = lines[0], lines[-1]
        assert [f"{100 * m['eval_success']:.1f}" for m in ends] == shown[:2], name
        if shown[2]:
            assert [f"{m['eval_score']:.1f}" for m in ends] == shown[2:], name
        rise = 100 * (ends[1]["eval_success"] - ends[0]["eval_success"])
        found.setdefault(env, []).append(rise)
    return found


def test_results_are_in_the_files():
    found = rises()
    assert set(found) == {"alfworld", "webshop", "search"}
    names = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search"}
    for env, values in found.items():
        assert len(values) == 3
        mean = sum(values) / 3
        assert f"| {env} | {mean:.1f} |" in RESULTS
        assert f"{mean:.1f} points on {names[env]}" in " ".join(README.split()), env
    ends = [read_metrics(f)[-1]["eval_success"] for f in (ROOT / "results").glob("alfworld-*")]
    p = sum(ends) / len(ends)
    assert f"a standard error of {100 * (p * (1 - p) / 60) ** 0.5:.0f} points" in README


STUDY = ROOT / "results/study"


def test_the_study_is_in_its_files():
    """The tables and the numbers of results/README.md and README.md."""
    settings = json.loads((STUDY / "study.json").read_text())
    change = "{difference:+.1f} [{low:+.1f}, {high:+.1f}]".format
    for setting in settings:
        (_, grpo), *others = list(setting["cells"].items())[:4]
        differences = [change(**arm["success"]) for _, arm in others]
        success = " | ".join([f"{grpo['success']['mean']:.1f}", *differences])
        p = " | ".join(f"{arm['p']['mean']:.1f}" for _, arm in [("", grpo), *others])
        assert f"| `{setting['name']}` | {success} |" in README
        for row in (success, p):
            assert f"| `{setting['name']}` | {row} |" in RESULTS
        paw, placebo, tenth = (arm for _, arm in others)
        assert {arm["success"]["seeds"] for arm in setting["cells"].values()} == {8}
        assert paw["p"]["difference"] > 25 and tenth["p"]["difference"] > 17
        assert 20 < paw["exact"]["mean"] < 28.5 and grpo["exact"]["mean"] == 0
        assert 2.5 < placebo["exact"]["mean"] < 9.5
        assert 4 < paw["p"]["mean"] - placebo["p"]["mean"] < 7
        for cell in (setting["pairs"]["GRPO w/ PaW"]["success"], tenth["success"]):
            assert cell["low"] < 0 < cell["high"]
    p = [[s["cells"][arm]["p"]["mean"] for s in settings] for arm in list(settings[0]["cells"])[:3]]
    grpo, paw, placebo = (f"{min(values):.0f} to {max(values):.0f} %" for values in p)
    told = f"is {grpo} with GRPO, {paw} with PaW, and {placebo} with the placebo"
    assert told in " ".join(README.split())
    sparse, text = settings[1], " ".join(RESULTS.split())
    for arm, cell in sparse["cells"].items():
        success = cell["success"]
        shown = [change(**success) if success["difference"] else f"{success['mean']:.1f}"]
        shown += [f"{cell[key]['mean']:.1f}" for key in ("p", "exact")]
        shown += [f"{sparse['training'][arm]['grad_norm, update 1']:.3f}"]
        assert f"| {arm} | {' | '.join(shown)} |" in RESULTS
    losses = {arm: -sparse["cells"][arm]["success"]["difference"] for arm in ("ECHO", "w/ CE loss")}
    told = f"ECHO loses {losses['ECHO']:.1f} points, cross entropy in place of the clipped MAE"
    assert f"{told} {losses['w/ CE loss']:.1f} (" in " ".join(README.split())
    assert f"from GiGPO by {change(**sparse['pairs']['GiGPO w/ PaW']['success'])}." in text
    ranks = [
        sorted((arm for arm in sparse["cells"] if "GiGPO" not in arm), key=key)
        for key in (lambda a: sparse["training"][a]["grad_norm, update 1"],
                    lambda a: -sparse["cells"][a]["success"]["mean"])
    ]  # fmt: skip
    assert ranks[0] == ranks[1] and len(ranks[0]) == 7
    to_placebo = sparse["pairs"]["GRPO w/ PaW"]
    assert change(**to_placebo["area"]) in text
    assert to_placebo["nothing"]["high"] < 0
    without, with_paw, _, tenth = settings[0]["cells"]
    numbers, moved = [], [s["training"] for s in settings]
    for name, arms, digits in (
        ("grad_norm, update 1", (with_paw, without), 3),
        ("ref_kl, update 2", (with_paw, without), 4), ("ref_kl, last", (with_paw, without), 3),
        ("grad_cosine", (with_paw,), 3), ("grad_norm, update 1", (tenth,), 3),
    ):  # fmt: skip
        numbers += [f"{by_arm[arm][name]:.{digits}f}" for arm in arms for by_arm in moved]
    why = re.search(r"\*\*Why\.\*\*(.*?)\n\n", RESULTS, flags=re.S)[1]
    assert re.findall(r"-?\d+\.\d+", why) == numbers
    key = "grad_norm, update 1"
    ratios = sorted(by_arm[with_paw][key] / by_arm[without][key] for by_arm in moved)
    text = f"gradient {ratios[0]:.1f} to {ratios[-1]:.1f} times as large"
    assert text in " ".join(README.split())


@pytest.mark.slow
def test_the_study_follows_from_its_runs(tmp_path):
    with tarfile.open(STUDY / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    grids = {"tiny": "study", "sparse": "study-all", "changed": "study"}
    sweeps = [tmp_path / name / f"{grid}-alfworld.json" for name, grid in grids.items()]
    study.main(sweeps, tmp_path / "out")
    made, kept = (
        [float(x) for x in re.findall(r"-?\d+\.[\de-]+", (folder / "study.json").read_text())]
        for folder in (tmp_path / "out", STUDY)
    )
    assert made == pytest.approx(kept, abs=1e-6) and len(kept) > 1000
    assert sum(len(table.find([sweep])) for sweep in sweeps) == 136
    runs = {(s.parent.name, e.label, e.seed): e.folder for s in sweeps for e in table.find([s])}
    ends = {key: read_metrics(folder)[-1] for key, folder in runs.items()}
    paw = {key: m for key, m in ends.items() if key[1] == "GRPO w/ PaW"}
    over_wm = sum(m["grad_norm_rl"] > m["grad_norm_wm"] for m in paw.values())
    without = {key: ends[key[0], "GRPO", key[2]]["grad_norm"] for key in paw}
    over_grpo = sum(m["grad_norm_rl"] > without[key] for key, m in paw.items())
    text = f"in {over_wm} of {len(paw)} runs, and larger than without PaW in {over_grpo} ("
    assert text in " ".join(RESULTS.split())


def test_what_the_stand_ins_do_not_know_is_in_the_files():
    """The share of observation tokens with p <= rho, before and after, and of the real model."""
    text, ends = " ".join(RESULTS.split()), []
    for env in ("alfworld", "webshop", "search"):
        lines = read_metrics(ROOT / f"results/{env}-tiny-grpo-paw-seed0")
        ends.append([f"{100 * (1 - m['wm_clipped_tokens']):.0f}" for m in (lines[1], lines[-1])])
    (a, x), (b, y), (c, z) = ends
    assert f"{a} % on ALFWorld, {b} % on WebShop, {c} % on search" in text
    assert f"In the last update: {x} %, {y} %, {z} %" in text
    real = read_metrics(ROOT / "results/smollm2")
    assert f"it is {100 * (1 - real[1]['wm_clipped_tokens']):.0f} % in the first update" in text
    for m in real + read_metrics(ROOT / "results/smollm2-grpo"):
        assert m.get("success", 0) == m.get("eval_success", 0) == 0


def test_the_quick_starts_time_is_in_the_file():
    text = (ROOT / "results/wall_time.txt").read_text()
    minutes, seconds = re.search(r"run_alfworld.py .*\nreal\t(\d+)m(\d+)", text).groups()
    assert f"{minutes} min {seconds} s on one core" in " ".join(README.split())


def test_the_cost_is_in_the_files():
    def load(name: str) -> dict:
        return json.loads((ROOT / f"bench/results/{name}.json").read_text())

    more = [load("overhead")[env]["percent"]["operations"] for env in ("alfworld", "webshop")]
    peers = [load("update")[shape] for shape in ("alfworld", "webshop", "search")]
    speeds = [r["speed_ratio"]["trl_valid"] for r in peers]
    text = " ".join(README.split())
    assert f"adds {more[0]:.1f} % to the operations of an update on rows with ALFWorld's" in text
    assert f"lengths, {more[1]:.1f} % on WebShop's" in text
    assert f"are {min(speeds):.1f} to {max(speeds):.1f} times as fast as TRL's" in text
    assert max(r["memory_ratio"]["trl_valid"] for r in peers) <= 0.5


def test_every_metric_is_explained():
    explained = set(re.findall(r"`(\w+)[`/]", RESULTS.partition("## Metrics")[2]))
    for folder in (ROOT / "results").glob("*seed*"):
        for line in read_metrics(folder):
            assert {key.split("/")[0] for key in line} - {"update"} <= explained


def test_the_commands_of_the_reproduce_table_exist():
    """Their smallest runs are in test_experiments, test_analyses and test_prompting."""
    from paw_min.experiments import figures, sweep
    from paw_min.experiments.grids import GRIDS

    table = README.partition("## Reproduce")[2].partition("\n## ")[0].partition("|---")[2]
    commands = re.findall(r"`(\w[\w-]*) ?([^`]*)`", table)
    named = {name for name, _ in commands} - {"plain", "react", "reflexion", "webshop", "search"}
    assert named <= {
        "sweep", "prompting", "figures", "fig2ab", "fig2c", "kept", "knowledge", "study",
    } | GRIDS.keys()  # fmt: skip
    swept = set()
    for name, rest in commands:
        if name == "sweep":
            grid, _, env, *extra = rest.split()
            arms = sweep.plan(grid, env, [0], "runs", [x for x in extra if x != "--"])
            swept.add(grid)
            assert len(arms) == len(GRIDS[grid])
        elif name == "figures":
            assert callable(getattr(figures, rest.split()[0]))
    assert swept | {"fig6-rho"} == set(GRIDS)


@pytest.mark.slow
def test_the_small_checks_are_in_their_files():
    """Minutes and shares in the README, and the tables of results/small."""
    from paw_min.experiments.table import compute, load, markdown

    small = ROOT / "results/small"
    page, table = (small / "README.md").read_text(), README.partition("## Reproduce")[2]
    for name, seconds in re.findall(r"^\| ([\w-]+) \| (\d+) \|$", page, flags=re.M):
        results, notes = load([small / f"{name}.json"])
        shown = markdown(*compute(results)).strip() in page
        assert not notes and shown == (f"`{name}.json`" in page)
        grid, _, env = name.rpartition("-")
        row = next(x for x in table.splitlines() if re.search(rf"`(sweep )?{grid}( --env|`)", x))
        assert f"{int(seconds) / 60:.0f}" in row.rpartition(" | ")[2] and env in row, name
    shares = json.loads((small / "fig2c-webshop.json").read_text())["noisy"]
    text = " ".join(README.split())
    phrases = {"share": "are {} % of the tokens", "CE": "get {} % of the gradient",
               "MAE": "and {} % with MAE", "clipped MAE": "they get {} %:"}  # fmt: skip
    for key, phrase in phrases.items():
        assert phrase.format(round(100 * shares[key])) in text


def test_links_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "paw_min/envs/README.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def test_the_stored_configs_are_those_of_the_presets():
    """The commands of results/README.md still mean the settings that the runs had."""
    import run_alfworld
    import run_search
    import run_webshop
    from paw_min.config import differences, parse_args

    scripts = {"alfworld": run_alfworld, "webshop": run_webshop, "search": run_search}
    for folder in (ROOT / "results").glob("*seed*"):
        env, *_, seed = folder.name.split("-")
        argv = ["--seed", seed[4:]] + ["--no-paw"] * ("-paw-" not in folder.name)
        cfg, _ = parse_args(env, scripts[env].PRESETS, "", argv)
        assert differences(json.loads((folder / "config.json").read_text()), cfg) == []
        assert cfg.name == folder.name
