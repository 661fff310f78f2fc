"""Which file may import which: the floors of the package.

python -m pytest tests/test_layout.py
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from paw_min.envs.benchmarks import NAMES
from paw_min.toy import GENERATORS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paw_min"


def imported_by(path: Path) -> set[str]:
    """The modules that a file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_ground_floor_imports_nothing_of_ours():
    for path in (PACKAGE / "base").glob("*.py"):
        ours = {name for name in imported_by(path) if name.startswith("paw_min")}
        assert all(name.startswith("paw_min.base") for name in ours), path


def test_the_package_imports_neither_examples_nor_tests():
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_by(path)}
        assert not roots & {"examples", "tests", "research"}, path


def module_files() -> dict[str, Path]:
    """The files of the package and of the examples, by the name of the module."""
    names = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def test_every_file_serves_a_run_script_a_command_or_an_example():
    """What only a study uses belongs in research/."""
    files = module_files()
    scripts = [*ROOT.glob("run_*.py"), *(ROOT / "examples").glob("*.py")]
    entries = {name for path in scripts for name in imported_by(path)}
    entries |= {f"paw_min.envs.{name}" for name in NAMES}  # both are imported by name
    entries |= {f"paw_min.toy.{module}" for module in GENERATORS.values()}
    for page in (*ROOT.glob("*.md"), *ROOT.glob("paw_min/**/*.md"), *ROOT.glob("research/**/*.md")):
        entries |= set(re.findall(r"-m (paw_min[\w.]+)", page.read_text()))
    entries |= {f"{name}.__main__" for name in entries if f"{name}.__main__" in files}
    used, left = set(), sorted(entries)
    while left:
        name = left.pop()
        if name in files and name not in used:
            used.add(name)
            left += imported_by(files[name])
        if "." in name:
            left.append(name.rpartition(".")[0])  # an import of a.b.c loads a and a.b, too
    unused = {name for name in files if name.startswith("paw_min")} - used
    assert not unused


def test_a_benchmark_imports_itself_only():
    """The modules that are loaded after a run script has loaded its data."""
    names = ("alfworld", "webshop", "search", "textworld")
    code = f"""
import os, sys
import paw_min.train  # takes seconds, so one process imports it, and a fork of it each benchmark
from paw_min.envs.benchmarks import BENCHMARKS
for own in {names[:3]}:
    if not os.fork():
        BENCHMARKS[own]
        print(own, *sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [own for own, *_ in lines] == list(names[:3]), done.stderr
    for own, *loaded in lines:
        for env in names:
            found = any(name.startswith(f"paw_min.envs.{env}") for name in loaded)
            assert found == (env == own), env
        if own == "alfworld":  # WebShop searches with BM25
            assert not any(name.startswith("paw_min.retrieval") for name in loaded)
