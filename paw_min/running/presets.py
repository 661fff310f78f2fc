"""The run scripts at the root of the repository, and the presets of benchmarks."""

import runpy
from importlib import import_module
from pathlib import Path

from paw_min.base.errors import UserError

ROOT = Path(__file__).parents[2]  # has the run scripts
SCRIPTS = sorted(path.stem.removeprefix("run_") for path in ROOT.glob("run_*.py"))


def presets_of(env: str) -> dict[str, dict]:
    """The presets of a benchmark's run script.

    env: its name, or a module from outside that adds itself to BENCHMARKS (examples.scienceworld).
    """
    if "." in env:
        try:
            return import_module(env).PRESETS
        except ModuleNotFoundError as error:
            raise UserError(f"{env} is no module here: {error}.") from error
    return runpy.run_path(str(ROOT / f"run_{env}.py"))["PRESETS"]
