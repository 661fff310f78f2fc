"""Figures of the paper from finished runs.

    python -m research.paper.figures bands SWEEP.json [KEY ...]      Fig. 10 and 11, any metric
    python -m research.paper.figures sensitivity SWEEP.json          Fig. 6
    python -m research.paper.figures overhead RUN_WITHOUT RUN_WITH   Fig. 5, and a table

Curves are averaged over seeds, at the updates that all seeds of an arm have, with a band of ± one
standard deviation (sample). Each command writes one PNG (--out FILE) and prints its path.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import writing
from paw_min.running.plot import COLORS, FIGURES, FRACTIONS, plt, set_limits
from paw_min.running.runs import read_metrics
from research.panels import Curves, deviation, panel_curves, styles_of
from research.paper.table import compute, find, load
from research.study import markdown_table

TITLES = {key: title for panels in FIGURES.values() for key, title in panels.items()}
SECONDS = {"seconds_rollout": "rollout", "seconds_old_pass": "old pass", "seconds_update": "update"}
AXES = {"alpha": "selection ratio α", "rho": "clipping threshold ρ"}


def stacked(curves: list[dict[int, float]]) -> Curves:
    """Curves {update: value} at the updates that all have."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return Curves(shared, np.array([[curve[update] for update in shared] for curve in curves]))


def save(figure, out: Path) -> None:
    with writing(str(out)):
        # With a format, a name without a suffix stays as it is.
        figure.savefig(out, dpi=130, format=out.suffix[1:] or "png")
    plt.close(figure)
    print(out)


def curve_of(lines: list[dict], key: str) -> dict[int, float]:
    """A metric of a run by update."""
    return {line["update"]: line[key] for line in lines if key in line}


def bands(sweep: Path, keys: list[str], out: Path | None) -> None:
    by_arm = defaultdict(list)
    for entry in find([sweep]):
        by_arm[entry.label].append(read_metrics(entry.folder))
    metrics = {key for runs in by_arm.values() for lines in runs for line in lines for key in line}
    unknown = [key for key in keys if key not in metrics]
    if unknown:
        raise UserError(f"no run of {sweep} has the metric {', '.join(unknown)}: choose from "
                        f"{', '.join(sorted(metrics))}.")
    n_columns = 2 if len(keys) == 4 else min(3, len(keys))
    n_rows = -(-len(keys) // n_columns)  # rounded up
    figure, axes = plt.subplots(n_rows, n_columns, figsize=(4 * n_columns + 0.6, 3 * n_rows + 0.6),
                                layout="constrained", squeeze=False)
    styles = styles_of(by_arm)
    handles = {}
    for axis, key in zip(axes.flat, keys):
        arms = {}
        for label, runs in by_arm.items():
            curves = [curve for curve in (curve_of(lines, key) for lines in runs) if curve]
            if curves and stacked(curves).x:  # else no run of this arm has the metric
                arms[label] = stacked(curves)
        limits = (0, 1) if key in FRACTIONS else (-np.inf, np.inf)
        panel_curves(axis, arms, styles, deviation, limits)
        set_limits(axis, key)
        lines, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, lines))
        axis.set_title(TITLES.get(key, key), fontsize=10)
        axis.set_xlabel("update", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat[len(keys) :]:
        axis.remove()
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=n_columns + 1,
                  frameon=False, title="line: mean over seeds, band: ± one standard deviation")
    save(figure, out or sweep.with_name(f"{sweep.stem}-bands.png"))


def sensitivity(sweep: Path, out: Path | None) -> None:
    results, notes = load([sweep])
    varied = [key for key in AXES if len({result.config[key] for result in results}) > 1]
    if len(varied) != 1:
        raise UserError(f"the runs of {sweep} differ in {' and '.join(varied) or 'neither'} of "
                        "--alpha and --rho: use fig6-alpha or fig6-rho.")
    (setting,) = varied
    value_of = {result.label: result.config[setting] for result in results}
    table = compute(results)
    labels = sorted(table, key=value_of.get)
    *_, name = results[0].columns()  # the overall success
    cells = [table[label][name] for label in labels]
    values = [value_of[label] for label in labels]
    means = [cell.mean for cell in cells]
    deviations = [cell.std or 0.0 for cell in cells]  # One seed has none.
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    axis.errorbar(values, means, yerr=deviations, marker="o", capsize=4)
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xlabel(AXES[setting])
    axis.set_ylabel(f"held-out {'mean over sets' if name == 'Avg.' else 'success'} (%)")
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
    found = {}
    for key, name in SECONDS.items():
        found[name] = float(np.mean([line[key] for line in lines]))
    found["all"] = sum(found.values())
    memory = [line["memory_gb"] for line in lines if "memory_gb" in line]
    if memory:
        found["peak"] = max(memory)
        found["mean"] = float(np.mean(memory))
    return found


def cost_table(base: dict[str, float], ours: dict[str, float]) -> str:
    lines = []
    for key in base:
        if key in ours:
            unit = "GB, memory" if key in ("peak", "mean") else "s,"
            percent = f"{100 * (ours[key] / base[key] - 1):+.1f} %" if base[key] else "–"
            lines.append([f"{unit} {key}", f"{base[key]:.2f}", f"{ours[key]:.2f}", percent])
    return markdown_table(["per update", "without PaW", "with PaW", "difference"], lines)


def overhead(without: Path, with_paw: Path, out: Path | None) -> None:
    runs = {"without PaW": costs(without), "with PaW": costs(with_paw)}
    print(cost_table(*runs.values()))
    n_panels = 2 if all("peak" in run for run in runs.values()) else 1
    figure, axes = plt.subplots(1, n_panels, figsize=(4.4 * n_panels, 3.6), layout="constrained",
                                squeeze=False)
    seconds = axes[0, 0]
    bottom = np.zeros(2)  # where the next part of each bar begins
    for name in SECONDS.values():
        heights = np.array([run[name] for run in runs.values()])
        bars = seconds.bar(list(runs), heights, 0.55, bottom=bottom, label=name)
        seconds.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=8)
        bottom += heights
    seconds.set_ylabel("seconds per update")
    for axis in axes.flat[1:]:
        for k, (name, run) in enumerate(runs.items()):
            bars = axis.bar(np.arange(2) + 0.38 * (k - 0.5), [run["peak"], run["mean"]], 0.36,
                            label=name, color=COLORS[("grpo", "paw")[k]].color)
            axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_xticks([0, 1], ["peak", "mean over updates"])
        axis.set_ylabel("memory (GB)")
    for axis in axes.flat:
        axis.margins(y=0.12)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
    for k, total in enumerate(bottom):
        seconds.text(k, total, f"{total:.1f} s", ha="center", va="bottom", fontsize=9)
    save(figure, out or with_paw / "overhead.png")


def main() -> None:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("bands", "sensitivity", "overhead"):
        sub = commands.add_parser(name)
        if name == "overhead":
            sub.add_argument("without", type=Path, help="run folder without PaW")
            sub.add_argument("with_paw", type=Path, help="run folder with PaW")
        else:
            sub.add_argument("sweep", type=Path, help="JSON file of a sweep")
        if name == "bands":
            sub.add_argument("keys", nargs="*", default=list(FIGURES["paw.png"]),
                             help="metrics (default: those of Fig. 10 and 11)")
        sub.add_argument("--out", type=Path, help="the PNG (default: next to the input)")
    args = vars(parser.parse_args())
    draw = dict(bands=bands, sensitivity=sensitivity, overhead=overhead)[args.pop("command")]
    draw(**args)


if __name__ == "__main__":
    with user_errors():
        main()
