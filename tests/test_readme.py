"""The pages are true: their code and commands run, links resolve, numbers are in the files.

    python -m pytest tests/test_readme.py

The pages are all tracked Markdown files. It does not matter on which page something stands or how
it is worded. research/bench/README.md has a test of its own, test_bench_readme.py.
"""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from functools import cache
from math import ceil, floor
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import Qwen2Config

import run_alfworld
import run_search
import run_webshop
from paw_min import advantages, train
from paw_min.base import seeds
from paw_min.config import parse_args
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.benchmarks import NAMES as ENVS
from paw_min.running.memory import estimate
from paw_min.running.runs import read_metrics
from paw_min.running.stored import differences
from research.outcomes import EDGES
from research.paper import figures, sweep, table, transitions
from research.paper.grids import GRIDS
from research.study import analyze as study
from tests.test_memory import LARGE, SMALL

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PRESETS = {
    "alfworld": run_alfworld.PRESETS,
    "webshop": run_webshop.PRESETS,
    "search": run_search.PRESETS,
}


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).exists()]


PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in tracked("*.md")}
EVERYTHING = "\n".join(PAGES.values())
# The changelog names what is gone.
CURRENT = {name: text for name, text in PAGES.items() if name != "CHANGELOG.md"}


# --- code --------------------------------------------------------------------------------------


def python_block(word: str) -> str:
    """The one Python block of all pages with this word."""
    blocks = re.findall(r"```python\n(.*?)```", EVERYTHING, flags=re.S)
    (found,) = [block for block in blocks if word in block]
    return found


def test_paw_in_40_lines_runs():
    names = {}
    exec(python_block("balance.wm_weight"), names)
    # egg failed twice, mug once: lambda is 1 and 0.5; three of four rows train the world model.
    assert [float(names["lam"][g]) for g in ("mug", "egg")] == [0.5, 1.0]
    assert names["selected"].sum() == 3
    assert names["logits_o"].grad.abs().sum() > 0 and names["logits_a"].grad.abs().sum() > 0


def test_the_environment_in_30_lines_trains(config, monkeypatch, tmp_path):
    names = {}
    exec(python_block("BENCHMARK = "), names)
    monkeypatch.setitem(BENCHMARKS, "guess", names["BENCHMARK"])
    train.train(config(env="guess", updates=1))
    assert read_metrics(tmp_path / "r")[1]["rows"] == 2 * 2 * 3  # random weights never guess it
    env = names["Guess"]()
    assert not env.reset("3").done and env.step("2").observation == "Higher."
    assert env.step("3").won and env.step("4").observation == "Lower."


def test_equations_stand_alone():
    """Importing them loads no other module of the project."""
    names = ("advantages", "select", "cmae", "balance", "losses")
    code = f"import sys; from paw_min import {', '.join(names)}; "
    code += "print(*sorted(m for m in sys.modules if m.startswith('paw_min.')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.split() == [f"paw_min.{name}" for name in sorted(names)], out.stderr


def test_ruff_is_clean():
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "."]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("version, works", [((3, 10, 9), False), ((3, 11, 0), True),
                                            ((3, 13, 9), True), ((3, 14, 0), False)])  # fmt: skip
