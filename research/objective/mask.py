"""What is the mask of Eq. 7 for? The runs of PROTOCOL-mask.md in the world of one_file.py.

    python -m research.objective.mask explore ...     exploration-mask.jsonl
    python -m research.objective.mask run             what mask.jsonl lacks

Both resume. research/tables.py writes the tables into README.md.
"""

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from examples import one_file
from examples.one_file import MATERIALS, TOOLS, Arm, Evaluation, Size, World, make_world
from examples.three_worlds import NAMES, SMALL
from paw_min.base.errors import user_errors
from research.locks.study import Cell, area, difference, end, keep
from research.objective import study
from research.study import read_lines

FOLDER = Path(__file__).parent
EXPLORATION, RUNS = FOLDER / "exploration-mask.jsonl", FOLDER / "mask.jsonl"
SEEDS = range(7100, 7116)
ARMS = {"grpo": Arm(scale=0.0), "placebo": Arm(placebo=True)}
ARMS |= {f"ce x{s:g}": Arm(loss="ce", scale=s) for s in (0.05, 1.0)}
for rho in (0.2, 0.5, 1.0):  # 1.0 is the MAE
    ARMS |= {f"rho {rho} x{s:g}": Arm(rho=rho, scale=s) for s in (1.0, 10.0, 30.0, 100.0)}
BORROWED = ("echo 0.05", "probable 0.03 x0.05, all")  # of study.py
PROTOCOL = {  # world -> its arms
    "fog": ["grpo", "placebo", "rho 0.2 x1", "rho 1.0 x1", "rho 0.2 x10", "rho 1.0 x10", "ce x1",
            *BORROWED],
    "small": ["grpo", "rho 0.2 x1", "rho 1.0 x1", "rho 0.2 x10", "rho 1.0 x10"],
    "one_file": ["grpo", "rho 0.2 x10", "rho 1.0 x10"],
}


