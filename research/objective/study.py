"""One loss for clean and for noisy observations? Candidates in the worlds of the board.

    python -m research.objective.study run      trains what runs.jsonl lacks
    python -m research.objective.study table    prints its table

A run takes 2 to 6 s of CPU.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from examples.one_file import Arm, cross_entropy
from examples.three_worlds import ECHO, PAW
from research import study
from research.board.__main__ import WORLDS
from research.locks.worlds import measure_in
from research.one_file_runs import KEY, Cell, in_world, measured, shared_warm_start

SEEDS = range(6100, 6116)
CANDIDATES = ["probable 0.03 x0.05, all", "gce 0.5 x0.05, all"]
BASES = ["paw", "echo 0.05"]
RUNS = Path(__file__).parent / "runs.jsonl"


# ---- the losses, in place of one_file.clipped_mae ----


def gce(logp: Tensor, rho: float, q: float) -> Tensor:
    """Generalized cross entropy, (1 - p^q) / q (arXiv 1805.07836): (B, O) -> (B,).

    The gradient on the logit of a token is p^q (1 - p): q -> 0 is cross entropy, q = 1 MAE.
    """
    return ((1 - (q * logp).exp()) / q).mean(-1)


def probable(logp: Tensor, rho: float, floor: float) -> Tensor:
    """Cross entropy of the tokens with p >= floor, the opposite of Eq. 7: (B, O) -> (B,)."""
    return cross_entropy(logp * (logp.exp() >= floor))


# ---- the arms ----

OURS = Arm(scale=0.05, alpha=1.0, lambda_g="constant")  # ECHO's scale, selection and weight
ARMS: dict[str, tuple[Arm, Callable | None]] = {  # name -> arm, its loss
    "paw": (PAW, None),
    "echo 0.05": (ECHO, None),
    "probable 0.03 x0.05, all": (OURS, partial(probable, floor=0.03)),
    "gce 0.5 x0.05, all": (OURS, partial(gce, q=0.5)),
}


# ---- runs ----


def train(job: tuple[str, str, int]) -> dict:
    """One run -> its line. All arms of a seed share one start model."""
    world, name, seed = job
    arm, loss = ARMS[name]
    instead = {"warm_start": shared_warm_start}
    if loss:
        instead["clipped_mae"] = loss
    lesson = WORLDS[world]
    points = Cell(arm, lesson.make_world, instead, lesson.size).run(seed)
    return {"world": world, "arm": name, "seed": seed} | study.columns([*map(measured, points)])


# ---- tables ----


def differences() -> str:
    """Each candidate and PaW against the bases; an arm that lacks a seed counts as not run."""
    pairs = [(arm, base) for arm in CANDIDATES for base in BASES] + [tuple(BASES)]
    short = dict(zip(CANDIDATES + BASES, ("probable", "gce", "PaW", "ECHO"), strict=True))
    lines = []
    for world in WORLDS:
        runs = study.complete(in_world(world, study.read_runs(RUNS, KEY)), SEEDS)
        cells = [study.difference(runs, a, b, measure_in(world)) for a, b in pairs]
        lines.append([world, *cells])
    return study.markdown_table(["world", *(f"{short[a]} - {short[b]}" for a, b in pairs)], lines)


if __name__ == "__main__":
    jobs = [
        (world, arm, seed) for seed in SEEDS for world in WORLDS for arm in BASES + CANDIDATES
    ]
    study.command(__doc__, RUNS, jobs, train, lambda: print(differences()), KEY)
