"""Held-out learning curves of sweeps: their heights, and the differences between the arms.

    python -m research.curves runs/fair-search.json ... --out FOLDER [--base ARM]
    python -m research.curves runs/comparison-alfworld.json --by steps --out FOLDER

Measures of a run, in percent, from the evaluations in its metrics.jsonl:

    area       mean of all evaluations after the start: the mean height of the learning curve
    plateau    mean of the last two

Runs of a sweep may have been evaluated after different updates; only those that all runs share
count.

With `--by steps`, a curve is over environment steps, those of a stage before RL included. During
the stage, it has the height of the base arm's start model. It ends at the budget, the smallest
number of steps that any run took, and is read at POINTS equal distances.

Each arm is compared with the base arm, seed by seed, with two 95 % intervals of the mean difference
(stats.py). A run keeps the outcomes of single tasks for its last evaluation only, so tasks are not
drawn.

A further table has what to watch in training: the fraction of clipped ratios relative to the base
arm (the check of B.2 in the paper), the gradient norm, entropy, and well-formed responses. Only
seeds that all arms have finished count. Writes curves.md, curves.json, curves.png.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import reading, writing
from paw_min.running.plot import plain, plt
from paw_min.running.runs import read_metrics
from paw_min.running.untrusted import read_json
from research.panels import Curves, Dot, extent, panel_curves, panel_dots
from research.paper.figures import curve_of, save
from research.paper.table import Settings, find, markdown_table
from research.stats import Compared, Record, compare, signed

LAST = 2  # evaluations of the plateau
POINTS = 16  # of a curve over environment steps, after the start
NEEDED = ("success", "valid", "clip_fraction", "rows", "grad_norm", "entropy")  # of each update

Curve = dict[int, float]  # update, or environment steps -> held-out success in percent


class Run(NamedTuple):
    """A finished run."""

    lines: list[dict]  # of metrics.jsonl
    steps_before: int  # environment steps of a stage before it

    def steps(self) -> int:
        """Environment steps at its end."""
        return self.steps_before + sum(line["rows"] for line in self.lines[1:])


Runs = dict[int, Run]  # by seed


@dataclass
class Training:
    """Metrics of an arm's training, means over the seeds."""

    # clip_fraction over the base arm's: median over the seeds. None: that arm clips nothing.
    clip_ratio: float | None
    grad_norm_first: float  # before clipping, of update 1
    grad_norm: float  # mean over the updates
    entropy_last: float  # nats per response token
    valid_lowest: float  # share of well-formed responses in the worst update


@dataclass
class Arm:
    curves: list[Curve]  # of each seed
    area: Compared
    plateau: Compared
    training: Training


@dataclass
class Setting:
    """One sweep."""

    name: str
    base: str
    seeds: list[int]
    arms: dict[str, Arm]


def area(curve: Curve) -> float:
    """Mean of the evaluations after the start."""
    return float(np.mean([height for update, height in curve.items() if update > 0]))


def plateau(curve: Curve) -> float:
    """Mean of the last evaluations."""
    return float(np.mean([curve[update] for update in sorted(curve)[-LAST:]]))


def changes(measure: Compared) -> list[str]:
    """The difference with each of its intervals."""
    return [signed(measure.difference, around) for around in (measure.bootstrap, measure.t)]


def spread(values: list[float]) -> str:
    """Over the seeds: mean, median, lowest and highest."""
    low = min(values)
    high = max(values)
    return f"{np.mean(values):.1f}, {np.median(values):.1f} ({low:.1f} to {high:.1f})"


def finished(sweep: Path) -> dict[str, Runs]:
    """The runs of each arm, on the seeds that all arms have finished."""
    by_arm = defaultdict(dict)
    for entry in find([sweep]):
        runs = by_arm[entry.label]
        config = Path(entry.folder) / "config.json"
        if not config.is_file():  # not begun
            continue
        updates = read_json(config, Settings)["updates"]
        lines = read_metrics(entry.folder)
        if lines and lines[-1]["update"] == updates:
            if entry.seed in runs:
                raise UserError(f"{sweep} has {entry.label!r}, seed {entry.seed}, twice: leave one "
                                "of them out.")
            check_metrics(entry.folder, lines)
            runs[entry.seed] = Run(lines, entry.steps_before)
    if not by_arm:
        raise UserError(f"{sweep} has no runs: run the sweep first.")
    shared = sorted(set.intersection(*(set(runs) for runs in by_arm.values())))
    if not shared:
        raise UserError(f"{sweep}: no seed is finished in all arms; run the sweep first.")
    return {label: {seed: runs[seed] for seed in shared} for label, runs in by_arm.items()}


