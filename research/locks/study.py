"""PaW and its parts in the world of locks: examples/one_file.py changed in one way at a time.

    python -m research.locks.study run      trains what runs.jsonl does not have yet
    python -m research.locks.study table    prints the tables, draws curves.png

A run takes 14 s of CPU.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from examples import one_file
from examples.one_file import Arm, World, make_arms, make_world
from research import study
from research.one_file_runs import Cell, material
from research.panels import draw_success

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


PARTS = {
    "content-free": Cell(replace(PAW, placebo=True), instead={"shuffled": content_free}),
    "alpha 1": Cell(replace(PAW, alpha=1.0)),
    "inverse": Cell(PAW, instead={"top_alpha": lowest_alpha}),
    "mae": Cell(replace(PAW, rho=1.0)),
    "ce": Cell(replace(PAW, loss="ce")),
    "ce 0.05": Cell(Arm(scale=0.05, alpha=1.0, lambda_g="constant", loss="ce")),
    "constant": Cell(replace(PAW, lambda_g="constant")),
    "scale 0.1": Cell(replace(PAW, scale=0.1)),
    "scale 10": Cell(replace(PAW, scale=10.0)),
    "tapo": Cell(
        Arm(alpha=1.0, lambda_g="constant", loss="ce"), instead={"learn": Alternating()}
    ),
    "world model alone": Cell(PAW, instead={"clipped_surrogate": no_surrogate}),
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
    arm, seed = job
    curve = [asdict(point) for point in CELLS[arm].run(seed)]
    return {"arm": arm, "seed": seed} | study.columns(curve)


# ---- tables ----


def levels(runs: study.Runs, arm: str) -> list[str]:
    """Cells of an arm: mean of the curve, at the end, p(material)."""
    successes = [study.level(runs, arm, measure) for measure in (study.area, study.end)]
    return [*successes, study.level(runs, arm, material, digits=2)]


def compared(runs: study.Runs, a: str, b: str) -> list[str]:
    """Cells of a - b: the difference, and on how many seeds a is above."""
    return [study.difference(runs, a, b, study.area), study.above(runs, a, b, study.area)]


def tables(runs: study.Runs) -> list[str]:
    """The arms, and the worlds; an arm that lacks a seed counts as not run."""
    runs = study.complete(runs, SEEDS)
    arms = []
    for arm in [*make_arms(PAW), *PARTS]:
        minus_grpo, minus_paw = (compared(runs, arm, base) for base in ("grpo", "paw"))
        arms.append([arm, *levels(runs, arm), *minus_grpo, *minus_paw])
    worlds = []
    for world in ["", *WORLDS]:
        grpo, paw, placebo = (f"{arm}, {world}" if world else arm for arm in make_arms(PAW))
        line = [world or "128 names, the default"]
        line += [study.level(runs, arm, study.area) for arm in (grpo, paw)]
        line.append(study.difference(runs, paw, grpo, study.area))
        line.append(study.difference(runs, paw, placebo, study.area) if placebo in CELLS else "-")
        worlds.append(line)
    first = ["arm", "mean of the curve", "at the end", "p(material)"]
    first += ["minus GRPO", "above on", "minus PaW", "above on"]
    second = ["world", "GRPO", "PaW", "PaW - GRPO", "PaW - placebo"]
    return [study.markdown_table(first, arms), study.markdown_table(second, worlds)]


def draw(runs: study.Runs) -> None:
    """curves.png: exact success of the three arms at each evaluation."""
    updates = runs["paw", SEEDS[0]]["update"]
    draw_success(FOLDER / "curves.png", updates, study.curves(runs, ["paw", "grpo", "placebo"]))


def table() -> None:
    """Print the tables, and draw the curves."""
    runs = study.read_runs(RUNS)
    print("\n\n".join(tables(runs)))
    draw(runs)


if __name__ == "__main__":
    jobs = [(arm, seed) for arm in CELLS for seed in SEEDS]
    study.command(__doc__, RUNS, jobs, train, table)
