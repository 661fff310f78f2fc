"""The runs of PROTOCOL.md in ScienceWorld (examples/scienceworld.py).

    python -m research.scienceworld.study run      what runs.jsonl lacks, seed by seed
    python -m research.scienceworld.study table    prints the tables

`run` resumes, in runs/scienceworld, a run that was cut.
"""

import json
import random
import re
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from examples.scienceworld import FRICTION, LIFESPAN, ScienceWorld, demonstrate, load
from paw_min.base.errors import user_errors
from paw_min.config import Config
from paw_min.model.batches import TokenRow, collate
from paw_min.model.policy import Policy, load_policy
from paw_min.toy.standins import Demonstration
from research.stats import signed, t_interval
from research.study import ROOT, play, read_lines

FOLDER = Path(__file__).parent
SEEDS = range(8)
ARMS = {
    "grpo": ["--no-paw"],
    "paw": [],
    "placebo": ["--wm-target", "shuffled"],
    "echo": ["--preset", "tiny", "echo"],
}
PAIRS = (("paw", "grpo"), ("paw", "placebo"), ("placebo", "grpo"), ("echo", "grpo"))
RUNS = FOLDER / "runs.jsonl"
OUT = ROOT / "runs" / "scienceworld"  # run folders
NUMBERS = range(1, 8)  # how far a block has come right after it was moved, in percent


def train(seed: int, arm: str) -> dict:
    """One run -> its line in runs.jsonl."""
    folder = OUT / f"{arm}-{seed}"
    start, *updates = play("scienceworld", ["--seed", str(seed), *ARMS[arm]], folder)
    end = load_policy(str(max(folder.glob("checkpoint-*"))))
    line = {"arm": arm, "seed": seed} | known(end, looks())
    for task in (FRICTION, LIFESPAN):  # at the start, and at each evaluation
        key = f"eval_success/{task}"
        line[task] = [metrics[key] for metrics in (start, *updates) if key in metrics]
    return line | {"success": [metrics["success"] for metrics in updates]}


def looks() -> list[Demonstration]:
    """A look at the plane of each surface on which a block slides, with the number in o'."""
    env, rng, found = ScienceWorld(), random.Random(0), {}
    for task in load(Config(eval_split="dev"), FRICTION).train:
        (row,) = [row for row in demonstrate(env, task, rng) if row.response.startswith("look at")]
        move = row.response.replace("look at", "move block to")
        env.reset(task)  # again: a demonstration has no true number
        *_, seen = map(env.step, ("teleport to workshop", move, row.response))
        found[row.response] = row._replace(observation=seen.observation)
    return [row for row in found.values() if "%" in row.observation]


def known(policy: Policy, rows: list[Demonstration]) -> dict[str, float]:
    """Of the number in o', as means: its probability, and whether that is the highest."""
    p, first = [], []
    for prompt, response, seen in rows:
        before, number = re.search(r"(.*approximately )(\d+)%", seen).groups()
        response_ids, begun = policy.encode_response(response), policy.encode(before)
        ends = [policy.encode(str(n)) for n in NUMBERS]
        texts = [TokenRow(policy.encode_chat(prompt), response_ids, begun + end) for end in ends]
        with torch.no_grad():
            logp, _ = policy(collate(texts, [True] * len(texts), policy.pad_id))  # (7, S)
        at = logp[:, len(response_ids) + len(begun)].exp()  # (7,)
        p.append(at[NUMBERS.index(int(number))].item())
        first.append(p[-1] == at.max().item())
    return {"p": round(mean(p), 4), "first": round(mean(first), 4)}


def read_runs() -> dict[tuple[int, str], dict]:
    return {(line["seed"], line["arm"]): line for line in read_lines(RUNS)}


def run() -> None:
    """Seed by seed, so that what there is has all arms."""
    for seed in SEEDS:
        for arm in ARMS:
            if (seed, arm) not in read_runs():
                line = json.dumps(train(seed, arm))
                with RUNS.open("a") as file:
                    file.write(line + "\n")


def measures(line: dict) -> list[float]:
    """In percent: means of the held-out evaluations after the start, and over all updates."""
    held_out = mean(line[FRICTION][1:]), mean(line[LIFESPAN][1:])
    return [100 * x for x in (*held_out, mean(line["success"]), line["p"], line["first"])]


def table() -> None:
    """By run, and the paired differences over the seeds that both arms have."""
    runs = read_runs()
    columns = "friction | lifespan | training | p | first |\n" + "|---" * 7 + "|"
    print(f"| seed | arm | {columns}")
    for (seed, arm), line in runs.items():
        print(f"| {seed} | {arm} | {' | '.join(f'{x:.1f}' for x in measures(line))} |")
    print(f"\n| difference | seeds | {columns}")
    for a, b in PAIRS:
        both = [(runs[s, a], runs[s, b]) for s in SEEDS if (s, a) in runs and (s, b) in runs]
        cells = ["not decided"] * 5  # PROTOCOL.md: by fewer than four seeds
        if len(both) >= 4:
            lists = zip(*[np.subtract(measures(x), measures(y)) for x, y in both])
            cells = [signed(mean(values), t_interval(values)) for values in lists]
        print(f"| {a} - {b} | {len(both)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    with user_errors():
        {"run": run, "table": table}[sys.argv[1]]()
