"""Do the tests of the method notice a wrong formula? Mutation testing of the six method files.

    pip install cosmic-ray==8.7.0
    python bench/mutants.py [--files balance cmae ...]

Each mutant is one change of one place in a file: an operator, a comparison, a number, a condition,
a dropped keyword or statement (cosmic-ray's operators and two of our own). The tests of the file
run against it until the first one fails; a mutant that passes all of them has survived. Only a
boundary, an opposite and an arithmetic neighbor of each operator are tried, since the others fail
at once, and annotations, messages and docstrings are left alone.

A process is forked per mutant from one that has imported all libraries, in a copy of the
repository. Writes bench/results/mutants.json after each file, and keeps what it has of other files.
"""

import argparse
import ast
import difflib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/mutants.json"
TESTS = {
    "balance": ["test_world_model"], "cmae": ["test_world_model", "test_losses"],
    "select": ["test_world_model", "test_update"], "losses": ["test_losses", "test_update"],
    "advantages": ["test_advantages", "test_update"], "update": ["test_update", "test_targets"],
}  # fmt: skip
BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul Mul_Add Add_Mul Pow_Mul FloorDiv_Div Mod_Mul".split()
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE Is_IsNot IsNot_Is".split()
SKIPPED = ("Variable", "UnaryOperator_USub_Not", "UnaryOperator_Delete_USub", "Invert", "Decorator")
SLOW = "test_similar_anchors_equals_the_plain_rule"
LIMIT_S = 120  # a mutant may loop for ever


def wanted(name: str) -> bool:
    if "BinaryOperator_" in name:
        return name.partition("Operator_")[2] in BINARY
    if "ComparisonOperator_" in name:
        return name.partition("Operator_")[2] in COMPARISON
    return not any(part in name for part in SKIPPED)


def mutants(source: str) -> Iterator[str]:
    """The different programs that one change makes of `source`."""
    seen = {ast.dump(ast.parse(source))}
    for new in (*of_cosmic_ray(source), *of_our_own(source)):
        try:
            tree = ast.dump(ast.parse(new))
        except SyntaxError:
            continue
        if tree not in seen and not only_text(source, new):
            seen.add(tree)
            yield new


def of_cosmic_ray(source: str) -> Iterator[str]:
    tree = get_ast(source)
    for name in filter(wanted, operator_names()):
        try:
            operator = get_operator(name)()
        except TypeError:  # needs arguments
            continue
        count = sum(1 for node in ast_nodes(tree) for _ in operator.mutation_positions(node))
        for k in range(count):
            if new := mutate_code(source, operator, k):
                yield new


def of_our_own(source: str) -> Iterator[str]:
    """Statements replaced by `pass`, and calls without one of their keywords."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and node.col_offset:
            yield replaced(source, node, "pass")
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                shorter = ast.Call(node.func, node.args, [k for k in node.keywords if k != keyword])
                yield replaced(source, node, ast.unparse(shorter))


def replaced(source: str, node: ast.AST, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    first = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    last = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (source.encode()[:first] + text.encode() + source.encode()[last:]).decode()


def diff(old: str, new: str) -> list[str]:
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[3:]


def only_text(old: str, new: str) -> bool:
    """Whether just a message or an annotation has changed."""
    return all(line[1:].strip().startswith(('f"', '"', "raise", "def ")) for line in diff(old, new))


def load_libraries(copy: Path) -> None:
    """Import what the tests import, and forget our own modules again."""
    os.chdir(copy)
    sys.path[0] = str(copy)
    for name in ("conftest", *sorted({test for tests in TESTS.values() for test in tests})):
        importlib.import_module(f"tests.{name}")
    for name in [m for m in sys.modules if m.split(".")[0] in ("paw_min", "tests")]:
        del sys.modules[name]


def survives(copy: Path, file: Path, new: str, tests: list[str]) -> bool:
    """Run the tests in a fork, in which nothing of ours is imported yet."""
    file.write_text(new)
    if (child := os.fork()) == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        paths = [f"tests/{name}.py" for name in tests]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", f"not {SLOW}", *paths]))
    start = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - start > LIMIT_S:
            os.kill(child, 9)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", choices=list(TESTS), default=list(TESTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    report = {"command": "python bench/mutants.py", "files": {}}
    if RESULTS.exists():
        report = json.loads(RESULTS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repo"
        ignored = shutil.ignore_patterns(".*", "runs", "data", "results")
        shutil.copytree(ROOT, copy, ignore=ignored)
        load_libraries(copy)
        for name in args.files:
            file, source = copy / f"paw_min/{name}.py", (ROOT / f"paw_min/{name}.py").read_text()
            if not survives(copy, file, source, TESTS[name]):
                sys.exit(f"error: the tests of {name}.py fail without a mutation: repair them.")
            todo, left = list(mutants(source)), []
            for new in tqdm(todo, name, unit="mutant"):
                if survives(copy, file, new, TESTS[name]):
                    left.append(diff(source, new))
            file.write_text(source)
            killed = len(todo) - len(left)
            report["files"][name] = {"mutants": len(todo), "killed": killed, "survivors": left}
            RESULTS.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{name}: {killed} of {len(todo)} killed", flush=True)


if __name__ == "__main__":
    main()
