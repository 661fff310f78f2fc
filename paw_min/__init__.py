"""PaW: policy and world-model co-training for language agents (arXiv 2606.02388)."""

import importlib.util
import os
import shutil
import sys

# Before anything is loaded, and, with the README's commands, before anything is installed.
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    version = sys.version.split()[0]
    sys.exit(f"error: paw_min needs Python 3.11, 3.12 or 3.13; this is {version}: use python3.12.")
# ALFWorld's planner has no wheel. Where torch is installed, the equation files work without it.
if importlib.util.find_spec("torch") is None:
    missing = [name for name in ("c++", "make") if not shutil.which(name)]
    if missing:
        sys.exit(
            f"error: the installation compiles ALFWorld's planner, and there is no "
            f"{' and no '.join(missing)}: run apt-get install g++ make."
        )

# Must be set before torch is imported. OpenMP threads spin while they wait by default, which makes
# torch 10 to 30 times slower as soon as the cores have anything else to do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
