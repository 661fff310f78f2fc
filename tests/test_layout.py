"""Which file may import which: the floors of the package.

python -m pytest tests/test_layout.py
"""

import ast
import re
from pathlib import Path

from paw_min.envs.benchmarks import NAMES
from paw_min.toy import GENERATORS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paw_min"


def imported_by(path: Path, whole: bool = True) -> set[str]:
    """The modules that a file imports; whole: also those inside its functions."""
    found = set()
    module = ast.parse(path.read_text())
    for node in ast.walk(module) if whole else module.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_ground_floor_imports_nothing_of_ours():
    for path in (PACKAGE / "base").glob("*.py"):
        ours = {name for name in imported_by(path) if name.startswith("paw_min")}
        assert all(name.startswith("paw_min.base") for name in ours), path


def test_the_package_imports_neither_examples_nor_tests_and_equations_nothing_of_ours():
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_by(path)}
        assert not roots & {"examples", "tests", "research"}, path
        if path.stem in ("advantages", "select", "cmae", "balance", "losses"):
            assert "paw_min" not in roots, path


def module_files() -> dict[str, Path]:
    """The files of the package and of the examples, by the name of the module."""
    names = {}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def loaded_with(names: set[str], whole: bool = True) -> set[str]:
    """Our modules that are loaded with these; whole: also those that their functions import."""
    files = module_files()
    used = set()
    left = sorted(names)
    while left:
        name = left.pop()
        if name in files and name not in used:
            used.add(name)
            left += imported_by(files[name], whole)
        if "." in name:
            left.append(name.rpartition(".")[0])  # an import of a.b.c loads a and a.b, too
    return used


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
    used = loaded_with(entries)
    unused = {name for name in files if name.startswith("paw_min")} - used
    assert not unused


def test_a_benchmark_imports_itself_only():
    """With a run script, its own benchmark is imported by name, and no other."""
    for own in ("alfworld", "webshop", "search"):  # TextWorld uses ALFWorld's engine
        loaded = loaded_with({"paw_min.train", f"paw_min.envs.{own}"}, whole=False)
        others = [f"paw_min.envs.{name}" for name in NAMES if name != own]
        assert not [name for name in loaded if name.startswith(tuple(others))], own
        if own == "alfworld":  # WebShop searches with BM25
            assert not any(name.startswith("paw_min.retrieval") for name in loaded)
