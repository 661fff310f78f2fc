"""The paper's tables and figures: sweeps of the run scripts, tables, figures, analyses of rollouts.

Nothing in the core imports this folder.
"""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]  # has the run scripts


def presets_of(env: str) -> dict[str, dict]:
    """The presets of a benchmark's run script."""
    return runpy.run_path(str(ROOT / f"run_{env}.py"))["PRESETS"]
