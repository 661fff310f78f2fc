"""Arms compared over their seeds: means, paired differences, and 95 % intervals of these.

The value of a run is the mean over the parts of a measure of the mean over their tasks. An arm is
compared with the base arm seed by seed and task by task, on those that both have. The mean
difference gets a bootstrap interval: draw seeds, then tasks, both with replacement. All seeds share
the panel, so the tasks of a draw are the same for all seeds. With three seeds and one number for
each, the interval is the range from the worst to the best seed, which holds the true mean in 75 %
of the cases if the distribution is symmetric. Studies with one number per seed use paired t:
mean ± t(n-1) s / sqrt(n).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

DRAWS = 2000

Interval = tuple[float, float]
Column = dict[str, dict[str, float]]  # a measure of a run: part (equal weights) -> task -> value


@dataclass
class Compared:
    """One measure of an arm over its seeds, and its difference to the base arm."""

    values: list[float]  # one per seed
    difference: float | None = None  # mean over the seeds of both; None: this is the base arm
    bootstrap: Interval | None = None  # None: there is only one number

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None: one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


def signed(difference: float | None, interval: Interval | None) -> str:
    """A difference with its interval: +1.0 [-0.5, +2.5]."""
    if difference is None:
        return "–"
    if interval is None:
        return f"{difference:+.1f}"
    low, high = interval
    return f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"


def compare(
    runs: dict[tuple[str, int], dict[str, Column]], base: str
) -> dict[str, dict[str, Compared]]:
    """{(arm, seed): measures of the run} -> {arm: {measure: Compared}}; what all runs have."""
    first, *_ = runs.values()
    measures = [name for name in first if all(name in columns for columns in runs.values())]

    def column(arm: str, name: str) -> dict[int, Column]:
        return {seed: columns[name] for (label, seed), columns in runs.items() if label == arm}

    return {
        arm: {
            name: compared(column(arm, name), {} if arm == base else column(base, name))
            for name in measures
        }
        for arm in dict.fromkeys(arm for arm, _ in runs)
    }


def compared(ours: dict[int, Column], base: dict[int, Column]) -> Compared:
    """One measure of two arms by seed; base: {} for the base arm itself."""
    found = Compared([mean_of(column) for column in ours.values()])
    seeds = sorted(ours.keys() & base.keys())
    parts = paired([ours[seed] for seed in seeds], [base[seed] for seed in seeds])
    if not parts:
        return found
    found.difference = float(np.mean([part.mean() for part in parts]))
    if any(part.size > 1 for part in parts):
        found.bootstrap = bootstrap_interval(parts)
    return found


def mean_of(column: Column) -> float:
    """The mean over the parts of the mean over their tasks."""
    return float(np.mean([np.mean(list(tasks.values())) for tasks in column.values()]))


def paired(ours: list[Column], base: list[Column]) -> list[np.ndarray]:
    """Differences by seed and task -> (seeds, tasks) for each part; only what all runs have."""
    found = []
    for part in base[0] if base else ():
        columns = [column.get(part, {}) for column in base + ours]
        tasks = [task for task in columns[0] if all(task in column for column in columns)]
        if tasks:
            values = np.array([[column[task] for task in tasks] for column in columns])
            found.append(values[len(base) :] - values[: len(base)])  # (seeds, tasks)
    return found


def bootstrap_interval(parts: list[np.ndarray]) -> Interval:
    """The interval of the mean of the parts' means; parts: (seeds, tasks) each."""
    rng = np.random.default_rng(0)
    means = [mean_of_draw(parts, rng) for _ in range(DRAWS)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def mean_of_draw(parts: list[np.ndarray], rng: np.random.Generator) -> float:
    """The mean of the parts' means for drawn seeds and tasks."""
    n_seeds = len(parts[0])
    seeds = rng.integers(n_seeds, size=n_seeds)
    drawn = []
    for part in parts:
        # All seeds share the tasks of a draw: average over the seeds first.
        by_task = part[seeds].mean(0)  # (tasks,)
        tasks = rng.integers(len(by_task), size=len(by_task))
        drawn.append(by_task[tasks].mean())
    return float(np.mean(drawn))


def t_interval(values: Sequence[float]) -> Interval:
    """The t interval of the mean of one value per seed, or of paired differences."""
    n = len(values)
    half = t_quantile(n - 1) * np.std(values, ddof=1) / n**0.5
    mean = np.mean(values)
    return float(mean - half), float(mean + half)


@cache
def t_quantile(df: int) -> float:
    """Below this, Student's t with df degrees of freedom is with a probability of 97.5 %.

    The density, summed from 0 up.
    """
    x = np.linspace(0, 13, 2_000_001)  # 12.7 with one degree of freedom, and less with more
    density = (1 + x**2 / df) ** (-(df + 1) / 2)
    density *= math.gamma((df + 1) / 2) / (math.gamma(df / 2) * math.sqrt(math.pi * df))
    below = np.cumsum(density[:-1] + density[1:]) * x[1] / 2  # up to x[1], x[2], ...
    return float(x[1 + np.searchsorted(below, 0.475)])
