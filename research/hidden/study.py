"""GRPO, PaW, its placebo and others in the games of examples/hidden.py.

    python -m research.hidden.study run      what runs.jsonl lacks, or --arms paw-kl ... of it
    python -m research.hidden.study table    prints the tables, draws curves.png and curves-kl.png

`run` resumes: a run that was cut continues at its last checkpoint, in runs/hidden. The arms whose
names end in -kl have a KL term of 0.01.
"""

from pathlib import Path

import torch

from examples import hidden
from paw_min.model.batches import TokenRow, collate
from paw_min.model.policy import load_policy
from research import study
from research.panels import draw_success

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
NO_KL = ["--kl-coef", "0"]
RUNS = FOLDER / "runs.jsonl"
OUT = study.ROOT / "runs" / "hidden"  # run folders


def train(job: tuple[str, int]) -> dict:
    """One run -> its line in runs.jsonl."""
    arm, seed = job
    folder = OUT / f"{arm}-{seed}"
    flags = ARMS[arm.removesuffix("-kl")] + ([] if arm.endswith("-kl") else NO_KL)
    flags = ["--seed", str(seed), *flags]
    module = "examples.hidden"
    if arm.startswith("probable"):
        module, flags = "examples.probable", ["examples.hidden", *flags]
    start, *updates = study.play(module, flags, folder)
    p, first = material(seed, max(folder.glob("checkpoint-*")))
    return {
        "arm": arm, "seed": seed,
        "success": [metrics["success"] for metrics in updates],  # share of 128 episodes
        "valid": [round(metrics["valid"], 4) for metrics in updates],
        "held_out": [start["eval_success"], updates[-1]["eval_success"]],  # start and end
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


def tables(runs: study.Runs, suffix: str) -> dict[str, str]:
    """The tables of the page by name. suffix: of the arms, "" or "-kl"."""
    arms = [arm + suffix for arm in ARMS if study.seeds_of(runs, arm + suffix)]
    pairs = [(a + suffix, b + suffix) for a, b in PAIRS]
    return {"means": means(runs, arms), "differences": differences(runs, pairs)}


def means(runs: study.Runs, arms: list[str]) -> str:
    """A row per arm, over the seeds that it has."""
    lines = []
    for arm in arms:
        seeds = len(study.seeds_of(runs, arm))
        lines.append([
            arm if seeds == len(SEEDS) else f"{arm} ({seeds} seeds)",
            study.level(runs, arm, study.training_area),
            study.level(runs, arm, study.training_end),
            study.level(runs, arm, lambda run: 100 * run["held_out"][1]),
            study.level(runs, arm, lambda run: run["material"], digits=2),
        ])
    header = ["", "mean of the curve", "last ten updates", "held out", "p"]
    return study.markdown_table(header, lines)


def differences(runs: study.Runs, pairs: list[tuple[str, str]]) -> str:
    """A table of paired differences, each over the seeds that both arms have."""
    lines = []
    for a, b in pairs:
        if len(study.seeds_of(runs, a, b)) > 1:  # one seed has no interval
            during = runs, a, b, study.training_area
            at_end = study.difference(runs, a, b, study.training_end)
            cells = [study.difference(*during), study.above(*during), at_end]
            lines.append([f"{a} - {b}", *cells])
    header = ["difference", "mean of the curve", "above on", "last ten updates"]
    return study.markdown_table(header, lines)


def draw(runs: study.Runs, suffix: str) -> None:
    """Success of the episodes of ten updates, each arm over the seeds that it has."""
    arms = [arm + suffix for arm in ("paw", "grpo", "placebo", "echo", "ce", "probable")]
    curves = {
        arm.removesuffix(suffix): of_seeds
        for arm, of_seeds in study.curves(runs, arms, window=10).items()
    }
    draw_success(FOLDER / f"curves{suffix}.png", range(10, 201, 10), curves)


def table() -> None:
    """Print the tables, and draw the curves."""
    runs = study.read_runs(RUNS)
    for suffix in ("", "-kl"):
        print("\n\n".join(tables(runs, suffix).values()) + "\n")
        draw(runs, suffix)


if __name__ == "__main__":
    # Seed by seed, so that the file has all arms of its seeds.
    jobs = [(f"{arm}-kl", seed) for seed in SEEDS for arm in ARMS]
    # The protocol has three arms without a KL term.
    jobs += [(arm, seed) for seed in SEEDS for arm in ("grpo", "paw", "placebo")]
    study.command(__doc__, RUNS, jobs, train, table)
