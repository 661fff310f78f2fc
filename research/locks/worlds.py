"""A world for each choice of PaW: examples/three_worlds.py with further arms and worlds.

    python -m research.locks.worlds run      trains what worlds.jsonl does not have yet
    python -m research.locks.worlds table    prints the tables, draws worlds.png

A run takes 2 to 6 s of CPU. All arms of a seed share one warm start. (Training them in one batch,
by vmap, was tried: a step of 16 arms cost as much as 16 steps.)
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from examples import one_file
from examples.one_file import Arm, Size, World
from examples.three_worlds import (
    CE,
    DIGITS,
    ECHO,
    GRPO,
    LESSONS,
    PAW,
    Lesson,
    Serials,
)
from paw_min.running.plot import plt
from research import study
from research.locks.study import levels, lowest_alpha
from research.one_file_runs import KEY, Cell, in_world, measured, noise, shared_warm_start
from research.panels import Curves, named, panel_success, styles_of

FOLDER = Path(__file__).parent
SEEDS = range(3000, 3016)
RUNS = FOLDER / "worlds.jsonl"


# ---- the worlds ----


@dataclass
class NoSerials(World):
    """The world of one_file.py, with the vocabulary of the serial numbers."""

    seed: int = 0

    def words(self) -> list[str]:
        return [*super().words(), *DIGITS]


@dataclass
class Fresh(Serials):
    """A new serial number in every observation."""

    def __post_init__(self):
        super().__post_init__()
        self.rng = random.Random(f"fresh {self.seed}")

    def observation(self, name: str, tool: str) -> list[str]:
        return World.observation(self, name, tool) + self.rng.choices(DIGITS, k=8)


# ---- the arms ----


def arms(alpha: float) -> dict[str, Arm]:
    """The arms of all three worlds. "inverse" has Eq. 4 upside down as well."""
    paw, ce = replace(PAW, alpha=alpha), replace(CE, alpha=alpha)
    return {
        "grpo": GRPO,
        "paw": paw,
        "placebo": replace(paw, placebo=True),
        "mae": replace(paw, rho=1.0),
        "constant": replace(paw, lambda_g="constant"),
        "alpha 1": replace(paw, alpha=1.0),
        "inverse": paw,
        "ce": ce,
        "ce, alpha 1": replace(ce, alpha=1.0),
        "ce, constant": replace(ce, lambda_g="constant"),
        "ce 0.05": replace(ce, scale=0.05),
        "echo 0.01": replace(ECHO, scale=0.01),
        "echo 0.05": ECHO,
        "echo 0.1": replace(ECHO, scale=0.1),
        "echo 0.3": replace(ECHO, scale=0.3),
    }


USUAL = arms(PAW.alpha)
FEW = {name: USUAL[name] for name in ("grpo", "paw", "mae", "ce", "echo 0.05")}
SWEEPS = {f"rho {rho}": replace(PAW, rho=rho) for rho in (0.05, 0.1, 0.5)}
SWEEPS |= {f"alpha {alpha}": replace(PAW, alpha=alpha) for alpha in (0.25, 0.5)}
TENFOLD = {
    f"{name} x10": replace(USUAL[name], scale=10.0)
    for name in ("paw", "constant", "ce", "ce, constant")
}


@dataclass
class Setting:
    """A lesson with the arms of the study."""

    lesson: Lesson
    arms: dict[str, Arm]
    seeds: range = SEEDS

    def cell(self, name: str, predict) -> Cell:
        """predict: takes the place of one_file.predict."""
        instead = {"warm_start": shared_warm_start, "predict": predict}
        if name == "inverse":
            instead["top_alpha"] = lowest_alpha
        return Cell(self.arms[name], self.lesson.make_world, instead, self.lesson.size)


SETTINGS = {
    "serials": Setting(LESSONS["serials"], USUAL | SWEEPS),
    "polish": Setting(LESSONS["polish"], USUAL | TENFOLD),
    "fresh": Setting(Lesson(Fresh, {}), FEW),
    "corridors": Setting(LESSONS["corridors"], arms(0.5)),
    "no serials": Setting(Lesson(NoSerials, {}), FEW),
    "large": Setting(Lesson(Serials, {}, Size(), names=128), FEW, SEEDS[:8]),
}


# ---- runs ----

predict = one_file.predict


def noise_share(logp: Tensor, arm: Arm) -> float:
    """The serial's share of the gradient on the logits of the true tokens: (N, O) -> ()."""
    p = logp.exp()
    gradient = 1 - p if arm.loss == "ce" else one_file.hard_tokens(logp, arm.rho) * p * (1 - p)
    return (gradient[:, 2:].sum() / gradient.sum().clamp(min=1e-9)).item()


