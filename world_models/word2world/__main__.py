"""python -m world_models.word2world COMMAND ENV --out FOLDER: see commands.py."""

from paw_min.base.errors import user_errors
from world_models.word2world.commands import main

if __name__ == "__main__":
    with user_errors():
        main()
