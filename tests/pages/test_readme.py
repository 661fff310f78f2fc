"""The pages are true: their code and commands run, and their links and names exist.

The pages are all tracked Markdown files. It does not matter on which page something stands or how
it is worded.
"""

import ast
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from paw_min.cli import parse_args
from paw_min.envs.benchmarks import presets_of
from paw_min.running.config_json import differences, read_config
from paw_min.running.runs import read_metrics
from research.paper import sweep
from research.paper.grids import GRIDS
from tests.helpers import ROOT, python

RUNS = ROOT / "research" / "runs"


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).exists()]


PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in tracked("*.md")}
EVERYTHING = "\n".join(PAGES.values())
INSTALLATIONS = [
    PAGES["RUNNING.md"], *((ROOT / name).read_text() for name in ("run.sh", "tests/run.sh"))
]


# --- code --------------------------------------------------------------------------------------


def test_paw_in_30_lines_runs():
    blocks = re.findall(r"```python\n(.*?)```", EVERYTHING, flags=re.S)
    (code,) = [block for block in blocks if "balance.lambda_g" in block]
    names = {}
    exec(code, names)
    # egg failed twice, mug once: lambda is 1 and 0.5; three of four rows train the world model.
    assert [float(names["lambdas"][g]) for g in ("mug", "egg")] == [0.5, 1.0]
    assert names["selected"].sum() == 3
    assert names["logits_o"].grad[names["selected"]].abs().sum() > 0
    assert names["logits_o"].grad[~names["selected"]].abs().sum() == 0


def test_ruff_is_clean():
    python("-m", "ruff", "check", "--quiet", ".")


CHECK = "import runpy; runpy.run_module('paw_min', run_name='__main__')"


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_other_versions_of_python_get_one_line(version):
    """The check comes first in every installation, before anything is installed."""
    for text in INSTALLATIONS:
        assert text.index("python3 -m paw_min") < text.index("-r requirements.txt")
    code = f"import sys; sys.version_info = {version}; {CHECK}"
    out = python("-c", code, code=1)
    assert out.stdout == "" and out.stderr.count("\n") == 1
    assert out.stderr.startswith("error: paw_min needs Python 3.11, 3.12 or 3.13; this is ")


@pytest.mark.parametrize("programs", [["c++", "make"], ["make"]])
def test_a_missing_compiler_gets_one_line(tmp_path, programs):
    """Where nothing is installed yet: without site-packages (-S, -I), there is no torch."""
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {CHECK}"
    words = ["-I", "-S", "-c", code]
    env = {"PATH": str(tmp_path)}
    if programs == ["c++", "make"]:
        said = python(*words, env=env).stdout
        assert said.count("\n") == 1 and "bash run.sh" in said
    else:
        said = python(*words, env=env, code=1).stderr
        assert said.count("\n") == 1
        assert "c++" in said and "apt-get install" in said


# --- names, links and commands -----------------------------------------------------------------


def code_spans(text: str) -> list[str]:
    """What stands in `backticks`, on one line each."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(text))]


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


NAMES_WHAT_IS_GONE = "research/closed.md"


@pytest.mark.parametrize("page", [page for page in PAGES if page != NAMES_WHAT_IS_GONE])
def test_named_scripts_exist(page):
    files = tracked("*.py")
    for span in code_spans(PAGES[page]):
        for name in re.findall(r"^[\w/-]+\.py\b", span):
            if not name.endswith("/NAME.py"):  # a file of the reader's
                assert any(f"{file}".endswith(f"/{name}") for file in files), name


def defined_in(path: Path) -> set[str]:
    """Names of the functions, classes, fields and constants of a module."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    targets = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    targets += [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def test_the_paper_to_code_tables_name_what_exists():
    """`file.py: name`, `name`."""
    named = re.findall(r"`([\w/]+\.py):\s+(\w+)`((?:, `\w+`)*)", EVERYTHING)
    assert len(named) > 10
    for file, first, others in named:
        paths = [path for path in tracked("*.py") if f"{path}".endswith(f"/{file}")]
        names = {first, *re.findall(r"\w+", others)}
        assert any(names <= defined_in(path) for path in paths), (file, names)


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
    """Indented and fenced lines, and code in backticks; not what runs in another commit."""
    blocks = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, flags=re.S)
    blocks += re.findall(r"(?:^ {4,}\S.*\n(?:\n(?= {4,}\S))?)+", text, flags=re.M)
    for block in blocks:
        if "git worktree add" in block:
            continue
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
            if program in ("python", "torchrun", "bash") or program in PAPER:
                found.append([program, *words[1:]])
    return found