def test_other_versions_of_python_get_one_line(version, works):
    """The check comes first in the README's commands, before anything is installed."""
    commands = re.findall(r"^    (python3 .*venv .*)$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    assert all(command.startswith('python3 -c "import paw_min" && ') for command in commands)
    code = f"import sys; sys.version_info = {version}; import paw_min; "
    code += "print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if works:
        assert (out.returncode, out.stdout) == (0, "False\n")
    else:
        assert out.returncode == 1 and out.stdout == "" and out.stderr.count("\n") == 1
        assert out.stderr.startswith("error: paw_min needs Python 3.11, 3.12 or 3.13; this is ")


@pytest.mark.parametrize("programs", [["c++", "make"], ["make"], []])
def test_a_missing_compiler_gets_one_line(tmp_path, programs):
    """Where nothing is installed yet: without site-packages (-S, -I), there is no torch."""
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import paw_min"
    command = [sys.executable, "-I", "-S", "-c", code]
    env = {"PATH": str(tmp_path)}
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    if programs == ["c++", "make"]:
        assert (out.returncode, out.stderr) == (0, "")
    else:
        missing = "c++" if programs else "c++ and no make"
        assert out.returncode == 1 and out.stderr.count("\n") == 1
        assert out.stderr.endswith(f"there is no {missing}: run apt-get install g++ make.\n")


# --- names, links and commands -----------------------------------------------------------------


def code_spans(text: str) -> list[str]:
    """What stands in `backticks`, on one line each."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(text))]


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


@pytest.mark.parametrize("page", CURRENT)
def test_named_scripts_exist(page):
    files = tracked("*.py")
    for span in code_spans(CURRENT[page]):
        for name in re.findall(r"^[\w/-]+\.py\b", span):
            if "guess" not in name:  # the example of an environment
                assert any(f"{file}".endswith(f"/{name}") for file in files), name


def test_every_module_of_the_method_is_named():
    for path in tracked("paw_min/*.py"):
        if path.parent.name == "paw_min" and path.name != "__init__.py":
            assert path.name in EVERYTHING


def defined_in(path: Path) -> set[str]:
    """Names of the functions, classes, fields and constants of a module."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    targets = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    targets += [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_paper_to_code_tables_name_what_exists():
    """`file.py: name`, `name`."""
    text = "\n".join(CURRENT.values())
    named = re.findall(r"`([\w/]+\.py):\s+(\w+)`((?:, `\w+`)*)", text)
    assert len(named) > 10
    for file, first, others in named:
        paths = [path for path in tracked("*.py") if f"{path}".endswith(f"/{file}")]
        names = {first, *re.findall(r"\w+", others)}
        assert any(names <= defined_in(path) for path in paths), (file, names)


def functions_in_the_table_of_seeds() -> list[str]:
    """The last column of the table in base/seeds.py."""
    lines = [line for line in seeds.__doc__.splitlines() if line.startswith("    ")]
    header, rule, *rows = [re.split(r"  +", line.strip()) for line in lines]
    assert header == ["draw", "key", "function"] and len(rule) == 3
    assert all(len(row) == 3 for row in rows)
    return [function for _, _, function in rows]


def test_the_table_of_seeds_names_functions_that_exist():
    """That of base/seeds.py."""
    files = [path.as_posix() for path in tracked("paw_min/*.py")]
    # tasks.panel; model/lora.py: attach; request_seed, sampler.py
    pattern = r"(?:([\w/]+)(?:\.py: |\.))?(\w+)(?:, (\w+\.py))?"
    names = []
    for function in functions_in_the_table_of_seeds():
        module, name, user = re.fullmatch(pattern, function).groups()
        ending = f"/{module or 'base/seeds'}.py"
        assert any(name in defined_in(Path(file)) for file in files if file.endswith(ending))
        assert not user or any(file.endswith(f"/{user}") for file in files)
        names.append(name)
    assert len(names) == 11


def heading_anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGES[page]):
        file, _, anchor = target.partition("#")
        path = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", without_blocks(path.read_text()), flags=re.M)
            assert anchor in map(heading_anchor, titles), target


def command_lines(text: str) -> Iterable[str]:
    """Indented and fenced lines, and code in backticks."""
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, flags=re.S)
    blocks += re.findall(r"(?:^ {4,}\S.*\n)+", text, flags=re.M)
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()
    yield from code_spans(text)


def commands(text: str) -> list[list[str]]:
    """Our commands: the words of each, from its program on, without comments."""
    found = []
    for line in command_lines(text):
        for part in line.split(" && "):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # an apostrophe: not a command
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            program = words[0].rpartition("/")[2] if words else ""
            if program in ("python", "torchrun", "bash") or program in EXPERIMENTS:
                found.append([program, *words[1:]])
    return found


EXPERIMENTS = {path.stem for path in (ROOT / "paw_min/experiments").glob("*.py")}
EXPERIMENTS |= {path.parent.name for path in (ROOT / "paw_min/experiments").glob("*/__main__.py")}
EXPERIMENTS -= {"__init__", "transitions", "grids"}
# What a page shows in place of a value: SEEDS, [--out FILE], runs/*/x.json, $FLAGS, a <b>.
PLACEHOLDER = re.compile(r"[\[\]$*<|]|\.\.\.|\.$|^(GRID|ENV|BENCHMARK)$")


def check_experiment(name: str, words: list[str], out: str) -> None:
    if any(PLACEHOLDER.search(word) for word in words) or not words or words[0].startswith("-"):
        return
    if name == "sweep":
        assert words[0] in GRIDS
        if "--env" in words:
            env = words[words.index("--env") + 1]
            extra = words[words.index("--") + 1 :] if "--" in words else []
            jobs = sweep.plan(words[0], env, [0], out, extra)
            assert len(jobs) == len(GRIDS[words[0]])
    elif name == "figures":
        assert callable(getattr(figures, words[0]))
    elif name in ("fig2ab", "fig2c", "kept"):
        transitions.arguments("", words, teacher=name == "fig2c")
    elif name == "prompting":
        assert words[0] in ENVS


