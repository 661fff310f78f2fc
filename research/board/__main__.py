"""A board for ideas: a file with one of your own, scored in four worlds by one command.

    python -m research.board my_idea.py        two minutes on one core

The file replaces functions of one_file.py by others of the same name and shapes, or sets the
fields of Arm, or both:

    from examples.one_file import Arm

    ARM = Arm(alpha=1.0, scale=0.5)

    def clipped_mae(logp, rho):            # (B, O) -> (B,)
        return (1 - logp.exp()).square().mean(-1)

The worlds are that of one_file.py, "plain", and those of three_worlds.py, all at the size of the
latter: 64 names, width 32, one layer, 120 updates. An entry has one setting for all of them. Its
score is the success in percent, averaged over the evaluations after the start, four seeds and the
four worlds. Eq. 4 ranks what `action_entropy` returns, from the log-probabilities of all words. A
loss that has to see the tokens replaces `learn`; it should leave RL and the step of the optimizer
as they are. This folder has the known entries; README.md says how to add one.
"""

import ast
import json
import math
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import numpy as np
import torch

from examples import one_file
from examples.one_file import Arm, World, run
from examples.three_worlds import LESSONS, Lesson
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import check_writable, damaged, replace_text
from paw_min.base.flags import Parser
from research.stats import signed, t_interval
from research.study import markdown_table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.jsonl"
# No study has used them, and nothing was tuned on them. Ideas that are tuned on the board are.
SEEDS = range(5000, 5004)
# cross_entropy, which also trains the start model, and RL are the same for all entries.
# Each with arguments to try it on: 8 transitions in 4 groups of 2 episodes, 3 tokens of o'.
LOGP = torch.full((8, 3), -1.0)
REPLACEABLE = {
    "action_entropy": (torch.arange(40.0).view(8, 5).log_softmax(-1),),
    "top_alpha": (torch.arange(8.0), 0.5),
    "mae": (LOGP,),
    "hard_tokens": (LOGP, 0.2),
    "clipped_mae": (LOGP, 0.2),
    "lambda_g": (torch.zeros(4, 2),),
    "row_weights": (torch.ones(8, dtype=torch.bool), torch.ones(4)),
    "shuffled": (torch.arange(24).view(8, 3),),
    "learn": None,  # found out in the first world
}


@dataclass
class Plain(World):
    """The world of one_file.py."""

    seed: int = 0


WORLDS = {"plain": Lesson(Plain, {}), **LESSONS}


def load(path: Path) -> tuple[Arm, dict[str, Callable]]:
    """An entry: its Arm, and its functions by name."""
    try:
        found = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # whatever an idea raises
        raise UserError(f"{path} cannot be run: {said(path, error)}") from error
    return found.get("ARM", Arm()), {name: found[name] for name in REPLACEABLE if name in found}


