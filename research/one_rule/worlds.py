"""Worlds made against the observation losses: in each, one of them should fail.

    python -m research.one_rule.worlds run --worlds catalog --seeds 9500 9501

trains what worlds.jsonl lacks, a line per run. A run takes about 6 s of CPU. Each world is that of
one_file.py at the size of three_worlds.py, with one change in what is observed. Read these first.
research/README.md has a table of all worlds and losses; README.md here says which of the worlds
had a protocol, and which seeds they ran on.
"""

import argparse
import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from examples import one_file
from examples.one_file import Arm, Size, World, cross_entropy
from examples.three_worlds import ECHO, GRPO, PAW, SMALL, Lesson
from paw_min.base.errors import user_errors
from research import study

RUNS = Path(__file__).parent / "worlds.jsonl"


# ---- the losses ----


def floor(logp: Tensor, rho: float, least: float) -> Tensor:
    """Cross entropy of the words with p >= least: (B, O) -> (B,). It replaces clipped_mae."""
    return cross_entropy(logp.masked_fill(logp < math.log(least), 0.0))


def probable(least: float) -> tuple[Arm, dict[str, Callable]]:
    """ECHO without the words below a floor."""
    return replace(ECHO, loss="cmae"), {"clipped_mae": partial(floor, least=least)}


# Name -> an arm, and the functions of one_file that it replaces, as an entry of the board does.
ARMS = {
    "grpo": (GRPO, {}),
    "paw": (PAW, {}),
    "echo": (ECHO, {}),
    "probable 0.01": probable(0.01),
    "probable 0.03": probable(0.03),
    "probable 0.09": probable(0.09),
    "echo placebo": (replace(ECHO, placebo=True), {}),
}


# ---- the worlds ----


@dataclass
class Inspect(World):
    """Half of the steps are a forced look, which alone shows the material.

        look lock17 with | eyes | seen glass
        open lock17 with | saw  | shut .

    A loss that trains only what undecided actions led to does not see the material.
    """

    seed: int = 0

    def steps(self) -> list[list[str]]:
        return super().steps() + [[f"look {name}" for name in self.material_of]] * 2

    def prompt(self, name: str) -> list[str]:
        if name.startswith("look "):
            return ["look", name.removeprefix("look "), "with"]
        return super().prompt(name)

    def right_tool(self, name: str) -> str:
        return "eyes" if name.startswith("look ") else super().right_tool(name)

    def shown_tool(self, name: str, rng: random.Random) -> str:
        return "eyes" if name.startswith("look ") else super().shown_tool(name, rng)

    def observation(self, name: str, tool: str) -> list[str]:
        if name.startswith("look "):
            return ["seen", self.material_of[name.removeprefix("look ")]]
        return [super().observation(name, tool)[0], "."]

    def words(self) -> list[str]:
        return [*super().words(), "look", "eyes", "seen", "."]


@dataclass
class Sensor(World):
    """A material shows as one of six readings, drawn anew each time: 48 readings in all.

    A loss that trains only words of few possible outcomes loses some of them.
    """

    seed: int = 0
    label = "sensor"
    readings = 6  # of each material

    def __post_init__(self):
        self.rng = random.Random(f"{self.label} {self.seed}")

    def observation(self, name: str, tool: str) -> list[str]:
        first = self.readings * list(self.tool_of).index(self.material_of[name])
        outcome = super().observation(name, tool)[0]
        return [outcome, f"reading{first + self.rng.randrange(self.readings)}"]

    def words(self) -> list[str]:
        count = self.readings * len(self.tool_of)
        return [*super().words(), *[f"reading{i}" for i in range(count)]]


@dataclass
class Sensor256(Sensor):
    """The same with 32 readings of each material: 256 in all, each with p = 1/256 at the start."""

    label = "sensor256"
    readings = 32


@dataclass
class Digits(World):
    """Behind the material stands a serial number of 8 digits of 10, fixed for each name.

    This is how a tokenizer writes it that splits numbers into digits: p = 1/10 at the start.
    """

    seed: int = 0

    def __post_init__(self):
        rng = random.Random(f"digits {self.seed}")
        self.serial = {name: self.number(rng) for name in self.material_of}

    def number(self, rng: random.Random) -> list[str]:
        return [f"d{rng.randrange(10)}" for _ in range(8)]

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool) + self.serial[name]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return super().shown_observation(names, rng)[:2] + self.number(rng)

    def words(self) -> list[str]:
        return [*super().words(), *[f"d{i}" for i in range(10)]]


@dataclass
class Long(World):
    """Nine words that are always the same stand before the outcome and the material."""

    seed: int = 0

    def observation(self, name: str, tool: str) -> list[str]:
        return [*self.page(), *super().observation(name, tool)]

    def page(self) -> list[str]:
        return [f"page{i}" for i in range(9)]

    def words(self) -> list[str]:
        return [*super().words(), *self.page()]


@dataclass
class Likes(World):
    """In place of the material stands another lock of the same one, drawn anew, of 128 locks.

    So a fact has p = 1/128 at the start, below the floor of 0.01.
    """

    seed: int = 0

    def __post_init__(self):
        self.rng = random.Random(f"likes {self.seed}")

    def observation(self, name: str, tool: str) -> list[str]:
        material = self.material_of[name]
        alike = [other for other, its in self.material_of.items() if its == material]
        alike.remove(name)
        return [super().observation(name, tool)[0], self.rng.choice(alike)]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return [rng.choice(["shut"] * 7 + ["opens"]), rng.choice(names)]