def make_skewed(seed: int, names: int) -> World:
    """make_world, but half of the names are of one material."""
    world = make_world(seed, names)
    rng = random.Random(f"skewed {seed}")
    frequent = rng.choice(MATERIALS)
    for name in rng.sample(sorted(world.material_of), names // 2):
        world.material_of[name] = frequent
    return world


@dataclass
class Fog(World):
    """Three of four observations have the word fog in place of the material."""

    seed: int = 0

    def __post_init__(self):
        self.rng = random.Random(f"fog {self.seed}")

    def observation(self, name: str, tool: str) -> list[str]:
        seen = super().observation(name, tool)
        return [seen[0], "fog"] if self.rng.random() < 0.75 else seen

    def words(self) -> list[str]:
        return [*super().words(), "fog"]


def make_fog(seed: int, names: int) -> World:
    return Fog(**vars(make_world(seed, names)), seed=seed)


@dataclass
class Predicted(Evaluation):
    # How much probability the most predicted material has, averaged over all locks and tools: 1/8
    # if the names are told apart or nothing is known, 1 if the model predicts one material always.
    most: float
    first: float  # share of locks and tools for which the true material is the most probable one


WORLDS = {  # name -> (model and run, names of locks)
    "small": (replace(SMALL, evaluate_every=5), partial(make_world, names=NAMES)),
    "skewed": (replace(SMALL, evaluate_every=5), partial(make_skewed, names=NAMES)),
    "fog": (replace(SMALL, evaluate_every=5), partial(make_fog, names=NAMES)),
    "one_file": (Size(evaluate_every=5), make_world),
}


@torch.no_grad()
def evaluate(model, world: World, update: int) -> Predicted:
    texts, true = [], []
    for name, material in world.material_of.items():
        for tool in TOOLS:
            outcome = "opens" if world.opens(name, tool) else "shut"
            texts.append(world.prompt(name) + [tool, outcome])
            true.append(MATERIALS.index(material))
    p = model(model.encode(texts))[:, -1].exp()  # (locks * tools, V), of the word after "shut"
    p = p[:, model.encode([MATERIALS])[0]]  # (locks * tools, 8)
    found = asdict(plain_evaluate(model, world, update))
    found["material"] = p[torch.arange(len(true)), true].mean().item()
    first = (p.argmax(-1) == torch.tensor(true)).float().mean().item()
    return Predicted(**found, most=p.mean(0).max().item(), first=first)


plain_evaluate = one_file.evaluate


MEASURES = ("success", "material", "most", "first")


def train(world: str, arm: str, seed: int) -> dict:
    """One run -> its line."""
    size, make = WORLDS[world]
    instead = {"evaluate": keep(evaluate)}
    own, loss = study.ARMS[arm] if arm in BORROWED else (ARMS[arm], None)
    if loss:
        instead["clipped_mae"] = keep(loss)
    curve = Cell(own, make, instead, size).run(seed)
    columns = {
        key: [float(f"{getattr(point, key):.4g}") for point in curve]
        for key in MEASURES
    }
    return {"world": world, "arm": arm, "seed": seed} | columns


def run(path: Path, worlds: dict[str, list[str]], seeds: Iterable[int]) -> None:
    """What `path` lacks, seed by seed. worlds: {world: arms}."""
    known = {(line["world"], line["arm"], line["seed"]) for line in read_lines(path)}
    with path.open("a") as file:
        for seed in seeds:
            for world, arms in worlds.items():
                for arm in arms:
                    if (world, arm, seed) not in known:
                        file.write(json.dumps(train(world, arm, seed)) + "\n")
                        file.flush()


# ---- tables ----

PAIRS = {  # world -> pairs of arms
    "fog": [
        ("rho 0.2 x1", "rho 1.0 x1"), ("rho 0.2 x10", "rho 1.0 x10"), ("rho 0.2 x1", "grpo"),
        ("rho 1.0 x1", "grpo"), ("rho 0.2 x1", "placebo"), ("rho 0.2 x1", "ce x1"),
        ("rho 0.2 x1", "echo 0.05"), ("probable 0.03 x0.05, all", "rho 0.2 x1"),
        ("probable 0.03 x0.05, all", "echo 0.05"),
    ],
    "small": [
        ("rho 0.2 x1", "rho 1.0 x1"), ("rho 0.2 x10", "rho 1.0 x10"), ("rho 0.2 x1", "grpo"),
        ("rho 1.0 x1", "grpo"),
    ],
    "one_file": [("rho 0.2 x10", "rho 1.0 x10"), ("rho 0.2 x10", "grpo"), ("rho 1.0 x10", "grpo")],
}  # fmt: skip


def curves_of(world: str) -> dict[tuple[str, int], list[dict]]:
    """{(arm, seed): evaluations}."""
    return {
        (line["arm"], line["seed"]): [dict(zip(MEASURES, p)) for p in zip(*map(line.get, MEASURES))]
        for line in read_lines(RUNS) if line["world"] == world
    }


def means() -> str:
    """Each arm over the seeds that it has."""
    columns = "mean of the curve | at the end | first | p(material) | collapses"
    lines = [f"| world | arm | seeds | {columns} |", "|---" * 8 + "|"]
    for world, arms in PROTOCOL.items():
        curves = curves_of(world)
        for arm in arms:
            runs = [curve for (name, _), curve in curves.items() if name == arm]
            if runs:
                first, p = (mean(run[-1][key] for run in runs) for key in ("first", "material"))
                collapses = sum(max(point["most"] for point in run) >= 0.5 for run in runs)
                lines.append(
                    f"| {world} | {arm} | {len(runs)} | {mean(map(area, runs)):.1f} | "
                    f"{mean(map(end, runs)):.1f} | {100 * first:.0f} % | {p:.2f} | {collapses} |"
                )
    return "\n".join(lines)


def differences() -> str:
    """Paired differences of the mean of the curve, over the seeds that both arms have."""
    lines = ["| world | comparison | seeds | difference | above on |", "|---" * 5 + "|"]
    for world, pairs in PAIRS.items():
        curves = curves_of(world)
        for a, b in pairs:
            seeds = [seed for seed in SEEDS if {(a, seed), (b, seed)} <= curves.keys()]
            found = difference(curves, a, b, seeds) if len(seeds) > 1 else "not run | "
            lines.append(f"| {world} | {a} - {b} | {len(seeds)} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        commands = parser.add_subparsers(dest="command", required=True)
        exploring = commands.add_parser("explore")
        exploring.add_argument("--worlds", nargs="+", choices=list(WORLDS), required=True)
        exploring.add_argument("--arms", nargs="+", choices=list(ARMS), required=True)
        exploring.add_argument("--seeds", nargs="+", type=int, required=True)
        commands.add_parser("run")
        args = parser.parse_args()
        if args.command == "explore":
            run(EXPLORATION, dict.fromkeys(args.worlds, args.arms), args.seeds)
        else:
            run(RUNS, PROTOCOL, SEEDS)
