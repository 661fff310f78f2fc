"""The study of PROTOCOL.md: examples/one_file.py with other losses, targets and worlds.

    python -m research.locks.study run [--workers 2]    trains what runs.jsonl does not have yet
    python -m research.locks.study table                prints the tables, draws curves.png

A run takes 14 s of CPU. An arm replaces a function of one_file or hands it another world; the file
itself has no setting for any of this.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch
from torch import Tensor

from examples import one_file
from examples.one_file import Arm, Evaluation, Size, World, make_arms, make_world
from paw_min.base.errors import user_errors
from research.panels import draw_success
from research.stats import t_interval
from research.study import read_lines

FOLDER = Path(__file__).parent
SEEDS = range(2, 18)
RUNS = FOLDER / "runs.jsonl"
PAW = Arm()


# ---- other functions of one_file ----

top_alpha = one_file.top_alpha
learn = one_file.learn


def lowest_alpha(entropy: Tensor, alpha: float) -> Tensor:
    """Eq. 4 upside down: the transitions with the lowest action entropy."""
    return top_alpha(-entropy, alpha)


def content_free(observation: Tensor) -> Tensor:
    """Each target token is drawn from all observation tokens of the update: (N, O) -> (N, O)."""
    tokens = observation.flatten()
    return tokens[torch.randint(len(tokens), observation.shape)]


def no_surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> Tensor:
    return 0 * logp.sum()


class Alternating:
    """TAPO's schedule: every update trains the policy; the world model follows every fourth one."""

    def __init__(self, every: int = 4):
        self.every = every
        self.updates = 0

    def __call__(self, model, optimizer, rollout, advantage, weight, arm) -> None:
        self.updates += 1
        learn(model, optimizer, rollout, advantage, 0 * weight, arm)
        if self.updates % self.every == 0:
            learn(model, optimizer, rollout, 0 * advantage, weight, arm)


# ---- other worlds ----


class Outcome(World):
    """The observation says whether the lock opens, and nothing of its material."""

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool)[:1]


class Shown(World):
    """The prompt has the material."""

    def prompt(self, name: str) -> list[str]:
        return ["open", name, self.material_of[name], "with"]


def as_class(kind: type[World], seed: int) -> World:
    world = make_world(seed)
    return kind(world.material_of, world.tool_of, world.locks)


def own_materials(seed: int) -> World:
    """Every name has a material of its own; the tools of the names are those of the default."""
    world = make_world(seed)
    material_of = {name: f"material-of-{name}" for name in world.material_of}
    tool_of = {material_of[name]: world.right_tool(name) for name in material_of}
    return World(material_of, tool_of, world.locks)


# ---- the arms ----


@dataclass(frozen=True)
class Cell:
    """One arm in one world."""

    arm: Arm
    make_world: Callable[[int], World] = make_world
    # Functions of one_file by name -> a function that makes the one to use instead.
    instead: dict[str, Callable] = field(default_factory=dict)
    size: Size = Size()

    def run(self, seed: int) -> list[Evaluation]:
        torch.set_num_threads(1)
        with ExitStack() as replaced:
            for function, make_other in self.instead.items():
                replaced.enter_context(patch.object(one_file, function, make_other()))
            return one_file.run(seed, self.arm, self.make_world(seed), self.size)


def keep(function):
    """For `instead`: the same function in each run."""
    return lambda: function


PARTS = {
    "content-free": Cell(replace(PAW, placebo=True), instead={"shuffled": keep(content_free)}),
    "alpha 1": Cell(replace(PAW, alpha=1.0)),
    "inverse": Cell(PAW, instead={"top_alpha": keep(lowest_alpha)}),
    "mae": Cell(replace(PAW, rho=1.0)),
    "ce": Cell(replace(PAW, loss="ce")),
    "ce 0.05": Cell(Arm(scale=0.05, alpha=1.0, lambda_g="constant", loss="ce")),
    "constant": Cell(replace(PAW, lambda_g="constant")),
    "scale 0.1": Cell(replace(PAW, scale=0.1)),
    "scale 10": Cell(replace(PAW, scale=10.0)),
    "tapo": Cell(
        Arm(alpha=1.0, lambda_g="constant", loss="ce"), instead={"learn": Alternating}
    ),
    "world model alone": Cell(PAW, instead={"clipped_surrogate": keep(no_surrogate)}),
}
WORLDS = {
    "outcome": partial(as_class, Outcome), "own": own_materials, "shown": partial(as_class, Shown),
    "32 names": partial(make_world, names=32), "64 names": partial(make_world, names=64),
    "256 names": partial(make_world, names=256),
}
CELLS = {name: Cell(arm) for name, arm in make_arms(PAW).items()} | PARTS
for world_name, make in WORLDS.items():
    for arm_name, arm in make_arms(PAW).items():
        if arm_name != "placebo" or "names" not in world_name:
            CELLS[f"{arm_name}, {world_name}"] = Cell(arm, make)


