"""Tables and figure of the study in research/: what PaW teaches, and what that does to success.

    python -m research.study.analyze runs/SETTING/study-alfworld.json ... --out FOLDER

A setting is a folder with a sweep, GRID-ENV.json, and GRID-ENV-knowledge.json, which knowledge.py
has made from it. Measures of a run, in percent:

    success     held-out success at the end
    area        success of all training episodes: the mean height of the learning curve
    p, exact, nothing, repeated, tool    see knowledge.py

Each arm is compared with the first one, GRPO, and those of PAIRS with their counterpart, seed by
seed. Intervals: 95 %, bootstrap (stats.py), for success over seeds and tasks, else over seeds.
A further table has metrics of training, see `training`. Writes study.md, study.json, study.png.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import reading, writing
from paw_min.running.plot import plt
from paw_min.running.runs import read_metrics
from paw_min.running.untrusted import read_json
from research.knowledge import Report
from research.panels import Curves, Dot, panel_curves, panel_dots
from research.paper.figures import save
from research.paper.table import Result, changes, load, markdown_table, shown_value, stored
from research.stats import Compared, Record, compare, over_seeds

KNOWN = ("p", "exact", "nothing", "repeated", "tool")
MEASURES = ("success", "area", *KNOWN)
PAIRS = {"GRPO w/ PaW": "placebo: shuffled targets", "GiGPO w/ PaW": "GiGPO"}
GRADIENTS = ("grad_norm_rl", "grad_norm_wm", "grad_cosine")
TITLES = {"p": "mean p of next-observation tokens (%)", "success": "held-out success (%)"}

Cells = dict[str, dict[str, Compared]]  # arm -> measure -> what stats.py finds


@dataclass
class Setting:
    name: str
    start: dict[str, float]  # measures of the start model
    cells: Cells  # differences are to the first arm
    pairs: Cells  # of the arms of PAIRS: differences to the other
    training: dict[str, dict[str, float]]  # arm -> metric -> mean over seeds
    curves: dict[str, list[list[float]]]  # arm -> training success of each seed and update


def training(lines: list[dict]) -> dict[str, float]:
    """Gradient norms of a run, and its distances from the start model if there is a KL term.

    With --conflict-every also the gradients of both losses, averaged over the measured updates.
    """
    updates = [line for line in lines if "success" in line]
    first = updates[0]
    last = updates[-1]
    found = {"grad_norm, update 1": first["grad_norm"]}
    if "ref_kl" in first:
        # Update 1 starts at the start model, so its KL is 0. A run of one update has no other.
        second = updates[1] if len(updates) > 1 else first
        found["ref_kl, update 2"] = second["ref_kl"]
        found["ref_kl, last"] = last["ref_kl"]
    measured = [line for line in updates if GRADIENTS[0] in line]
    if measured:
        for key in GRADIENTS:
            found[key] = float(np.mean([line[key] for line in measured]))
    return found


def measure(result: Result, report: Report, curve: list[float]) -> list[Record]:
    """All measures of a run. Success keeps its tasks, for pairing; the others are one number.

    report: of this run, by knowledge.py. curve: training success by update, in percent.
    """
    if result.episodes is None:
        raise UserError(f"{result.folder} has no evaluation.json: train the run again.")
    *_, overall = result.columns(per_task=True).values()
    percents = {"area": float(np.mean(curve))}
    percents |= {key: 100 * getattr(report, key) for key in KNOWN}
    others = [Record(result.label, result.seed, name, found) for name, found in percents.items()]
    return result.records("success", overall) + others


def mean_by_key(runs: list[dict[str, float]]) -> dict[str, float]:
    common = [key for key in runs[0] if all(key in run for run in runs)]
    return {key: float(np.mean([run[key] for run in runs])) for key in common}


@dataclass
class Arm:
    """The runs of an arm."""

    records: list[Record]
    training: list[dict[str, float]]  # of each seed, see `training`
    curves: list[list[float]]  # of each seed: training success by update, in percent


def read(sweep: Path) -> Setting:
    """The measures of a setting. UserError if a run or its report is missing."""
    results, notes = load([sweep])
    if notes:
        raise UserError(" ".join(notes) + " Finish the sweep first.")
    file = sweep.with_name(f"{sweep.stem}-knowledge.json")
    reports = {(report.label, report.seed): report for report in read_json(file, list[Report])}
    for label, seed in [("start model", 0), *((result.label, result.seed) for result in results)]:
        if (label, seed) not in reports:
            raise UserError(f"{file} has no {label}, seed {seed}: run knowledge again.")
    arms = read_arms(results, reports)
    for name, arm in arms.items():
        if len({len(curve) for curve in arm.curves}) > 1:
            raise UserError(f"{sweep}: the seeds of {name!r} have different numbers of updates: "
                            "finish the sweep first.")

    first, *_ = arms
    records = [record for arm in arms.values() for record in arm.records]
    pairs = {}
    for name, other in PAIRS.items():
        if name in arms and other in arms:
            pairs[name] = compare(arms[name].records + arms[other].records, other)[name]
    start = reports["start model", 0]
    return Setting(
        name=sweep.parent.name,
        start={key: 100 * getattr(start, key) for key in ("success", *KNOWN)},
        cells=compare(records, first),
        pairs=pairs,
        training={name: mean_by_key(arm.training) for name, arm in arms.items()},
        curves={name: arm.curves for name, arm in arms.items()},
    )


def read_arms(results: list[Result], reports: dict[tuple[str, int], Report]) -> dict[str, Arm]:
    """The measures, training metrics and curves of all runs, by arm, in the order of the sweep."""
    arms = {}
    for result in results:
        if result.label not in arms:
            arms[result.label] = Arm([], [], [])
        arm = arms[result.label]
        lines = read_metrics(result.folder)
        curve = [100 * line["success"] for line in lines if "success" in line]
        arm.curves.append(curve)
        with reading(Path(result.folder) / "metrics.jsonl"):  # a metric may be missing
            arm.training.append(training(lines))
        report = reports[result.label, result.seed]
        arm.records += measure(result, report, curve)
    return arms


def markdown(setting: Setting) -> str:
    """Tables of a setting: values, differences to the first arm and to PAIRS, training."""
    first, *others = setting.cells
    start = {key: f"{value:.1f}" for key, value in setting.start.items()}

    values = [["start model", *(start.get(name, "") for name in MEASURES)]]
    values += [[arm, *map(shown_value, row.values())] for arm, row in setting.cells.items()]
    differences = [[arm, *changes(setting.cells[arm])] for arm in others]
    tables = [
        markdown_table(["method", *MEASURES], values),
        markdown_table([f"difference to {first}", *MEASURES], differences),
    ]
    for arm, row in setting.pairs.items():
        header = [f"difference to {PAIRS[arm]}", *MEASURES]
        tables.append(markdown_table(header, [[arm, *changes(row)]]))

    # Arms without PaW have no gradient of the world model: their cells stay empty.
    metrics = list(dict.fromkeys(key for row in setting.training.values() for key in row))
    lines = []
    for arm, row in setting.training.items():
        lines.append([arm, *(f"{row[key]:.4f}" if key in row else "" for key in metrics)])
    tables.append(markdown_table(["training", *metrics], lines))
    return "\n\n".join([f"### {setting.name}", *tables]) + "\n"


def as_json(setting: Setting) -> dict:
    """study.json: the values of each seed apart from what is compared."""

    def of_arms(cells: Cells, function) -> dict:
        return {arm: {name: function(cell) for name, cell in row.items()}
                for arm, row in cells.items()}

    return {
        "name": setting.name,
        "start": setting.start,
        "seeds": of_arms(setting.cells, lambda cell: cell.values),
        "cells": of_arms(setting.cells, stored),
        "pairs": of_arms(setting.pairs, stored),
        "training": setting.training,
        "curves": setting.curves,
    }


def picture(settings: list[Setting], out: Path) -> None:
    """Per setting, a row: training success, what the arms know, and how often they succeed."""
    heights = [1.5 + 0.3 * len(setting.cells) for setting in settings]  # inches
    figure, axes = plt.subplots(
        len(settings), 1 + len(TITLES), figsize=(13, 0.6 + sum(heights)), height_ratios=heights,
        squeeze=False, layout="constrained", sharex="col",
    )
    for row, setting in zip(axes, settings):
        curve, *others = row
        colors = {arm: f"C{k}" if k else "0.25" for k, arm in enumerate(setting.cells)}
        drawn = {}
        for arm, runs in setting.curves.items():
            drawn[arm] = Curves(range(1, 1 + len(runs[0])), np.array(runs))
        panel_curves(curve, drawn, colors, over_seeds)
        curve.set_title(setting.name, loc="left", fontsize=10, fontweight="bold")
        for axis, name in zip(others, TITLES):
            dots = {}
            for arm, cells in setting.cells.items():
                values = cells[name].values
                dots[arm] = Dot(cells[name].mean, over_seeds(values), values)
            panel_dots(axis, dots, colors, line=setting.start[name])  # dotted: the start model
        # All panels of a row have the same order of arms, so one has their names.
        others[1].set_yticklabels([])
    for axis, title in zip(axes[-1], ("update", *TITLES.values())):
        axis.set_xlabel(title)
    axes[0, 0].set_ylabel("training success (%)")
    save(figure, out)


def main(sweeps: list[Path], out: Path) -> None:
    settings = [read(sweep) for sweep in sweeps]
    text = "\n".join(markdown(setting) for setting in settings)
    print(text)
    with writing(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        (out / "study.md").write_text(text)
        numbers = [as_json(setting) for setting in settings]
        plain = json.dumps(numbers, indent=1, ensure_ascii=False)
        (out / "study.json").write_text(plain + "\n")
    picture(settings, out / "study.png")


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("sweeps", nargs="+", type=Path, help="JSON files of the sweeps")
        parser.add_argument("--out", type=Path, required=True, help="folder of table and picture")
        args = parser.parse_args()
        main(args.sweeps, args.out)