def check_metrics(folder: str, lines: list[dict]) -> None:
    """UserError unless the lines of a finished run have all that is measured here."""
    with reading(Path(folder) / "metrics.jsonl"):
        start, *updates = lines
        if start["update"] != 0 or "eval_success" not in start:
            raise ValueError("no evaluation before training")
        for line in updates:
            for name in NEEDED:
                if name not in line:
                    raise ValueError(f"update {line['update']} has no {name}")


def by_update(run: Run) -> Curve:
    heights = curve_of(run.lines, "eval_success")
    return {update: 100 * success for update, success in heights.items()}


def at_shared_updates(curves: dict[str, list[Curve]], sweep: Path) -> dict[str, list[Curve]]:
    """The curves of all arms at the updates that each of them has."""
    shared = set.intersection(*(set(curve) for of_arm in curves.values() for curve in of_arm))
    if max(shared) == 0:
        raise UserError(f"{sweep}: no update but 0 was evaluated in all runs; use --by steps.")
    return {
        label: [{update: curve[update] for update in sorted(shared)} for curve in of_arm]
        for label, of_arm in curves.items()
    }


def by_steps(run: Run, start: float, budget: int) -> Curve:
    """start: height of the curve during the stage before RL, in percent."""
    steps = [0]
    heights = [start]
    if run.steps_before:
        steps.append(run.steps_before)
        heights.append(start)
    now = run.steps_before
    for line in run.lines:
        now += line.get("rows", 0)  # one per environment step; none at update 0
        if "eval_success" in line:
            steps.append(now)
            heights.append(100 * line["eval_success"])
    read_at = [round(budget * k / POINTS) for k in range(POINTS + 1)]
    return dict(zip(read_at, np.interp(read_at, steps, heights).tolist(), strict=True))


def training(runs: Runs, base: Runs | None, updates_of_all: int) -> Training:
    """updates_of_all: how many updates each run of the sweep has; further ones do not count."""
    found = defaultdict(list)
    ratios = []
    for seed, run in runs.items():
        updates = [line for line in run.lines if "success" in line][:updates_of_all]
        found["grad_norm_first"].append(updates[0]["grad_norm"])
        found["grad_norm"].append(np.mean([line["grad_norm"] for line in updates]))
        found["entropy_last"].append(updates[-1]["entropy"])
        found["valid_lowest"].append(min(line["valid"] for line in updates))
        if base:
            own = np.mean([line["clip_fraction"] for line in updates])
            others = [line for line in base[seed].lines if "success" in line][:updates_of_all]
            other = np.mean([line["clip_fraction"] for line in others])
            if other:
                ratios.append(own / other)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return Training(clip_ratio=float(np.median(ratios)) if ratios else None, **means)


def read(sweep: Path, base: str | None, by: str = "updates") -> Setting:
    """The measures of a sweep. base: an arm, or the first one. by: updates or steps."""
    by_arm = finished(sweep)
    base = base or next(iter(by_arm))
    if base not in by_arm:
        raise UserError(f"--base {base}: {sweep} has {', '.join(by_arm)}.")
    # All lines but the first, the evaluation before training, are updates.
    updates_of_all = min(len(run.lines) - 1 for runs in by_arm.values() for run in runs.values())
    if not updates_of_all:
        raise UserError(f"{sweep}: a run has no updates; train it with --updates 1 or more.")
    curves = {}
    if by == "updates":
        for label, runs in by_arm.items():
            curves[label] = [by_update(run) for run in runs.values()]
        curves = at_shared_updates(curves, sweep)
    else:
        budget = min(run.steps() for runs in by_arm.values() for run in runs.values())
        for label, runs in by_arm.items():
            starts = [by_update(by_arm[base][seed])[0] for seed in runs]
            curves[label] = [
                by_steps(run, start, budget)
                for run, start in zip(runs.values(), starts, strict=True)
            ]
    records = []
    for label, runs in by_arm.items():
        for seed, curve in zip(runs, curves[label]):
            records.append(Record(label, seed, "area", area(curve)))
            records.append(Record(label, seed, "plateau", plateau(curve)))
    measures = compare(records, base)
    arms = {}
    for label, runs in by_arm.items():
        is_base = label == base
        trained = training(runs, None if is_base else by_arm[base], updates_of_all)
        arms[label] = Arm(
            curves=curves[label],
            area=measures[label]["area"],
            plateau=measures[label]["plateau"],
            training=trained,
        )
    return Setting(sweep.stem, base, list(by_arm[base]), arms)


