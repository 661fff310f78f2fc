"""A board for ideas: a file with one of your own, scored in four worlds by one command.

    python -m examples.board my_idea.py        a minute on an idle core

The file replaces functions of one_file.py by others of the same name and shapes, or sets the
fields of Arm, or both:

    from examples.one_file import Arm

    ARM = Arm(alpha=1.0, scale=0.5)

    def clipped_mae(logp, rho):            # (B, O) -> (B,)
        return (1 - logp.exp()).square().mean(-1)

The worlds are that of one_file.py, "plain", and those of three_worlds.py, all at the size of the
latter: 64 names, width 32, one layer, 120 updates. An entry has one setting for all of them. Its
score is the success in percent, averaged over the evaluations after the start, four seeds and the
four worlds. A loss that has to see the tokens replaces `learn`; it should leave RL and the step of
the optimizer as they are. research/board has the entries that are known, and how to add one.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch

from examples import one_file
from examples.one_file import Arm, World, run
from examples.three_worlds import LESSONS, Lesson
from research.stats import signed, t_interval

FOLDER = Path(__file__).parent.parent / "research" / "board"
RESULTS = FOLDER / "results.jsonl"
# No study has used them, and nothing was tuned on them. Ideas that are tuned on the board are.
SEEDS = range(5000, 5004)
# Not cross_entropy, which also trains the start model, nor RL: those are the same for all.
REPLACEABLE = (
    "top_alpha", "mae", "hard_tokens", "clipped_mae", "lambda_g", "row_weights", "shuffled",
    "learn",
)


@dataclass
class Plain(World):
    """The world of one_file.py."""

    seed: int = 0


WORLDS = {"plain": Lesson(Plain, {}), **LESSONS}


def load(path: Path) -> tuple[Arm, dict[str, Callable]]:
    """An entry: its Arm, and its functions by name."""
    found = runpy.run_path(str(path))
    return found.get("ARM", Arm()), {name: found[name] for name in REPLACEABLE if name in found}


def play(path: Path, world: str, seed: int) -> float:
    """One run -> the mean of its curve, in percent."""
    arm, functions = load(path)  # anew in each run: an entry may count its updates
    lesson = WORLDS[world]
    with patch.dict(vars(one_file), functions):
        curve = run(seed, arm, lesson.make_world(seed), lesson.size)
    return 100 * mean(point.success for point in curve[1:])


def read_results() -> dict[str, dict[str, list[float]]]:
    """{entry: {world: the mean of the curve of each seed}}."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {line.pop("entry"): line for line in lines}


def by_seed(result: dict[str, list[float]]) -> list[float]:
    """The mean over the worlds."""
    return [mean(values) for values in zip(*result.values())]


def best_first(results: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    return dict(sorted(results.items(), key=lambda item: -mean(by_seed(item[1]))))


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """With the paired difference of the score to PaW's: mean and 95 % t interval over the seeds."""
    lines = [f"| entry | score | {' | '.join(WORLDS)} | minus PaW |", "|---" * 7 + "|"]
    paw = by_seed(results["paw"])
    for name, result in results.items():
        worlds = " | ".join(f"{mean(result[world]):.1f}" for world in WORLDS)
        gains = [own - other for own, other in zip(by_seed(result), paw)]
        gain = "" if name == "paw" else signed(mean(gains), t_interval(gains))
        lines.append(f"| {name} | {mean(by_seed(result)):.1f} | {worlds} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score an idea in four worlds")
    parser.add_argument("file", type=Path, help="a Python file, as in examples/board.py")
    path = parser.parse_args().file
    if not path.is_file():
        parser.error(f"there is no file {path}")
    arm, functions = load(path)
    if arm == Arm() and not functions and path.stem != "paw":
        parser.error(f"{path} has no ARM and none of these functions: {', '.join(REPLACEABLE)}")
    own = ", ".join(functions)
    print(f"{path.stem}: {arm}" + (f", with its own {own}, which may ignore it" if own else ""))
    torch.set_num_threads(1)
    result = {}
    for world in WORLDS:
        result[world] = [round(play(path, world, seed), 2) for seed in SEEDS]
        print(f"{world:9}  {mean(result[world]):5.1f} %  seeds {result[world]}", flush=True)
    results = read_results() | {path.stem: result}
    print(f"\n{table(best_first(results))}")
    if path.resolve().parent == FOLDER:  # an entry of the board: write it down
        lines = [json.dumps({"entry": name} | found) for name, found in results.items()]
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
