"""ALFWorld: where the games are, and playing one.

What it computes: the list of playable games of a split, and `AlfworldEnv`, which plays one game
after another.

Source: `AlfredTWEnv` of alfworld 0.4.2 (which games count, the wrappers) and verl-agent (reward 10
for winning; the observation is TextWorld's text as it is, "-= Welcome to TextWorld, ALFRED! =-"
included; the task is what follows "Your task is to: "; `help` is not offered). Deviations, each
because the stock way cannot be repeated or fails without a word:

- Games are listed in sorted order; stock takes the order of the file system.
- Stock reads two files per game at every start. Here, what was found in them is kept in a small
  file and is read again only where the size or time of a game's files has changed.
- A broken file, an unknown folder or an empty list is an error in one sentence; stock hangs forever
  on an empty list.
- No limit of steps: that belongs to the rollout. `done` means won.
"""

import hashlib
import json
import os
from pathlib import Path

import textworld
from tqdm import tqdm

from paw_min.envs import engine, games
from paw_min.envs.pool import EnvPool

SPLITS = ("train", "valid_seen", "valid_unseen")  # as the folders are called
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
GENERATED = {"train": 400, "valid_seen": 60, "valid_unseen": 60}  # games made by default
WIN_REWARD = 10.0  # verl-agent; in the step that wins, else 0
REMEDY = ("get the games with `alfworld-download`, or make small ones with "
          "`python -m paw_min.envs.games`")


def find_data(data: str | Path | None = None) -> Path:
    """The folder json_2.1.1, which holds the splits.

    data: that folder or the one around it; None: $ALFWORLD_DATA. Raises FileNotFoundError.
    """
    source = "data"
    if data is None:
        data, source = os.environ.get("ALFWORLD_DATA"), "$ALFWORLD_DATA"
        if not data:
            raise FileNotFoundError(f"No ALFWorld data: neither data nor $ALFWORLD_DATA is set; "
                                    f"{REMEDY}, and name the folder.")
    folder = Path(os.path.expandvars(data)).expanduser()
    for candidate in (folder / "json_2.1.1", folder):
        if any((candidate / split).is_dir() for split in SPLITS):
            return candidate
    state = "has no json_2.1.1 with a split in it" if folder.is_dir() else "is not a folder"
    raise FileNotFoundError(f"{source} is {str(folder)!r}, which {state}; {REMEDY}.")


def list_games(data: str | Path | None, split: str) -> list[str]:
    """Paths of the playable games of a split, sorted by their posix path below the split.

    Playable as in AlfredTWEnv: one of the six task types, nothing 'movable' or 'Sliced', with a
    game.tw-pddl that says `solvable: true`. The verdict on each game is kept in
    json_2.1.1/.paw_min_<split>.json (in ~/.cache/paw_min where that cannot be written) with size
    and time of its files, so that a second call opens no game: it only looks at the folders.
    Raises FileNotFoundError (no such data, no playable game) and ValueError (broken JSON, split).
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; choose one of {', '.join(SPLITS)}.")
    folder = find_data(data) / split
    stamps = {}  # posix path of a trial below the split -> size and time of its files
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
        raise FileNotFoundError(f"{folder} holds {len(stamps)} games and none of them is playable "
                                f"(six task types, `solvable`); {REMEDY}.")
    return games


def _playable(trial: Path) -> bool:
    # Parsing all of a game takes 0.1 ms; a search for `"solvable"` in its bytes takes nine times as
    # long and would not notice a file that breaks off.
    content = []
    for path in (trial / "traj_data.json", trial / "game.tw-pddl"):
        try:
            content.append(json.loads(path.read_bytes()))
        except ValueError as error:  # JSONDecodeError, UnicodeDecodeError: neither names the file
            raise ValueError(f"{path} is broken ({error}); delete its folder or get it "
                             f"again.") from error
    traj, game = content
    return traj.get("task_type") in TASK_TYPES and game.get("solvable") is True


def _cache_places(folder: Path) -> list[Path]:
    """Where the verdicts of a split may be kept, best place first."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return [folder.with_name(f".paw_min_{folder.name}.json"),
            Path.home() / ".cache" / "paw_min" / f"{folder.name}-{key}.json"]


def _read_cache(places: list[Path]) -> dict:
    for place in places:
        try:
            return dict(json.loads(place.read_bytes()))
        except (OSError, ValueError, TypeError):  # absent or damaged: it is made again
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
        except OSError:  # read-only data: the next place; nowhere: the next start reads all again
            partial.unlink(missing_ok=True)


def generated_data(root: Path = Path("data") / "alfworld") -> Path:
    """The default data: small games in the published layout, made on first use (a minute)."""
    for split, n in GENERATED.items():
        games.generate(root, split, n, seed=0, progress=True)
    return root


def setup(cfg) -> tuple:
    """(make_pool, games of the training split, games of the held-out split) of a run."""
    data = cfg.data or os.environ.get("ALFWORLD_DATA") or generated_data()
    train, held_out = list_games(data, cfg.train_split), list_games(data, cfg.eval_split)
    return lambda n: EnvPool(AlfworldEnv, n, cfg.workers, cfg.env_timeout), train, held_out


class AlfworldEnv:
    """One seat to play at: any number of games, one after another.

    Keep a fixed number of these and reset them: fast-downward never frees an engine's memory.
    Text and admissible commands depend on the game and the actions alone.
    """

    def __init__(self):
        self.engine = engine.make_env(textworld.EnvInfos(admissible_commands=True, won=True))
        self.info = None  # of the game being played

    def reset(self, game: str) -> tuple[str, dict]:
        """Start a game (path of a game.tw-pddl); returns (observation, info).

        info: admissible (list[str], without `help`), won (bool), task (str), task_type (str), game.
        Raises engine.GameError (a ValueError) for a game that cannot be played.
        """
        self.info = None
        self.engine.load(str(game))
        state = self.engine.reset()
        if not any(template.startswith("move ") for template in state["command_templates"]):
            raise engine.GameError(f"{game}: its grammar has no command `move X to Y` (games from "
                                   f"before alfworld 0.4 say `put X in/on Y`); {REMEDY}.")
        task = state["feedback"].partition("Your task is to: ")[2].rstrip("\n")
        self.info = {"task": task, "task_type": _task_type(Path(game)), "game": str(game)}
        return state["feedback"], self._info(state)

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Give a command; returns (observation, reward, done, info), info as in `reset`.

        A command that is not admissible changes nothing ("Nothing happens."). Raises RuntimeError
        before the first reset and after `done`: stock would play on and could undo the win.
        """
        if self.info is None:
            raise RuntimeError("step without a running game (none started, or already won); call "
                               "reset first.")
        state, _, _ = self.engine.step(action)
        info = self._info(state)
        if info["won"]:
            self.info = None
        return state["feedback"], WIN_REWARD * info["won"], info["won"], info

    def _info(self, state) -> dict:
        admissible = [c for c in state["admissible_commands"] if c != "help"]
        return {**self.info, "admissible": admissible, "won": bool(state["won"])}


def _task_type(game: Path) -> str:
    """From the folder <task type>-<...>/<trial>/game.tw-pddl, else from traj_data.json."""
    name = game.parts[-3].partition("-")[0] if len(game.parts) > 2 else ""
    if name in TASK_TYPES:
        return name
    return json.loads(game.with_name("traj_data.json").read_bytes())["task_type"]
