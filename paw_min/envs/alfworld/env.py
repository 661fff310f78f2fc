"""ALFWorld: the list of playable games of a split, and an environment that plays them.

Source: `AlfredTWEnv` of alfworld 0.4.2 (which games count, the wrappers) and verl-agent (reward 10
for a win; the observation is TextWorld's text unchanged, "-= Welcome to TextWorld, ALFRED! =-"
included; the task is the text after "Your task is to: "; `help` is not offered). Deviations:

- Games are listed in sorted order, so that runs are reproducible; AlfredTWEnv uses the order of the
  file system.
- AlfredTWEnv reads two files per game at every start. Here the result is cached in a small file,
  and a game is read again only if the size or the time of its files has changed.
- A broken file, a missing folder or an empty list is an error; AlfredTWEnv hangs on an empty list.
- The environment does not limit the number of steps (the rollout does). `done` means won.
"""

import hashlib
import json
import os
from pathlib import Path

import textworld
from tqdm import tqdm

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
REMEDY = ("download the games with `alfworld-download`, or generate small ones with "
          "`python -m paw_min.toy.alfworld_games`")


def load(cfg: Config, data: str) -> Tasks:
    """The games of a run (a task is the path of a game) and its pool."""

    def make_pool(n_envs: int) -> EnvPool:
        return EnvPool(AlfworldEnv, n_envs, cfg.workers)

    return Tasks(list_games(data, "train"), list_games(data, cfg.eval_split), make_pool)


def find_data(data: str | Path) -> Path:
    """The folder json_2.1.1, which contains the splits; `data` is that folder or its parent."""
    folder = Path(os.path.expandvars(data)).expanduser()
    for candidate in (folder / "json_2.1.1", folder):
        if any((candidate / split).is_dir() for split in SPLITS):
            return candidate
    state = "has no json_2.1.1 with a split in it" if folder.is_dir() else "does not exist"
    raise FileNotFoundError(f"The ALFWorld data folder {str(folder)!r} {state}; {REMEDY}, and pass "
                            "the folder as --data or $ALFWORLD_DATA.")


def list_games(data: str | Path, split: str) -> list[str]:
    """Paths of the playable games of a split, sorted by their posix path below the split.

    Playable as in AlfredTWEnv: one of the six task types, no 'movable' or 'Sliced' in the path, and
    `solvable: true` in game.tw-pddl. The result for each game is cached with the size and the time
    of its files in json_2.1.1/.paw_min_<split>.json (in ~/.cache/paw_min if the data are
    read-only), so that a second call opens no game.
    Raises FileNotFoundError (no data, no playable game) or ValueError (broken JSON, bad split).
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; choose one of {', '.join(SPLITS)}.")
    folder = find_data(data) / split
    stamps = {}  # posix path of a trial below the split -> sizes and times of its files
    for root, _, files in os.walk(folder):
        if "traj_data.json" in files and "game.tw-pddl" in files:
            trial = Path(root).relative_to(folder).as_posix()
            if "movable" not in trial and "Sliced" not in trial:
                stats = [os.stat(os.path.join(root, f)) for f in ("traj_data.json", "game.tw-pddl")]
                stamps[trial] = [n for s in stats for n in (s.st_size, s.st_mtime_ns)]
    places = _cache_places(folder)
    known = _read_cache(places)
    new = [t for t in stamps if known.get(t, [None])[0] != stamps[t]]
    for trial in tqdm(new, f"reading {split}", unit="game", disable=len(new) < 500):
        known[trial] = [stamps[trial], _playable(folder / trial)]
    if new or len(known) != len(stamps):
        _write_cache(places, {trial: known[trial] for trial in stamps})
    games = [str(folder / trial / "game.tw-pddl") for trial in sorted(stamps) if known[trial][1]]
    if not games:
        raise FileNotFoundError(f"{folder} has {len(stamps)} games, but none of them is playable "
                                f"(of the six task types and `solvable`); {REMEDY}.")
    return games


def _playable(trial: Path) -> bool:
    # Parsing the whole game takes 0.1 ms; searching its bytes for `"solvable"` takes nine times as
    # long and would miss a truncated file.
    traj, game = _read_dict(trial / "traj_data.json"), _read_dict(trial / "game.tw-pddl")
    return traj.get("task_type") in TASK_TYPES and game.get("solvable") is True


def _read_dict(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:  # RecursionError: lists in lists in lists ...
        raise ValueError(f"{path} is broken ({error}); delete its folder or download it "
                         "again.") from error
    return content


def _cache_places(folder: Path) -> list[Path]:
    """Candidate cache files of a split, the preferred one first."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return [folder.with_name(f".paw_min_{folder.name}.json"),
            Path.home() / ".cache" / "paw_min" / f"{folder.name}-{key}.json"]


def _read_cache(places: list[Path]) -> dict:
    for place in places:
        try:
            content = json.loads(place.read_bytes())
            return {trial: [stamps, playable] for trial, (stamps, playable) in content.items()}
        # Missing or damaged: build it again.
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            continue
    return {}


def _write_cache(places: list[Path], content: dict):
    for place in places:
        partial = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(content), encoding="utf-8")
            os.replace(partial, place)
            return
        except OSError:  # not writable: try the next place; without a cache, all games are read
            partial.unlink(missing_ok=True)


class AlfworldEnv:
    """Plays one game after another; observations depend on the game and the commands only.

    Create a fixed number of these and reset them: fast-downward never frees an engine's memory.
    """

    def __init__(self):
        self.engine = engine.make_env(textworld.EnvInfos(admissible_commands=True, won=True))
        self._task = self._task_type = None  # of the running game

    def reset(self, task: str) -> Step:
        """Start a game, given the path of its game.tw-pddl.

        Raises engine.GameError (a ValueError) if the game cannot be played.
        """
        self._task = None
        self.engine.load(str(task))
        state = self.engine.reset()
        if not any(template.startswith("move ") for template in state["command_templates"]):
            raise engine.GameError(f"{task}: its grammar has no command `move X to Y` (games from "
                                   f"before alfworld 0.4 use `put X in/on Y`); {REMEDY}.")
        self._task_type = _task_type(Path(task))
        self._task = state["feedback"].partition("Your task is to: ")[2].rstrip("\n")
        return self._answer(state)

    def step(self, command: str) -> Step:
        """Execute a command; one that is not admissible changes nothing ("Nothing happens.").

        Raises RuntimeError before the first reset and after `done`: TextWorld would play on, and
        could undo the win.
        """
        if self._task is None:
            raise RuntimeError("step without a running game (none started, or already won); call "
                               "reset first.")
        answer = self._answer(self.engine.step(command)[0])
        if answer.done:
            self._task = None
        return answer

    def _answer(self, state) -> Step:
        won = bool(state["won"])
        admissible = [c for c in state["admissible_commands"] if c != "help"]
        return Step(state["feedback"], self._task, self._task_type, admissible,
                    reward=WIN_REWARD * won, done=won, won=won)


def _task_type(game: Path) -> str:
    """From the folder <task type>-<...>/<trial>/game.tw-pddl, else from traj_data.json."""
    name = game.parts[-3].partition("-")[0] if len(game.parts) > 2 else ""
    if name in TASK_TYPES:
        return name
    return _read_dict(game.with_name("traj_data.json"))["task_type"]