def train(job: tuple[str, str, int]) -> dict:
    """One run -> its line in worlds.jsonl."""
    world, arm, seed = job
    setting = SETTINGS[world]
    shares = []

    def predict_and_measure(model, world: World) -> Tensor:
        logp = predict(model, world)
        shares.append(noise_share(logp, setting.arms[arm]))
        return logp

    points = setting.cell(arm, predict_and_measure).run(seed)
    curve = [measured(at) | {"share": share} for at, share in zip(points, shares, strict=True)]
    return {"world": world, "arm": arm, "seed": seed} | study.columns(curve)


# ---- tables ----


def measure_in(world: str) -> study.Measure:
    """A policy that already wins is compared at the end."""
    return study.end if world == "polish" else study.area


PAIRS = [  # world, a, b, what the protocol expects of a - b; by_world has those with PaW
    ("serials", "ce", "grpo", "below 0"),
    ("serials", "placebo", "grpo", "0 in the interval"),
    ("fresh", "ce", "grpo", "above 0"),
    ("corridors", "ce, alpha 1", "ce", "below 0"),
    ("polish", "ce, constant", "ce", "below 0"),
    ("polish", "ce, constant x10", "ce x10", "below 0"),
    ("polish", "constant x10", "paw x10", "-"),
]
COMPARED = [  # the arms of by_world
    "grpo", "placebo", "mae", "rho 0.1", "ce", "ce 0.05", "echo 0.05", "alpha 1", "alpha 0.25",
    "inverse", "constant",
]


def complete_runs(runs: dict[tuple[str, str, int], dict]) -> dict[str, study.Runs]:
    """By world; an arm that lacks a seed is left out."""
    return {
        world: study.complete(in_world(world, runs), setting.seeds)
        for world, setting in SETTINGS.items()
    }


def by_world(runs: dict[tuple[str, str, int], dict]) -> str:
    """PaW's success in each world, and each arm minus PaW."""
    found = complete_runs(runs)
    lines = [["paw", *(study.level(found[world], "paw", measure_in(world)) for world in SETTINGS)]]
    for arm in COMPARED:
        cells = [
            study.difference(found[world], arm, "paw", measure_in(world)) if arm in setting.arms
            else "-" for world, setting in SETTINGS.items()
        ]
        lines.append([f"{arm} - paw", *cells])
    return study.markdown_table(["", *SETTINGS], lines)


def pairs(runs: dict[tuple[str, str, int], dict]) -> str:
    found = complete_runs(runs)
    lines = [
        [world, f"{a} - {b}", expected, study.difference(found[world], a, b, measure_in(world))]
        for world, a, b, expected in PAIRS
    ]
    return study.markdown_table(["world", "comparison", "expected", "difference"], lines)


def all_arms(world: str, runs: dict[tuple[str, str, int], dict]) -> str:
    """All arms and measures of one world."""
    ours = complete_runs(runs)[world]
    lines = []
    for arm in SETTINGS[world].arms:
        if study.seeds_of(ours, arm):
            line = [arm, *levels(ours, arm), study.level(ours, arm, noise, digits=2)]
            line.append(study.level(ours, arm, lambda run: 100 * run["share"][0], digits=0))
            for base in ("grpo", "paw"):
                line.append(study.difference(ours, arm, base, measure_in(world)))
            lines.append(line)
    header = [world, "mean of the curve", "at the end", "p(material)", "p(noise)", "share"]
    return study.markdown_table([*header, "minus GRPO", "minus PaW"], lines)


DRAWN = {
    "serials": ["grpo", "paw", "placebo", "ce", "echo 0.05"],
    "corridors": ["grpo", "paw", "alpha 1", "ce", "ce, alpha 1"],
    "polish": ["grpo", "paw", "constant", "ce", "ce, constant"],
}


def draw(runs: dict[tuple[str, str, int], dict]) -> None:
    """worlds.png: a panel for each of the three worlds, means and 95 % t intervals."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained", sharey=True)
    handles, drawn = {}, []
    for axis, (world, arms) in zip(axes, DRAWN.items()):
        every = SETTINGS[world].lesson.size.evaluate_every
        panel = {}
        for arm, success in study.curves(in_world(world, runs), arms).items():
            updates = range(0, every * len(success[0]), every)
            panel["echo" if arm == "echo 0.05" else arm] = Curves(updates, np.array(success))
        panel_success(axis, panel, styles_of(panel))
        axis.set_title(world)
        lines, names = axis.get_legend_handles_labels()
        handles |= dict(zip(names, lines))
        drawn += panel.values()
    axes[0].set_ylabel("success (%)")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False,
                  title=named(drawn))
    figure.savefig(FOLDER / "worlds.png", dpi=150)


def table() -> None:
    """Print the tables, and draw the curves."""
    runs = study.read_runs(RUNS, KEY)
    print(by_world(runs), pairs(runs), *(all_arms(world, runs) for world in SETTINGS), sep="\n\n")
    draw(runs)


if __name__ == "__main__":
    jobs = [
        (world, arm, seed)
        for world, setting in SETTINGS.items()
        for seed in setting.seeds
        for arm in setting.arms
    ]
    study.command(__doc__, RUNS, jobs, train, table, KEY)
