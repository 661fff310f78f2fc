"""The paper's tables and figures: sweeps of the run scripts, tables, figures, analyses of rollouts.

Nothing in the core imports this folder.
"""

from paw_min.running.presets import SCRIPTS, presets_of  # noqa: F401 - for comparison.py
