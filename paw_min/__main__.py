"""Check this machine before the installation: python3 -m paw_min.

Prints one sentence: what to do next, or what is missing. Needs no package.
"""

import importlib.util
import shutil
import sys

if __name__ == "__main__":
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        version = sys.version.split()[0]
        sys.exit(
            f"error: paw_min needs Python 3.11, 3.12 or 3.13; this is {version}: use python3.12."
        )
    found = "ALFWorld is installed: next, python -m examples.hidden"
    # ALFWorld's planner has no wheel, so pip compiles it. Where ALFWorld is installed, so is that.
    if importlib.util.find_spec("alfworld") is None:
        missing = [name for name in ("c++", "make") if not shutil.which(name)]
        if missing:
            sys.exit(
                f"error: the installation compiles ALFWorld's planner, and there is no "
                f"{' and no '.join(missing)}: run apt-get install g++ make."
            )
        found = "a compiler is here: next, pip install -r requirements.txt"
    print(f"Python {sys.version.split()[0]} will do, and {found}")
