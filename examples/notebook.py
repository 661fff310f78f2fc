"""Write one_file.ipynb: one_file.py cut into cells at its headings, and the exercises after it.

    python -m examples.notebook
"""

import ast
import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
NOTEBOOK = FOLDER / "one_file.ipynb"
COMPARISON = """\
torch.set_num_threads(1)
curves = {name: [] for name in make_arms(Arm())}
for seed in (0, 1):
    for name, arm in make_arms(Arm()).items():
        curves[name].append(run(seed, arm, name=name))
draw(curves, "one_file.png")"""
FIGURE = """\
from IPython.display import Image

Image("one_file.png", width=500)"""
# For the exercises that need this file alone, by their number in EXERCISES.md.
CELLS = {
    1: """\
curve = run(0, Arm(rho=0.1), name="rho 0.1")
curve = run(0, Arm(rho=0.5), name="rho 0.5")""",
    2: """\
every = list(MATERIALS)
MATERIALS[:] = every[:4]
for name in ("grpo", "paw"):
    curve = run(0, make_arms(Arm())[name], name=name)
curve = run(0, Arm(rho=0.5), name="rho 0.5")
MATERIALS[:] = every""",
    3: "# The comparison above has the three arms.",
    4: 'curve = run(7, Arm(scale=10.0), name="scale 10")',
    7: """\
# Change the cells of "An update" and "A run", and run them and this one.
for name in ("grpo", "paw"):
    curve = run(0, make_arms(Arm())[name], name=name)""",
    8: """\
with_mask = clipped_mae


def clipped_mae(logp, rho):  # (B, O) -> (B,)
    return with_mask(logp, rho)  # yours


curve = run(0, Arm(), name="mine")
clipped_mae = with_mask""",
}


def cells_of(source: str) -> list[tuple[str, str]]:
    """(markdown or code, text) of one_file.py, without `main` and its imports."""
    docstring = ast.get_docstring(ast.parse(source))
    source = source.split('"""', 2)[2].split("\ndef main()")[0]
    for module in ("argparse", "sys", "time"):
        source = source.replace(f"import {module}\n", "")
    start, *sections = re.split(r"^# ---- (.*) ----\n", source, flags=re.M)
    title, rest = docstring.split("\n", 1)
    cells = [("markdown", f"# {title}\n{rest}"), ("code", start)]
    for heading, text in zip(sections[::2], sections[1::2]):
        # The comment below a heading is text, too.
        comment = re.match(r"(?:#.*\n)*", text)[0]
        words = re.sub(r"^# ?", "", comment, flags=re.M)
        cells += [("markdown", f"## {heading}\n\n{words}"), ("code", text[len(comment) :])]
    return cells


def exercise_cells(page: str) -> list[tuple[str, str]]:
    """The questions of EXERCISES.md without their answers, each with a cell to work in."""
    parts = re.split(r"^## (\d+)\. ", page, flags=re.M)
    cells = [("markdown", "## Exercises\n\nPredict, run, compare. The answers are in EXERCISES.md, "
              "which has two more that need other files.")]
    for number, text in zip(map(int, parts[1::2]), parts[2::2]):
        if number in CELLS:
            question = text.split("<details>")[0]
            cells += [("markdown", f"### {number}. {question}"), ("code", CELLS[number])]
    return cells


def notebook() -> str:
    cells = cells_of((FOLDER / "one_file.py").read_text())
    cells += [("code", COMPARISON), ("code", FIGURE)]
    cells += exercise_cells((FOLDER / "EXERCISES.md").read_text())
    written = []
    for k, (kind, text) in enumerate(cells):
        cell = {"cell_type": kind, "id": f"cell-{k}", "metadata": {}}
        cell["source"] = text.strip().splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        written.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": written, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook())
