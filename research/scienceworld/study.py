"""The runs of PROTOCOL.md in ScienceWorld (examples/scienceworld.py).

    python -m research.scienceworld.study run      what runs.jsonl lacks, seed by seed
    python -m research.scienceworld.study table    prints the tables

`run` resumes, in runs/scienceworld, a run that was cut.
"""

import random
import re
from pathlib import Path
from statistics import mean

import torch

from examples.scienceworld import FRICTION, LIFESPAN, ScienceWorld, demonstrate, load
from paw_min.config import Config
from paw_min.model.batches import TokenRow, collate
from paw_min.model.policy import Policy, load_policy
from paw_min.toy.standins import Demonstration
from research import study

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
OUT = study.ROOT / "runs" / "scienceworld"  # run folders
NUMBERS = range(1, 8)  # how far a block has come right after it was moved, in percent


def train(job: tuple[str, int]) -> dict:
    """One run -> its line in runs.jsonl."""
    arm, seed = job
    folder = OUT / f"{arm}-{seed}"
    flags = ["--seed", str(seed), *ARMS[arm]]
    start, *updates = study.play("examples.scienceworld", flags, folder)
    end = load_policy(str(max(folder.glob("checkpoint-*"))))
    line = {"arm": arm, "seed": seed} | known(end, looks())
    for task in (FRICTION, LIFESPAN):  # The first value is that of the start model.
        key = f"eval_success/{task}"
        line[task] = [metrics[key] for metrics in (start, *updates) if key in metrics]
    return line | {"success": [metrics["success"] for metrics in updates]}


def looks() -> list[Demonstration]:
    """A look at the plane of each surface on which a block slides, with the number in o'."""
    env, rng, found = ScienceWorld(), random.Random(0), {}
    for task in load(Config(eval_split="dev"), FRICTION).train:
        (row,) = [row for row in demonstrate(env, task, rng) if row.response.startswith("look at")]
        move = row.response.replace("look at", "move block to")
        env.reset(task)  # A demonstration has no true number.
        *_, seen = map(env.step, ("teleport to workshop", move, row.response))
        found[row.response] = row._replace(observation=seen.observation)
    return [row for row in found.values() if "%" in row.observation]


def known(policy: Policy, rows: list[Demonstration]) -> dict[str, float]:
    """Means for the number in o': its probability, and whether that is the highest."""
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


MEASURES = {
    "friction": lambda run: 100 * mean(run[FRICTION][1:]),  # held out, evaluations after the start
    "lifespan": lambda run: 100 * mean(run[LIFESPAN][1:]),
    "training": study.training_area,
    "p": lambda run: 100 * run["p"],
    "first": lambda run: 100 * run["first"],
}


def tables(runs: study.Runs) -> list[str]:
    """All runs, and paired differences, by which PROTOCOL.md decides with four seeds."""
    by_run = [
        [seed, arm, *(f"{measure(run):.1f}" for measure in MEASURES.values())]
        for (arm, seed), run in runs.items()
    ]
    pairs = [
        [f"{a} - {b}", len(study.seeds_of(runs, a, b)),
         *(study.difference(runs, a, b, measure, 4) for measure in MEASURES.values())]
        for a, b in PAIRS
    ]  # fmt: skip
    return [
        study.markdown_table(["seed", "arm", *MEASURES], by_run),
        study.markdown_table(["difference", "seeds", *MEASURES], pairs),
    ]


if __name__ == "__main__":
    # Seed by seed, so that the file has all arms of its seeds.
    jobs = [(arm, seed) for seed in SEEDS for arm in ARMS]
    study.command(
        __doc__, RUNS, jobs, train, lambda: print("\n\n".join(tables(study.read_runs(RUNS))))
    )
