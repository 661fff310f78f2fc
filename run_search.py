"""PaW on search-augmented question answering.

    python run_search.py                                    a stand-in model on a CPU, a few minutes
    python run_search.py --algo gigpo --no-paw --seed 1     the GiGPO baseline, another seed
    python run_search.py --preset paper --model Qwen/Qwen2.5-3B-Instruct --data DIR --retriever URL

DIR holds the published train.parquet (NQ, HotpotQA) and test.parquet (seven sets), URL is a server
with Search-R1's protocol, theirs or ours (paw_min.retrieval.server). `--dry-run` checks all of them
and prints the plan. Rerun the same command to resume. Results: runs/<name>/, with plots.
"""

from paw_min.cli import main
from paw_min.envs.search.presets import PRESETS

if __name__ == "__main__":
    main("search", PRESETS, __doc__)
