"""One loss for clean and for noisy observations? Candidates in the worlds of the board.

    python -m research.objective.study run      trains what runs.jsonl lacks
    python -m research.objective.study table    prints its tables, and that of exploration.jsonl

A run takes 2 to 6 s of CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from examples.one_file import Arm, cross_entropy
from examples.three_worlds import ECHO, GRPO, PAW
from research import study
from research.board.__main__ import WORLDS
from research.locks.worlds import measure_in
from research.one_file_runs import (
    KEY,
    Cell,
    in_world,
    material,
    measured,
    noise,
    shared_warm_start,
)

SEEDS = range(6100, 6116)
CANDIDATES = ["probable 0.03 x0.05, all", "gce 0.5 x0.05, all"]
BASES = ["paw", "echo 0.05"]
FOLDER = Path(__file__).parent
EXPLORATION, RUNS = FOLDER / "exploration.jsonl", FOLDER / "runs.jsonl"


# ---- the losses, in place of one_file.clipped_mae ----


def gce(logp: Tensor, rho: float, q: float) -> Tensor:
    """Generalized cross entropy, (1 - p^q) / q (arXiv 1805.07836): (B, O) -> (B,).

    The gradient on the logit of a token is p^q (1 - p): q -> 0 is cross entropy, q = 1 MAE.
    """
    return ((1 - (q * logp).exp()) / q).mean(-1)


def probable(logp: Tensor, rho: float, floor: float) -> Tensor:
    """Cross entropy of the tokens with p >= floor, the opposite of Eq. 7: (B, O) -> (B,)."""
    return cross_entropy(logp * (logp.exp() >= floor))


LOSSES: dict[str, Callable] = {f"gce {q}": partial(gce, q=q) for q in (0.3, 0.5, 0.7)}
LOSSES |= {f"probable {floor}": partial(probable, floor=floor) for floor in (0.03, 0.06)}


# ---- the arms ----


def arms() -> dict[str, tuple[Arm, Callable | None]]:
    """{name: (arm, its loss)}. ", all": on all transitions, with lambda_g = 1, as in ECHO."""
    found = {"grpo": (GRPO, None), "paw": (PAW, None)}
    found |= {f"echo {s}": (replace(ECHO, scale=s), None) for s in (0.02, 0.05, 0.1, 0.3, 1.0)}
    for name, loss in LOSSES.items():
        for scale in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0):
            own = Arm(scale=scale)
            found[f"{name} x{scale:g}"] = own, loss
            found[f"{name} x{scale:g}, all"] = replace(own, alpha=1.0, lambda_g="constant"), loss
    return found


ARMS = arms()


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


def means(path: Path = RUNS) -> str:
    """Each arm's mean in each world: success, p(material) and p(noise) at the end."""
    runs = study.read_runs(path, KEY)
    trained = {arm for _, arm, _ in runs}
    lines = []
    for arm in [arm for arm in ARMS if arm in trained]:
        cells = []
        for world in WORLDS:
            ours = in_world(world, runs)
            success = study.level(ours, arm, measure_in(world))
            p = ", ".join(study.level(ours, arm, last, digits=2) for last in (material, noise))
            cells.append(f"{success} ({p})" if study.seeds_of(ours, arm) else "not run")
        lines.append([arm, *cells])
    return study.markdown_table(["arm", *WORLDS], lines)


def table() -> None:
    print("\n\n".join([differences(), means(), means(EXPLORATION)]))


if __name__ == "__main__":
    jobs = [
        (world, arm, seed) for seed in SEEDS for world in WORLDS for arm in BASES + CANDIDATES
    ]
    study.command(__doc__, RUNS, jobs, train, table, KEY)
