"""What does it bring to compute each prompt once?

    python bench/repeats.py [--out bench/results/repeats.json]

Members of a group share their first prompt, and later ones repeat where agents do the same; an
update lays such rows out as one sequence (batches.find_families). Rows of the first rollout of each
tiny preset, with its stand-in; of their forward tokens (prompt and response),

    all_rows        are in prompts that occurred before, counting all rows (the old pass)
    mini_batches    ... within random mini-batches of the preset's size (the training passes)
    first_prompts   ... counting the first turns only

and CPU seconds of one whole update with and without sharing, in turn, twice, the least of each.
Stand-ins say three words, and so repeat themselves more than a language model that reasons at
temperature 1. What is sure there is the share of the first prompts. About three minutes.
"""

import argparse
import importlib
import json
import os
import platform
import random
import sys
from pathlib import Path
from time import process_time

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.chdir(ROOT)

import torch
import transformers

from paw_min.config import Config
from paw_min.model import batches
from paw_min.model.policy import load_policy
from paw_min.model.sampler import HFSampler
from paw_min.rollout import rollout
from paw_min.tasks import draw_groups
from paw_min.toy.standins import STANDINS
from paw_min.train import find_tasks
from paw_min.update import update


def play(env: str) -> tuple[Config, list]:
    cfg = Config(**importlib.import_module(f"run_{env}").PRESETS["tiny"])
    make_pool, train_tasks, _ = find_tasks(cfg)
    policy, sampler = load_policy(str(STANDINS / env)), HFSampler()
    tasks = [t for t in draw_groups(train_tasks, cfg.groups, 0, 0) for _ in range(cfg.group_size)]
    groups = [g for g in range(cfg.groups) for _ in range(cfg.group_size)]
    with make_pool(len(tasks)) as pool, sampler.sync(policy):
        episodes, _ = rollout(
            cfg, policy, sampler, pool, tasks, groups, temperature=1.0, seed=(0, 1)
        )
    return cfg, episodes


def repeated(rows: list) -> int:
    """Tokens of prompts that stand in an earlier row already."""
    seen, tokens = set(), 0
    for row in rows:
        prompt = tuple(row.prompt_ids)
        tokens += len(prompt) if prompt in seen else 0
        seen.add(prompt)
    return tokens


def count(env: str) -> dict:
    cfg, episodes = play(env)
    rows = [row for e in episodes for row in e.transitions]
    total = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    order = random.Random(0).sample(rows, len(rows))
    n_mini = -(-len(rows) // cfg.mini_batch)
    cuts = [k * len(rows) // n_mini for k in range(n_mini + 1)]
    minis = sum(repeated(order[a:b]) for a, b in zip(cuts, cuts[1:]))
    percent = {
        "all_rows": 100 * repeated(rows) / total,
        "mini_batches": 100 * minis / total,
        "first_prompts": 100 * repeated([row for row in rows if row.turn == 0]) / total,
    }
    apart, shared = cpu_seconds(env, cfg, episodes)
    return {
        "rows": len(rows),
        "percent": {k: round(v, 1) for k, v in percent.items()},
        "cpu_s": {"apart": round(apart, 1), "shared": round(shared, 1)},
        "ratio": round(apart / shared, 2),
    }


def cpu_seconds(env: str, cfg: Config, episodes: list) -> list[float]:
    """Of one update, every row with a prompt of its own, and shared: the least of two each."""
    shared, times = batches.find_families, {False: [], True: []}
    for _ in range(2):
        for share in times:
            batches.find_families = shared if share else alone
            policy = load_policy(str(STANDINS / env))
            policy.train()
            optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
            start = process_time()
            update(cfg, policy, None, optimizer, episodes, (0, 1))
            times[share].append(process_time() - start)
    batches.find_families = shared
    return [min(seconds) for seconds in times.values()]


def alone(prompts: list, tails: list, budget: int) -> list[list[int]]:
    return [[i] for i in range(len(prompts))]


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
