"""Generated data and stand-in models, so that runs need no download.

Runs that name no data or no model use `default_data` and `default_model`.
"""

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.base.files import made_once

DATA = Path("data")  # below the current folder
GENERATORS = {  # the module of each, with a function `generate`
    "alfworld": "alfworld_games", "webshop": "webshop_shops", "search": "search_world",
}


def folder_of(env: str) -> Path:
    """The data folder of a run that names none; UserError for a benchmark without a generator."""
    if env not in GENERATORS:
        raise UserError(f"{env} generates no data: give --data, or set data in its preset (to any "
                        "text if its `load` reads none).")
    return DATA / env


def default_data(env: str) -> str:
    """The same folder, generated on first use (ALFWorld: a minute)."""
    folder = folder_of(env)
    # Imported here: each generator needs its benchmark's packages, a run only those of its own.
    generator = import_module(f"paw_min.toy.{GENERATORS[env]}")
    return str(generator.generate(folder))


def default_model(env: str) -> str:
    """The folder of a benchmark's stand-in model."""
    folder = Path(__file__).parent / "weights" / env
    if not folder.is_dir():
        raise UserError(f"there is no stand-in model {env}: give one with --model.")
    return str(folder)


def generated(
    folder: Path, names: Iterable[str], manifest: dict, texts: Callable[[], dict[str, str]]
) -> Path:
    """The folder, written complete or not at all unless it is there.

    texts: makes its ASCII files, name -> text; they have the same bytes on every system. UserError
    unless the folder has these names, and in manifest.json the arguments of its generator.
    """

    def make(new: Path) -> None:
        for name, text in (texts() | {"manifest.json": json.dumps(manifest) + "\n"}).items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(text.encode("ascii"))  # text mode may change line ends

    made_once(folder, make)
    try:
        found = json.loads((folder / "manifest.json").read_text("ascii"))
        wrong = [f"{key} {found.get(key)!r:.60}, not {value!r}" for key, value in manifest.items()
                 if found.get(key) != value]
    except (OSError, ValueError, AttributeError, RecursionError):
        wrong = ["no manifest.json of generated data"]
    wrong += [f"no {name}" for name in names if not (folder / name).is_file()]
    if wrong:
        raise UserError(f"{folder} has {wrong[0]}: delete it to have the data generated again, or "
                        "choose another folder.")
    return folder
