"""The figure of README.md, and how many updates its arms needed: locks with and without a KL term.

    python -m research.tables --figure    draws locks/curves.png
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from paw_min.running.plot import COLORS
from research import study
from research.stats import t_interval

FOLDER = Path(__file__).parent / "locks"
LEVEL = 0.8  # of success, for "the first evaluation with at least 80 %"
NAMES = ("GRPO", "PaW", "placebo", "ECHO")
SIDES = (  # title of a panel or column, file, its arms in the order of NAMES
    ("with a KL term of 0.01", FOLDER / "kl.jsonl", ("grpo", "paw", "placebo", "echo")),
    ("without a KL term", FOLDER / "runs.jsonl", ("grpo", "paw", "placebo", "ce 0.05")),
)


def complete(path: Path, arms: tuple[str, ...]) -> dict[str, list[dict]]:
    """By name, the runs of the seeds that have all arms."""
    runs = study.read_runs(path)[""]
    seeds = study.seeds_of(runs, *arms)
    return {name: [runs[arm, seed] for seed in seeds] for name, arm in zip(NAMES, arms)}


def first_at_level(run: dict) -> float:
    """The update of the first evaluation with 80 % or more; inf if there is none."""
    reached = (k for k, success in zip(run["update"], run["success"]) if success >= LEVEL)
    return next(reached, float("inf"))


def reached_table() -> str:
    """For each arm, how many updates half of the seeds needed to 80 %, and how many got there."""
    lines = [[name] for name in NAMES]
    for _, path, arms in SIDES:
        for line, runs in zip(lines, complete(path, arms).values()):
            firsts = sorted(map(first_at_level, runs))
            half = firsts[(len(firsts) - 1) // 2]
            count = sum(first < float("inf") for first in firsts)
            shown = "not in 200" if half == float("inf") else f"{half:.0f}"
            line.append(f"{shown} ({count} of {len(firsts)} seeds)")
    return study.markdown_table(["updates to 80 %", *(title for title, *_ in SIDES)], lines)


def draw() -> None:
    """curves.png: the mean success of each arm, and its 95 % t interval."""
    figure = Figure(figsize=(7.6, 3.7), layout="constrained")
    styles = {style.name: style for style in COLORS.values()}
    for axis, (title, path, arms) in zip(figure.subplots(1, 2, sharey=True), SIDES):
        for name, runs in complete(path, arms).items():
            updates = runs[0]["update"]
            success = 100 * np.array([run["success"] for run in runs])  # (seeds, evaluations)
            axis.plot(updates, success.mean(0), color=styles[name].color, marker=".", label=name)
            low, high = zip(*map(t_interval, success.T))
            axis.fill_between(
                updates, np.clip(low, 0, 100), np.clip(high, 0, 100), color=styles[name].color,
                alpha=0.15, lw=0,
            )
        axis.set(title=title, xlabel="updates", ylim=(0, 100), xticks=range(0, 201, 50))
        axis.grid(alpha=0.3)
        axis.text(4, 93, f"{len(runs)} seeds", fontsize=9)
    figure.axes[0].set_ylabel("success (%)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False, title="line: mean over the seeds, band: 95 % interval")
    figure.savefig(FOLDER / "curves.png", dpi=200)