PAPER = {path.stem for path in (ROOT / "research/paper").glob("*.py")}
PAPER -= {"grids"}
# What a page shows in place of a value: SEEDS, [--out FILE], runs/*/x.json, $FLAGS, a <b>.
PLACEHOLDER = re.compile(r"[\[\]$*<|]|\.\.\.|\.$|^(GRID|ENV|BENCHMARK)$|[./]NAME$")


def check_sweep(name: str, words: list[str], out: str) -> None:
    if name == "sweep" and "--env" in words and not any(map(PLACEHOLDER.search, words)):
        env = words[words.index("--env") + 1]
        extra = words[words.index("--") + 1 :] if "--" in words else []
        jobs = sweep.plan(words[0], env, [0], out, extra)
        assert len(jobs) == len(GRIDS[words[0]])


def check_run_script(script: str, flags: list[str]) -> None:
    if "--help" not in flags and not any(PLACEHOLDER.search(word) for word in flags):
        env = Path(script).stem.removeprefix("run_")
        parse_args(env, presets_of(env), "", ["0" if word == "S" else word for word in flags])


def check_command(words: list[str], out: str) -> None:
    program, *rest = words
    scripts = [k for k, word in enumerate(rest) if word.endswith((".py", ".sh"))]
    if program in PAPER:
        check_sweep(program, rest, out)
    elif rest[:1] == ["-m"] and not PLACEHOLDER.search(rest[1]):
        assert importlib.util.find_spec(rest[1]), rest[1]
        package, _, name = rest[1].rpartition(".")
        if package == "research.paper":
            check_sweep(name, rest[2:], out)
    elif scripts:
        script = rest[scripts[0]]
        assert (ROOT / script).is_file(), script
        if script.startswith("run_"):
            check_run_script(script, rest[scripts[0] + 1 :])


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page, tmp_path, monkeypatch):
    """Their smallest runs are in test_experiments, test_analyses and test_prompting."""
    monkeypatch.chdir(tmp_path)
    for words in commands(PAGES[page]):
        try:
            check_command(words, str(tmp_path))
        except SystemExit:
            pytest.fail(f"{' '.join(words)}: the flags are not those of the program")


# --- what the pages say of runs ----------------------------------------------------------------


def test_every_metric_is_explained():
    pages = [text for text in PAGES.values() if "\n## Metrics" in text]
    explained = set(re.findall(r"`(\w+)[`/]", "\n".join(pages)))
    for folder in [*RUNS.glob("*seed*"), *RUNS.parent.glob("rwml/*/")]:
        for line in read_metrics(folder):
            assert {key.split("/")[0] for key in line} - {"update"} <= explained


@pytest.mark.parametrize("folder", sorted(RUNS.glob("*seed*")), ids=lambda folder: folder.name)
def test_the_stored_configs_are_those_of_the_presets(folder):
    """The commands of research/LOG.md still mean the settings that the runs had."""
    env, *_, seed = folder.name.split("-")
    cfg, _ = parse_args(env, presets_of(env), "", ["--seed", seed.removeprefix("seed")])
    assert differences(read_config(folder / "config.json"), cfg) == []
    assert cfg.name == folder.name
