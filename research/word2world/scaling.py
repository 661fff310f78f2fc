"""Scaling and coverage of world models (Word2World, arXiv 2512.18832, sec. 5.3 and 6), one figure.

    python -m research.word2world.scaling ENV --trajectories FILE ... --held-out FILE ... \\
        --limits 75 150 300 --widths 64 128 --out FOLDER [flags of word2world train]

Scaling: a world model from scratch for each width and each number of trajectories, drawn from all
files together. Coverage: with the largest of both, one more for each file alone, so that the number
of trajectories is the same and only who played differs. Each is measured by `word2world fidelity`
on each held-out file. A file is named by its folder, as `word2world collect --out` made it.

Writes scaling.json and scaling.png, and prints a table. A rerun skips what is complete. The paper
measures SciWorld's coverage by consistency (Table 3); here it is exact match of single steps. All
models have the same number of epochs, so more trajectories are more steps, too.
"""

import sys
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import matplotlib

from paw_min.base.console import say
from paw_min.base.errors import Parser, UserError, command_line, user_errors
from paw_min.base.files import expanded, writing
from paw_min.metrics import mean
from paw_min.running.runs import hold
from world_models import word2world
from world_models.pieces import stage
from world_models.word2world.settings import ENVS, check_width
from world_models.word2world.trajectories import read_trajectories

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

ALL = "all"  # the training files together
OWN = ("--limit", "--width", "--start", "--world-model")  # of word2world, set for each model
# Of single steps; the second leaves out the list of available actions, and is drawn pale.
MEASURES = ("em", "em_observation")


class Cell(NamedTuple):
    """One world model."""

    data: str  # a training file's name, or ALL
    limit: int  # trajectories
    width: int


class Plan(NamedTuple):
    """The command line."""

    env: str
    out: Path
    flags: list[str]  # of `train` and `fidelity`
    trajectories: list[Path]  # files to train on
    held_out: list[Path]  # files to measure on
    limits: list[int]
    widths: list[int]


