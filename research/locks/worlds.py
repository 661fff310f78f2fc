"""The study of protocol-worlds.md: examples/three_worlds.py with further arms and worlds.

    python research/locks/worlds.py run      trains what worlds.jsonl does not have yet
    python research/locks/worlds.py table    worlds-tables.md and worlds.png from worlds.jsonl

A run takes 2 to 6 s of CPU. All arms of a seed share one warm start. (Training them in one batch,
by vmap, was tried: a step of 16 arms cost as much as 16 steps.)
"""

import argparse
import copy
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
from torch import Tensor

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent.parent))  # the repository, for examples and paw_min

from examples import one_file  # noqa: E402
from examples.one_file import Arm, Size, World  # noqa: E402
from examples.three_worlds import (  # noqa: E402
    CE,
    DIGITS,
    ECHO,
    GRPO,
    LESSONS,
    PAW,
    Lesson,
    Serials,
)
from paw_min.running.plot import plt  # noqa: E402
from research.locks.study import Cell, keep, lowest_alpha  # noqa: E402
from research.panels import Curves, panel_curves  # noqa: E402
from research.stats import signed, t_interval  # noqa: E402

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
    """Those of all three worlds. "inverse" has Eq. 4 upside down as well."""
    paw, ce = replace(PAW, alpha=alpha), replace(CE, alpha=alpha)
    return {
        "grpo": GRPO,
        "paw": paw,
        "placebo": replace(paw, placebo=True),
        "mae": replace(paw, rho=1.0),
        "constant": replace(paw, lambda_mode="constant"),
        "alpha 1": replace(paw, alpha=1.0),
        "inverse": paw,
        "ce": ce,
        "ce, alpha 1": replace(ce, alpha=1.0),
        "ce, constant": replace(ce, lambda_mode="constant"),
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
    first: list[str]  # the arms of the protocol's questions are trained first
    seeds: range = SEEDS

    def cell(self, name: str, predict) -> Cell:
        """predict: takes the place of one_file.predict."""
        instead = {"warm_start": keep(shared_warm_start), "predict": keep(predict)}
        if name == "inverse":
            instead["top_alpha"] = keep(lowest_alpha)
        return Cell(self.arms[name], self.lesson.make_world, instead, self.lesson.size)


SETTINGS = {
    "serials": Setting(
        LESSONS["serials"], USUAL | SWEEPS, ["grpo", "paw", "placebo", "ce", "echo 0.05"]
    ),
    "polish": Setting(
        LESSONS["polish"], USUAL | TENFOLD,
        ["grpo", "paw", "constant", "ce", "ce, constant", "ce x10", "ce, constant x10",
         "echo 0.05"],
    ),
    "fresh": Setting(Lesson(Fresh, {}), FEW, ["grpo", "paw", "ce"]),
    "corridors": Setting(
        LESSONS["corridors"], arms(0.5),
        ["grpo", "paw", "alpha 1", "inverse", "ce", "ce, alpha 1", "echo 0.05"],
    ),
    "no serials": Setting(Lesson(NoSerials, {}), FEW, []),
    "large": Setting(Lesson(Serials, {}, Size(), names=128), FEW, [], SEEDS[:8]),
}


# ---- runs ----

MEASURES = ("success", "material", "noise")
predict = one_file.predict
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


def noise_share(logp: Tensor, arm: Arm) -> float:
    """Of the gradient on the logits of the true tokens, the share on the serial: (N, O) -> ()."""
    p = logp.exp()
    gradient = 1 - p if arm.loss == "ce" else one_file.hard_tokens(logp, arm.rho) * p * (1 - p)
    return (gradient[:, 2:].sum() / gradient.sum().clamp(min=1e-9)).item()


def train(world: str, arm: str, seed: int) -> dict:
    """One run -> its line in worlds.jsonl."""
    setting = SETTINGS[world]
    shares = []

    def predict_and_measure(model, world: World) -> Tensor:
        logp = predict(model, world)
        shares.append(noise_share(logp, setting.arms[arm]))
        return logp

    curve = setting.cell(arm, predict_and_measure).run(seed)
    line = {"world": world, "arm": arm, "seed": seed}
    columns = {name: [getattr(point, name) for point in curve] for name in MEASURES}
    for name, values in (columns | {"share": shares}).items():
        line[name] = [float(f"{value:.5g}") for value in values]
    return line


def jobs() -> Iterator[tuple[str, str, int]]:
    """(world, arm, seed), those of the protocol's questions first."""
    for world, of in SETTINGS.items():
        for seed in of.seeds:
            for arm in of.first:
                yield world, arm, seed
    for world, of in SETTINGS.items():
        for seed in of.seeds:
            for arm in of.arms:
                if arm not in of.first:
                    yield world, arm, seed


def read_runs() -> dict[tuple[str, str, int], dict]:
    """{(world, arm, seed): its line}."""
    if not RUNS.exists():
        return {}
    lines = [json.loads(line) for line in RUNS.read_text().splitlines()]
    return {(line["world"], line["arm"], line["seed"]): line for line in lines}


def run() -> None:
    from tqdm import tqdm

    known = read_runs()
    missing = [job for job in jobs() if job not in known]
    with RUNS.open("a") as file:
        for world, arm, seed in tqdm(missing, unit="run"):
            file.write(json.dumps(train(world, arm, seed)) + "\n")
            file.flush()


# ---- tables ----


Finished = dict[str, list[list[float]]]  # arm -> for each seed, success in percent


def finished(world: str, known: dict) -> Finished:
    """The arms with all of their seeds, in the order of the settings."""
    of = SETTINGS[world]
    curves = {}
    for arm in of.arms:
        lines = [known.get((world, arm, seed)) for seed in of.seeds]
        if all(lines):
            curves[arm] = [[100 * success for success in line["success"]] for line in lines]
    return curves


def area(curve: list[float]) -> float:
    return mean(curve[1:])


def end(curve: list[float]) -> float:
    return curve[-1]


def difference(curves: Finished, a: str, b: str, measure) -> str:
    """a - b over the seeds: the mean, its 95 % t interval, and on how many seeds a is above."""
    if not {a, b} <= curves.keys():
        return "not run | "
    values = [measure(x) - measure(y) for x, y in zip(curves[a], curves[b])]
    above = sum(value > 0 for value in values)
    return f"{signed(mean(values), t_interval(values))} | {above} of {len(values)}"


QUESTIONS = [  # number, world, a, b, measure
    (1, "serials", "ce", "grpo", area), (1, "serials", "ce", "paw", area),
    (1, "serials", "paw", "grpo", area), (1, "serials", "placebo", "grpo", area),
    (2, "fresh", "ce", "grpo", area), (2, "fresh", "ce", "paw", area),
    (3, "corridors", "ce, alpha 1", "ce", area), (3, "corridors", "inverse", "paw", area),
    (3, "corridors", "alpha 1", "paw", area),
    (4, "polish", "ce, constant", "ce", end), (4, "polish", "ce, constant x10", "ce x10", end),
    (4, "polish", "constant", "paw", end),
    (5, "serials", "echo 0.05", "paw", area), (5, "corridors", "echo 0.05", "paw", area),
    (5, "polish", "echo 0.05", "paw", end),
]


def table() -> None:
    """The protocol's questions, then a table for each world, "not run" for unfinished arms."""
    known = read_runs()
    lines = ["| question | world | comparison | difference | above on |", "|---" * 5 + "|"]
    for number, world, a, b, measure in QUESTIONS:
        found = difference(finished(world, known), a, b, measure)
        lines.append(f"| {number} | {world} | {a} - {b} | {found} |")
    for world, of in SETTINGS.items():
        curves = finished(world, known)
        columns = "mean of the curve | at the end | p(material) | p(noise) | share"
        measure = end if world == "polish" else area
        lines += ["", f"| {world} | {columns} | minus GRPO | above on | minus PaW | above on |",
                  "|---" * 10 + "|"]
        for arm in of.arms:
            row = f"| {arm} | not run | | | |"
            if arm in curves:
                runs = [known[world, arm, seed] for seed in of.seeds]
                levels = [mean(map(measure, curves[arm])) for measure in (area, end)]
                ends = [mean(run[name][-1] for run in runs) for name in MEASURES[1:]]
                share = 100 * mean(run["share"][0] for run in runs)
                row = f"| {arm} | {levels[0]:.1f} | {levels[1]:.1f} | {ends[0]:.2f} | "
                row += f"{ends[1]:.2f} | {share:.0f}"
            gains = []
            for base in ("grpo", "paw"):
                gains.append(" | " if arm == base else difference(curves, arm, base, measure))
            lines.append(f"{row} | {' | '.join(gains)} |")
    (FOLDER / "worlds-tables.md").write_text("\n".join(lines) + "\n")
    draw(known)


DRAWN = {
    "serials": ["grpo", "paw", "placebo", "ce", "echo 0.05"],
    "corridors": ["grpo", "paw", "alpha 1", "ce", "ce, alpha 1"],
    "polish": ["grpo", "paw", "constant", "ce", "ce, constant"],
}


def draw(known: dict) -> None:
    """worlds.png: a panel for each of the three worlds, means and 95 % t intervals."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, (world, arms) in zip(axes, DRAWN.items()):
        curves = finished(world, known)
        every = SETTINGS[world].lesson.size.evaluate_every
        shown = {}
        for arm in arms:
            if arm in curves:
                values = np.array(curves[arm])  # (seeds, evaluations)
                shown[arm] = Curves(range(0, every * values.shape[1], every), values)
        panel_curves(axis, shown, {arm: f"C{k}" for k, arm in enumerate(arms)}, t_interval)
        axis.set(title=world, xlabel="updates")
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("success (%)")
    axes[-1].set_ylim(85, 100)
    figure.savefig(FOLDER / "worlds.png", dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    if parser.parse_args().command == "run":
        run()
    else:
        table()