@dataclass
class Catalog(World):
    """Behind the material stands a description, fixed for each name: 8 ordinary words of 64.

    They recur with other names, but which ones stand here has to be memorized, and is of no use.
    p = 1/64 at the start, above the floor of 0.01.
    """

    seed: int = 0
    vocabulary = [f"word{i}" for i in range(64)]

    def __post_init__(self):
        rng = random.Random(f"catalog {self.seed}")
        self.description = {name: rng.choices(self.vocabulary, k=8) for name in self.material_of}

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool) + self.description[name]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return super().shown_observation(names, rng)[:2] + rng.choices(self.vocabulary, k=8)

    def words(self) -> list[str]:
        return [*super().words(), *self.vocabulary]


@dataclass
class Seldom(World):
    """One observation in 16 shows the material, each has a serial number of two words of 256.

        open lock17 with | saw | shut nothing id9 id201

    It is like a log: each line has a request's id, and few have a cause. A material has p = 1/128
    at the start, below the floor of 0.01.
    """

    seed: int = 0
    ids = [f"id{i}" for i in range(256)]

    def __post_init__(self):
        self.rng = random.Random(f"seldom {self.seed}")
        self.serial = {name: self.rng.choices(self.ids, k=2) for name in self.material_of}

    def observation(self, name: str, tool: str) -> list[str]:
        outcome, material = super().observation(name, tool)
        shown = material if self.rng.random() < 1 / 16 else "nothing"
        return [outcome, shown, *self.serial[name]]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return super().shown_observation(names, rng)[:2] + rng.choices(self.ids, k=2)

    def words(self) -> list[str]:
        return [*super().words(), "nothing", *self.ids]


@dataclass
class Crowd(Catalog):
    """Catalog with 16 words: p = 1/16 at the start, just below a material's 1/8."""

    vocabulary = [f"word{i}" for i in range(16)]


@dataclass
class Metered(Sensor):
    """Sensor, and behind the reading a serial number of 8 words of 256, fixed for each name.

    A reading has p = 1/48 at the start, a word of the serial number 1/256.
    """

    label = "metered"
    ids = [f"id{i}" for i in range(256)]

    def __post_init__(self):
        super().__post_init__()
        self.serial = {name: self.rng.choices(self.ids, k=8) for name in self.material_of}

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool) + self.serial[name]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return super().shown_observation(names, rng)[:2] + rng.choices(self.ids, k=8)

    def words(self) -> list[str]:
        return [*super().words(), *self.ids]


@dataclass
class Log(World):
    """One observation in 4 shows the material; behind it stand 8 words of 256, new each time.

    No word is fixed for a name but the material, which has p = 1/32 at the start.
    """

    seed: int = 0
    shows = 1 / 4  # share of the observations that show the material
    ids = [f"id{i}" for i in range(256)]

    def __post_init__(self):
        self.rng = random.Random(f"log {self.seed}")

    def observation(self, name: str, tool: str) -> list[str]:
        outcome, material = super().observation(name, tool)
        shown = material if self.rng.random() < self.shows else "nothing"
        return [outcome, shown, *self.rng.choices(self.ids, k=8)]

    def words(self) -> list[str]:
        return [*super().words(), "nothing", *self.ids]


@dataclass
class Fresh(Log):
    """Log where each observation shows the material: fresh of research/LOG.md, with floors."""

    shows = 1.0


WORLDS = {
    "inspect": Lesson(Inspect, {}),
    "sensor": Lesson(Sensor, {}),
    "sensor256": Lesson(Sensor256, {}),
    "digits": Lesson(Digits, {}),
    "long": Lesson(Long, {}),
    "likes": Lesson(Likes, {}, names=128),
    "catalog": Lesson(Catalog, {}),
    "seldom": Lesson(Seldom, {}),
    "crowd": Lesson(Crowd, {}),
    "metered": Lesson(Metered, {}),
    "log": Lesson(Log, {}),
    "fresh": Lesson(Fresh, {}),
}


# ---- runs ----

warm_start = one_file.warm_start
STARTS = {}  # of the last world and seed: weights, state of the tasks' generator, the world's facts


def shared_warm_start(model, world: World, rng: random.Random, size: Size) -> None:
    """one_file.warm_start, once for all arms of a seed. It draws from rng and the world alone."""
    key = type(world), world.seed
    if key not in STARTS:
        STARTS.clear()
        warm_start(model, world, rng, size)
        STARTS[key] = copy.deepcopy((model.state_dict(), rng.getstate(), vars(world)))
    weights, state, facts = copy.deepcopy(STARTS[key])
    model.load_state_dict(weights)
    rng.setstate(state)
    vars(world).update(facts)


def train(world: str, name: str, seed: int) -> dict:
    """One run -> its line. All arms of a seed have the same world, warm start and tasks."""
    arm, functions = ARMS[name]
    with patch.dict(vars(one_file), functions | {"warm_start": shared_warm_start}):
        curve = one_file.run(seed, arm, WORLDS[world].make_world(seed), SMALL)
    measures = {
        measure: [float(f"{getattr(point, measure):.5g}") for point in curve]
        for measure in ("success", "material", "noise")
    }
    return {"world": world, "arm": name, "seed": seed} | measures


def main(worlds: list[str], seeds: list[int]) -> None:
    """Seed by seed, so that the file has all arms of its seeds."""
    torch.set_num_threads(1)
    done = {(run["world"], run["arm"], run["seed"]) for run in study.read_lines(RUNS)}
    for seed in seeds:
        for world in worlds:
            for arm in ARMS:
                if (world, arm, seed) not in done:
                    line = json.dumps(train(world, arm, seed))
                    with RUNS.open("a", encoding="utf-8") as file:
                        print(line, file=file)


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("command", choices=["run"])
        parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
        parser.add_argument("--seeds", nargs="+", type=int, required=True)
        args = parser.parse_args()
        main(args.worlds, args.seeds)