def parse(argv: list[str]) -> Plan:
    """Read the command line; UserError before any long work."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("env", choices=ENVS)
    add("--out", type=expanded, required=True, help="folder to write")
    add("--trajectories", type=Path, nargs="+", required=True, help="files to train on")
    add("--held-out", type=Path, nargs="+", required=True, help="files to measure on")
    add("--limits", type=int, nargs="+", required=True, help="numbers of trajectories")
    add("--widths", type=int, nargs="+", default=[128], help="of the models")
    args, flags = parser.parse_known_args(argv)
    plan = Plan(**vars(args), flags=flags)
    for word in flags:
        if word.partition("=")[0] in OWN:
            raise UserError(f"{word}: the plan decides it, see --limits and --widths; omit it.")
    if min(plan.limits) < 1:
        raise UserError(f"--limits {min(plan.limits)} is out of range: it must be at least 1.")
    for files in (plan.trajectories, plan.held_out):
        names = [named(file) for file in files]
        if len(set(names)) < len(names) or ALL in names:
            raise UserError(f"the files' folders are named {', '.join(names)}: use names that "
                            f"differ from each other and from {ALL!r}.")
    for width in plan.widths:
        check_width("--widths", width)  # all of them, before the first is trained
    for file in plan.trajectories:
        found = len(read_trajectories([file]))
        if found < max(plan.limits):
            raise UserError(f"{file} has {found} trajectories, --limits asks for "
                            f"{max(plan.limits)}: collect more.")
    read_trajectories(plan.held_out)
    return plan


def named(file: Path) -> str:
    return file.absolute().parent.name


def cells(plan: Plan) -> list[Cell]:
    """The world models: scaling, then coverage if there is more than one training file."""
    found = [Cell(ALL, limit, width) for limit, width in product(plan.limits, plan.widths)]
    if len(plan.trajectories) > 1:
        largest = (max(plan.limits), max(plan.widths))
        found += [Cell(named(file), *largest) for file in plan.trajectories]
    return found


def train_and_measure(plan: Plan, cell: Cell) -> dict:
    """Train one world model -> the cell, its size, and its measures by held-out file."""
    folder = plan.out / f"{cell.data}-{cell.limit}-{cell.width}"
    files = [file for file in plan.trajectories if cell.data in (ALL, named(file))]
    trained = call("train", plan, "--trajectories", *files, "--limit", cell.limit, "--width",
                   cell.width, "--out", folder)
    found = cell._asdict() | {"parameters": trained["parameters"], "steps": trained["steps"]}
    found |= {measure: {} for measure in MEASURES}
    for file in plan.held_out:
        measured = call("fidelity", plan, "--world-model", folder, "--trajectories", file,
                        "--out", folder / named(file))
        for measure in MEASURES:
            found[measure][named(file)] = measured[measure]
    return found


def call(command: str, plan: Plan, *words) -> dict:
    """A command of Word2World, which resumes -> its result."""
    return word2world.main([str(word) for word in (command, plan.env, *words, *plan.flags)])


# ---- the figure ----


def draw(rows: list[dict], path: Path) -> None:
    """Left: scaling, averaged over the held-out files. Right: coverage, for each of them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    scaling = [row for row in rows if row["data"] == ALL]
    for number, width in enumerate(sorted({row["width"] for row in scaling})):
        of_width = sorted((r for r in scaling if r["width"] == width), key=itemgetter("limit"))
        limits = [row["limit"] for row in of_width]
        for measure, alpha in zip(MEASURES, (1, 0.4)):
            label = f"width {width}" if measure == "em" else None
            heights = [mean(list(row[measure].values())) for row in of_width]
            left.plot(limits, heights, f"C{number}o-", alpha=alpha, label=label)
    left.set(xscale="log", xlabel="trajectories", ylabel="exact match", title="scaling")
    left.set_xticks(limits, limits)
    left.minorticks_off()
    largest = max((row["limit"], row["width"]) for row in rows)
    coverage = [row for row in rows if (row["limit"], row["width"]) == largest]
    for number, row in enumerate(coverage):
        places = [k + 0.8 * number / len(coverage) for k in range(len(row["em"]))]
        for measure, alpha in zip(MEASURES, (1, 0.4)):
            label = f"trained on {row['data']}" if measure == "em" else None
            right.bar(places, row[measure].values(), 0.75 / len(coverage), align="edge",
                      color=f"C{number}", alpha=alpha, label=label)
    right.set_xticks([k + 0.4 for k in range(len(row["em"]))], row["em"])
    right.set(ylabel="exact match", title=f"coverage: {largest[0]} trajectories, {largest[1]} wide")
    for axis in (left, right):
        axis.set_ylim(0, 1.3 * axis.get_ylim()[1])  # room for the legend
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    with writing(str(path)):
        figure.savefig(path, dpi=110)
    plt.close(figure)


def table(rows: list[dict]) -> str:
    """A line per world model, with its exact match on each held-out file, in percent."""
    names = list(rows[0]["em"])
    lines = [["data", "limit", "width", "parameters", "steps", *names]]
    for row in rows:
        shown = [row[key] for key in ("data", "limit", "width", "parameters", "steps")]
        lines.append(shown + [f"{100 * row['em'][name]:.1f}" for name in names])
    return "\n".join("  ".join(f"{cell!s:>10}" for cell in line) for line in lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    plan = parse(argv)
    with writing(f"the folder {plan.out}"):
        plan.out.mkdir(parents=True, exist_ok=True)
        lock = hold(plan.out, "--out")

    def make() -> dict:
        return {"models": [train_and_measure(plan, cell) for cell in cells(plan)]}

    line = command_line(["scaling", *argv])
    rows = stage(plan.out / "scaling.json", {"command": line}, make)["models"]
    draw(rows, plan.out / "scaling.png")
    lock.release()
    say(table(rows))


if __name__ == "__main__":
    with user_errors():
        main()
