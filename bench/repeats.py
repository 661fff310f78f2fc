"""How much of an update would be saved by computing each prompt once?

    python bench/repeats.py [--out bench/results/repeats.json]

Members of a group share their first prompt, and later ones repeat where agents do the same. Rows of
the first rollout of each tiny preset, with its stand-in, are searched for whole prompts that occur
again: among all rows, as in the pass for old log-probs, and within the update's own random
mini-batches. Counted are forward tokens (prompt and response); an update is one pass over all rows
and three passes' worth over the mini-batches (forward, and twice that backward).

Nothing of this is built: it would take attention masks of its own for each batch, and stand-ins, who
say three words, repeat themselves far more than a language model that reasons at temperature 1. What
is left for such a model is mostly the first prompts: `first_prompts` is the share that they have.
"""

import argparse
import importlib
import json
import os
import platform
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.chdir(ROOT)

import torch
import transformers

from paw_min.config import Config
from paw_min.policy import load_policy
from paw_min.rollout import rollout
from paw_min.sampler import HFSampler
from paw_min.tasks import draw_groups
from paw_min.tiny import STANDINS
from paw_min.train import find_tasks


def rows_of(env: str) -> tuple[Config, list]:
    cfg = Config(**importlib.import_module(f"run_{env}").PRESETS["tiny"])
    make_pool, train_tasks, _ = find_tasks(cfg)
    policy, sampler = load_policy(str(STANDINS / env)), HFSampler()
    tasks = [t for t in draw_groups(train_tasks, cfg.groups, 0, 0) for _ in range(cfg.group_size)]
    groups = [g for g in range(cfg.groups) for _ in range(cfg.group_size)]
    with make_pool(len(tasks)) as pool, sampler.sync(policy):
        episodes, _ = rollout(
            cfg, policy, sampler, pool, tasks, groups, temperature=1.0, seed=(0, 1)
        )
    return cfg, [row for e in episodes for row in e.transitions]


def repeated(rows: list) -> int:
    """Tokens of prompts that stand in an earlier row already."""
    seen, tokens = set(), 0
    for row in rows:
        prompt = tuple(row.prompt_ids)
        tokens += len(prompt) if prompt in seen else 0
        seen.add(prompt)
    return tokens


def count(env: str) -> dict:
    cfg, rows = rows_of(env)
    total = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    order = random.Random(0).sample(rows, len(rows))
    n_mini = -(-len(rows) // cfg.mini_batch)
    cuts = [k * len(rows) // n_mini for k in range(n_mini + 1)]
    minis = sum(repeated(order[a:b]) for a, b in zip(cuts, cuts[1:]))
    percent = {
        "all_rows": 100 * repeated(rows) / total,
        "mini_batches": 100 * minis / total,
        "update": 100 * (repeated(rows) + 3 * minis) / (4 * total),
        "first_prompts": 100 * repeated([row for row in rows if row.turn == 0]) / total,
    }
    return {"rows": len(rows), "percent": {k: round(v, 1) for k, v in percent.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="bench/results/repeats.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {"command": "python bench/repeats.py"}
    report |= {env: count(env) for env in ("alfworld", "webshop", "search")}
    report["versions"] = {"python": platform.python_version(), "torch": torch.__version__,
                          "transformers": transformers.__version__}  # fmt: skip
    for name, value in report.items():
        print(f"{name:12}{value}")
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    main()
