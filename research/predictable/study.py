"""Which observation loss is safe to switch on? The small worlds of README.md.

    python -m research.predictable.study run --seeds 9100 9101    trains what runs.jsonl lacks
    python -m research.predictable.study table                    prints its tables

A run takes 2 to 6 s of CPU, in the worlds of one_file.py's size 14 s. Two processes with different
seeds may run at the same time.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
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
from research.locks.worlds import measure_in
from research.objective.mask import Fog
from research.objective.study import probable
from research.one_file_runs import KEY, Cell, in_world, measured, shared_warm_start
from research.predictable import unseen
from research.stats import signed, t_quantile

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


# ---- tables ----

CANDIDATES = ("predictable", "prediction", "probable 0.01")
BASES = ("paw", "echo", "probable 0.03")
MADE_IN = tuple(world for world in WORLDS if world != "unseen")
DRAWS = 10_000


def common_seeds(runs: dict[tuple[str, str, int], dict], worlds: Iterable[str]) -> list[int]:
    """The seeds that all arms of these worlds have."""
    cells = [(world, arm) for world in worlds for arm in SETTINGS[world].arms]
    return [seed for seed in SEEDS if all((*cell, seed) in runs for cell in cells)]


def success(runs: dict[tuple[str, str, int], dict], seeds: list[int]) -> np.ndarray:
    """The measure of each run, in percent: (worlds, arms, seeds)."""
    return np.array([
        [[measure_in(world)(runs[world, arm, seed]) for seed in seeds] for arm in ARMS]
        for world in WORLDS
    ])


def shortfalls(success: np.ndarray) -> np.ndarray:
    """How far each arm's mean is below that of the best loss: (..., seeds) -> (worlds, arms)."""
    means = success.mean(-1)  # (worlds, arms)
    best = means[:, : len(LOSSES)].max(1, keepdims=True)  # placebos are no losses to choose
    return best - means


def regrets(success: np.ndarray) -> np.ndarray:
    """The largest shortfall of each arm over the worlds: (worlds, arms, seeds) -> (arms,)."""
    return shortfalls(success).max(0)


def drawn_regrets(success: np.ndarray) -> np.ndarray:
    """Regrets of seeds drawn with replacement, the same in all worlds: (DRAWS, arms)."""
    rng = np.random.default_rng(0)
    n = success.shape[-1]
    return np.array([regrets(success[..., rng.integers(n, size=n)]) for _ in range(DRAWS)])


def with_range(value: float, drawn: np.ndarray) -> str:
    """A number and its 95 % interval by bootstrap."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def regret_table(runs: dict[tuple[str, str, int], dict]) -> str:
    """Each arm's mean in each world, and its regret over all worlds and without the unseen one."""
    found = success(runs, common_seeds(runs, WORLDS))
    seen = found[[WORLDS.index(world) for world in MADE_IN]]
    columns = [(regrets(part), drawn_regrets(part)) for part in (found, seen)]
    worst = shortfalls(found).argmax(0)  # (arms,)
    lines = []
    for a, arm in enumerate(ARMS):
        cells = [f"{mean:.1f}" for mean in found[:, a].mean(-1)]
        cells += [with_range(regret[a], drawn[:, a]) for regret, drawn in columns]
        lines.append([arm, *cells, WORLDS[worst[a]]])
    header = ["loss", *WORLDS, "regret", "without unseen", "worst in"]
    return study.markdown_table(header, lines)


def regret_differences(runs: dict[tuple[str, str, int], dict]) -> str:
    """Regret of each candidate minus that of each base, with and without the unseen world."""
    found = success(runs, common_seeds(runs, WORLDS))
    names = list(ARMS)
    lines = []
    for a in CANDIDATES:
        for b in BASES:
            line = [f"{a} - {b}"]
            for worlds in (WORLDS, MADE_IN):
                part = found[[WORLDS.index(world) for world in worlds]]
                value, drawn = regrets(part), drawn_regrets(part)
                i, j = names.index(a), names.index(b)
                interval = np.percentile(drawn[:, i] - drawn[:, j], [2.5, 97.5])
                line.append(signed(value[i] - value[j], tuple(interval)))
            lines.append(line)
    return study.markdown_table(["regret", "all worlds", "without unseen"], lines)


def detectable(gains: list[float]) -> float:
    """The difference that a paired t test finds with a probability of 80 %."""
    n = len(gains)
    return (t_quantile(n - 1) + t_quantile(n - 1, 0.8)) * np.std(gains, ddof=1) / n**0.5


def criterion_table(runs: dict[tuple[str, str, int], dict]) -> str:
    """Each candidate minus the better of PaW and ECHO, and what this test would find."""
    lines = []
    for world in WORLDS:
        ours = study.complete(in_world(world, runs), common_seeds(runs, WORLDS))
        measure = measure_in(world)
        better = max(("paw", "echo"), key=lambda arm: mean(study.values_of(ours, arm, measure)))
        line = [world, better]
        for arm in CANDIDATES:
            least = detectable(study.gains(ours, arm, better, measure))
            line.append(f"{study.difference(ours, arm, better, measure)} ({least:.1f})")
        lines.append(line)
    return study.markdown_table(["world", "better base", *CANDIDATES], lines)


PAIRS = (
    ("predictable", "grpo"), ("predictable", "paw"), ("predictable", "echo"),
    ("predictable", "probable 0.03"), ("predictable", "prediction"), ("echo", "paw"),
    *((name.removesuffix(PLACEBO), name) for name in PLACEBOS),
    *((name, "grpo") for name in PLACEBOS),
)


def differences(runs: dict[tuple[str, str, int], dict]) -> str:
    """Paired differences in each world."""
    seeds = common_seeds(runs, WORLDS)
    lines = []
    for a, b in PAIRS:
        cells = [
            study.difference(study.complete(in_world(world, runs), seeds), a, b, measure_in(world))
            for world in WORLDS
        ]
        lines.append([f"{a} - {b}", *cells])
    return study.markdown_table(["difference", *WORLDS], lines)


FACTS = (
    ("paw", "grpo"), ("echo", "grpo"), ("echo", "paw"), ("echo", "echo" + PLACEBO),
    ("echo" + PLACEBO, "grpo"),
)


def facts(runs: dict[tuple[str, str, int], dict]) -> str:
    """What an observation says -> means and differences of the mean of the curve."""
    seeds = common_seeds(runs, SAYS)
    lines = []
    for world in SAYS:
        ours = study.complete(in_world(world, runs), seeds)
        levels = [study.level(ours, arm, study.area) for arm in SETTINGS[world].arms]
        gains = [study.difference(ours, a, b, study.area) for a, b in FACTS]
        lines.append([world, *levels, *gains])
    header = ["", *SETTINGS[next(iter(SAYS))].arms, *(f"{a} - {b}" for a, b in FACTS)]
    return study.markdown_table(header, lines)


def table() -> None:
    runs = study.read_runs(RUNS, KEY)
    print(f"{len(common_seeds(runs, WORLDS))} seeds in all small worlds, "
          f"{len(common_seeds(runs, SAYS))} with facts and labels\n")
    made = (regret_table, regret_differences, criterion_table, differences, facts)
    print("\n\n".join(make(runs) for make in made))


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
