"""Which file may import which: the floors of the package.

python -m pytest tests/test_layout.py
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("own", ["alfworld", "webshop", "search"])
def test_a_benchmark_imports_itself_only(own):
    """The modules that are loaded after a run script has loaded its data."""
    code = (
        "import sys; import paw_min.train; from paw_min.envs.benchmarks import BENCHMARKS; "
        f"BENCHMARKS[{own!r}]; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    loaded = done.stdout.split()
    for env in ("alfworld", "webshop", "search", "textworld"):
        found = any(name.startswith(f"paw_min.envs.{env}") for name in loaded)
        assert found == (env == own), env
    if own == "alfworld":  # WebShop searches with BM25
        assert not any(name.startswith("paw_min.retrieval") for name in loaded)
