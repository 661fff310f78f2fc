"""The panels in the pictures of studies: arms over x, and success over updates."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paw_min.running.plot import COLORS, OTHERS, Method, label_of, plt
from research.stats import Interval, t_interval

BLUE, PINK = COLORS["paw"].color, COLORS["ce"].color
# The arms of the studies: those of COLORS, and the same with one thing replaced: dashed, or
# dotted for λ.
STYLES = COLORS | {
    "mae": Method("PaW, ρ = 1", "#D55E00"),
    "probable": Method("ECHO where p ≥ 0.03", "#882255"),
    "alpha 1": Method("PaW, α = 1", BLUE, "--"),
    "constant": Method("PaW, λ = 1", BLUE, ":"),
    "ce, alpha 1": Method("PaW with cross entropy, α = 1", PINK, "--"),
    "ce, constant": Method("PaW with cross entropy, λ = 1", PINK, ":"),
}
# The grids of the paper name them so (paper/grids.py).
STYLES |= {"GRPO": COLORS["grpo"], "GRPO w/ PaW": COLORS["paw"], "ECHO": COLORS["echo"],
           "placebo: shuffled targets": COLORS["placebo"]}


class Curves(NamedTuple):
    """The curves of an arm."""

    x: Sequence[float]
    values: np.ndarray  # (seeds, len(x))


def styles_of(arms: Iterable[str]) -> dict[str, Method]:
    """Name, color and line of each arm; one that is not in STYLES has a color of its own."""
    others = iter(OTHERS * 9)
    return {arm: STYLES.get(arm) or Method(arm, next(others)) for arm in arms}


def deviation(values: np.ndarray) -> Interval:
    """A band for panel_curves: the mean ± the sample standard deviation (one seed: 0)."""
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return values.mean() - std, values.mean() + std


def panel_curves(
    axis,
    arms: dict[str, Curves],
    styles: dict[str, Method],
    band: Callable[[np.ndarray], Interval],
    limits: Interval = (-np.inf, np.inf),
) -> None:
    """The mean of each arm over its seeds. band: values of the seeds at one x -> its band there.

    limits: of what is measured; a band ends there.
    """
    for arm, (x, values) in arms.items():
        name, color, line = styles[arm]
        axis.plot(x, values.mean(0), line, color=color, marker=".", label=label_of(name))
        low, high = zip(*(np.clip(band(at_x), *limits) for at_x in values.T))
        axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    axis.grid(alpha=0.3)


def panel_success(axis, arms: dict[str, Curves], styles: dict[str, Method]) -> None:
    """Success in percent of each arm, with 95 % t intervals."""
    panel_curves(axis, arms, styles, t_interval, (0, 100))
    axis.set(xlabel="updates", ylim=(0, 100))


def named(curves: Iterable[Curves]) -> str:
    """What lines and bands are, for a legend."""
    seeds = sorted({len(arm.values) for arm in curves})
    n = " or ".join(map(str, seeds))
    return f"line: mean over {n} seeds, band: 95 % interval"


def draw_success(
    file: Path,
    updates: Sequence[int],
    curves: dict[str, list[list[float]]],
    details: dict[str, str] | None = None,
) -> None:
    """A picture of success in percent: the mean of each arm, and its 95 % t interval.

    curves: arm -> one list per seed, with a value per entry of `updates`.
    details: arm -> what is special about its method in this study.
    """
    details = details or {}
    arms = {arm: Curves(updates, np.array(runs)) for arm, runs in curves.items()}
    styles = styles_of(arms)
    unequal = len({len(runs) for runs in curves.values()}) > 1
    for arm, style in styles.items():
        name = f"{style.name}, {details[arm]}" if details.get(arm) else style.name
        seeds = f" ({len(curves[arm])} seeds)" if unequal else ""
        styles[arm] = style._replace(name=name + seeds)
    figure, axis = plt.subplots(figsize=(6, 4.2), layout="constrained")
    panel_success(axis, arms, styles)
    axis.set_ylabel("success (%)")
    # Outside of the axes, no grid line runs through the names.
    figure.legend(loc="outside lower center", ncols=2 if unequal else 3, frameon=False, fontsize=9,
                  title=named(arms.values()), title_fontsize=9)
    figure.savefig(file, dpi=150)
    plt.close(figure)
