"""Check this machine before the installation: python3 -m paw_min.

Says in one sentence what is missing, or that nothing is. Needs no package.
"""

import importlib.util
import shutil
import sys

REMEDY = "apt-get install -y git python3-venv g++ make"


def missing() -> str:
    """What keeps the packages from being installed, with its remedy; "" if nothing does."""
    version = sys.version.split()[0]
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return f"paw_min needs Python 3.11, 3.12 or 3.13; this is {version}: use python3.12."
    parts = []
    # Debian has the module venv without what installs pip.
    if importlib.util.find_spec("ensurepip") is None:
        parts.append("no module ensurepip, which makes environments")
    # ALFWorld's planner has no wheel, so pip compiles it. Where ALFWorld is installed, so is that.
    if importlib.util.find_spec("alfworld") is None:
        found = [name for name in ("c++", "make") if not shutil.which(name)]
        if found:
            parts.append(f"no {' and no '.join(found)}, which compile ALFWorld's planner")
    return f"there is {' and '.join(parts)}: run {REMEDY}." if parts else ""


if __name__ == "__main__":
    if text := missing():
        sys.exit(f"error: {text}")
    print(f"Python {sys.version.split()[0]} and a compiler are here: next, bash run.sh")