def check_run_script(script: str, flags: list[str]) -> None:
    if "--help" not in flags and not any(PLACEHOLDER.search(word) for word in flags):
        env = Path(script).stem.removeprefix("run_")
        parse_args(env, PRESETS[env], "", ["0" if word == "S" else word for word in flags])


def check_command(words: list[str], out: str) -> None:
    program, *rest = words
    scripts = [k for k, word in enumerate(rest) if word.endswith((".py", ".sh"))]
    if program in EXPERIMENTS:
        check_experiment(program, rest, out)
    elif rest[:1] == ["-m"] and not PLACEHOLDER.search(rest[1]):
        assert importlib.util.find_spec(rest[1]), rest[1]
        package, _, name = rest[1].rpartition(".")
        if package == "paw_min.experiments":
            check_experiment(name, rest[2:], out)
    elif scripts:
        script = rest[scripts[0]]
        assert (ROOT / script).is_file(), script
        if script.startswith("run_"):
            check_run_script(script, rest[scripts[0] + 1 :])


@pytest.mark.parametrize("page", CURRENT)
def test_commands_parse(page, tmp_path, monkeypatch):
    """Their smallest runs are in test_experiments, test_analyses and test_prompting."""
    monkeypatch.chdir(tmp_path)
    for words in commands(CURRENT[page]):
        try:
            check_command(words, str(tmp_path))
        except SystemExit:
            pytest.fail(f"{' '.join(words)}: the flags are not those of the program")


def test_every_kind_of_command_is_found_and_every_grid_has_one():
    found = [words for text in CURRENT.values() for words in commands(text)]
    assert len(found) > 60
    programs = {words[0] for words in found} | {words[2] for words in found if "-m" in words}
    assert {"torchrun", "bash", "sweep", "table", "figures", "paw_min.inspect"} <= programs
    code = " ".join(span for text in CURRENT.values() for span in code_spans(text))
    assert set(GRIDS) <= set(re.findall(r"[\w-]+", code))


def test_the_commands_activate_their_environment():
    """The build of ALFWorld's planner calls `python`, which a stock Debian does not have."""
    for command in re.findall(r"^    (python3 .*venv .*)$", (ROOT / "README.md").read_text(), re.M):
        folder, rest = re.search(r"-m venv (\S+) && (.*)", command).groups()
        assert rest.startswith(f". {folder}/bin/activate && pip install ")


def test_ci_runs_the_test_command_of_its_page():
    script = (ROOT / ".ci/run").read_text()
    pattern, page = re.search(r"sed -n '(s/.*?/p)' (\S+\.md)", script).groups()
    found = subprocess.run(["sed", "-n", pattern, page], capture_output=True, text=True, cwd=ROOT)
    (command,) = found.stdout.splitlines()
    assert command.endswith("-m pytest -n 2 --dist loadfile")
    for file in re.findall(r"requirements\S*txt", EVERYTHING):
        assert (ROOT / file).is_file()


# --- numbers -----------------------------------------------------------------------------------


NAMES = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search"}
# 0.25, +1.5, -3; not the 2.5 of Qwen2.5, the 3.11 of 3.11.4 or the 4 of a table's 1e-4.
SIGNED = r"(?<![\w.-])[+-]?\d+(?:\.\d+)?(?![\w.]*\d)"
# Decimals that were not measured here: sizes of models, settings, sections, the paper's, versions.
CONSTANTS = set(
    "0.01 0.05 0.1 0.2 0.4 0.5 0.6 0.9 0.99 0.95 0.001 0.75 1.5 3.1 3.2 3.11 3.12 3.13 4.1 4.7 "
    "2.5".split()
)
PERCENT_CONSTANTS = {"95", "80", "0", "100"}  # intervals, power, bounds


