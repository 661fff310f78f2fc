"""Figures of the paper from finished runs.

    python -m research.paper.figures bands SWEEP.json [KEY ...]      Fig. 10 and 11, any metric
    python -m research.paper.figures sensitivity SWEEP.json          Fig. 6
    python -m research.paper.figures overhead RUN_WITHOUT RUN_WITH   Fig. 5, and a table

Curves are averaged over seeds, at the updates that all seeds of an arm have, with a band of ± one
standard deviation (sample). Each command writes one PNG (--out FILE) and prints its path.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import writing
from paw_min.base.flags import Parser
from paw_min.running.plot import (
    COLORS,
    FIGURES,
    FRACTIONS,
    OTHERS,
    Style,
    label_of,
    set_limits,
)
from paw_min.running.runs import read_metrics
from research.paper.table import compute, find, load
from research.study import markdown_table

TITLES = {key: title for panels in FIGURES.values() for key, title in panels.items()}
SECONDS = {"seconds_rollout": "rollout", "seconds_old_pass": "old pass", "seconds_update": "update"}
AXES = {"alpha": "selection ratio α", "rho": "clipping threshold ρ"}
# The arms of the grids (grids.py) that have colors in all figures.
METHODS = {"GRPO": "grpo", "GRPO w/ PaW": "paw", "ECHO": "echo",
           "placebo: shuffled targets": "placebo"}


class Curves(NamedTuple):
    """The curves of an arm."""

    updates: Sequence[int]
    values: np.ndarray  # (seeds, updates)


def save(figure, out: Path) -> None:
    with writing(str(out)):
        # A name without a suffix stays as it is, because the format is given.
        figure.savefig(out, dpi=130, format=out.suffix[1:] or "png")
    print(out)


def stacked(runs: list[list[dict]], key: str) -> Curves:
    """A metric of the runs that have it, at the updates that all of these have."""
    curves = [{line["update"]: line[key] for line in lines if key in line} for lines in runs]
    curves = [curve for curve in curves if curve]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return Curves(shared, np.array([[curve[update] for update in shared] for curve in curves]))


def styles_of(arms: Sequence[str]) -> list[Style]:
    """Name and color of each arm; one that no other figure has gets a color of its own."""
    others = iter(OTHERS * 9)
    return [
        COLORS[METHODS[arm]] if arm in METHODS else Style(arm, next(others)) for arm in arms
    ]


def draw_bands(axis, curves: Curves, style: Style, limits: tuple[float, float]) -> None:
    """The mean over the seeds ± the sample standard deviation (one seed: 0), within limits."""
    mean = curves.values.mean(0)  # (updates,)
    std = curves.values.std(0, ddof=1) if len(curves.values) > 1 else 0.0
    axis.plot(curves.updates, mean, color=style.color, marker=".", label=label_of(style.name))
    low, high = np.clip(mean - std, *limits), np.clip(mean + std, *limits)
    axis.fill_between(curves.updates, low, high, color=style.color, alpha=0.15, lw=0)


def bands(sweep: Path, keys: list[str], out: Path | None) -> None:
    by_arm = defaultdict(list)
    for entry in find([sweep]):
        by_arm[entry.label].append(read_metrics(entry.folder))
    known = {key for runs in by_arm.values() for lines in runs for line in lines for key in line}
    if unknown := [key for key in keys if key not in known]:
        raise UserError(f"no run of {sweep} has the metric {', '.join(unknown)}: choose from "
                        f"{', '.join(sorted(known))}.")
    columns = 2 if len(keys) == 4 else min(3, len(keys))
    rows = -(-len(keys) // columns)  # rounded up
    size = 4 * columns + 0.6, 3 * rows + 0.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    handles = {}
    for axis, key in zip(axes.flat, keys):
        limits = (0, 1) if key in FRACTIONS else (-np.inf, np.inf)
        for runs, style in zip(by_arm.values(), styles_of(list(by_arm))):
            curves = stacked(runs, key)
            if curves.updates:
                draw_bands(axis, curves, style, limits)
        set_limits(axis, key)
        axis.grid(alpha=0.3)
        axis.set_title(TITLES.get(key, key), fontsize=10)
        axis.set_xlabel("update", fontsize=9)
        lines, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, lines))
    for axis in axes.flat[len(keys) :]:
        axis.remove()
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns + 1,
                  frameon=False, title="line: mean over seeds, band: ± one standard deviation")
    save(figure, out or sweep.with_name(f"{sweep.stem}-bands.png"))


def sensitivity(sweep: Path, out: Path | None) -> None:
    results, notes = load([sweep])
    varied = [key for key in AXES if len({result.config[key] for result in results}) > 1]
    if len(varied) != 1:
        raise UserError(f"the runs of {sweep} differ in {' and '.join(varied) or 'neither'} of "
                        "--alpha and --rho: use fig6-alpha or fig6-rho.")
    (setting,) = varied
    value_of = {result.entry.label: result.config[setting] for result in results}
    labels = sorted(value_of, key=value_of.get)
    table = compute(results)
    *_, overall = results[0].columns
    cells = [table[label][overall] for label in labels]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.errorbar([value_of[label] for label in labels], [cell.mean for cell in cells],
                  yerr=[cell.std or 0.0 for cell in cells], marker="o", capsize=4)
    axis.set(xlabel=AXES[setting], ylabel=f"held-out {overall} (%)")
    axis.set_title("mean ± standard deviation over seeds", fontsize=10)
    axis.grid(alpha=0.3)
    for note in notes:
        print(note)
    save(figure, out or sweep.with_suffix(".png"))


def costs(folder: Path) -> dict[str, float]:
    """Seconds per update, averaged over the updates, and memory (GB), where it was measured."""
    lines = [line for line in read_metrics(folder) if all(key in line for key in SECONDS)]
    if not lines:
        raise UserError(f"{folder} has no finished update: run it first.")
    found = {
        f"s, {name}": float(np.mean([line[key] for line in lines])) for key, name in SECONDS.items()
    }
    found["s, all"] = sum(found.values())
    if memory := [line["memory_gb"] for line in lines if "memory_gb" in line]:
        found |= {"GB, memory peak": max(memory), "GB, memory mean": float(np.mean(memory))}
    return found


def cost_table(base: dict[str, float], ours: dict[str, float]) -> str:
    lines = []
    for key in base.keys() & ours.keys():
        percent = f"{100 * (ours[key] / base[key] - 1):+.1f} %" if base[key] else "–"
        lines.append([key, f"{base[key]:.2f}", f"{ours[key]:.2f}", percent])
    lines.sort(key=lambda line: list(base).index(line[0]))
    return markdown_table(["per update", "without PaW", "with PaW", "difference"], lines)


def overhead(without: Path, with_paw: Path, out: Path | None) -> None:
    runs = {"without PaW": costs(without), "with PaW": costs(with_paw)}
    print(cost_table(*runs.values()))
    figure = Figure(figsize=(4.4, 3.6), layout="constrained")
    axis = figure.subplots()
    bottom = np.zeros(2)  # where the next part of each bar begins
    for name in SECONDS.values():
        heights = np.array([run[f"s, {name}"] for run in runs.values()])
        bars = axis.bar(list(runs), heights, 0.55, bottom=bottom, label=name)
        axis.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=8)
        bottom += heights
    peaks = [run.get("GB, memory peak") for run in runs.values()]
    if None not in peaks:
        names = [f"{name}\n{peak:.2f} GB" for name, peak in zip(runs, peaks)]
        axis.set_xticks(range(2), names)
    axis.set_ylabel("seconds per update")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    save(figure, out or with_paw / "overhead.png")


def main() -> None:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_bands, of_sensitivity, of_overhead = map(
        commands.add_parser, ("bands", "sensitivity", "overhead")
    )
    for sub in (of_bands, of_sensitivity):
        sub.add_argument("sweep", type=Path, help="JSON file of a sweep")
    of_bands.add_argument("keys", nargs="*", default=list(FIGURES["paw.png"]),
                          help="metrics (default: those of Fig. 10 and 11)")
    of_overhead.add_argument("without", type=Path, help="run folder without PaW")
    of_overhead.add_argument("with_paw", type=Path, help="run folder with PaW")
    for sub in (of_bands, of_sensitivity, of_overhead):
        sub.add_argument("--out", type=Path, help="the PNG (default: next to the input)")
    args = vars(parser.parse_args())
    draw = dict(bands=bands, sensitivity=sensitivity, overhead=overhead)[args.pop("command")]
    draw(**args)


if __name__ == "__main__":
    with user_errors():
        main()
