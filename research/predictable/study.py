"""Which observation loss is safe to switch on? The small worlds of README.md.

    python -m research.predictable.study run --seeds 9100 9101    trains what runs.jsonl lacks
    python -m research.predictable.study table                    prints its tables

A run takes 2 to 6 s of CPU, in the worlds of one_file.py's size 14 s. Two processes with different
seeds may run at the same time.
"""

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from examples import one_file
from examples.one_file import (
    GRADIENT_CLIP,
    MINI_BATCHES,
    Arm,
    Rollout,
    Size,
    World,
    clipped_surrogate,
    cross_entropy,
    logp_of,
)
from examples.three_worlds import DIGITS, ECHO, GRPO, PAW, SMALL, Lesson, Serials
from paw_min.base.errors import user_errors
from research import study
from research.board.__main__ import WORLDS as BOARD
from research.board.__main__ import Plain
from research.objective.mask import Fog
from research.objective.study import probable
from research.one_file_runs import KEY, Cell, measured, shared_warm_start
from research.predictable import unseen

FOLDER = Path(__file__).parent
RUNS = FOLDER / "runs.jsonl"
SEEDS = range(9100, 9116)
MOST = 32  # outcomes between which a prediction may hesitate, e^H


# ---- the rule of two entropies ----


def few_outcomes(logp: Tensor) -> Tensor:
    """Does the prediction hesitate between at most MOST words? Log-probs (..., V) -> bool (...)."""
    entropy = -(logp.exp() * logp).sum(-1)  # nats
    return entropy <= math.log(MOST)


class Undecided:
    """In place of Eq. 4: True for actions with a quarter of the start's mean entropy, or more.

    The start is the first update: its mean is over all of its transitions.
    """

    def __init__(self):
        self.least = None  # nats

    def __call__(self, entropy: Tensor, alpha: float) -> Tensor:
        if self.least is None:
            self.least = entropy.mean() / 4
        return entropy >= self.least


def learn(
    model: one_file.Model, optimizer, rollout: Rollout, advantage: Tensor, weight: Tensor, arm: Arm
) -> None:
    """one_file.learn with another loss: cross entropy of the words with few outcomes.

    A word that is left out still counts in the mean over the observation, as in Eq. 8.
    """
    tokens = torch.cat([rollout.prompt, rollout.action[:, None], rollout.observation], 1)  # (N, T)
    n_prompt = rollout.prompt.shape[1]
    for index in torch.randperm(len(tokens)).chunk(MINI_BATCHES):  # (B,)
        predicted = model(tokens[index, :-1])  # (B, T - 1, V)
        logp = logp_of(predicted, tokens[index, 1:])  # (B, T - 1)
        rl = clipped_surrogate(logp[:, n_prompt - 1], rollout.old_logp[index], advantage[index])
        trained = few_outcomes(predicted[:, n_prompt:].detach())  # (B, O)
        wm = cross_entropy(logp[:, n_prompt:] * trained)  # (B,)
        wm = (weight[index] * wm).sum() * len(tokens) / len(index)
        loss = rl + arm.scale * wm
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()


# ---- the arms ----


@dataclass(frozen=True)
class Loss:
    """An arm, and the functions of one_file that it replaces."""

    arm: Arm
    instead: dict[str, Callable]


def floor(least: float) -> Loss:
    """ECHO without the words that have p < least; the loss replaces clipped_mae."""
    return Loss(replace(ECHO, loss="cmae"), {"clipped_mae": partial(probable, floor=least)})


LOSSES = {
    "grpo": Loss(GRPO, {}),
    "paw": Loss(PAW, {}),
    "echo": Loss(ECHO, {}),
    "probable 0.03": floor(0.03),
    "probable 0.01": floor(0.01),
    "prediction": Loss(ECHO, {"learn": learn}),
    "predictable": Loss(ECHO, {"learn": learn, "top_alpha": Undecided()}),
}
PLACEBO = " placebo"  # at the end of an arm's name: with the observations of other transitions
PLACEBOS = {
    name + PLACEBO: replace(LOSSES[name], arm=replace(LOSSES[name].arm, placebo=True))
    for name in ("echo", "probable 0.01", "prediction", "predictable")
}
ARMS = LOSSES | PLACEBOS


# ---- the worlds ----


@dataclass
class LongSerials(Serials):
    """Serial numbers of 16 digits."""

    def __post_init__(self):
        rng = random.Random(f"long serials {self.seed}")
        self.serial = {name: rng.choices(DIGITS, k=16) for name in self.material_of}

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return World.shown_observation(self, names, rng)[:2] + rng.choices(DIGITS, k=16)


class LongModel(one_file.Model):
    """With positions for rows of LongSerials."""

    def __init__(self, words: list[str], size: Size):
        super().__init__(words, size)
        self.position = nn.Embedding(32, size.width)
        nn.init.normal_(self.position.weight, std=0.02)


@dataclass
class Outcome(World):
    """An observation says whether the lock opens, and nothing else."""

    seed: int = 0

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool)[:1]


@dataclass
class Material(World):
    """An observation says the material, and not whether the lock opens."""

    seed: int = 0

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool)[1:]


@dataclass(frozen=True)
class Setting:
    """A world with its model, run and arms."""

    make_world: Callable[[int], World]
    size: Size = SMALL
    arms: tuple[str, ...] = tuple(ARMS)


SETTINGS = {
    name: Setting(BOARD[name].make_world, BOARD[name].size)
    for name in ("plain", "serials", "corridors", "polish")
}
SETTINGS |= {
    "fog": Setting(Lesson(Fog, {}).make_world),
    "long serials": Setting(Lesson(LongSerials, {}).make_world),
    "outcome": Setting(Lesson(Outcome, {}).make_world),
    "unseen": Setting(unseen.make_world, unseen.SIZE),
}
WORLDS = tuple(SETTINGS)
# What helps: the fact, or the label of success? In the setting of one_file.py.
SAYS = {"says both": Plain, "says the outcome": Outcome, "says the material": Material}
SETTINGS |= {
    name: Setting(Lesson(kind, {}, names=128).make_world, Size(),
                  ("grpo", "paw", "echo", "echo" + PLACEBO))
    for name, kind in SAYS.items()
}


# ---- runs ----


def train(job: tuple[str, str, int]) -> dict:
    """One run -> its line. All arms of a seed share one start model."""
    world, name, seed = job
    setting, loss = SETTINGS[world], ARMS[name]
    instead = {"warm_start": shared_warm_start, **loss.instead}
    if world == "long serials":
        instead["Model"] = LongModel
    points = Cell(loss.arm, setting.make_world, instead, setting.size).run(seed)
    # An observation of one word has no material at its second place, so its probability is NaN.
    curves = study.columns([*map(measured, points)])
    curves = {key: values for key, values in curves.items() if not math.isnan(values[0])}
    return {"world": world, "arm": name, "seed": seed} | curves


def jobs(seeds: list[int]) -> list[tuple[str, str, int]]:
    """Seed by seed, so that the file has all arms of its seeds."""
    return [
        (world, arm, seed)
        for seed in seeds for world, setting in SETTINGS.items() for arm in setting.arms
    ]


def table() -> None:
    print(len(study.read_runs(RUNS, KEY)), "runs")


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("command", choices=["run", "table"])
        parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="of `run`")
        args = parser.parse_args()
        if args.command == "run":
            study.train_missing(RUNS, jobs(args.seeds), train, key=KEY)
        else:
            table()