def prose(text: str) -> str:
    """Without code, tables and links."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.S)
    text = re.sub(r"^(\|| {4}).*$", "", text, flags=re.M)
    return " ".join(re.sub(r"arXiv\s+[\d.]+", "", text).split())


def decimals(text: str) -> set[str]:
    return {number for number in re.findall(SIGNED, prose(text)) if "." in number}


def percentages(text: str) -> set[str]:
    """Whole numbers in percent or points, also of a range: 54 to 58 %."""
    found = re.findall(rf"({SIGNED})(?: to ({SIGNED}))? (?:%|points)", prose(text))
    return {number for pair in found for number in pair if number and "." not in number}


def load(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def change(cell: dict) -> str:
    return f"{cell['difference']:+.1f} [{cell['low']:+.1f}, {cell['high']:+.1f}]"


class Study:
    """The recorded study: research/study/study.json."""

    settings = json.loads((RESULTS / "study/study.json").read_text())
    sparse = settings[1]
    first_norm = "grad_norm, update 1"

    def arms(self, setting: dict) -> list[dict]:
        """GRPO, GRPO w/ PaW, the placebo, a tenth of the loss."""
        return list(setting["cells"].values())[:4]

    def rows(self) -> list[str]:
        """Of the tables of success and of p, and of all arms of `sparse`."""
        found = []
        for setting in self.settings:
            grpo, *others = self.arms(setting)
            success = [f"{grpo['success']['mean']:.1f}", *(change(a["success"]) for a in others)]
            p = [f"{arm['p']['mean']:.1f}" for arm in (grpo, *others)]
            found += [f"| `{setting['name']}` | {' | '.join(row)} |" for row in (success, p)]
        for arm, cell in self.sparse["cells"].items():
            success = cell["success"]
            shown = [change(success) if success["difference"] else f"{success['mean']:.1f}"]
            shown += [f"{cell[key]['mean']:.1f}" for key in ("p", "exact")]
            shown += [f"{self.sparse['training'][arm][self.first_norm]:.3f}"]
            found.append(f"| {arm} | {' | '.join(shown)} |")
        return found

    def trained(self, arm: int, metric: str) -> list[float]:
        """The mean over the seeds in each setting."""
        return [list(s["training"].values())[arm][metric] for s in self.settings]

    def why(self) -> list[str]:
        """The table behind the explanation: gradient norms, drifts, cosine."""
        arms = {"GRPO": 0, "GRPO w/ PaW": 1, "a tenth of the loss": 3}
        found = ["| metric | arm | `tiny` | `sparse` | `changed` |", "|---|---|---|---|---|"]
        for metric, title, digits in (
            (self.first_norm, "`grad_norm`, update 1", 3),
            ("ref_kl, update 2", "`ref_kl`, update 2", 4),
            ("ref_kl, last", "`ref_kl`, last update", 3),
            ("grad_cosine", "`grad_cosine`, updates 4 and 8", 3),
        ):
            shown = ["GRPO w/ PaW"] if metric == "grad_cosine" else list(arms)
            for arm in shown:
                cells = [f"{value:.{digits}f}" for value in self.trained(arms[arm], metric)]
                first = f" {title} " if arm == shown[0] else " "
                found.append(f"|{first}| {arm} | {' | '.join(cells)} |")
        return found

    def numbers(self) -> set[str]:
        """Of the text."""
        cells = self.sparse["cells"]
        found = [f"{-cells[arm]['success']['difference']:.1f}" for arm in ("ECHO", "w/ CE loss")]
        pairs = self.sparse["pairs"]
        shown = [pairs["GRPO w/ PaW"]["area"], pairs["GiGPO w/ PaW"]["success"]]
        found += [f"{cell[key]:+.1f}" for cell in shown for key in ("difference", "low", "high")]
        norms = zip(self.trained(1, self.first_norm), self.trained(0, self.first_norm))
        ratios = [with_paw / without for with_paw, without in norms]
        return {*found, f"{min(ratios):.1f}", f"{max(ratios):.1f}"}

    def percentages(self) -> set[str]:
        """Ranges over the settings."""
        arms = [self.arms(setting) for setting in self.settings]
        ranges = [[setting[k]["p"]["mean"] for setting in arms] for k in range(3)]
        ranges += [[setting[k]["exact"]["mean"] for setting in arms] for k in (1, 2)]
        found = [value for values in ranges for value in (min(values), max(values))]
        apart = [paw["p"]["mean"] - placebo["p"]["mean"] for _, paw, placebo, _ in arms]
        at_least = [min(setting[k]["p"]["difference"] for setting in arms) for k in (1, 3)]
        return {f"{value:.0f}" for value in found + [min(apart), max(apart)]} | {
            f"{floor(value)}" for value in at_least
        }


def test_the_study_says_what_the_pages_say():
    """The claims in words, on the recorded numbers."""
    recorded = Study()
    for setting in recorded.settings:
        grpo, paw, placebo, tenth = recorded.arms(setting)
        assert {arm["success"]["seeds"] for arm in setting["cells"].values()} == {8}
        assert grpo["exact"]["mean"] == 0
        assert placebo["exact"]["mean"] < paw["exact"]["mean"]
        for cell in (setting["pairs"]["GRPO w/ PaW"]["success"], tenth["success"]):
            assert cell["low"] < 0 < cell["high"]
    sparse = recorded.sparse
    assert sparse["pairs"]["GRPO w/ PaW"]["nothing"]["high"] < 0

    # A larger gradient goes with lower success.
    arms = [arm for arm in sparse["cells"] if "GiGPO" not in arm]
    by_norm = {sparse["training"][arm][recorded.first_norm]: arm for arm in arms}
    by_success = {-sparse["cells"][arm]["success"]["mean"]: arm for arm in arms}
    in_order = [by_norm[norm] for norm in sorted(by_norm)]
    assert in_order == [by_success[success] for success in sorted(by_success)]
    assert len(in_order) == 7


def test_the_tables_of_the_study_are_in_its_file():
    assert [setting["name"] for setting in Study.settings] == ["tiny", "sparse", "changed"]
    assert "\n".join(Study().why()) + "\n\n" in PAGES["research/README.md"]
    expected = Study().rows()
    names = "|".join(re.escape(row.split(" | ")[0].strip("| ")) for row in expected)
    pages = f"{PAGES['README.md']}\n{PAGES['research/README.md']}"
    shown = re.findall(rf"^\| (?:{names}) \| .*\[[+-].*$", pages, flags=re.M)
    assert len(shown) >= 3 and set(shown) <= set(expected)
    assert set(expected) <= set(PAGES["research/README.md"].splitlines())


def rises() -> dict[str, list[float]]:
    """Points gained by each seed of each benchmark."""
    found = {}
    for env in NAMES:
        for folder in sorted(RESULTS.glob(f"{env}-*")):
            evaluated = [m for m in read_metrics(folder) if "eval_success" in m]
            rise = 100 * (evaluated[-1]["eval_success"] - evaluated[0]["eval_success"])
            found.setdefault(env, []).append(rise)
    return found


def alfworld_curve() -> dict[int, float]:
    """Held-out success by update, averaged over the seeds, in percent."""
    values = {}
    for folder in RESULTS.glob("alfworld-*"):
        for m in read_metrics(folder):
            if "eval_success" in m:
                values.setdefault(m["update"], []).append(100 * m["eval_success"])
    return {update: sum(found) / len(found) for update, found in values.items()}


def standard_error(successes: float, tasks: int) -> float:
    """Of one success rate; both in percent."""
    share = successes / 100
    return 100 * (share * (1 - share) / tasks) ** 0.5


def known_tokens() -> set[str]:
    """Observation tokens with p <= rho, in percent: first and last update, and a real model."""
    shares = []
    for env in NAMES:
        lines = read_metrics(RESULTS / f"{env}-tiny-grpo-paw-seed0")
        shares += [1 - m["wm_clipped_tokens"] for m in (lines[1], lines[-1])]
    shares.append(1 - read_metrics(RESULTS / "smollm2")[1]["wm_clipped_tokens"])
    return {f"{100 * share:.0f}" for share in shares}


@cache
def open_questions() -> list[str]:
    """What the page says of gradient norms per run, success by update and areas, from the files."""
    runs = {}  # (setting, run) -> metrics
    with tarfile.open(RESULTS / "study/runs.tar.xz") as archive:
        for member in archive:
            if member.name.endswith("/metrics.jsonl"):
                setting, name, _ = member.name.split("/")
                lines = archive.extractfile(member).read().decode().splitlines()
                runs[setting, name] = [json.loads(line) for line in lines]

    def pairs(setting: str) -> list[tuple[list[dict], list[dict]]]:
        """Metrics of GRPO and of GRPO w/ PaW, for each of the eight seeds."""
        name = f"alfworld-{setting}-grpo{{}}-eval-tasks=120-seed{{}}"
        return [
            (runs[setting, name.format("", seed)], runs[setting, name.format("-paw", seed)])
            for seed in range(8)
        ]

    def ratios(setting: str) -> list[float]:
        return sorted(paw[1]["grad_norm"] / grpo[1]["grad_norm"] for grpo, paw in pairs(setting))

    def lost(update: int) -> str:
        changes = [paw[update]["success"] - grpo[update]["success"] for grpo, paw in pairs("tiny")]
        return f"{100 * sum(changes) / len(changes):.1f}"

    cells = {one["name"]: one["cells"] for one in load("research/study/study.json")}

    def below(setting: str, arm: str) -> str:
        area = cells[setting][arm]["area"]
        assert area["high"] < 0  # the interval does not contain 0
        return f"{-area['difference']:.1f} [{-area['high']:.1f}, {-area['low']:.1f}]"

    def success_change(arm: str) -> str:
        return f"{cells['sparse'][arm]['success']['difference']:.1f}"

    def mean_lambda(update: int) -> str:
        found = [with_paw[update]["lambda"] for _, with_paw in pairs("sparse")]
        return f"{sum(found) / len(found):.2f}"

    tiny, sparse, changed = (ratios(setting) for setting in ("tiny", "sparse", "changed"))
    paw = "GRPO w/ PaW"
    tenth = "world-model loss x 0.1"
    return [
        f"is {tiny[0]:.1f} to {tiny[-1]:.1f} times that of GRPO",
        f"`tiny` (median {median(tiny):.1f})",
        f"{sparse[0]:.1f} to {sparse[-1]:.1f} in `sparse` (median {median(sparse):.1f})",
        f"{changed[0]:.1f} to {changed[-1]:.1f} in `changed` (median {median(changed):.1f})",
        f"by {lost(2)}, {lost(3)}, {lost(4)} and {lost(5)} points in updates 2 to 5",
        f"by {lost(6)}, {lost(7)} and {lost(8)} points in updates 6 to 8",
        f"by {below('tiny', paw)}, {below('sparse', paw)} and {below('changed', paw)} points",
        f"`tiny`, by {below('tiny', tenth)}, and in `sparse`, by {below('sparse', tenth)}",
        f"{success_change(paw)} points with it, {success_change('w/o Ada. Coef.')} without. It "
        f"falls only from {mean_lambda(1)} in the first update to {mean_lambda(-1)} in the last",
    ]


def recorded_decimals() -> set[str]:
    found = Study().numbers()
    found |= decimals(" ".join(open_questions()))
    found |= {f"{sum(values) / len(values):.1f}" for values in rises().values()}
    found |= {f"{value:.1f}" for value in alfworld_curve().values()}
    overhead = load("research/bench/results/overhead.json")
    update = load("research/bench/results/update.json")
    for env in ("alfworld", "webshop"):
        percent = overhead[env]["percent"]
        found |= {f"{percent[key]:.1f}" for key in ("operations", "observation_tokens")}
    speeds = [update[env]["speed_ratio"]["trl_valid"] for env in NAMES]
    memory = [update[env]["memory_ratio"]["trl_valid"] for env in NAMES]
    assert max(memory) <= 0.5  # "at most half"
    found |= {f"{edge:.1f}" for edge in (min(speeds), max(speeds))}
    for setting in load("research/fair/curves.json")[:3]:  # GRPO with and without PaW
        area = setting["arms"]["GRPO w/ PaW"]["area"]
        found |= {f"{number:+.1f}" for number in (area["difference"], *area["t"])}
    # Locks: test_locks.py says that these are the runs'.
    return found | decimals((RESULTS / "locks/tables.md").read_text().replace("|", ";"))


def recorded_percentages() -> set[str]:
    found = Study().percentages() | known_tokens()
    # Branch tokens between rho and 0.6 after the clipped MAE, above 0.99 after cross entropy.
    runs = load("research/teach/teach-alfworld.json")
    taught = {one["loss"]: one["outcomes"][-1] for one in runs}
    middle = [edge for edge in EDGES if 0.2 < edge <= 0.6]
    between = [taught["cmae-0.2"]["branch_shares"][EDGES.index(edge)] for edge in middle]
    found |= {f"{100 * sum(between):.0f}", f"{100 * taught['ce']['branch_shares'][-1]:.0f}"}
    found.add(f"{standard_error(alfworld_curve()[8], 60):.0f}")
    shares = load("research/small/fig2c-webshop.json")["noisy"]
    found |= {f"{100 * shares[key]:.0f}" for key in ("share", "CE", "MAE", "clipped MAE")}
    # The plan of the memory was within these errors.
    for part in ("passes", "all"):
        rows = load("research/bench/results/memory.json")["rows"]
        errors = [abs(row["error"][part]) for row in rows]
        found.add(f"{ceil(100 * max(errors))}")
    return found


WITH_NUMBERS = [
    "README.md", "CHOICES.md", "RUNNING.md", "paw_min/README.md", "research/paper/README.md",
    "research/README.md",
]  # fmt: skip


@pytest.mark.parametrize("page", WITH_NUMBERS)
def test_numbers_are_in_the_files(page):
    assert decimals(PAGES[page]) <= recorded_decimals() | CONSTANTS
    assert percentages(PAGES[page]) <= recorded_percentages() | PERCENT_CONSTANTS


def test_what_the_explanation_of_the_study_leaves_open():
    page = " ".join(PAGES["research/README.md"].split())
    for sentence in open_questions():
        assert sentence in page


def test_the_response_tokens_of_an_episode_are_in_the_files():
    """In update 1, of the quick start and averaged over the runs of `sparse`."""
    episodes = 64
    (first,) = [
        line
        for line in read_metrics(RESULTS / "alfworld-tiny-grpo-paw-seed0")
        if line["update"] == 1
    ]
    quick_start = first["tokens_generated"] / episodes
    of_runs = []
    with tarfile.open(RESULTS / "study/runs.tar.xz") as archive:
        for member in archive:
            if re.fullmatch(r"sparse/[^/]*/metrics\.jsonl", member.name):
                lines = [json.loads(line) for line in archive.extractfile(member)]
                of_runs += [m["tokens_generated"] / episodes for m in lines if m["update"] == 1]
    assert len(of_runs) == 72
    sparse = sum(of_runs) / len(of_runs)
    pattern = r"(\d+) in the first update of the quick start .seed 0., (\d+) in that of the preset"
    (shown,) = re.findall(pattern, prose(PAGES["CHOICES.md"]))
    assert shown == (f"{quick_start:.0f}", f"{sparse:.0f}")
    # The printed scale of the world-model term.
    (scale,) = re.findall(r"`--wm-scale ([\d.]+)` is the printed scale", PAGES["CHOICES.md"])
    assert scale == f"{1 / quick_start:.3f}" == f"{1 / sparse:.3f}"


def test_one_malformed_row_gets_the_advantage_that_the_page_has():
    shown = re.findall(r"(-[\d.]+) with (\d+)(?: rows)?", PAGES["CHOICES.md"])
    assert [int(n_rows) for _, n_rows in shown] == [128, 400]
    for advantage, n_rows in shown:
        returns = torch.full((int(n_rows),), 10.0)
        valid = torch.ones(len(returns), dtype=torch.bool)
        valid[0] = False
        scores = advantages.penalized(returns, valid, penalty=0.1)
        first, *others = advantages.grpo(scores, [0] * len(returns)).tolist()
        assert f"{first:.1f}" == advantage
        assert min(others) > 0


def test_the_shares_of_fig_2c_are_in_the_file():
    shares = load("research/small/fig2c-webshop.json")["noisy"]
    expected = {f"{100 * shares[key]:.0f}" for key in ("share", "CE", "MAE", "clipped MAE")}
    pages = [text for text in PAGES.values() if expected <= percentages(text)]
    assert pages and all("Fig. 2c" in text for text in pages)


def test_tables_of_results_are_in_the_files():
    page = PAGES["research/README.md"]
    row = r"^\| (\w+-\S+seed\d) \| ([\d.]+) \| ([\d.]+) \|(?: ([\d.]+) \| ([\d.]+) \|)?"
    shown = re.findall(row, page, flags=re.M)
    assert len(shown) == 9
    for name, *cells in shown:
        lines = [m for m in read_metrics(RESULTS / name) if "eval_success" in m]
        ends = [lines[0], lines[-1]]
        assert cells[:2] == [f"{100 * m['eval_success']:.1f}" for m in ends], name
        if cells[2]:
            assert cells[2:] == [f"{m['eval_score']:.1f}" for m in ends], name
    for env, values in rises().items():
        assert len(values) == 3
        assert f"| {env} | {sum(values) / 3:.1f} |" in page
    for folder in ("smollm2", "smollm2-grpo"):
        for m in read_metrics(RESULTS / folder):
            assert m.get("success", 0) == m.get("eval_success", 0) == 0


def test_the_run_on_display_is_in_the_results():
    shown = re.findall(r"```\n(run runs/.*?)```", EVERYTHING, flags=re.S)
    assert shown
    for output in shown:
        folder = re.search(r"run runs/(\S+):", output)[1]
        lines = read_metrics(RESULTS / folder)
        rows = [line.split() for line in output.splitlines() if line[:7].strip().isdigit()]
        by_update = {m["update"]: m for m in lines}
        for row in rows:
            m = by_update[int(row[0])]
            if m["update"]:
                assert row[1] == f"{m['success']:.3f}" and row[6] == f"{m['wm_loss']:.4f}"
            if "eval_success" in m:
                assert row[-1] == f"{m['eval_success']:.3f}"
        before, after = lines[0]["eval_success"], lines[-1]["eval_success"]
        assert re.findall(r"success: ([\d.]+) \w+, ([\d.]+)", output) == [
            (f"{before:.3f}", f"{after:.3f}")
        ]


def test_wall_times_are_in_the_file():
    recorded = (RESULTS / "wall_time.txt").read_text()
    times = re.findall(r"real\t(\d+)m(\d+)", recorded)
    shown = re.findall(r"(\d+) min (\d+) s", prose(PAGES["README.md"]))
    assert shown and set(shown) <= set(times)


def test_minutes_of_a_pretrained_model_are_in_its_metrics():
    minutes = []
    for folder in ("smollm2", "smollm2-grpo"):
        parts = ("seconds_rollout", "seconds_old_pass", "seconds_update")
        updates = read_metrics(RESULTS / folder)[1:]
        minutes.append([sum(m[part] for part in parts) / 60 for m in updates])
    paw, grpo = minutes
    assert f"{min(grpo):.0f}" == f"{max(grpo):.0f}"
    text = f"took {min(paw):.0f} to {max(paw):.0f} minutes with PaW and {grpo[0]:.0f} without"
    assert text in prose(PAGES["RUNNING.md"])


def test_the_gpus_that_the_page_names_have_enough_memory():
    """Preset `paper` on GPUs of 80 GB: 1.5B on one; 7B on four needs both flags, and fits then."""
    text = "estimated: one 80 GB GPU; 7B: four, with `--shard --ref-offload`; not run"
    assert text in PAGES["README.md"]

    def peak(shape: dict, ranks: int, *flags: str) -> float:
        argv = ["--preset", "paper", "--data", "d", *flags]
        cfg, _ = parse_args("alfworld", PRESETS["alfworld"], "", argv)
        return estimate(cfg, Qwen2Config(**shape), ranks, bf16=True, gpu_bytes=80e9).peak

    assert peak(SMALL, 1) < 80e9
    assert peak(LARGE, 4, "--shard", "--ref-offload") < 80e9
    assert peak(LARGE, 4, "--shard") > 80e9 and peak(LARGE, 4) > 80e9
    assert peak(LARGE, 2, "--shard", "--ref-offload") > 80e9


@pytest.mark.slow
def test_the_study_follows_from_its_runs(tmp_path):
    with tarfile.open(RESULTS / "study/runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    grids = {"tiny": "study", "sparse": "study-all", "changed": "study"}
    sweeps = [tmp_path / name / f"{grid}-alfworld.json" for name, grid in grids.items()]
    study.main(sweeps, tmp_path / "out")
    made, kept = (
        [float(x) for x in re.findall(r"-?\d+\.[\de-]+", (folder / "study.json").read_text())]
        for folder in (tmp_path / "out", RESULTS / "study")
    )
    assert made == pytest.approx(kept, abs=1e-6) and len(kept) > 1000

    # In the last update, RL's gradient against the world model's, and against that without PaW.
    ends = {}
    for path in sweeps:
        for entry in table.find([path]):
            ends[path.parent.name, entry.label, entry.seed] = read_metrics(entry.folder)[-1]
    assert len(ends) == 136
    paw = {key: m for key, m in ends.items() if key[1] == "GRPO w/ PaW"}
    over_wm = sum(m["grad_norm_rl"] > m["grad_norm_wm"] for m in paw.values())
    over_grpo = 0
    for (setting, _, seed), m in paw.items():
        over_grpo += m["grad_norm_rl"] > ends[setting, "GRPO", seed]["grad_norm"]
    text = prose(PAGES["research/README.md"])
    (shown,) = re.findall(rf"(\d+) of {len(paw)} runs.*? in (\d+) ", text)
    assert shown == (str(over_wm), str(over_grpo))


def test_every_metric_is_explained():
    pages = [text for text in PAGES.values() if "\n## Metrics" in text]
    explained = set(re.findall(r"`(\w+)[`/]", "\n".join(pages)))
    for folder in [*RESULTS.glob("*seed*"), *RESULTS.glob("rwml/*/")]:
        for line in read_metrics(folder):
            assert {key.split("/")[0] for key in line} - {"update"} <= explained


@pytest.mark.slow
def test_the_small_checks_are_in_their_files():
    """The tables of research/small, and their minutes, wherever a table shows them."""
    small = RESULTS / "small"
    page = PAGES["research/small/README.md"]
    table_rows = [line for line in EVERYTHING.splitlines() if line.startswith("| ")]
    timed = re.findall(r"^\| ([\w-]+) \| (\d+) \|$", page, flags=re.M)
    assert len(timed) == 9
    for name, seconds in timed:
        results, notes = table.load([small / f"{name}.json"])
        shown = table.markdown(*table.compute(results)).strip() in page
        assert not notes and shown == (f"`{name}.json`" in page)
        grid, _, env = name.rpartition("-")
        rows = [row for row in table_rows if re.search(rf"`(sweep )?{grid}( --env|`)", row)]
        assert rows, name
        for row in rows:
            minutes = re.findall(r"\d+", row.rpartition(" | ")[2])
            assert f"{int(seconds) / 60:.0f}" in minutes and env in row, name


def test_the_stored_configs_are_those_of_the_presets():
    """The commands of research/README.md still mean the settings that the runs had."""
    for folder in RESULTS.glob("*seed*"):
        env, *_, seed = folder.name.split("-")
        argv = ["--seed", seed[4:]] + ["--no-paw"] * ("-paw-" not in folder.name)
        cfg, _ = parse_args(env, PRESETS[env], "", argv)
        assert differences(json.loads((folder / "config.json").read_text()), cfg) == []
        assert cfg.name == folder.name
