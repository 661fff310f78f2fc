"""The panels in the pictures of studies: arms over x, and success over updates."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paw_min.running.plot import plain, plt
from research.stats import Interval, t_interval


class Curves(NamedTuple):
    """The curves of an arm."""

    x: Sequence[float]
    values: np.ndarray  # (seeds, len(x))


def deviation(values: np.ndarray) -> Interval:
    """A band for panel_curves: the mean ± the sample standard deviation (one seed: 0)."""
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return values.mean() - std, values.mean() + std


def panel_curves(
    axis,
    arms: dict[str, Curves],
    colors: dict[str, str],
    band: Callable[[np.ndarray], Interval],
) -> None:
    """The mean of each arm over its seeds. band: values of the seeds at one x -> its band there."""
    for arm, (x, values) in arms.items():
        axis.plot(x, values.mean(0), color=colors[arm], marker=".", label=plain(arm))
        low, high = zip(*(band(at_x) for at_x in values.T))
        axis.fill_between(x, low, high, color=colors[arm], alpha=0.15, lw=0)
    axis.grid(alpha=0.3)


def draw_success(
    file: Path, updates: Sequence[int], curves: dict[str, list[list[float]]]
) -> None:
    """A picture of success in percent: the mean of each arm, and its 95 % t interval.

    curves: arm -> one list per seed, with a value per entry of `updates`.
    """
    labels = {
        "paw": "GRPO with PaW", "grpo": "GRPO", "placebo": "placebo: observations shuffled",
        "ce": "PaW with cross entropy", "paw-ce": "PaW with cross entropy", "echo": "ECHO",
        "paw-30": "PaW, scale 30",
    }
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    arms = {labels[arm]: Curves(updates, np.array(runs)) for arm, runs in curves.items()}
    panel_curves(axis, arms, {label: f"C{k}" for k, label in enumerate(arms)}, t_interval)
    axis.set(xlabel="updates", ylabel="success (%)", ylim=(0, 100))
    axis.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
