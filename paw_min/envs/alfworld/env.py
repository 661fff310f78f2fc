"""ALFWorld: the list of playable games of a split, and an environment that plays them.

Source: `AlfredTWEnv` of alfworld 0.4.2 (which games count, the names) and verl-agent (reward 10
for a win; the observation is TextWorld's text unchanged, "-= Welcome to TextWorld, ALFRED! =-"
included; the task is the text after "Your task is to: "; `help` is not offered). Deviations:

- Games are listed in sorted order, so that runs are reproducible; AlfredTWEnv uses the order of the
  file system.
- A broken file, a missing folder or an empty list is an error; AlfredTWEnv hangs on an empty list.
- The environment does not limit the number of steps (the rollout does). `done` means won.
"""

import os
import re
from pathlib import Path

import textworld
from tqdm import tqdm

from paw_min.base.files import expanded, read_dict
from paw_min.config import Config
from paw_min.envs.alfworld import engine
from paw_min.envs.interface import Step, Tasks
from paw_min.envs.pool import EnvPool

SPLITS = ("train", "valid_seen", "valid_unseen")  # names of the folders
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
WIN_REWARD = 10.0  # verl-agent; for the step that wins, all others get 0
REMEDY = ("download the games with `ALFWORLD_DATA=FOLDER alfworld-download -f` (-f: replace old "
          "files), or use --preset tiny without --data, which has small ones")
BROKEN = "delete its folder, or download it again with `alfworld-download -f`"


def load(cfg: Config, data: str) -> Tasks:
    """The games of a run (a task is the path of a game) and its pool."""

    def make_pool(n_envs: int) -> EnvPool:
        return EnvPool(AlfworldEnv, n_envs, cfg.workers)

    train = list_games(data, "train")
    held_out = list_games(data, cfg.eval_split)
    return Tasks(train, held_out, make_pool)


def find_data(data: str | Path) -> Path:
    """The folder json_2.1.1, which contains the splits; `data` is that folder or its parent."""
    folder = expanded(data)
    for candidate in (folder / "json_2.1.1", folder):
        if any((candidate / split).is_dir() for split in SPLITS):
            return candidate
    state = "has no json_2.1.1 with a split in it" if folder.is_dir() else "does not exist"
    raise FileNotFoundError(f"The ALFWorld data folder {str(folder)!r} {state}; {REMEDY}. "
                            "The folder is --data or $ALFWORLD_DATA.")


def list_games(data: str | Path, split: str) -> list[str]:
    """Paths of the playable games of a split, sorted by their posix path below the split.

    Playable as in AlfredTWEnv: one of the six task types, no 'movable' or 'Sliced' in the path, and
    `solvable: true` in game.tw-pddl. All games are read at every start, as AlfredTWEnv does: half a
    second for 3,553 small games, about 4 s if each has 0.1 MB more.
    Raises FileNotFoundError (no data, no playable game) or ValueError (bad split; a game that is
    broken, incomplete or from before alfworld 0.4).
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; choose one of {', '.join(SPLITS)}.")
    folder = find_data(data) / split
    trials = []  # posix paths below the split
    for root, _, files in os.walk(folder):
        if "traj_data.json" in files and "game.tw-pddl" in files:
            trial = Path(root).relative_to(folder).as_posix()
            if "movable" not in trial and "Sliced" not in trial:
                trials.append(trial)
    games = []
    few = len(trials) < 500  # a fraction of a second
    for trial in tqdm(sorted(trials), f"reading {split}", unit="game", disable=few):
        if _playable(folder / trial):
            games.append(str(folder / trial / "game.tw-pddl"))
    if not games:
        raise FileNotFoundError(f"{folder} has {len(trials)} games, but none of them is playable "
                                f"(of the six task types and `solvable`); {REMEDY}.")
    return games


def _playable(trial: Path) -> bool:
    # Both files are parsed in full: a search for `"solvable"` in the bytes takes nine times as long
    # and would miss a truncated file.
    traj = read_dict(trial / "traj_data.json", BROKEN)
    game = read_dict(trial / "game.tw-pddl", BROKEN)
    if traj.get("task_type") not in TASK_TYPES or game.get("solvable") is not True:
        return False
    for part in ("pddl_domain", "pddl_problem", "grammar"):
        if not isinstance(game.get(part), str):
            raise ValueError(f"{trial / 'game.tw-pddl'} has no text {part}: {BROKEN}.")
    if not re.search(r'template\s*::\s*"move ', game["grammar"]):
        raise ValueError(f"{trial / 'game.tw-pddl'}: its grammar has no command `move X to Y` "
                         f"(games from before alfworld 0.4 use `put X in/on Y`); {REMEDY}.")
    return True


class AlfworldEnv:
    """Plays one game after another; observations depend on the game and the commands only.

    Create a fixed number of these and reset them: fast-downward never frees an engine's memory.
    """

    def __init__(self):
        self.engine = engine.make_env(textworld.EnvInfos(admissible_commands=True, won=True))
        self._task = ""  # its text
        self._task_type = ""

    def reset(self, task: str) -> Step:
        """Start a game, given the path of its game.tw-pddl.

        Raises engine.GameError (a ValueError) if the game cannot be played.
        """
        self.engine.load(str(task))
        state = self.engine.reset()
        self._task_type = read_dict(Path(task).with_name("traj_data.json"), BROKEN)["task_type"]
        self._task = state["feedback"].partition("Your task is to: ")[2].rstrip("\n")
        return self._to_step(state)

    def step(self, command: str) -> Step:
        """Execute a command; one that is not admissible changes nothing ("Nothing happens.").

        After `done`, TextWorld would play on, and could undo the win: call `reset`.
        """
        state, _, _ = self.engine.step(command)
        return self._to_step(state)

    def _to_step(self, state) -> Step:
        won = bool(state["won"])
        return Step(
            observation=state["feedback"],
            task=self._task,
            task_type=self._task_type,
            admissible=[c for c in state["admissible_commands"] if c != "help"],
            reward=WIN_REWARD if won else 0.0,
            done=won,
            won=won,
        )
