"""Which file may import which."""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from paw_min.envs.benchmarks import NAMES
from tests.helpers import ROOT, python

ORDER = ["paw_min", "world_models", "examples", "research", "tests"]  # none imports a later one
EQUATIONS = [f"paw_min.{name}" for name in ("advantages", "select", "cmae", "balance", "losses")]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for top in ORDER for path in (ROOT / top).rglob("*.py")}


def imports_of(name: str) -> set[str]:
    """The modules of ours that this one imports, also inside of its functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inside & MODULES.keys()) or {node.module}
    return found & MODULES.keys()


IMPORTS = {name: imports_of(name) for name in MODULES}


def part_of(name: str) -> str:
    """A folder or a file of paw_min; of another package, the package."""
    top, *inside = name.split(".")
    return f"{top}.{inside[0]}" if top == "paw_min" and inside else top


def test_no_imports_go_in_a_circle():
    """Neither those of modules nor those of the parts of paw_min. Else, the error names one."""
    assert list(TopologicalSorter(IMPORTS).static_order())
    between = defaultdict(set)
    for name, imported in IMPORTS.items():
        between[part_of(name)] |= {part_of(other) for other in imported} - {part_of(name)}
    assert list(TopologicalSorter(between).static_order())


def test_no_import_goes_upward():
    """base/ imports no other part, and the equations nothing of ours."""
    for name, imported in IMPORTS.items():
        tops = {ORDER.index(other.split(".")[0]) for other in imported}
        assert max(tops, default=0) <= ORDER.index(name.split(".")[0]), name
        if part_of(name) == "paw_min.base":
            assert {part_of(other) for other in imported} <= {"paw_min.base"}, name
    assert all(not IMPORTS[name] for name in EQUATIONS)


def test_no_test_file_imports_another():
    """What several share is in modules without test_."""
    for name, imported in IMPORTS.items():
        assert not any(other.rpartition(".")[2].startswith("test_") for other in imported), name


def opens_a_text_file_in_the_encoding_of_the_locale(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    module = getattr(getattr(call.func, "value", None), "id", "")
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if any(k.arg == "encoding" for k in call.keywords) or "utf-8" in texts:
        return False
    if name == "open" and module not in ("os", "tarfile"):
        return not any("b" in text and set(text) <= set("rwaxb+") for text in texts)
    return name in ("read_text", "write_text")


def test_every_text_file_is_opened_as_utf_8():
    """Whatever the locale; not so in tests."""
    folders = ("paw_min", "world_models", "research", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in [*paths, *ROOT.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                where = f"{path}:{node.lineno}"
                assert not opens_a_text_file_in_the_encoding_of_the_locale(node), where


@pytest.mark.parametrize("own", ["alfworld", "webshop", "search"])
def test_a_benchmark_loads_itself_only(own):
    """With a run script, its own benchmark is imported by name, and no other."""
    code = f"import sys, paw_min.train, paw_min.envs.{own}; print(*sys.modules)"
    loaded = {name for name in python("-c", code).stdout.split() if name.startswith("paw_min.")}
    assert {name for name in NAMES if f"paw_min.envs.{name}" in loaded} == {own}
    # WebShop searches with BM25.
    assert any(name.startswith("paw_min.retrieval") for name in loaded) == (own != "alfworld")
