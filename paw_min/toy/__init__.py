"""Invented data and stand-in models, so that runs need no download.

Runs that name no data or no model use `default_data` and `default_model`. The data have the formats
of the published files:

- WebShop (data/webshop): 100 products of twenty kinds, with 1,250 synthetic goals. The title names
  every attribute that an instruction asks for, but only the product's own page shows the options.
  As on WebShop's pages, asins and the upper-case brands say nothing about the product; they are the
  noise of PaW A.4. One product in nine has an irregularity of the official data.
- Search (data/search): 3,000 passages on invented people and places, and questions that take one
  fact (`single`) or two (`two_hop`). No fact behind a test question is behind a training question.
- ALFWorld (data/alfworld): 580 games with ALFWorld's domain, grammar and goals, in invented rooms
  of 6 to 8 receptacles and 5 to 7 objects. valid_unseen has own scenes; train and valid_seen
  share scenes, but no goal in a scene. Each game has commands that win it.

The vocabularies are small enough for a word-level language model of a million parameters.
"""

import tarfile
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.base.files import made_once

DATA = Path("data")  # what is made on first use, below the current folder
STORED = Path(__file__).parent / "data"
GAMES = STORED / "alfworld" / "games.tar.xz"


def default_data(env: str) -> str:
    """The data folder of a run that names none; UserError for a benchmark without one.

    ALFWorld's games are unpacked on first use (25 MB, a second).
    """
    folder = STORED / env
    if not folder.is_dir():
        raise UserError(f"{env} has no data of its own: give --data, or set data in its preset (to "
                        "any text if its `load` reads none).")
    if env == "alfworld":
        folder = DATA / env
        made_once(folder, unpack_games)
    return str(folder)


def unpack_games(folder: Path) -> None:
    with tarfile.open(GAMES) as archive:
        # Python before 3.11.4, as in Debian 12, has no filters, and does not look for this one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def default_model(env: str) -> str:
    """The folder of a benchmark's stand-in model."""
    folder = Path(__file__).parent / "weights" / env
    if not folder.is_dir():
        raise UserError(f"there is no stand-in model {env}: give one with --model.")
    return str(folder)
