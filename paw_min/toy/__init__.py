"""Invented data and stand-in models, so that runs need no download.

Runs that name no data or no model use `default_data` and `default_model`. The data have the formats
of the published files:

- WebShop (data/webshop): 100 products of twenty kinds, with 1,250 synthetic goals. The title names
  every attribute that an instruction asks for, but only the product's own page shows the options.
  As on WebShop's pages, asins and the upper-case brands say nothing about the product; they are the
  noise of PaW A.4. One product in nine has an irregularity of the official data.
- Search (data/search): 3,000 passages on invented people and places, and questions that take one
  fact (`single`) or two (`two_hop`). No fact behind a test question is behind a training question.
- ALFWorld: 580 games, generated on first use (alfworld_games.py).

The vocabularies are small enough for a word-level language model of a million parameters.
"""

from pathlib import Path

from paw_min.base.errors import UserError

DATA = Path("data")  # generated data, below the current folder
STORED = Path(__file__).parent / "data"


def folder_of(env: str) -> Path:
    """The data folder of a run that names none; UserError for a benchmark without one."""
    if env == "alfworld":
        return DATA / env
    if not (STORED / env).is_dir():
        raise UserError(f"{env} has no data of its own: give --data, or set data in its preset (to "
                        "any text if its `load` reads none).")
    return STORED / env


def default_data(env: str) -> str:
    """The same folder; ALFWorld's is generated on first use (a minute)."""
    folder = folder_of(env)
    if env == "alfworld":
        # Imported here: only runs of ALFWorld need its packages.
        from paw_min.toy import alfworld_games

        alfworld_games.generate(folder)
    return str(folder)


def default_model(env: str) -> str:
    """The folder of a benchmark's stand-in model."""
    folder = Path(__file__).parent / "weights" / env
    if not folder.is_dir():
        raise UserError(f"there is no stand-in model {env}: give one with --model.")
    return str(folder)
