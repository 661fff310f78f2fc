"""The runs of PROTOCOL.md: GRPO, PaW and the placebo in the games of examples/hidden.py.

    python research/hidden/study.py run [--workers 2] [--seeds 2 3]    what runs.jsonl lacks
    python research/hidden/study.py table                 tables.md and curves.png from runs.jsonl

`run` resumes: a run that was cut continues at its last checkpoint, in runs/hidden.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

SEEDS = range(2, 10)
ARMS = {"grpo": ["--no-paw"], "paw": [], "placebo": ["--wm-target", "shuffled"]}
RUNS = FOLDER / "runs.jsonl"
OUT = ROOT / "runs" / "hidden"  # run folders


def train(seed: int, arm: str) -> dict:
    """One run -> its line in runs.jsonl."""
    name = f"{arm}-{seed}"
    command = [sys.executable, "-m", "examples.hidden", "--seed", str(seed), *ARMS[arm]]
    command += ["--out", OUT, "--name", name]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    lines = (OUT / name / "metrics.jsonl").read_text().splitlines()
    start, *updates = [json.loads(line) for line in lines]
    return {
        "arm": arm, "seed": seed,
        "success": [metrics["success"] for metrics in updates],  # of the update's 128 episodes
        "valid": [round(metrics["valid"], 4) for metrics in updates],
        "held_out": [start["eval_success"], updates[-1]["eval_success"]],  # before, after
        "material": p_material(seed, max((OUT / name).glob("checkpoint-*"))),
    }


def p_material(seed: int, checkpoint: Path) -> float:
    """The mean probability of the material in o', over all kinds and receptacles."""
    import torch

    from examples import hidden
    from paw_min.model.batches import TokenRow, collate
    from paw_min.model.policy import load_policy

    policy = load_policy(str(checkpoint))
    world = hidden.make_world(seed)
    rows = []
    for kind in hidden.KINDS:
        for receptacle in hidden.RECEPTACLES:
            prompt = policy.encode_chat(f"clean {kind.lower()} 1 with")
            response = policy.encode_rendered(receptacle.lower() + policy.tokenizer.eos_token)
            outcome = "Clean" if receptacle == world.cleaner(kind) else "Dirty"
            observed = policy.encode_rendered(f"{outcome} {world.material_of[kind]}.")
            rows.append(TokenRow(prompt, response, observed))
    batch = collate(rows, [True] * len(rows), policy.pad_id)
    with torch.no_grad():
        logp, _ = policy(batch)  # (B, S): receptacle, end, outcome, material, period
    return logp[:, 3].exp().mean().item()


def read_runs() -> dict[tuple[int, str], dict]:
    if not RUNS.exists():
        return {}
    lines = [json.loads(line) for line in RUNS.read_text().splitlines()]
    return {(line["seed"], line["arm"]): line for line in lines}


def run(seeds: list[int], workers: int) -> None:
    """Seed by seed, so that what there is has all arms."""
    from examples import hidden

    known = read_runs()
    for seed in seeds:
        jobs = [arm for arm in ARMS if (seed, arm) not in known]
        if jobs:
            hidden.prepare(seed)  # once, before the arms use it at the same time
        with ThreadPoolExecutor(workers) as pool:
            for line in pool.map(partial(train, seed), jobs):
                with RUNS.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line["arm"], seed, f"{area(line):.1f}", flush=True)


def area(line: dict) -> float:
    """Mean success in percent over the updates."""
    return 100 * mean(line["success"])


def end(line: dict) -> float:
    """The same over the last ten updates."""
    return 100 * mean(line["success"][-10:])


def table() -> None:
    """tables.md and curves.png, over the seeds that have all arms."""
    from research.stats import t_interval

    known = read_runs()
    seeds = [seed for seed in SEEDS if all((seed, arm) in known for arm in ARMS)]
    lines = ["| seed | " + " | ".join(f"{arm}: mean, end, held out, p" for arm in ARMS) + " |",
             "|---" * (1 + len(ARMS)) + "|"]
    for seed in seeds:
        cells = [known[seed, arm] for arm in ARMS]
        shown = [f"{area(c):.1f}, {end(c):.1f}, {100 * c['held_out'][1]:.1f}, {c['material']:.2f}"
                 for c in cells]
        lines.append(f"| {seed} | {' | '.join(shown)} |")
    lines += ["", "| difference | mean of the curve | above on |", "|---|---|---|"]
    for a, b in (("paw", "grpo"), ("paw", "placebo"), ("placebo", "grpo")):
        values = [area(known[seed, a]) - area(known[seed, b]) for seed in seeds]
        shown = "not run"
        if len(values) > 1:
            low, high = t_interval(values)
            shown = f"{mean(values):+.1f} [{low:+.1f}, {high:+.1f}]"
        above = sum(value > 0 for value in values)
        lines.append(f"| {a} - {b} | {shown} | {above} of {len(values)} |")
    (FOLDER / "tables.md").write_text("\n".join(lines) + "\n")
    draw(known, seeds)


def draw(known: dict, seeds: list[int]) -> None:
    """curves.png: success of the episodes of ten updates."""
    from research.panels import draw_success

    curves = {}
    for arm in ("paw", "grpo", "placebo"):
        of_arm = [known[seed, arm]["success"] for seed in seeds]
        updates = range(10, len(of_arm[0]) + 1, 10)
        curves[arm] = [[100 * mean(curve[k - 10 : k]) for k in updates] for curve in of_arm]
    draw_success(FOLDER / "curves.png", updates, curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each (2)")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    args = parser.parse_args()
    if args.command == "run":
        run(args.seeds, args.workers)
    else:
        table()
