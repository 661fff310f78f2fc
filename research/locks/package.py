"""The world of locks in the package: examples/locks.py, with its KL term.

    python -m research.locks.package run      trains what package.jsonl does not have yet
    python -m research.locks.package table    prints the table

A run is trained in parts of 25 updates. After each, success is computed exactly from the
probabilities of the policy that the run has saved, as in one_file.py.
"""

import shutil
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import torch

from examples import locks
from examples.one_file import TOOLS, World, make_world
from paw_min.base.files import made_once
from paw_min.config import METHOD_PRESETS, Config
from paw_min.model.batches import collate
from paw_min.model.policy import Policy, load_policy
from paw_min.rows import TokenRow
from paw_min.running.runs import newest_checkpoint
from paw_min.train import train
from research import study

RUNS = Path(__file__).parent / "package.jsonl"
SCRATCH = Path("runs/locks-package")  # start models and run folders
SEEDS = range(3000, 3016)
ARMS = {"grpo": dict(paw=False), "paw": {}, "placebo": dict(wm_target="shuffled")} | METHOD_PRESETS


@torch.no_grad()
def measure(policy: Policy, world: World) -> dict[str, float]:
    """Success, well-formed responses and p(material), as probabilities, without sampling."""
    names = list(world.material_of)
    rows, places = [], []
    for name in names:
        (material,) = policy.encode(world.material_of[name])
        for tool in TOOLS:
            said = policy.encode(" ".join(world.observation(name, tool)))
            response = policy.encode_response(tool)
            chat = policy.encode_chat(" ".join(world.prompt(name)))
            rows.append(TokenRow(chat, response, said))
            places.append(len(response) + said.index(material))
    batch = collate(rows, [True] * len(rows), policy.pad_id)
    logp, _ = policy(batch)  # (B, S), B: names times tools
    p = (logp * batch.response_mask).sum(1).exp().view(len(names), -1)  # (names, tools)
    right = [TOOLS.index(world.right_tool(name)) for name in names]
    p_right = p[torch.arange(len(names)), right].mean().item()
    p_material = logp[torch.arange(len(rows)), places].exp().mean().item()
    return {"success": p_right**world.locks, "valid": p.sum(1).mean().item(),
            "material": p_material}


def train_arm(job: tuple[str, int]) -> dict:
    """One run -> its line in package.jsonl."""
    arm, seed = job
    torch.set_num_threads(1)
    preset = locks.PRESETS["tiny"]
    start = SCRATCH / f"start {seed}"
    made_once(start, partial(locks.warm_start, seed=seed))  # The arms of a seed share it.
    folder = SCRATCH / f"{arm} {seed}"
    shutil.rmtree(folder, ignore_errors=True)  # A killed command left it.
    curve = []
    for updates in range(0, preset["updates"] + 1, preset["eval_every"]):
        settings = preset | ARMS[arm] | dict(
            env="locks", name=folder.name, out=str(SCRATCH), model=str(start), seed=seed,
            updates=updates, eval_every=0, eval_tasks=1,
        )
        if updates:
            with redirect_stdout(StringIO()):
                train(Config(**settings))
        policy = load_policy(str(newest_checkpoint(folder) if updates else start))
        curve.append({"update": updates} | measure(policy, make_world(seed)))
    return {"arm": arm, "seed": seed} | study.columns(curve)


def table() -> str:
    """Each arm, and its differences to GRPO and PaW; one that lacks a seed counts as not run."""
    runs = study.complete(study.read_runs(RUNS), SEEDS)
    lines = []
    for arm in ARMS:
        cells = []
        for measure in (study.area, study.end):
            cells.append(study.level(runs, arm, measure))
            for base in ("grpo", "paw"):
                cells.append(study.difference(runs, arm, base, measure))
        lines.append([arm, *cells])
    header = ["arm", "mean of the curve", "minus GRPO", "minus PaW"]
    header += ["at the end", "end minus GRPO", "end minus PaW"]
    return study.markdown_table(header, lines)


if __name__ == "__main__":
    jobs = [(arm, seed) for seed in SEEDS for arm in ARMS]
    study.command(__doc__, RUNS, jobs, train_arm, lambda: print(table()))
