"""python -m world_models.rwml ENV --out FOLDER: see stages.py."""

from paw_min.base.errors import user_errors
from world_models.rwml.stages import main

if __name__ == "__main__":
    with user_errors():
        main()
