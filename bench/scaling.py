"""What does a second process bring? Fixed work for each rank, and the same by one process alone.

    python bench/scaling.py [--gpu] [--ranks 2] [--quick] [--out bench/results/scaling.json]

Updates of run_webshop.py in the generated shop, with 4 groups of 8 episodes for each of N ranks: a
rollout with real environments and a generator on each rank, then the update with its exchange of
rows and its sum of gradients. One process does the work of all N: the same groups, 32 episodes at a
time, the same update. The learning rate is 0, so that every update of both has the same episodes.
torchrun starts 1 and N processes in turn, twice each. Counted is wall time, from barrier to
barrier, of one update of each start, after a small one that warms up; a ratio is that of the sums.
Each process computes with one thread: give it idle cores, else it measures them.

CPU size: preset tiny, the stand-in. --gpu: preset paper with vLLM and 16 groups of 8 a rank,
Qwen2.5-1.5B-Instruct from the hub. --quick: one start each. Two minutes.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

import run_webshop
from paw_min import distributed as dist
from paw_min.config import Config
from paw_min.envs.webshop import env as webshop
from paw_min.model.policy import load_policy
from paw_min.rollout import rollout
from paw_min.tasks import draw_groups
from paw_min.toy.standins import STANDINS
from paw_min.train import make_sampler
from paw_min.update import update

PARTS = ("rollout", "update", "whole")


def work(gpu: bool, shares: int, draw: int, out: str) -> None:
    """What each rank does; rank 0 writes a line of JSON."""
    preset, groups = ("paper", 16) if gpu else ("tiny", 4)
    cfg = replace(Config(**run_webshop.PRESETS[preset]), data=str(webshop.generated_data()))
    device = dist.start("cuda" if gpu else "cpu")
    precision, folder = ("bf16", cfg.model) if gpu else ("fp32", str(STANDINS / "webshop"))
    torch.set_num_threads(1)
    make_pool, train_tasks, _ = webshop.setup(cfg)
    sampler = make_sampler(cfg, folder, precision)
    policy = load_policy(folder, cfg.temperature, device, precision)
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    with make_pool(groups * cfg.group_size) as pool:
        for n_groups in (shares, groups * shares):  # to warm up, and for the record
            cfg = replace(cfg, groups=n_groups)
            drawn = draw_groups(train_tasks, cfg.groups, 0, draw)
            tasks = [task for task in drawn for _ in range(cfg.group_size)]
            names = [g for g in range(cfg.groups) for _ in range(cfg.group_size)]
            times = [now()]
            with sampler.sync(policy):
                episodes, stats = rollout(
                    cfg, policy, sampler, pool, tasks, names, temperature=1.0, seed=(0, draw)
                )
            times.append(now())
            update(cfg, policy, None, optimizer, episodes, (0, draw))
            times.append(now())
            line = {
                "rollout": times[1] - times[0],
                "update": times[2] - times[1],
                "whole": times[2] - times[0],
                "rows": sum(len(e.transitions) for e in episodes),
                "tokens": stats["tokens_generated"],
            }
    if dist.rank() == 0:
        Path(out).write_text(json.dumps(line))
    dist.finish()


def now() -> float:
    """The time when all ranks are here."""
    dist.barrier()
    return time.perf_counter()


def launch(ranks: int, args, draw: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [str(Path(__file__)), "--worker", str(out), "--draw", str(draw)]
        command += ["--ranks", str(args.ranks)]
        subprocess.run(command + ["--gpu"] * args.gpu, check=True, cwd=ROOT)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="paper's preset, one GPU per rank")
    parser.add_argument("--ranks", type=int, default=2, help="processes to compare with one")
    parser.add_argument("--quick", action="store_true", help="one start each instead of two")
    parser.add_argument("--out", default="bench/results/scaling.json")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.gpu, args.ranks, args.draw, args.worker)
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: 2 or more, to be compared with one process")
    webshop.generated_data()  # once, before anything is timed
    lines = {1: [], args.ranks: []}
    for draw in range(1 if args.quick else 2):
        for ranks in lines:
            lines[ranks].append(launch(ranks, args, draw))
    one, many = ({part: sum(line[part] for line in those) for part in (*PARTS, "rows", "tokens")}
                 for those in lines.values())  # fmt: skip
    report = {
        "command": "python bench/scaling.py" + " --gpu" * args.gpu + " --quick" * args.quick,
        "ranks": args.ranks,
        **{f"{part}_seconds": {1: round(one[part], 2), args.ranks: round(many[part], 2)}
           for part in PARTS},
        **{f"{part}_ratio": round(one[part] / many[part], 2) for part in PARTS},
        "whole_ratios": [round(a["whole"] / b["whole"], 2) for a, b in zip(*lines.values())],
        **{name: {1: one[name], args.ranks: many[name]} for name in ("rows", "tokens")},
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
