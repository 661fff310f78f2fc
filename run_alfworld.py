"""PaW on ALFWorld.

    python run_alfworld.py                                  a stand-in model on a CPU, a few minutes
    python run_alfworld.py --algo gigpo --no-paw --seed 1   the GiGPO baseline, another seed
    python run_alfworld.py --preset paper --model Qwen/Qwen2.5-1.5B-Instruct --data DIR

Rerun the same command to resume. Results: runs/<name>/, with plots.
"""

from paw_min.cli import main
from paw_min.envs.alfworld.presets import PRESETS

if __name__ == "__main__":
    main("alfworld", PRESETS, __doc__)
