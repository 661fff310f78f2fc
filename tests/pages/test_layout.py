"""Which file may import which."""

import ast
from pathlib import Path

import pytest

from paw_min.envs.benchmarks import NAMES
from tests.helpers import ROOT, python

PACKAGE = ROOT / "paw_min"


def imported_by(path: Path) -> set[str]:
    """The modules that a file imports, also inside of its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_the_package_imports_neither_examples_nor_tests_and_equations_nothing_of_ours():
    """Nor does base/ import another part."""
    for path in PACKAGE.rglob("*.py"):
        names = imported_by(path)
        roots = {name.split(".")[0] for name in names}
        assert not roots & {"examples", "tests", "research", "world_models"}, path
        if path.stem in ("advantages", "select", "cmae", "balance", "losses"):
            assert "paw_min" not in roots, path
        if path.parent.name == "base":
            assert all(name.startswith("paw_min.base") for name in names if "paw_min" in name), path


def test_examples_import_nothing_of_research():
    """Research imports examples; the other way around, a reader of one would need both."""
    for path in (ROOT / "examples").glob("*.py"):
        assert not any(name.split(".")[0] == "research" for name in imported_by(path)), path


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
