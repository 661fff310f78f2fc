"""What the studies of examples/one_file.py share: an arm in a world, its runs and their measures.

A study replaces functions of one_file, or hands it another world. The file itself has no setting
for any of this.
"""

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from examples import one_file
from examples.one_file import Arm, Evaluation, Size, World, make_world
from research import study

KEY = ("world", "arm", "seed")  # names a run of a study with several worlds


# ---- runs ----


@dataclass(frozen=True)
class Cell:
    """One arm in one world."""

    arm: Arm
    make_world: Callable[[int], World] = make_world
    # Functions of one_file by name -> the one to use instead. A run gets a copy of its own, because
    # TAPO's counts its updates (a copy of a function is the function).
    instead: dict[str, Callable] = field(default_factory=dict)
    size: Size = Size()

    def run(self, seed: int) -> list[Evaluation]:
        torch.set_num_threads(1)
        with ExitStack() as replaced:
            for function, other in self.instead.items():
                replaced.enter_context(patch.object(one_file, function, copy.copy(other)))
            return one_file.run(seed, self.arm, self.make_world(seed), self.size)


warm_start = one_file.warm_start
STARTS = {}  # (world, seed, size) -> weights, state of the tasks' generator, the world


def shared_warm_start(model, world: World, rng: random.Random, size: Size) -> None:
    """one_file.warm_start, once for all arms of a seed."""
    key = (type(world), world.seed, size)
    if key not in STARTS:
        warm_start(model, world, rng, size)
        STARTS[key] = copy.deepcopy((model.state_dict(), rng.getstate(), vars(world)))
    weights, state, facts = copy.deepcopy(STARTS[key])
    model.load_state_dict(weights)
    rng.setstate(state)
    vars(world).update(facts)


# ---- measures ----


def measured(point: Evaluation) -> dict[str, float]:
    """What a line has of an evaluation."""
    return {name: getattr(point, name) for name in ("success", "material", "noise")}


def in_world(world: str, runs: dict[tuple[str, str, int], dict]) -> study.Runs:
    """The runs of one world."""
    return {(arm, seed): run for (where, arm, seed), run in runs.items() if where == world}


def material(run: dict) -> float:
    """p(material) at the end."""
    return run["material"][-1]


def noise(run: dict) -> float:
    """p(noise) at the end."""
    return run["noise"][-1]