# ---- runs ----


def train(job: tuple[str, int]) -> dict:
    """One run -> its line in runs.jsonl."""
    name, seed = job
    curve = CELLS[name].run(seed)
    return {"cell": name, "seed": seed, "curve": [asdict(point) for point in curve]}


def read_runs() -> dict[tuple[str, int], list[dict]]:
    """{(cell, seed): curve}."""
    return {(line["cell"], line["seed"]): line["curve"] for line in read_lines(RUNS)}


def run(workers: int) -> None:
    from tqdm import tqdm

    known = read_runs()
    jobs = [(name, seed) for name in CELLS for seed in SEEDS if (name, seed) not in known]
    with multiprocessing.get_context("spawn").Pool(workers) as pool, RUNS.open("a") as file:
        for line in tqdm(pool.imap(train, jobs), total=len(jobs), unit="run"):
            file.write(json.dumps(line) + "\n")
            file.flush()


# ---- tables ----


def area(curve: list[dict]) -> float:
    """Mean success in percent, over the evaluations after the start."""
    return 100 * mean(point["success"] for point in curve[1:])


def end(curve: list[dict]) -> float:
    return 100 * curve[-1]["success"]


def difference(
    known: dict, a: str, b: str, seeds: Iterable[int] = SEEDS, measure: Callable = area
) -> str:
    """a - b over the seeds: the mean, its 95 % t interval, and on how many seeds a is above."""
    values = [measure(known[a, seed]) - measure(known[b, seed]) for seed in seeds]
    low, high = t_interval(values)
    above = sum(value > 0 for value in values)
    return f"{mean(values):+.1f} [{low:+.1f}, {high:+.1f}] | {above} of {len(values)}"


def levels(known: dict, name: str, seeds: Iterable[int] = SEEDS) -> str:
    """The columns of one cell: mean of the curve, at the end, p(material)."""
    curves = [known[name, seed] for seed in seeds]
    during = mean(area(curve) for curve in curves)
    at_end = mean(end(curve) for curve in curves)
    material = mean(curve[-1]["material"] for curve in curves)
    return f"{during:.1f} | {at_end:.1f} | {material:.2f}"


def tables(known: dict) -> list[str]:
    """The arms, and the worlds; with "not run" for an arm that does not have all seeds."""
    complete = {name for name in CELLS if all((name, seed) in known for seed in SEEDS)}

    def compared(a: str, b: str) -> str:
        if a == b:
            return " | "
        return difference(known, a, b) if {a, b} <= complete else "not run | "

    columns = "arm | mean of the curve | at the end | p(material) | minus GRPO | above on"
    arms = [f"| {columns} | minus PaW | above on |", "|---" * 8 + "|"]
    for name in [*make_arms(PAW), *PARTS]:
        shown = levels(known, name) if name in complete else "not run | | "
        arms.append(f"| {name} | {shown} | {compared(name, 'grpo')} | {compared(name, 'paw')} |")
    worlds = ["| world | GRPO | PaW | PaW - GRPO | above on | PaW - placebo | above on |",
              "|---" * 7 + "|"]
    for world in ["", *(f", {name}" for name in WORLDS)]:
        values = []
        for arm in (f"grpo{world}", f"paw{world}"):
            values.append("not run")
            if arm in complete:
                values[-1] = f"{mean(area(known[arm, seed]) for seed in SEEDS):.1f}"
        gain = compared(f"paw{world}", f"grpo{world}")
        over = compared(f"paw{world}", f"placebo{world}") if f"placebo{world}" in CELLS else "- | "
        shown = world.removeprefix(", ") or "128 names, the default"
        worlds.append(f"| {shown} | {' | '.join(values)} | {gain} | {over} |")
    return ["\n".join(arms), "\n".join(worlds)]


def draw(known: dict) -> None:
    """curves.png: exact success of the three arms at each evaluation."""
    curves = {}
    for name in ("paw", "grpo", "placebo"):
        of_arm = [known[name, seed] for seed in SEEDS]
        curves[name] = [[100 * point["success"] for point in points] for points in of_arm]
    updates = [point["update"] for point in of_arm[0]]
    draw_success(FOLDER / "curves.png", updates, curves)


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("command", choices=["run", "table"])
        parser.add_argument("--workers", type=int, default=2, help="processes, one core each (2)")
        args = parser.parse_args()
        if args.command == "run":
            run(args.workers)
        else:
            print("\n\n".join(tables(read_runs())))
            draw(read_runs())