def said(path: Path, error: BaseException) -> str:
    """What an idea raises, and at which line of its file, if it is one of them."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return text + f" (line {lines[-1]})" if lines else text


def unread(path: Path) -> list[str]:
    """What an entry names at its top level and nothing reads: a typing error, a lost setting."""
    tree = ast.parse(path.read_bytes())
    named = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
            named += [one.id for one in found if isinstance(one.ctx, ast.Store)]
    names = [one for one in ast.walk(tree) if isinstance(one, ast.Name)]
    read = {one.id for one in names if isinstance(one.ctx, ast.Load)}
    return [name for name in named if name not in {"ARM", *REPLACEABLE, *read}]


def is_arm(found) -> bool:
    return (
        isinstance(found, Arm)
        and found.loss in ("cmae", "ce")
        and found.lambda_g in ("adaptive", "constant")
        and 0 < found.alpha <= 1
        and 0 < found.rho <= 1
        and 0 <= found.scale < math.inf
        and 0 <= found.kl < math.inf
    )


def check(path: Path) -> None:
    """UserError for an entry that would fail, be ignored, or be read as another."""
    arm, functions = load(path)
    if not is_arm(arm):
        raise UserError(f"{path}: ARM is {arm!r:.200}; it must be an Arm of examples.one_file, "
                        "with the loss cmae or ce, lambda_g adaptive or constant, alpha and rho "
                        "above 0 and at most 1, finite scale and kl of at least 0")
    if names := unread(path):
        raise UserError(f"{path}: nothing reads {', '.join(names)}; the board takes ARM and the "
                        f"functions {', '.join(REPLACEABLE)}")
    if arm == Arm() and not functions and path.stem != "paw":
        raise UserError(f"{path} has no ARM and none of these functions: {', '.join(REPLACEABLE)}")
    if arm.loss == "ce" and functions.keys() & {"mae", "hard_tokens", "clipped_mae"}:
        raise UserError(f"{path}: with loss='ce', its MAE would not be called: leave one out")
    for name, function in functions.items():
        if REPLACEABLE[name] is None:
            continue
        expected = tuple(getattr(one_file, name)(*REPLACEABLE[name]).shape)
        try:
            shape = tuple(function(*REPLACEABLE[name]).shape)
        except Exception as error:  # whatever an idea raises
            raise UserError(f"{path}: {name} raises {said(path, error)}") from error
        if shape != expected:
            raise UserError(f"{path}: {name} returns the shape {shape} instead of {expected}")


def play(path: Path, world: str, seed: int) -> float:
    """One run -> the mean of its curve, in percent."""
    arm, functions = load(path)  # anew in each run: an entry may count its updates
    lesson = WORLDS[world]
    with patch.dict(vars(one_file), functions):
        try:
            curve = run(seed, arm, lesson.make_world(seed), lesson.size)
        except Exception as error:  # whatever an idea raises
            raise UserError(f"{path}, in the world {world}: {said(path, error)}") from error
    return 100 * mean(point.success for point in curve[1:])


def read_results() -> dict[str, dict[str, list[float]]]:
    """{entry: {world: the mean of the curve of each seed}}."""
    results = {}
    for n, line in enumerate(RESULTS.read_text("utf-8").splitlines(), start=1):
        with damaged(f"line {n} of {RESULTS}", "restore or remove it"):
            found = json.loads(line)
            results[found["entry"]] = {world: found[world] for world in WORLDS}
            # A number for each seed: another shape is a ValueError.
            np.array([found[world] for world in WORLDS], float).reshape(len(WORLDS), len(SEEDS))
    return results


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """All entries, the best first.

    "minus PaW": the paired difference of the scores, mean and 95 % t interval over the seeds.
    """
    found = {
        entry: np.array([result[world] for world in WORLDS])  # (worlds, seeds)
        for entry, result in results.items()
    }
    lines = []
    for entry in sorted(found, key=lambda entry: -found[entry].mean()):
        success = found[entry]
        gains = success.mean(0) - found["paw"].mean(0)  # (seeds,)
        gain = signed(gains.mean(), t_interval(gains)) if entry != "paw" else ""
        means = [success.mean(), *success.mean(1)]
        lines.append([entry, *(f"{value:.1f}" for value in means), gain])
    return markdown_table(["entry", "score", *WORLDS, "minus PaW"], lines)


def main() -> None:
    parser = Parser(description="Score an idea in four worlds")
    parser.add_argument("file", type=Path, help="a Python file, as in the docstring above")
    path = parser.parse_args().file
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    check(path)
    is_entry = path.resolve().parent == FOLDER
    known = read_results()
    if "paw" not in known and not (is_entry and path.stem == "paw"):
        raise UserError(f"{RESULTS} has no entry paw, to compare others with: restore it, or "
                        f"run {FOLDER / 'paw.py'} first")
    if path.stem in known and not is_entry:
        raise UserError(f"{path}: the board has an entry {path.stem}; give the file another name")
    if is_entry:
        check_writable(RESULTS)
    torch.set_num_threads(1)
    result = {}
    for world in WORLDS:
        result[world] = [round(play(path, world, seed), 2) for seed in SEEDS]
        print(f"{world:9}  {mean(result[world]):5.1f} %  seeds {result[world]}", flush=True)
    # Read again: another entry may have been scored meanwhile.
    results = read_results() | {path.stem: result}
    if is_entry:  # write it down
        lines = [json.dumps({"entry": name} | found) for name, found in results.items()]
        replace_text(RESULTS, "\n".join(lines) + "\n")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    with user_errors():
        try:
            main()
        except KeyboardInterrupt:
            sys.exit("interrupted; nothing was written down")
