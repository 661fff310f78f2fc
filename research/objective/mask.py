"""What is the mask of Eq. 7 for? Runs in the world of one_file.py, with and without it.

    python -m research.objective.mask run      trains what mask.jsonl lacks
    python -m research.objective.mask table    prints the tables
"""

import random
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from examples import one_file
from examples.one_file import MATERIALS, TOOLS, Arm, Evaluation, Size, World, make_world
from examples.three_worlds import NAMES, SMALL
from research import study
from research.objective.study import ARMS as CANDIDATES
from research.one_file_runs import KEY, Cell, in_world, material

FOLDER = Path(__file__).parent
RUNS = FOLDER / "mask.jsonl"
SEEDS = range(7100, 7116)
ARMS = {"grpo": Arm(scale=0.0), "placebo": Arm(placebo=True), "ce x1": Arm(loss="ce")}
for rho in (0.2, 1.0):  # 1.0 is the MAE
    ARMS |= {f"rho {rho} x{scale}": Arm(rho=rho, scale=scale) for scale in (1, 10)}
BORROWED = ("echo 0.05", "probable 0.03 x0.05, all")  # arms of study.py
PROTOCOL = {  # world -> its arms
    "fog": ["grpo", "placebo", "rho 0.2 x1", "rho 1.0 x1", "rho 0.2 x10", "rho 1.0 x10", "ce x1",
            *BORROWED],
    "small": ["grpo", "rho 0.2 x1", "rho 1.0 x1", "rho 0.2 x10", "rho 1.0 x10"],
    "one_file": ["grpo", "rho 0.2 x10", "rho 1.0 x10"],
}


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


WORLDS = {  # name -> (size of model and run, a function that makes the world of a seed)
    "small": (replace(SMALL, evaluate_every=5), partial(make_world, names=NAMES)),
    "fog": (replace(SMALL, evaluate_every=5), partial(make_fog, names=NAMES)),
    "one_file": (Size(evaluate_every=5), make_world),
}


plain_evaluate = one_file.evaluate


@torch.no_grad()
def evaluate(model, world: World, update: int) -> Predicted:
    """one_file.evaluate, but p(material) is that of the true one, behind fog as well."""
    texts, true = [], []
    for name in world.material_of:
        for tool in TOOLS:
            outcome = "opens" if world.opens(name, tool) else "shut"
            texts.append(world.prompt(name) + [tool, outcome])
            true.append(MATERIALS.index(world.material_of[name]))
    p = model(model.encode(texts))[:, -1].exp()  # (locks * tools, V), of the word after "shut"
    p = p[:, model.encode([MATERIALS])[0]]  # (locks * tools, 8)
    found = asdict(plain_evaluate(model, world, update))
    found["material"] = p[torch.arange(len(true)), true].mean().item()
    first = (p.argmax(-1) == torch.tensor(true)).float().mean().item()
    return Predicted(**found, most=p.mean(0).max().item(), first=first)


MEASURES = ("success", "material", "most", "first")
PAIRS = {  # world -> pairs of arms
    "fog": [
        ("rho 0.2 x1", "rho 1.0 x1"), ("rho 0.2 x10", "rho 1.0 x10"), ("rho 0.2 x1", "grpo"),
        ("rho 1.0 x1", "grpo"), ("rho 0.2 x10", "grpo"), ("rho 1.0 x10", "grpo"),
        ("rho 0.2 x1", "placebo"), ("rho 0.2 x1", "ce x1"), ("rho 0.2 x1", "echo 0.05"),
        ("probable 0.03 x0.05, all", "rho 0.2 x1"), ("probable 0.03 x0.05, all", "echo 0.05"),
        ("probable 0.03 x0.05, all", "grpo"),
    ],
    "small": [
        ("rho 0.2 x1", "rho 1.0 x1"), ("rho 0.2 x10", "rho 1.0 x10"), ("rho 0.2 x1", "grpo"),
        ("rho 1.0 x1", "grpo"),
    ],
    "one_file": [("rho 0.2 x10", "rho 1.0 x10"), ("rho 0.2 x10", "grpo"), ("rho 1.0 x10", "grpo")],
}  # fmt: skip


def train(job: tuple[str, str, int]) -> dict:
    """One run -> its line."""
    world, arm, seed = job
    size, make = WORLDS[world]
    instead = {"evaluate": evaluate}
    own, loss = CANDIDATES[arm] if arm in BORROWED else (ARMS[arm], None)
    if loss:
        instead["clipped_mae"] = loss
    points = Cell(own, make, instead, size).run(seed)
    measures = [{name: getattr(point, name) for name in MEASURES} for point in points]
    return {"world": world, "arm": arm, "seed": seed} | study.columns(measures)


# ---- tables ----


def first(run: dict) -> float:
    """The measure at the last evaluation, in percent."""
    return 100 * run["first"][-1]


def collapsed(run: dict) -> bool:
    """Has the model predicted one material for all locks?"""
    return max(run["most"]) >= 0.5


def runs_in(world: str) -> study.Runs:
    """An arm that lacks a seed counts as not run."""
    return study.complete(in_world(world, study.read_runs(RUNS, KEY)), SEEDS)


def means(world: str) -> str:
    """The arms of a world."""
    runs, lines = runs_in(world), []
    for arm in PROTOCOL[world]:
        levels = [study.level(runs, arm, measure) for measure in (study.area, study.end, first)]
        levels.append(study.level(runs, arm, material, digits=2))
        lines.append([arm, *levels, sum(study.values_of(runs, arm, collapsed))])
    header = [world, "mean of the curve", "at the end", "first", "p(material)", "collapses"]
    return study.markdown_table(header, lines)


def differences(world: str) -> str:
    """Paired differences of the mean of the curve."""
    runs = runs_in(world)
    lines = [[f"{a} - {b}", study.difference(runs, a, b, study.area)] for a, b in PAIRS[world]]
    return study.markdown_table([world, "difference"], lines)


def table() -> None:
    for world in PROTOCOL:
        print(f"{means(world)}\n\n{differences(world)}\n")


if __name__ == "__main__":
    jobs = [(world, arm, seed) for seed in SEEDS for world in PROTOCOL for arm in PROTOCOL[world]]
    study.command(__doc__, RUNS, jobs, train, table, KEY)