def markdown(setting: Setting) -> str:
    """Three tables: heights, differences, training."""
    heights = []
    differences = []
    trained = []
    for label, arm in setting.arms.items():
        heights.append([label, spread(arm.area.values), spread(arm.plateau.values)])
        if label != setting.base:
            differences.append([label, *changes(arm.area), *changes(arm.plateau)])
        of = arm.training
        norms = [of.grad_norm_first, of.grad_norm]
        trained.append([label, of.clip_ratio, *norms, of.entropy_last, of.valid_lowest])
    seeds = " ".join(map(str, setting.seeds))
    header = [f"difference to {setting.base}"]
    header += ["area, bootstrap", "area, paired t", "plateau, bootstrap", "plateau, paired t"]
    columns = ["clip fraction, relative", "grad norm, update 1", "grad norm", "entropy, last"]
    return "\n\n".join(
        [
            f"### {setting.name}, seeds {seeds}",
            "Held-out success in percent: mean, median (lowest to highest seed).",
            markdown_table(["method", "area", "plateau"], heights),
            markdown_table(header, differences),
            markdown_table(["training", *columns, "well-formed, lowest"], trained),
        ]
    )


def picture(settings: list[Setting], out: Path, x: str) -> None:
    """Per setting, a row: mean curves, and the differences in area with their t intervals."""
    rows = len(settings)
    heights = [1.2 + 0.32 * len(setting.arms) for setting in settings]  # inches
    figure, axes = plt.subplots(
        rows, 2, figsize=(12, 0.6 + sum(heights)), height_ratios=heights, squeeze=False,
        layout="constrained",
    )
    # An arm has the same color in all settings.
    labels = dict.fromkeys(label for setting in settings for label in setting.arms)
    colors = {label: f"C{k}" for k, label in enumerate(labels)}
    for (left, right), setting in zip(axes, settings):
        drawn = {}
        dots = {}
        for label, arm in setting.arms.items():
            heights_of = np.array([list(curve.values()) for curve in arm.curves])  # (seeds, points)
            drawn[label] = Curves(list(arm.curves[0]), heights_of)
            dots[label] = Dot(arm.area.difference or 0.0, arm.area.t)
        colors[setting.base] = "black"
        # The range of the base arm's seeds: what a difference has to be compared with.
        panel_curves(left, {setting.base: drawn.pop(setting.base)}, colors, extent)
        panel_curves(left, drawn, colors)
        panel_dots(right, dots, colors, line=0)
        left.set_title(plain(setting.name), loc="left", fontsize=10, fontweight="bold")
        left.set_ylabel("held-out success (%)")
    axes[-1, 0].set_xlabel(x)
    axes[-1, 1].set_xlabel(plain(f"area, difference to {settings[-1].base} (points)"))
    save(figure, out)


def main(sweeps: list[Path], out: Path, base: str | None, by: str) -> None:
    settings = [read(sweep, base, by) for sweep in sweeps]
    text = "\n\n".join(markdown(setting) for setting in settings)
    print(text)
    with writing(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        (out / "curves.md").write_text(text + "\n")
        numbers = json.dumps([asdict(one) for one in settings], indent=1, ensure_ascii=False)
        (out / "curves.json").write_text(numbers + "\n")
    picture(settings, out / "curves.png", "update" if by == "updates" else "environment steps")


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("sweeps", nargs="+", type=Path, help="JSON files of the sweeps")
        parser.add_argument("--out", type=Path, required=True, help="folder of tables and picture")
        parser.add_argument("--base", help="arm to compare with (default: the first of the sweep)")
        text = "x axis (default: updates)"
        parser.add_argument("--by", choices=("updates", "steps"), default="updates", help=text)
        args = parser.parse_args()
        main(args.sweeps, args.out, args.base, args.by)
