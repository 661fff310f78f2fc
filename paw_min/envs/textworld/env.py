"""TextWorld's own games: the list of a split, and an environment that plays them.

A data folder has the folders train, valid_seen and valid_unseen with games of `tw-make`: a .z8 file
and its .json, which has the facts and the goal. toy/textworld_games.py generates one. TextWorld
plays them with its own interpreter (jericho), without a server.

Source: `agentenv-textworld` of Word2World (50 steps, admissible commands, won = the full score).
Deviations: what TextWorld prints around a text is cut (`text_of`); the reward of a win is 10, as in
the other benchmarks. Only admissible commands reach the interpreter, which would also execute
several in one step ("go north. open gate"), write files (`save`, `script`) and load the state of
another episode (`restore`).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import textworld

from paw_min.base.files import expanded
from paw_min.config import Config
from paw_min.envs.interface import Step, Tasks
from paw_min.envs.pool import EnvPool

SPLITS = ("train", "valid_seen", "valid_unseen")
WIN_REWARD = 10.0
NO_EFFECT = "Nothing happens."  # to a command that is not admissible; ALFWorld's text
SEED = 1  # of the interpreter; without one, it takes the time


def load(cfg: Config, data: str) -> Tasks:
    """The games of a run (a task is the path of a .z8 file) and its pool."""
    train = list_games(data, "train")
    held_out = list_games(data, cfg.eval_split)
    return Tasks(train, held_out, partial(EnvPool, TextworldEnv, workers=cfg.workers))


def list_games(data: str | Path, split: str) -> list[str]:
    """Paths of the games of a split, sorted; ValueError or FileNotFoundError if there are none."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; choose one of {', '.join(SPLITS)}.")
    folder = expanded(data) / split
    games = sorted(path for path in folder.glob("*.z8") if path.with_suffix(".json").is_file())
    if not games:
        raise FileNotFoundError(f"{folder} has no game (a .z8 file and its .json): make some with "
                                "tw-make, or omit --data.")
    return [str(path) for path in games]


def text_of(feedback: str, objective: str) -> str:
    """The text of an answer: without banner, prompt, status line, and the end's count of turns."""
    text = feedback[max(0, feedback.find(objective)) :]
    text = text.partition("\n>")[0].partition("***")[0]
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


class TextworldEnv:
    """Plays one game after another; observations depend on the game and the commands only."""

    def __init__(self):
        self.infos = textworld.EnvInfos(
            admissible_commands=True, won=True, lost=True, objective=True
        )
        self.engine = None
        self.last: Step | None = None  # the latest answer

    def reset(self, task: str) -> Step:
        """Start a game, given the path of its .z8 file."""
        if self.engine is None:
            self.engine = textworld.start(task, self.infos)
        else:
            self.engine.load(task)
        self.engine.seed(SEED)
        self.last = self._to_step(self.engine.reset())
        return self.last

    def step(self, command: str) -> Step:
        """Execute a command; one that is not admissible changes nothing."""
        # Names of things may have capitals; the parser of responses writes lower case.
        admissible = {known.lower(): known for known in self.last.admissible}
        if command.lower() not in admissible:
            return replace(self.last, observation=NO_EFFECT)
        state, _, _ = self.engine.step(admissible[command.lower()])
        self.last = self._to_step(state)
        return self.last

    def _to_step(self, state) -> Step:
        won = bool(state["won"])
        return Step(
            observation=text_of(state["feedback"], state["objective"]),
            task=state["objective"],
            task_type="quest",
            admissible=state["admissible_commands"],
            reward=WIN_REWARD if won else 0.0,
            done=won or bool(state["lost"]),
            won=won,
        )
