"""Speedup by several processes: the same updates by N ranks and by one process.

    python research/bench/scaling.py [--gpu] [--ranks 2] [--quick] [--out FILE]

Updates of run_webshop.py in the generated shop, with 4 groups of 8 episodes per rank: a rollout
with environments and a sampler on each rank, then the update with its exchange of rows and its sum
of gradients. One process does the work of all N ranks: the same groups, 32 episodes at a time, the
same update. The learning rate is 0, so that all updates of both have the same episodes. torchrun
starts 1 and N processes alternately, twice each. Measured is the wall time of one update per start,
from barrier to barrier, after a small update as a warm-up; the ratios are those of the sums. Each
process computes with one thread and needs an idle core.

CPU size: preset tiny with the stand-in model, each rank on a core of its own. What every rank
repeats (Python, the optimizer) weighs more there than in large models. So the update of a model of
the size LARGE is measured, too, on the same rows with the lengths of ALFWorld's in all starts.
Cores share caches and memory, so N ranks cannot be N times as fast: "limit" is the speedup of N
processes that do this update at the same time without any communication.
--gpu: preset paper with vLLM and 16 groups of 8 per rank, Qwen2.5-1.5B-Instruct from the
hub. --quick: one start each. Takes five minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import paw_min  # noqa: F401 - before torch, for OMP_WAIT_POLICY

# isort: split
import torch
from overhead import make_episodes
from transformers import Qwen2Config
from update import make_policy, versions, write

import run_webshop
from paw_min.base import distributed
from paw_min.base.errors import user_errors
from paw_min.config import Config
from paw_min.model.policy import load_policy
from paw_min.rollout import rollout
from paw_min.rows import flatten
from paw_min.running.session import find_tasks, make_sampler, start_model
from paw_min.running.tasks import draw_groups
from paw_min.toy import default_data
from paw_min.update import learn, prepare

PARTS = ("rollout", "update", "whole")
LARGE = dict(hidden_size=384, num_attention_heads=6, num_key_value_heads=2, intermediate_size=1536,
             num_hidden_layers=6, vocab_size=2500, tie_word_embeddings=True)


def work(gpu: bool, shares: int, draw: int, out: str, core: int | None) -> None:
    """The work of each rank; rank 0 writes its measurements as JSON. core: only the large update"""
    groups = 16 if gpu else 4
    cfg = Config(env="webshop", **run_webshop.PRESETS["paper" if gpu else "tiny"])
    device = distributed.join("cuda" if gpu else "cpu")
    if not gpu:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(core or distributed.rank()) % len(cores)]})
    precision = "bf16" if gpu else "fp32"
    folder = start_model(cfg)
    torch.set_num_threads(1)
    if core is not None:
        Path(out).write_text(json.dumps({"large_update": large_update()}))
        return distributed.finish()
    tasks = find_tasks(cfg)
    sampler = make_sampler(cfg, folder, precision)
    policy = load_policy(folder, cfg.temperature, device, precision)
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    with closing(tasks.make_pool(groups * cfg.group_size)) as pool:
        for n_groups in (shares, groups * shares):  # the first is the warm-up
            cfg = replace(cfg, groups=n_groups)
            drawn = draw_groups(tasks.train, cfg.groups, 0, draw)
            played_tasks = [task for task in drawn for _ in range(cfg.group_size)]
            names = [g for g in range(cfg.groups) for _ in range(cfg.group_size)]
            times = [now()]
            with sampler.sync(policy):
                played = rollout(
                    cfg, policy, sampler, pool, played_tasks, names,
                    temperature=1.0, seed_key=(0, draw),
                )
            times.append(now())
            rows = prepare(cfg, policy, None, flatten(played.episodes))
            learn(cfg, policy, optimizer, rows, (0, draw))
            times.append(now())
            line = {
                "rollout": times[1] - times[0],
                "update": times[2] - times[1],
                "whole": times[2] - times[0],
                "rows": len(rows.tokens),
                "tokens": played.metrics["tokens_generated"],
            }
    if not gpu:
        line["large_update"] = large_update()
    if distributed.rank() == 0:
        Path(out).write_text(json.dumps(line))
    distributed.finish()


def large_update() -> float:
    """Seconds of one update of a model with random weights."""
    policy = make_policy(Qwen2Config(**LARGE), "cpu", "fp32")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    cfg = Config(mini_batch=16, micro_tokens=2048, kl_coef=0.0)
    for n_rows in (8, 32):  # the first is the warm-up
        episodes = make_episodes("alfworld", "cpu", n_rows, LARGE["vocab_size"], seed=0)
        start = now()
        learn(cfg, policy, optimizer, prepare(cfg, policy, None, flatten(episodes)), (0, 0))
        seconds = now() - start
    return seconds


def now() -> float:
    """The time at which all ranks have arrived."""
    distributed.all_gather([])  # a barrier
    return time.perf_counter()


def launch(ranks: int, args, draw: int) -> dict:
    return together([["--nproc-per-node", str(ranks)]], args, ["--draw", str(draw)])[0]


def limit(args) -> float:
    """Speedup of the large update by processes that do not communicate, each on a core."""
    flags = ["--standalone", "--nproc-per-node", "1"]
    alone = together([flags], args, ["--core", "0"])
    many = together([flags] * args.ranks, args, ["--core", "{}"])
    slowest = max(line["large_update"] for line in many)
    return args.ranks * alone[0]["large_update"] / slowest


def together(starts: list[list[str]], args, flags: list[str]) -> list[dict]:
    """Start torchrun with each list of options at the same time -> what their rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{number}.json" for number in range(len(starts))]
        processes = []
        for number, (options, out) in enumerate(zip(starts, outs)):
            command = [sys.executable, "-m", "torch.distributed.run", *options, __file__]
            command += ["--worker", str(out), "--ranks", str(args.ranks), *["--gpu"] * args.gpu]
            processes.append(subprocess.Popen(command + [flag.format(number) for flag in flags]))
        if any([process.wait() for process in processes]):
            raise SystemExit("A process failed: see above.")
        return [json.loads(out.read_text()) for out in outs]


