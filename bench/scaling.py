"""What does a second process bring? Fixed work for each rank, 1 process against 2.

    python bench/scaling.py [--gpu] [--ranks 2] [--quick] [--out bench/results/scaling.json]

Updates of run_webshop.py in the generated shop, every rank with the same number of groups: a
rollout with real environments and a generator on each rank, then the update with its exchange of
rows and its sum of gradients. torchrun starts 1 and N processes in turn, twice each. Counted
are processed tokens (generated in the rollout, forwarded in the update, padding included) per
second of wall time, from barrier to barrier, without the first update; the figure is the ratio of
the medians of all updates. Each process computes with one thread: give it idle cores, else it
measures them.

CPU size: preset tiny, the stand-in, 4 groups of 8 episodes a rank. --gpu: preset paper with vLLM
and 16 groups of 8, Qwen2.5-1.5B-Instruct from the hub. --quick: one start each, two updates.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

import run_webshop
from paw_min import dist
from paw_min.config import Config
from paw_min.envs import webshop
from paw_min.policy import load_policy
from paw_min.rollout import rollout
from paw_min.tasks import draw_groups
from paw_min.tiny import STANDINS
from paw_min.train import make_sampler
from paw_min.update import update

PARTS = ("rollout", "update")


def work(gpu: bool, updates: int, out: str) -> None:
    """What each rank does: a line of JSON per update, written by rank 0."""
    preset, groups = ("paper", 16) if gpu else ("tiny", 4)
    cfg = replace(Config(**run_webshop.PRESETS[preset]), data=str(webshop.generated_data()))
    device = dist.start("cuda" if gpu else "cpu")
    precision, folder = ("bf16", cfg.model) if gpu else ("fp32", str(STANDINS / "webshop"))
    cfg = replace(cfg, groups=groups * dist.world())
    torch.set_num_threads(1)
    make_pool, train_tasks, _ = webshop.setup(cfg)
    sampler = make_sampler(cfg, folder, precision)
    policy = load_policy(folder, cfg.temperature, device, precision)
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
    lines = []
    with make_pool(groups * cfg.group_size) as pool:
        for k in range(updates):
            drawn = draw_groups(train_tasks, cfg.groups, 0, k)
            tasks = [task for task in drawn for _ in range(cfg.group_size)]
            names = [g for g in range(cfg.groups) for _ in range(cfg.group_size)]
            times = [now()]
            with sampler.sync(policy):
                episodes, stats = rollout(
                    cfg, policy, sampler, pool, tasks, names, temperature=1.0, seed=(0, k)
                )
            times.append(now())
            metrics = update(cfg, policy, None, optimizer, episodes, (0, k))
            times.append(now())
            tokens = stats["tokens_generated"], metrics["tokens_forward"]
            lines.append({part: tokens[i] / (times[i + 1] - times[i])
                          for i, part in enumerate(PARTS)}
                         | {"seconds": times[2] - times[0], "tokens": sum(tokens)})  # fmt: skip
    if dist.rank() == 0:
        Path(out).write_text(json.dumps(lines))
    dist.finish()


def now() -> float:
    """The time when all ranks are here."""
    dist.barrier()
    return time.perf_counter()


def launch(ranks: int, args, updates: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [str(Path(__file__)), "--worker", str(out), "--updates", str(updates)]
        subprocess.run(command + ["--gpu"] * args.gpu, check=True, cwd=ROOT)
        return json.loads(out.read_text())[1:]  # the first update warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="paper's preset, one GPU per rank")
    parser.add_argument("--ranks", type=int, default=2, help="processes to compare with one")
    parser.add_argument("--quick", action="store_true", help="one start each, two updates")
    parser.add_argument("--out", default="bench/results/scaling.json")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.gpu, args.updates, args.worker)
    webshop.generated_data()  # once, before anything is timed
    rounds, updates = (1, 2) if args.quick else (2, 4)
    lines = {1: [], args.ranks: []}
    for _ in range(rounds):
        for ranks in lines:
            lines[ranks] += launch(ranks, args, updates)
    speed = {
        ranks: {part: median(line[part] for line in those) for part in PARTS}
        | {"whole": median(line["tokens"] / line["seconds"] for line in those)}
        for ranks, those in lines.items()
    }
    report = {
        "command": "python bench/scaling.py" + " --gpu" * args.gpu + " --quick" * args.quick,
        "ranks": args.ranks,
        **{f"{part}_tokens_per_s": {r: round(s[part], 1) for r, s in speed.items()}
           for part in (*PARTS, "whole")},
        **{f"{part}_ratio": round(speed[args.ranks][part] / speed[1][part], 2)
           for part in (*PARTS, "whole")},
        "device": torch.cuda.get_device_name() if args.gpu else f"CPU, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }  # fmt: skip
    for name, value in report.items():
        print(f"{name:24}{value}")
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    main()
