"""The panels in the pictures of studies: arms over x, arms side by side, success over updates."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from paw_min.running.plot import plain
from research.stats import Interval, t_interval


class Curves(NamedTuple):
    """The curves of an arm."""

    x: Sequence[float]
    values: np.ndarray  # (seeds, len(x))


class Dot(NamedTuple):
    """One measure of an arm."""

    middle: float
    interval: Interval | None
    seeds: Sequence[float] = ()


def extent(values: np.ndarray) -> Interval:
    """A band for panel_curves: the range of the seeds."""
    return values.min(), values.max()


def deviation(values: np.ndarray) -> Interval:
    """A band for panel_curves: the mean ± the sample standard deviation (one seed: 0)."""
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return values.mean() - std, values.mean() + std


def panel_curves(
    axis,
    arms: dict[str, Curves],
    colors: dict[str, str],
    band: Callable[[np.ndarray], Interval] | None = None,
) -> None:
    """The mean of each arm over its seeds. band: values of the seeds at one x -> its band there."""
    for arm, (x, values) in arms.items():
        axis.plot(x, values.mean(0), color=colors[arm], marker=".", label=plain(arm))
        if band:
            low, high = zip(*(band(at_x) for at_x in values.T))
            axis.fill_between(x, low, high, color=colors[arm], alpha=0.15, lw=0)
    axis.grid(alpha=0.3)


def panel_dots(axis, arms: dict[str, Dot], colors: dict[str, str], line: float) -> None:
    """A row per arm, the first at the top: dot, interval, and seeds as ticks. line: dotted."""
    axis.axvline(line, color="gray", lw=0.8, ls=":")
    for height, (arm, dot) in enumerate(arms.items()):
        axis.plot(dot.seeds, [height] * len(dot.seeds), "|", color=colors[arm], alpha=0.5)
        if dot.interval:
            axis.plot(dot.interval, [height, height], color=colors[arm], lw=2)
        axis.plot(dot.middle, height, "o", color=colors[arm])
    axis.set_yticks(range(len(arms)), map(plain, arms), fontsize=8)
    axis.set_ylim(len(arms) - 0.5, -0.5)
    axis.grid(alpha=0.3)


def draw_success(
    file: Path, updates: Sequence[int], curves: dict[str, list[list[float]]]
) -> None:
    """A picture of success in percent: the mean of each arm, and its 95 % t interval.

    curves: arm -> one list per seed, with a value per entry of `updates`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    labels = {
        "paw": "GRPO with PaW", "grpo": "GRPO", "placebo": "placebo: observations shuffled",
        "paw-ce": "PaW with cross entropy", "echo": "ECHO",
    }
    for arm, by_seed in curves.items():
        by_update = list(zip(*by_seed))
        low, high = zip(*(t_interval(values) for values in by_update))
        axis.plot(updates, [mean(values) for values in by_update], label=labels[arm])
        axis.fill_between(updates, low, high, alpha=0.2)
    axis.set(xlabel="updates", ylabel="success (%)", ylim=(0, 100))
    axis.legend(frameon=False)
    figure.savefig(file, dpi=150)
