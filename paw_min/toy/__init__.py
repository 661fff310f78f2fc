"""What exists because no weights and no data can be downloaded: invented data, teachers, stand-ins.

`default_data` and `default_model` are all that the rest of the project uses, for runs that name no
data or no model.
"""

import os
from pathlib import Path
from typing import NamedTuple

DATA = Path("data")  # below the current folder


class Demonstration(NamedTuple):
    """One step of a teacher's episode, as text: a row of the warm start."""

    prompt: str
    response: str
    observation: str  # what followed in the environment


def default_data(env: str, world: str = "home") -> str:
    """The data folder of a run without --data; generated on first use (ALFWorld: a minute).

    ALFWorld's own variable, $ALFWORLD_DATA, is used where it is set, unless world is "changed".
    """
    if env == "alfworld":
        if world == "home" and (folder := os.environ.get("ALFWORLD_DATA")):
            return folder
        from paw_min.toy import alfworld_games

        name = "alfworld" if world == "home" else f"alfworld-{world}"
        return str(alfworld_games.default(DATA / name, world))
    if env == "webshop":
        from paw_min.toy import webshop_shops

        return str(webshop_shops.default(DATA / "webshop"))
    if env == "search":
        from paw_min.toy import search_world

        return str(search_world.default(DATA / "search"))
    raise ValueError(f"there are no generated data for {env}: pass --data")


def default_model(name: str) -> str:
    """The folder of a stand-in model (see standins.py): a benchmark's, or sparse."""
    return str(Path(__file__).parent / "weights" / name)
