"""examples/locks.py with one difference from examples/one_file.py at a time: package.md.

    python research/locks/package.py run [--workers 2]   trains what package.jsonl does not have yet
    python research/locks/package.py table               the tables of package.md

A cell is the example with other settings, responses, observations or another model; its arms are
GRPO, PaW and the placebo. Nothing of the package changes: a cell replaces functions of the example.
Success is computed exactly from the policy's probabilities, as in one_file.
"""

import argparse
import json
import multiprocessing
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent.parent))  # the repository, for examples and paw_min

from examples import locks, one_file  # noqa: E402
from examples.one_file import TOOLS, World, make_world  # noqa: E402
from paw_min import train  # noqa: E402
from paw_min.config import Config  # noqa: E402
from paw_min.envs.benchmarks import BENCHMARKS  # noqa: E402
from paw_min.envs.interface import Command  # noqa: E402
from paw_min.model.batches import collate  # noqa: E402
from paw_min.model.policy import Policy  # noqa: E402
from paw_min.rows import TokenRow  # noqa: E402
from paw_min.toy import standins  # noqa: E402

RUNS = FOLDER / "package.jsonl"
SCRATCH = Path("runs/locks-package")  # start models and run folders
ARMS = {"grpo": dict(paw=False), "paw": {}, "placebo": dict(wm_target="shuffled")}


# ---- other responses, observations and models ----


def tagged(tool: str) -> str:
    return f"<action>{tool}</action>"


def parse_tagged(response: str) -> Command:
    """Three tokens besides the end, as in the benchmarks."""
    found = re.fullmatch(r"<action>\s*(\w+)\s*</action>", response.strip())
    tool = found[1] if found else response[-20:]
    return Command(tool, valid=tool in TOOLS)


class Sentence(World):
    """Observations with the words of a template around the two facts."""

    def observation(self, name: str, tool: str) -> list[str]:
        opens, material = super().observation(name, tool)
        return ["it", "opens" if opens == "opens" else "stays shut", ":", material, "."]


def without_end(policy: Policy, text: str) -> list[int]:
    """For Policy.encode_response: a response of one token, the tool."""
    return policy.encode(text)


def make_standin(tokenizer, seed: int):
    """The stand-ins' model, as small: Qwen3 with 4 layers, tied embeddings, all weights at 0.02."""
    return standins.make_model(tokenizer, seed, width=64, positions=64)


@dataclass(frozen=True)
class Cell:
    """The example with other settings; its start model is another one if `start` differs."""

    start: str = "end"
    settings: dict = field(default_factory=dict)
    tags: bool = False
    end: bool = True
    world: type[World] = World
    model: Callable = locks.make_model

    def make_world(self, seed: int) -> World:
        world = make_world(seed)
        return self.world(world.material_of, world.tool_of, world.locks)


TAGS = dict(max_response_tokens=4)
SENTENCE = dict(max_obs_tokens=6)
CELLS = {
    "one token": Cell("one token", dict(max_response_tokens=1), end=False),
    "end": Cell(),
}


# ---- a run ----


@torch.no_grad()
def measure(policy: Policy, world: World) -> dict[str, float]:
    """Success, well-formed responses and p(material), as probabilities, without sampling."""
    names = list(world.material_of)
    rows, places = [], []
    for name in names:
        (material,) = policy.encode(world.material_of[name])
        for tool in TOOLS:
            said = policy.encode(" ".join(world.observation(name, tool)))
            response = policy.encode_response(locks.respond(tool))
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
            "material": p_material}  # fmt: skip


KEPT = ("entropy", "grad_norm", "wm_loss", "wm_clipped_tokens", "approx_kl", "no_variance")


def run_package(cell: Cell, arm: str, seed: int, updates: int, out: Path) -> list[dict]:
    """One run of paw_min.train -> its evaluations."""
    curve = []
    recent = []  # metrics of the updates since the last evaluation

    def play_panel(cfg, session, done):
        point = {"update": done} | measure(session.policy, cell.make_world(seed))
        for name in KEPT:
            values = [line[name] for line in recent if name in line]
            if values:
                point[name] = mean(values)
        recent.clear()
        curve.append({key: float(f"{value:.5g}") for key, value in point.items()})
        return {"eval_success": point["success"]}

    usual_update = train.run_update

    def run_update(*args):
        recent.append(usual_update(*args))
        return recent[-1]

    with ExitStack() as replaced:

        def instead(owner, name, value):
            replaced.enter_context(patch.object(owner, name, value))

        instead(locks, "make_world", cell.make_world)
        instead(locks, "make_model", cell.model)
        if cell.tags:
            instead(locks, "respond", tagged)
            usual = BENCHMARKS["locks"]
            replaced.enter_context(
                patch.dict(BENCHMARKS, {"locks": replace(usual, parse=parse_tagged)})
            )
        if not cell.end:
            instead(Policy, "encode_response", without_end)
        start = SCRATCH / f"start {cell.start} {seed}"
        if not start.exists():
            start.parent.mkdir(parents=True, exist_ok=True)
            locks.warm_start(start, seed)
        instead(train, "play_panel", play_panel)
        instead(train, "run_update", run_update)
        # For speed only: no files for people, and each text is encoded once.
        instead(train, "draw", lambda *_: None)
        instead(train, "sample", lambda *_: {})
        for name in ("encode_chat", "encode"):
            instead(Policy, name, cache(getattr(Policy, name)))
        settings = locks.PRESETS["tiny"] | dict(
            env="locks", name=f"{arm} {seed}", out=str(out), model=str(start), seed=seed,
            save_every=10**6, updates=updates,
        )  # fmt: skip
        train.train(Config(**settings | cell.settings | ARMS[arm]))
    return curve


def job(key: tuple[str, str, int]) -> dict:
    """One run -> its line in package.jsonl."""
    name, arm, seed = key
    torch.set_num_threads(1)
    began = time.time()
    if name == "one_file":
        points = one_file.run(seed, one_file.make_arms(one_file.Arm())[arm])
        curve = [vars(point) for point in points]
    else:
        out = SCRATCH / name
        shutil.rmtree(out / f"{arm} {seed}", ignore_errors=True)
        with redirect_stdout(StringIO()):
            curve = run_package(CELLS[name], arm, seed, one_file.UPDATES, out)
    seconds = round(time.time() - began)
    return {"cell": name, "arm": arm, "seed": seed, "seconds": seconds, "curve": curve}


if __name__ == "__main__":
    for key in sys.argv[1:]:
        name, arm, seed = key.split("/")
        line = job((name, arm, int(seed)))
        with RUNS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        c = line["curve"]
        print(key, line["seconds"], "s", [round(100 * p["success"], 1) for p in c],
              [round(p["material"], 2) for p in c], [round(p.get("valid", 1), 3) for p in c], flush=True)
