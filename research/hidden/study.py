"""The runs of PROTOCOL.md in the games of examples/hidden.py.

    python -m research.hidden.study run       what runs.jsonl lacks of the runs without a KL term
    python -m research.hidden.study run --kl  the same of those with the term
    python -m research.hidden.study table     prints the tables, draws curves.png and curves-kl.png

`run` resumes: a run that was cut continues at its last checkpoint, in runs/hidden.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from examples import hidden
from paw_min.base.errors import user_errors
from paw_min.model.batches import TokenRow, collate
from paw_min.model.policy import load_policy
from research.panels import draw_success
from research.stats import signed, t_interval
from research.study import ROOT, markdown_table, play, read_lines

FOLDER = Path(__file__).parent
SEEDS = range(2, 10)
ARMS = {
    "grpo": ["--no-paw"],
    "paw": [],
    "placebo": ["--wm-target", "shuffled"],
    "echo": ["--preset", "tiny", "echo"],
    "ce": ["--wm-loss", "ce"],
    "probable": [],  # examples/probable.py
}
PAIRS = (
    ("paw", "grpo"), ("paw", "placebo"), ("placebo", "grpo"),
    ("paw", "echo"), ("ce", "paw"), ("ce", "echo"),
    ("probable", "paw"), ("probable", "echo"),
)  # fmt: skip
NO_KL = ["--kl-coef", "0"]  # of the arms whose names do not end in -kl
RUNS = FOLDER / "runs.jsonl"
OUT = ROOT / "runs" / "hidden"  # run folders


def train(seed: int, arm: str) -> dict:
    """One run -> its line in runs.jsonl."""
    folder = OUT / f"{arm}-{seed}"
    flags = ARMS[arm.removesuffix("-kl")] + ([] if arm.endswith("-kl") else NO_KL)
    flags = ["--seed", str(seed), *flags]
    example = "hidden"
    if arm.startswith("probable"):
        example, flags = "probable", ["examples.hidden", *flags]
    start, *updates = play(example, flags, folder)
    p, first = material(seed, max(folder.glob("checkpoint-*")))
    return {
        "arm": arm, "seed": seed,
        "success": [metrics["success"] for metrics in updates],  # of the update's 128 episodes
        "valid": [round(metrics["valid"], 4) for metrics in updates],
        "held_out": [start["eval_success"], updates[-1]["eval_success"]],  # before, after
        "material": p,
        "first": first,
    }


def material(seed: int, checkpoint: Path) -> tuple[float, float]:
    """What the model knows of the materials in o'.

    Returns the mean probability of the true one, over all kinds and receptacles, and the share of
    kinds for which it is the most probable of the eight (each averaged over the receptacles).
    """
    policy = load_policy(str(checkpoint))
    world = hidden.make_world(seed)
    rows = []
    for kind in hidden.KINDS:
        for receptacle in hidden.RECEPTACLES:
            prompt = policy.encode_chat(f"clean {kind.lower()} 1 with")
            response = policy.encode_rendered(receptacle.lower() + policy.tokenizer.eos_token)
            outcome = "Clean" if receptacle == world.cleaner(kind) else "Dirty"
            for name in hidden.MATERIALS:
                observed = policy.encode_rendered(f"{outcome} {name}.")
                rows.append(TokenRow(prompt, response, observed))
    batch = collate(rows, [True] * len(rows), policy.pad_id)
    with torch.no_grad():
        logp, _ = policy(batch)  # (B, S): receptacle, end, outcome, material, period
    shape = len(hidden.KINDS), len(hidden.RECEPTACLES), len(hidden.MATERIALS)
    p = logp[:, 3].exp().view(shape).mean(dim=1)  # (kinds, materials)
    true = torch.tensor([hidden.MATERIALS.index(world.material_of[kind]) for kind in hidden.KINDS])
    first = (p.argmax(dim=1) == true).float().mean().item()
    return p.gather(1, true[:, None]).mean().item(), first


def read_runs() -> dict[tuple[int, str], dict]:
    return {(line["seed"], line["arm"]): line for line in read_lines(RUNS)}


def run(arms: list[str], seeds: list[int], workers: int) -> None:
    """Seed by seed, so that what there is has all arms."""
    known = read_runs()
    for seed in seeds:
        jobs = [arm for arm in arms if (seed, arm) not in known]
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


def tables(known: dict, suffix: str) -> dict[str, str]:
    """The tables of the page by name. suffix: of the arms, "" or "-kl"."""
    arms = [arm + suffix for arm in ARMS if seeds_of(known, arm + suffix)]
    pairs = [(a + suffix, b + suffix) for a, b in PAIRS]
    return {
        "means": means(known, arms),
        "differences": differences(known, pairs),
    }


def seeds_of(known: dict, *arms: str) -> list[int]:
    """The seeds that have all of `arms`."""
    return [seed for seed in SEEDS if all((seed, arm) in known for arm in arms)]


def means(known: dict, arms: list[str]) -> str:
    """A row per arm, over the seeds that it has."""
    header = ["", "seeds", "mean of the curve", "last ten updates", "held out", "p", "first"]
    lines = []
    for arm in arms:
        runs = [known[seed, arm] for seed in seeds_of(known, arm)]
        first = [100 * run["first"] for run in runs if "first" in run]
        lines.append([
            arm, str(len(runs)), f"{mean(map(area, runs)):.1f}", f"{mean(map(end, runs)):.1f}",
            f"{100 * mean(run['held_out'][1] for run in runs):.1f}",
            f"{mean(run['material'] for run in runs):.2f}",
            f"{mean(first):.0f} ({len(first)} seeds)" if first else "not measured",
        ])  # fmt: skip
    return markdown_table(header, lines)


def differences(known: dict, pairs: list[tuple[str, str]]) -> str:
    """A table of paired differences, each over the seeds that both arms have."""
    lines = []
    for a, b in pairs:
        seeds = seeds_of(known, a, b)
        if len(seeds) < 2:  # one seed has no interval
            continue
        during = [area(known[seed, a]) - area(known[seed, b]) for seed in seeds]
        at_end = [end(known[seed, a]) - end(known[seed, b]) for seed in seeds]
        lines.append([
            f"{a} - {b}", signed(mean(during), t_interval(during)),
            f"{sum(value > 0 for value in during)} of {len(seeds)}",
            signed(mean(at_end), t_interval(at_end)),
        ])  # fmt: skip
    return markdown_table(
        ["difference", "mean of the curve", "above on", "last ten updates"], lines
    )


def draw(known: dict, suffix: str) -> None:
    """Success of the episodes of ten updates, each arm over the seeds that it has."""
    updates = range(10, 201, 10)
    curves = {}
    for name in ("paw", "grpo", "placebo", "echo", "ce"):
        arm = name + suffix
        runs = [known[seed, arm]["success"] for seed in seeds_of(known, arm)]
        if runs:
            curves[name] = [[100 * mean(run[k - 10 : k]) for k in updates] for run in runs]
    if curves:
        draw_success(FOLDER / f"curves{suffix}.png", updates, curves)


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("command", choices=["run", "table"])
        parser.add_argument("--workers", type=int, default=2, help="processes, one core each (2)")
        parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
        parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
        parser.add_argument("--kl", action="store_true", help="the arms with a KL term of 0.01")
        args = parser.parse_args()
        if args.command == "run":
            suffix = "-kl" if args.kl else ""
            run([arm + suffix for arm in args.arms], args.seeds, args.workers)
        else:
            for suffix in ("", "-kl"):
                print("\n\n".join(tables(read_runs(), suffix).values()) + "\n")
                draw(read_runs(), suffix)
