"""Figures of the paper from finished runs.

    python -m paw_min.experiments.figures bands SWEEP.json [KEY ...]      Fig. 10 and 11, any metric
    python -m paw_min.experiments.figures sensitivity SWEEP.json          Fig. 6
    python -m paw_min.experiments.figures overhead RUN_WITHOUT RUN_WITH   Fig. 5, and a table

Curves are averaged over seeds, at the updates that all seeds of an arm have, with a band of ± one
standard deviation (sample). Each command writes one PNG (--out FILE) and prints its path.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from paw_min.experiments.table import compute, find, load
from paw_min.running.errors import Parser, UserError, user_errors
from paw_min.running.plot import FIGURES, plt
from paw_min.running.runs import read_metrics, writing

TITLES = {key: title for panels in FIGURES.values() for key, title in panels.items()}
SECONDS = {"seconds_rollout": "rollout", "seconds_old_pass": "old pass", "seconds_update": "update"}
AXES = {"select_ratio": "selection ratio α", "rho": "clipping threshold ρ"}


def over_seeds(curves: list[dict[int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Curves {update: value} -> updates of all curves, mean, standard deviation (one seed: 0)."""
    shared = sorted(set.intersection(*map(set, curves)))
    values = np.array([[curve[k] for k in shared] for curve in curves])  # (seeds, updates)
    std = values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(shared))
    return np.array(shared), values.mean(0), std


def save(figure, out: Path) -> None:
    with writing(str(out)):
        figure.savefig(out, dpi=130)
    plt.close(figure)
    print(out)


def bands(sweep: Path, keys: list[str], out: Path | None) -> None:
    by_arm = defaultdict(list)
    for entry in find([sweep]):
        by_arm[entry.label].append(read_metrics(entry.folder))
    known = {key for runs in by_arm.values() for lines in runs for m in lines for key in m}
    if unknown := [key for key in keys if key not in known]:
        raise UserError(f"no run of {sweep} has the metric {', '.join(unknown)}: choose from "
                        f"{', '.join(sorted(known))}.")  # fmt: skip
    n_columns = 2 if len(keys) == 4 else min(3, len(keys))
    n_rows = -(-len(keys) // n_columns)
    figure, axes = plt.subplots(n_rows, n_columns, figsize=(4 * n_columns + 0.6, 3 * n_rows + 0.6),
                                layout="constrained", squeeze=False)  # fmt: skip
    handles = {}
    for axis, key in zip(axes.flat, keys):
        for number, (label, runs) in enumerate(by_arm.items()):
            curves = [{m["update"]: m[key] for m in lines if key in m} for lines in runs]
            updates, mean, std = over_seeds([c for c in curves if c] or [{}])
            if len(updates):
                color = f"C{number}"
                axis.fill_between(updates, mean - std, mean + std, color=color, alpha=0.2, lw=0)
                (handles[label],) = axis.plot(updates, mean, color=color, marker=".", label=label)
        axis.set_title(TITLES.get(key, key), fontsize=10)
        axis.set_xlabel("update", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(keys) :]:
        axis.remove()
    place = dict(loc="outside lower center", ncols=n_columns + 1, frameon=False)
    figure.legend(handles.values(), handles, **place)
    save(figure, out or sweep.with_name(f"{sweep.stem}-bands.png"))


def sensitivity(sweep: Path, out: Path | None) -> None:
    results, notes = load([sweep])
    varied = [key for key in AXES if len({r.config[key] for r in results}) > 1]
    if len(varied) != 1:
        raise UserError(f"the runs of {sweep} differ in {' and '.join(varied) or 'neither'} of "
                        "--select-ratio and --rho: use fig6-alpha or fig6-rho.")  # fmt: skip
    table, _ = compute(results)
    setting = {r.label: r.config[varied[0]] for r in results}
    labels, name = sorted(table, key=setting.get), list(results[0].columns(False))[-1]
    cells = [table[label][name] for label in labels]
    x, mean = [setting[label] for label in labels], [c.mean for c in cells]
    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    axis.errorbar(x, mean, yerr=[c.std or 0.0 for c in cells], marker="o", capsize=4)
    axis.set_xticks(x, [f"{tick:g}" for tick in x])
    axis.set_xlabel(AXES[varied[0]])
    axis.set_ylabel(f"held-out {'mean over sets' if name == 'Avg.' else 'success'} (%)")
    axis.set_title("mean ± standard deviation over seeds", fontsize=10)
    axis.grid(alpha=0.3)
    print(*notes, sep="\n", end="\n" if notes else "")
    save(figure, out or sweep.with_suffix(".png"))


def costs(folder: Path) -> dict[str, float]:
    """Seconds per update, averaged over the updates, and memory (GB), where it was measured."""
    lines = [m for m in read_metrics(folder) if "seconds_update" in m]
    if not lines:
        raise UserError(f"{folder} has no finished update: run it first.")
    found = {name: float(np.mean([m[key] for m in lines])) for key, name in SECONDS.items()}
    found["all"] = sum(found.values())
    if memory := [m["memory_gb"] for m in lines if "memory_gb" in m]:
        found |= {"peak": max(memory), "mean": float(np.mean(memory))}
    return found


def overhead(without: Path, with_paw: Path, out: Path | None) -> None:
    runs = {"without PaW": costs(without), "with PaW": costs(with_paw)}
    a, b = runs.values()
    shared = [key for key in a if key in b]
    print("| per update | without PaW | with PaW | difference |\n|---|---|---|---|")
    for key in shared:
        unit = "GB, memory" if key in ("peak", "mean") else "s,"
        percent = f"{100 * (b[key] / a[key] - 1):+.1f} %" if a[key] else "–"
        print(f"| {unit} {key} | {a[key]:.2f} | {b[key]:.2f} | {percent} |")
    n_panels = 2 if "peak" in shared else 1
    figure, axes = plt.subplots(1, n_panels, figsize=(4.4 * n_panels, 3.6), layout="constrained",
                                squeeze=False)  # fmt: skip
    bottom = np.zeros(2)
    for name in SECONDS.values():
        heights = np.array([run[name] for run in runs.values()])
        bars = axes[0, 0].bar(list(runs), heights, 0.55, bottom=bottom, label=name)
        axes[0, 0].bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=8)
        bottom += heights
    axes[0, 0].set_ylabel("seconds per update")
    for axis in axes.flat[1:]:
        for k, (name, run) in enumerate(runs.items()):
            bars = axis.bar(np.arange(2) + 0.38 * (k - 0.5), [run["peak"], run["mean"]], 0.36,
                            label=name, color=f"C{k + 4}")  # fmt: skip
            axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_xticks([0, 1], ["peak", "mean over updates"])
        axis.set_ylabel("memory (GB)")
    for axis in axes.flat:
        axis.margins(y=0.12)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
    for k, total in enumerate(bottom):
        axes[0, 0].text(k, total, f"{total:.1f} s", ha="center", va="bottom", fontsize=9)
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
                             help="metrics (default: those of Fig. 10 and 11)")  # fmt: skip
        sub.add_argument("--out", type=Path, help="the PNG (default: next to the input)")
    args = vars(parser.parse_args())
    draw = dict(bands=bands, sensitivity=sensitivity, overhead=overhead)[args.pop("command")]
    with user_errors():
        draw(**args)


if __name__ == "__main__":
    main()
