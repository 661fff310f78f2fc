"""Which observation loss is safe to switch on? Regrets in the small worlds of LOG.md, "One rule".

The regret of a loss is how far its mean over the seeds is below that of the best loss, in the world
where this is most. research/tables.py shows them on the page.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from research.study import Runs, level, main_measure, markdown_table, read_runs, values_of

RUNS = Path(__file__).parent / "runs.jsonl"
LOSSES = ("grpo", "paw", "echo", "probable 0.03", "probable 0.01", "prediction", "predictable")
# Their targets are the observations of other transitions.
PLACEBOS = (
    "echo placebo", "probable 0.01 placebo", "prediction placebo", "predictable placebo",
)  # fmt: skip
ARMS = LOSSES + PLACEBOS
WORLDS = ("plain", "serials", "corridors", "polish", "fog", "long serials", "outcome", "unseen")
MADE_IN = WORLDS[:-1]  # the worlds that the rule's author knew
DRAWS = 10_000


def success(runs: dict[str, Runs], worlds: Sequence[str]) -> np.ndarray:
    """The measure of each run, in percent: (worlds, arms, seeds). runs: by world."""
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


def intervals(success: np.ndarray) -> np.ndarray:
    """The 95 % percentile bootstrap interval of each regret: (2, arms).

    Seeds are drawn with replacement, the same in all worlds.
    """
    rng = np.random.default_rng(0)
    n = success.shape[-1]
    drawn = [regrets(success[..., rng.integers(n, size=n)]) for _ in range(DRAWS)]
    return np.percentile(drawn, [2.5, 97.5], axis=0)


def regret_table() -> str:
    """Each arm's means and regrets, over all worlds and without the unseen one."""
    runs = read_runs(RUNS)
    found = success(runs, WORLDS)
    columns = []  # regrets, (arms,), and their intervals, (2, arms)
    for part in (found, success(runs, MADE_IN)):
        columns.append((regrets(part), intervals(part)))
    worst = shortfalls(found).argmax(0)  # (arms,)
    lines = []
    for a, arm in enumerate(ARMS):
        cells = [level(runs[world], arm, main_measure) for world in WORLDS]
        for regret, (low, high) in columns:
            cells.append(f"{regret[a]:.1f} [{low[a]:.1f}, {high[a]:.1f}]")
        lines.append([arm, *cells, WORLDS[worst[a]]])
    return markdown_table(["loss", *WORLDS, "regret", "without unseen", "worst in"], lines)
