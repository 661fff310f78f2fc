"""PaW on WebShop.

    python run_webshop.py                                   a stand-in model on a CPU, a few minutes
    python run_webshop.py --algo gigpo --no-paw --seed 1    the GiGPO baseline, another seed
    python run_webshop.py --preset paper --model Qwen/Qwen2.5-1.5B-Instruct --data DIR

DIR holds the official items_shuffle*.json, items_ins_v2*.json and, for --human-goals,
items_human_ins.json. Rerun the same command to resume. Results: runs/<name>/, with plots.
"""

from paw_min.cli import main
from paw_min.envs.webshop.presets import PRESETS

if __name__ == "__main__":
    main("webshop", PRESETS, __doc__)
