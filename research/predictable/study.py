"""Which observation loss is safe to switch on? The tables of the small worlds of README.md.

    python -m research.predictable.study

README.md has the commit with the code of the runs.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from paw_min.base.errors import user_errors
from research.stats import signed, t_quantile
from research.study import (
    Runs,
    difference,
    gains,
    level,
    main_measure,
    markdown_table,
    read_runs,
    values_of,
)

RUNS = Path(__file__).parent / "runs.jsonl"
SEEDS = range(9100, 9116)
LOSSES = ("grpo", "paw", "echo", "probable 0.03", "probable 0.01", "prediction", "predictable")
PLACEBO = " placebo"  # at the end of an arm's name: with the observations of other transitions
PLACEBOS = tuple(name + PLACEBO for name in ("echo", "probable 0.01", "prediction", "predictable"))
ARMS = LOSSES + PLACEBOS
WORLDS = ("plain", "serials", "corridors", "polish", "fog", "long serials", "outcome", "unseen")
MADE_IN = WORLDS[:-1]  # the worlds that the rule's author knew
CANDIDATES = ("predictable", "prediction", "probable 0.01")
BASES = ("paw", "echo", "probable 0.03")
PAIRS = (
    ("predictable", "grpo"), ("predictable", "paw"), ("predictable", "echo"),
    ("predictable", "probable 0.03"), ("predictable", "prediction"), ("echo", "paw"),
    *((name.removesuffix(PLACEBO), name) for name in PLACEBOS),
    *((name, "grpo") for name in PLACEBOS),
)  # fmt: skip
DRAWS = 10_000

Found = dict[str, Runs]  # by world


def complete(runs: Found, worlds: Sequence[str], arms: Sequence[str]) -> tuple[Found, list[int]]:
    """The runs of these worlds on the seeds that all of these arms have in all of them."""
    seeds = [
        seed for seed in SEEDS
        if all((arm, seed) in runs[world] for world in worlds for arm in arms)
    ]
    found = {
        world: {(arm, seed): runs[world][arm, seed] for arm in arms for seed in seeds}
        for world in worlds
    }
    return found, seeds


# ---- regret ----


def success(runs: Found, worlds: Sequence[str]) -> np.ndarray:
    """The measure of each run, in percent: (worlds, arms, seeds)."""
    return np.array([
        [values_of(runs[world], arm, main_measure) for arm in ARMS] for world in worlds
    ])


def shortfalls(success: np.ndarray) -> np.ndarray:
    """How far each arm's mean is below that of the best loss: (..., seeds) -> (worlds, arms)."""
    means = success.mean(-1)  # (worlds, arms)
    best = means[:, : len(LOSSES)].max(1, keepdims=True)  # placebos are no losses to choose
    return best - means


def regrets(success: np.ndarray) -> np.ndarray:
    """The largest shortfall of each arm over the worlds: (worlds, arms, seeds) -> (arms,)."""
    return shortfalls(success).max(0)


def drawn_regrets(success: np.ndarray) -> np.ndarray:
    """Regrets of seeds drawn with replacement, the same in all worlds: (DRAWS, arms)."""
    rng = np.random.default_rng(0)
    n = success.shape[-1]
    return np.array([regrets(success[..., rng.integers(n, size=n)]) for _ in range(DRAWS)])


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of drawn values, (DRAWS,)."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def regret_tables(runs: Found) -> list[str]:
    """Each arm's means and regrets; and each candidate's regret minus that of each base.

    Regrets are over all worlds, and without the unseen one.
    """
    found = success(runs, WORLDS)
    columns = []  # regrets of the arms, (arms,), and drawn ones, (DRAWS, arms)
    for part in (found, success(runs, MADE_IN)):
        columns.append((regrets(part), drawn_regrets(part)))
    worst = shortfalls(found).argmax(0)  # (arms,)
    lines = []
    for a, arm in enumerate(ARMS):
        cells = [level(runs[world], arm, main_measure) for world in WORLDS]
        for regret, drawn in columns:
            low, high = interval(drawn[:, a])
            cells.append(f"{regret[a]:.1f} [{low:.1f}, {high:.1f}]")
        lines.append([arm, *cells, WORLDS[worst[a]]])
    pairs = []
    for candidate in CANDIDATES:
        for base in BASES:
            a, b = ARMS.index(candidate), ARMS.index(base)
            cells = [
                signed(regret[a] - regret[b], interval(drawn[:, a] - drawn[:, b]))
                for regret, drawn in columns
            ]
            pairs.append([f"{candidate} - {base}", *cells])
    header = ["loss", *WORLDS, "regret", "without unseen", "worst in"]
    return [
        markdown_table(header, lines),
        markdown_table(["regret", "all worlds", "without unseen"], pairs),
    ]


# ---- paired differences ----


def detectable(gains: list[float]) -> float:
    """The difference that a paired t test finds with a probability of 80 %."""
    n = len(gains)
    return (t_quantile(n - 1) + t_quantile(n - 1, 0.8)) * np.std(gains, ddof=1) / n**0.5


def criterion_table(runs: Found) -> str:
    """Each candidate minus the better of PaW and ECHO, and what this test would find."""
    lines = []
    for world in WORLDS:
        ours = runs[world]
        better = max(("paw", "echo"), key=lambda arm: mean(values_of(ours, arm, main_measure)))
        line = [world, better]
        for arm in CANDIDATES:
            least = detectable(gains(ours, arm, better, main_measure))
            line.append(f"{difference(ours, arm, better, main_measure)} ({least:.1f})")
        lines.append(line)
    return markdown_table(["world", "better base", *CANDIDATES], lines)


def differences(runs: Found) -> str:
    """Paired differences in each world."""
    lines = [
        [f"{a} - {b}", *(difference(runs[world], a, b, main_measure) for world in WORLDS)]
        for a, b in PAIRS
    ]
    return markdown_table(["difference", *WORLDS], lines)


def tables_of_losses() -> list[str]:
    """Regrets, their differences, and the old criterion, on the seeds that all arms have."""
    runs, _ = complete(read_runs(RUNS), WORLDS, ARMS)
    return [*regret_tables(runs), criterion_table(runs)]


def main() -> None:
    runs, seeds = complete(read_runs(RUNS), WORLDS, ARMS)
    print(f"{len(seeds)} seeds in all worlds\n")
    print("\n\n".join([*tables_of_losses(), differences(runs)]))


if __name__ == "__main__":
    with user_errors():
        main()