def totals(lines: list[dict], parts: tuple[str, ...]) -> dict[str, float]:
    """Sums over the starts."""
    return {part: sum(line[part] for line in lines) for part in (*parts, "rows", "tokens")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="preset paper, one GPU per rank")
    parser.add_argument("--ranks", type=int, default=2, help="processes to compare with one")
    parser.add_argument("--quick", action="store_true", help="one start each instead of two")
    parser.add_argument("--out", default="research/bench/results/scaling.json")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.gpu, args.ranks, args.draw, args.worker, args.core)
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks} leaves nothing to compare with one process: use 2 or "
                     "more")
    default_data("webshop")  # generated once, before anything is timed
    lines = {1: [], args.ranks: []}
    for draw in range(1 if args.quick else 2):
        for ranks in lines:
            lines[ranks].append(launch(ranks, args, draw))
    parts = PARTS if args.gpu else (*PARTS, "large_update")
    one = totals(lines[1], parts)
    many = totals(lines[args.ranks], parts)
    pairs = zip(lines[1], lines[args.ranks])
    report = {
        "command": "python research/bench/scaling.py"
        + " --gpu" * args.gpu
        + " --quick" * args.quick,
        "ranks": args.ranks,
        **{f"{part}_seconds": {1: round(one[part], 2), args.ranks: round(many[part], 2)}
           for part in parts},
        **{f"{part}_ratio": round(one[part] / many[part], 2) for part in parts},
        **({} if args.gpu else {"large_update_limit": round(limit(args), 2)}),
        "whole_ratios": [round(alone["whole"] / both["whole"], 2) for alone, both in pairs],
        **{name: {1: one[name], args.ranks: many[name]} for name in ("rows", "tokens")},
        **versions("cuda" if args.gpu else "cpu"),
    }
    write(report, args.out)


if __name__ == "__main__":
    with user_errors():
        main()
