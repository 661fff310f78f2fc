"""One loss for clean and for noisy observations? The runs of PROTOCOL.md in the board's worlds.

    python -m research.objective.study explore --seeds 6000 --arms "gce 0.5 x1" ...
    python -m research.objective.study run [--seeds 6100 ...]

Both train what their file lacks: exploration.jsonl, runs.jsonl. A run takes 2 to 6 s of CPU. Two
commands with different seeds may run at once. research/tables.py writes the tables into README.md.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from torch import Tensor

from examples.board import WORLDS
from examples.one_file import Arm, cross_entropy
from examples.three_worlds import ECHO, GRPO, PAW
from paw_min.base.errors import user_errors
from research.locks.study import Cell, area, difference, end, keep
from research.locks.worlds import MEASURES, shared_warm_start
from research.study import read_lines

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


def train(world: str, name: str, seed: int) -> dict:
    """One run -> its line. All arms of a seed share one start model."""
    arm, loss = ARMS[name]
    instead = {"warm_start": keep(shared_warm_start)}
    if loss:
        instead["clipped_mae"] = keep(loss)
    lesson = WORLDS[world]
    curve = Cell(arm, lesson.make_world, instead, lesson.size).run(seed)
    columns = {key: [getattr(point, key) for point in curve] for key in MEASURES[:3]}
    rounded = {key: [float(f"{x:.5g}") for x in values] for key, values in columns.items()}
    return {"world": world, "arm": name, "seed": seed} | rounded


def read_runs(path: Path = RUNS) -> dict[tuple[str, str, int], dict]:
    """{(world, arm, seed): its line}."""
    return {(line["world"], line["arm"], line["seed"]): line for line in read_lines(path)}


def run(path: Path, worlds: list[str], names: list[str], seeds: list[int]) -> None:
    """What `path` lacks, seed by seed."""
    known = read_runs(path)
    with path.open("a") as file:
        for seed in seeds:
            for world in worlds:
                for name in names:
                    if (world, name, seed) not in known:
                        file.write(json.dumps(train(world, name, seed)) + "\n")
                        file.flush()


# ---- tables ----


def curves_of(world: str, known: dict) -> dict[tuple[str, int], list[dict]]:
    """{(arm, seed): evaluations}."""
    return {
        (arm, seed): [dict(zip(MEASURES[:3], point)) for point in zip(*map(line.get, MEASURES[:3]))]
        for (where, arm, seed), line in known.items() if where == world
    }


def measure_of(world: str) -> Callable:
    return end if world == "polish" else area


def differences() -> str:
    """Each candidate and PaW against the bases, over the seeds that have all four arms."""
    lines = ["| world | comparison | seeds | difference | above on |", "|---" * 5 + "|"]
    pairs = [(arm, base) for arm in CANDIDATES for base in BASES] + [tuple(BASES)]
    for world in WORLDS:
        curves = curves_of(world, read_runs())
        seeds = complete(curves)
        for a, b in pairs:
            found = "not run | "
            if len(seeds) > 1:
                found = difference(curves, a, b, seeds, measure_of(world))
            lines.append(f"| {world} | {a} - {b} | {len(seeds)} | {found} |")
    return "\n".join(lines)


def complete(curves: dict) -> list[int]:
    return [s for s in SEEDS if all((arm, s) in curves for arm in CANDIDATES + BASES)]


def means(path: Path = RUNS) -> str:
    """Each arm's mean in each world: success, p(material) and p(noise) at the end."""
    known = read_runs(path)
    lines = [f"| arm | {' | '.join(WORLDS)} |", "|---" * (1 + len(WORLDS)) + "|"]
    for name in sorted({arm for _, arm, _ in known}, key=list(ARMS).index):
        cells = []
        for world in WORLDS:
            runs = [run for (arm, _), run in curves_of(world, known).items() if arm == name]
            cells.append("not run")
            if runs:
                success = mean(map(measure_of(world), runs))
                p, noise = (mean(run[-1][key] for run in runs) for key in MEASURES[1:3])
                cells[-1] = f"{success:.1f} ({p:.2f}, {noise:.2f})"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        commands = parser.add_subparsers(dest="command", required=True)
        exploring = commands.add_parser("explore")
        exploring.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
        exploring.add_argument("--arms", nargs="+", choices=list(ARMS), required=True)
        exploring.add_argument("--seeds", nargs="+", type=int, required=True)
        running = commands.add_parser("run")
        running.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
        args = parser.parse_args()
        if args.command == "explore":
            run(EXPLORATION, args.worlds, args.arms, args.seeds)
        else:
            run(RUNS, list(WORLDS), BASES + CANDIDATES, args.seeds)
