"""Write one_file.ipynb: one_file.py cut into cells at its headings, and the exercises after it.

    python -m examples.notebook          # keeps the stored outputs of the comparison
    python -m examples.notebook --run    # computes them anew; two minutes on one core

The cells of the exercises are stored without outputs: the reader predicts them first.
"""

import argparse
import ast
import base64
import json
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

FOLDER = Path(__file__).parent
NOTEBOOK = FOLDER / "one_file.ipynb"
NOTE = """

**This notebook** needs torch and matplotlib, and no GPU. The comparison takes about two minutes on
an idle core, the cells of the exercises 15 to 60 seconds each. On two busy cores, all together took
6 to 8 minutes. Links lead to files of the repository. They work on GitHub and in a clone; on Colab
they do not, but the next cell can fetch the files."""
CLONE = """\
import subprocess

REPOSITORY = ""  # its address, to have the files to which the text links, such as EXERCISES.md
if REPOSITORY:
    subprocess.run(["git", "clone", REPOSITORY], check=True)"""
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
# Cells for the exercises that need this file alone, by their number in EXERCISES.md.
CELLS = {
    1: """\
curve = run(0, Arm(rho=0.1), name="rho 0.1")
curve = run(0, Arm(rho=0.5), name="rho 0.5")""",
    2: """\
every = list(MATERIALS)
try:
    MATERIALS[:] = every[:4]
    for name in ("grpo", "paw"):
        curve = run(0, make_arms(Arm())[name], name=name)
    curve = run(0, Arm(rho=0.5), name="rho 0.5")
finally:  # even if this cell is interrupted
    MATERIALS[:] = every""",
    3: """\
for name, runs in curves.items():  # of the comparison above
    print(name, [round(100 * points[-1].success, 1) for points in runs])""",
    4: 'curve = run(7, Arm(scale=10.0), name="scale 10")',
    7: """\
import copy

without = learn, run


{learn}


{run}


try:
    for name in ("grpo", "paw"):
        curve = run(0, make_arms(Arm())[name], name=name)
finally:
    learn, run = without""",
    8: """\
with_mask = clipped_mae


def clipped_mae(logp, rho):  # (B, O) -> (B,)
    return with_mask(logp, rho)  # yours


try:
    curve = run(0, Arm(), name="mine")
finally:
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


def with_kl(source: str, page: str) -> dict[str, str]:
    """The functions of one_file.py that the diff of exercise 7 changes, after it."""
    diff = re.search(r"```diff\n(.*?)```", page, flags=re.S)[1].replace("examples/", "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one_file.py"
        file.write_text(source)
        subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, check=True)
        changed = file.read_text()
    functions = {}
    for node in ast.parse(changed).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("learn", "run"):
            functions[node.name] = ast.get_source_segment(changed, node)
    return functions


def exercise_cells(source: str, page: str) -> list[tuple[str, str]]:
    """The questions of EXERCISES.md without answers and commands, each with a cell to work in."""
    parts = re.split(r"^## (\d+)\. ", page, flags=re.M)
    cells = [("markdown", "## Exercises\n\nPredict, run the cell below the question, compare. The "
              "answers are in [EXERCISES.md](EXERCISES.md), which has two more that need other "
              "files.")]
    for number, text in zip(map(int, parts[1::2]), parts[2::2]):
        if number in CELLS:
            question = text.split("<details>")[0]
            # What is a command or a patch there is the cell here. A line that ends in a colon
            # introduces it.
            question = re.sub(r"```diff\n.*?```\n", "", question, flags=re.S)
            question = re.sub(r"(?:^    .*\n)+", "", question, flags=re.M)
            kept = [part.strip() for part in question.split("\n\n")]
            kept = [part for part in kept if part and not part.endswith(":")]
            code = CELLS[number]
            if number == 7:
                code = code.format(**with_kl(source, page))
                kept.append("The cell has the term in `learn`, and the start model in `run`.")
            if number == 8:
                kept = [kept[0], "Write a loss in place of `clipped_mae`. Before you run it: "
                        "should it win more than PaW, and why? "
                        "[The board](../research/board/README.md) scores it in four worlds."]
            cells += [("markdown", f"### {number}. " + "\n\n".join(kept)), ("code", code)]
    return cells


def outputs_of(cells: list[tuple[str, str]]) -> dict[str, list]:
    """Run the cells up to the figure -> the outputs of the last two, by their code."""
    names = {"__name__": "notebook"}
    outputs = {}
    for kind, code in cells:
        if kind != "code":
            continue
        if code == FIGURE:
            data = {"image/png": base64.b64encode(Path("one_file.png").read_bytes()).decode()}
            image = {"output_type": "display_data", "data": data,
                     "metadata": {"image/png": {"width": 500}}}
            return outputs | {FIGURE: [image]}
        printed = StringIO()
        with redirect_stdout(printed):
            exec(code, names)
        if code == COMPARISON:
            lines = printed.getvalue().splitlines(keepends=True)
            outputs[code] = [{"output_type": "stream", "name": "stdout", "text": lines}]


def stored_outputs() -> dict[str, list]:
    """The outputs in one_file.ipynb, by the code of their cells."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return {"".join(cell["source"]): cell["outputs"] for cell in cells if cell.get("outputs")}


def notebook(run: bool = False) -> str:
    source, page = ((FOLDER / name).read_text() for name in ("one_file.py", "EXERCISES.md"))
    cells = cells_of(source)
    cells[0] = ("markdown", cells[0][1] + NOTE)
    cells.insert(1, ("code", CLONE))
    cells += [("code", COMPARISON), ("code", FIGURE)]
    outputs = outputs_of(cells) if run else stored_outputs()
    cells += exercise_cells(source, page)
    written = []
    for k, (kind, text) in enumerate(cells):
        cell = {"cell_type": kind, "id": f"cell-{k}", "metadata": {}}
        cell["source"] = text.strip().splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": outputs.get(text.strip(), [])}
        written.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": written, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write one_file.ipynb, over what it has")
    parser.add_argument("--run", action="store_true", help="compute the outputs anew")
    NOTEBOOK.write_text(notebook(**vars(parser.parse_args())))
