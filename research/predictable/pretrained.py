"""The runs of README.md in the package: SmolLM2 in examples/boxes.py, games of examples/hidden.py.

    python -m research.predictable.pretrained boxes [--arms ...] [--seeds ...]     boxes.jsonl
    python -m research.predictable.pretrained hidden [--arms ...] [--seeds ...]    hidden.jsonl

Trains what the file lacks, in the order of the protocol. A run that was cut continues at its last
checkpoint, in runs/boxes and runs/hidden; a finished one is a line and is not repeated.
"""

import argparse
from pathlib import Path

from paw_min.base.errors import user_errors
from research import study
from research.boxes import study as boxes
from research.hidden import study as hidden

FOLDER = Path(__file__).parent
SERIALS = ["--preset", boxes.SERIALS]
SHUFFLED = ["--wm-target", "shuffled"]
RULE = "research.predictable.in_package"
MATERIAL = "research.boxes.material"
# arm -> module and first flags
BOXES = {
    "predictable-serials": [RULE, "boxes", *SERIALS, "--wm-scale", "1"],
    "predictable": [RULE, "boxes", "--wm-scale", "1"],
    "predictable-placebo-serials": [RULE, "boxes", *SERIALS, "--wm-scale", "1", *SHUFFLED],
    "predictable-placebo": [RULE, "boxes", "--wm-scale", "1", *SHUFFLED],
    "echo-placebo-serials": [MATERIAL, *SERIALS, *boxes.ECHO, "--wm-scale", "0.05", *SHUFFLED],
    "echo-placebo": [MATERIAL, *boxes.ECHO, *SHUFFLED],
}
SCALES = {  # PaW's, on one seed
    f"paw-{scale}{suffix}": [MATERIAL, *preset, "--wm-scale", str(scale)]
    for suffix, preset, scales in (("", [], (3, 10, 30)), ("-serials", SERIALS, (10, 30, 100)))
    for scale in scales
}
BOXES |= SCALES
SCALE_SEED = 1001
HIDDEN = {
    "predictable-kl": [RULE, "hidden"],
    "predictable-placebo-kl": [RULE, "hidden", *SHUFFLED],
}


def train_boxes(job: tuple[str, int]) -> dict:
    """One run with SmolLM2 -> its line, as those of research/boxes."""
    arm, seed = job
    module, *flags = BOXES[arm]
    lines = study.play(module, [*flags, "--seed", str(seed)], boxes.OUT / f"{arm}-{seed}")
    start, *updates = lines
    held_out = [start["eval_success"], updates[-1]["eval_success"]]  # start and end
    curves = {
        key: [round(line[key], 4) if key in line else None for line in updates]
        for key in (*boxes.KEPT, "selected", "wm_clipped_tokens")
        if any(key in line for line in updates)
    }
    return {"arm": arm, "seed": seed, "held_out": held_out} | curves


def train_hidden(job: tuple[str, int]) -> dict:
    """One run in ALFWorld's engine -> its line, as those of research/hidden."""
    arm, seed = job
    module, *flags = HIDDEN[arm]
    folder = hidden.OUT / f"{arm}-{seed}"
    start, *updates = study.play(module, [*flags, "--seed", str(seed)], folder)
    p, first = hidden.material(seed, max(folder.glob("checkpoint-*")))
    return {
        "arm": arm, "seed": seed,
        "success": [metrics["success"] for metrics in updates],
        "valid": [round(metrics["valid"], 4) for metrics in updates],
        "held_out": [start["eval_success"], updates[-1]["eval_success"]],
        "material": p,
        "first": first,
    }


def jobs(world: str) -> list[tuple[str, int]]:
    """The protocol's runs in its order."""
    if world == "hidden":
        return [(arm, seed) for arm in HIDDEN for seed in hidden.SEEDS]
    rule = [(arm, seed) for seed in range(8) for arm in ("predictable-serials", "predictable")]
    placebos = [(arm, seed) for seed in range(4) for arm in BOXES if "placebo" in arm]
    return rule + placebos + [(arm, SCALE_SEED) for arm in SCALES]


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("world", choices=["boxes", "hidden"])
        parser.add_argument("--arms", nargs="+", choices=[*BOXES, *HIDDEN])
        parser.add_argument("--seeds", nargs="+", type=int)
        args = parser.parse_args()
        chosen = [
            (arm, seed) for arm, seed in jobs(args.world)
            if (not args.arms or arm in args.arms) and (not args.seeds or seed in args.seeds)
        ]
        train = {"boxes": train_boxes, "hidden": train_hidden}[args.world]
        study.train_missing(FOLDER / f"{args.world}.jsonl", chosen, train)
