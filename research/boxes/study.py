"""SmolLM2 in the world of boxes (examples/boxes.py): LOG.md has the question of each arm.

    python -m research.boxes.study run      what runs.jsonl lacks, seed by seed
    python -m research.boxes.study table    prints the tables and all runs, draws both pictures

`run` resumes: a run that was cut continues at its last checkpoint, in runs/boxes. A finished one is
a line of runs.jsonl and is not repeated, on another machine either.
"""

import argparse
import json
from collections.abc import Collection
from pathlib import Path

from paw_min.base.errors import user_errors
from research import stats, study
from research.panels import draw_success

FOLDER = Path(__file__).parent
SEEDS = range(8)
SERIALS = "smollm2-serials"
# The preset `echo`, in flags: a run with a method of its own (material.py) has no such presets.
ECHO = ["--wm-loss", "ce", "--alpha", "1", "--lambda-g", "constant", "--wm-scale", "1"]
ARMS = {
    "grpo": ["--no-paw"],
    "paw": [],
    "placebo": ["--wm-target", "shuffled"],
    "echo": ECHO,
    "paw-ce": ["--wm-loss", "ce", "--wm-scale", "1"],
    "paw-30": ["--wm-scale", "30"],
    "mae": ["--rho", "1"],
    "alpha-1": ["--alpha", "1"],
    "echo-selection": [*ECHO, "--alpha", "0.75"],
    "echo-balance": [*ECHO, "--lambda-g", "adaptive"],
    "probable": ["--wm-scale", "1"],  # examples/probable.py
    "grpo-serials": ["--preset", SERIALS, "--no-paw"],
    "paw-serials": ["--preset", SERIALS],
    "echo-serials": ["--preset", SERIALS, *ECHO, "--wm-scale", "0.05"],
    "echo-0.3-serials": ["--preset", SERIALS, *ECHO, "--wm-scale", "0.3"],
    "echo-1-serials": ["--preset", SERIALS, *ECHO],
    "probable-serials": ["--preset", SERIALS, "--wm-scale", "1"],
    "placebo-serials": ["--preset", SERIALS, "--wm-target", "shuffled"],
    "grpo-natural": ["--no-paw", "--data", "natural"],
    "paw-natural": ["--data", "natural"],
}
DIFFERENCES = (
    ("paw", "grpo"), ("paw", "placebo"), ("placebo", "grpo"), ("paw-ce", "grpo"), ("paw", "paw-ce"),
    ("paw", "echo"), ("echo", "grpo"), ("echo", "paw-ce"), ("echo-selection", "echo"),
    ("echo-balance", "echo"), ("probable", "grpo"), ("probable", "echo"), ("probable", "paw"),
    ("paw-30", "grpo"), ("paw-30", "paw"), ("paw", "mae"), ("mae", "grpo"), ("alpha-1", "paw"),
    ("grpo-natural", "grpo"), ("paw-natural", "paw"),
)
OF_SERIALS = (
    ("paw-serials", "grpo-serials"), ("echo-serials", "grpo-serials"),
    ("paw-serials", "echo-serials"), ("probable-serials", "grpo-serials"),
    ("probable-serials", "echo-serials"), ("probable-serials", "paw-serials"),
    ("paw-serials", "placebo-serials"), ("placebo-serials", "grpo-serials"),
    ("echo-0.3-serials", "grpo-serials"), ("echo-0.3-serials", "echo-serials"),
    ("paw-serials", "echo-0.3-serials"), ("probable-serials", "echo-0.3-serials"),
    ("echo-1-serials", "grpo-serials"), ("echo-1-serials", "echo-serials"),
)
# Differences that were first seen on seeds 0 to 3, so that their test is on the others alone.
FRESH = (("probable", "grpo"), ("probable-serials", "grpo-serials"))
# Each picture: the suffix of its arms -> its arms, and what is special about them in it.
PICTURES = {
    "": {"grpo": "", "paw": "scale 10", "mae": "scale 10", "placebo": "scale 10",
         "echo": "weight 1", "probable": "weight 1"},
    "-serials": {"grpo": "", "paw": "scale 30", "placebo": "scale 30",
                 "echo": "weight 0.05", "probable": "weight 1"},
}
# A value per update of each of these, None where it was not measured: wm_p_first where no
# observation is trained since all groups win everything, wm_p_most in four of five updates.
KEPT = ("success", "valid", "entropy", "grad_norm", "ref_kl", "wm_p_first", "wm_p_most")
RUNS = FOLDER / "runs.jsonl"
NORMS = FOLDER / "norms.json"
OUT = study.ROOT / "runs" / "boxes"  # run folders
WINDOW = 5  # updates, 320 episodes: what one update says is too noisy
UPDATES = 100
LEAST = 4  # seeds; the protocol has no interval before


def train(job: tuple[str, int]) -> dict:
    """One run -> its line in runs.jsonl."""
    arm, seed = job
    flags = ["--seed", str(seed), *ARMS[arm]]
    module = "examples.boxes" if "--no-paw" in flags else "research.boxes.material"
    if arm.startswith("probable"):
        flags = ["probable", *flags]
    start, *updates = study.play(module, flags, OUT / f"{arm}-{seed}")
    held_out = [start["eval_success"], updates[-1]["eval_success"]]  # start and end
    curves = {
        key: [round(line[key], 4) if key in line else None for line in updates]
        for key in KEPT if any(key in line for line in updates)
    }
    return {"arm": arm, "seed": seed, "held_out": held_out} | curves


def held_out(run: dict) -> float:
    """Success on the held-out tasks after training, in percent."""
    return 100 * run["held_out"][1]


def table() -> None:
    """Print the tables and all runs, and draw the curves."""
    runs = study.read_runs(RUNS)
    print(differences(runs, DIFFERENCES), differences(runs, OF_SERIALS), sep="\n\n")
    print(holm(runs), by_run(runs), sep="\n\n")
    for suffix in PICTURES:
        draw(runs, suffix)


def by_run(runs: study.Runs) -> str:
    """A table of the runs that there are.

    p: of the true material at update 40. most: the highest probability that any material had at one
    time, averaged over the boxes; a model that says one material for all has a value near 1.
    """
    lines = []
    for (arm, seed), run in sorted(runs.items()):
        measures = study.training_area, study.training_end, held_out
        p = run["wm_p_first"][39] if "wm_p_first" in run else None
        most = max((p for p in run.get("wm_p_most", []) if p is not None), default=None)
        lines.append([arm, seed, *(f"{measure(run):.1f}" for measure in measures), p, most])
    header = ["arm", "seed", "mean", "last ten", "held out", "p", "most"]
    return study.markdown_table(header, lines)


def differences(runs: study.Runs, pairs: tuple[tuple[str, str], ...]) -> str:
    """A table of paired differences, each over the seeds that both arms have; if none, left out."""
    measures = study.training_area, study.training_end, held_out
    lines = []

    def add_line(runs: study.Runs, a: str, b: str, note: str = "") -> None:
        if n_seeds := len(study.seeds_of(runs, a, b)):
            cells = [study.difference(runs, a, b, measure, LEAST) for measure in measures]
            lines.append([f"{a} - {b}{note}", n_seeds, *cells])

    for a, b in pairs:
        add_line(runs, a, b)
        if (a, b) in FRESH:
            add_line(only_seeds(runs, range(4, 8)), a, b, ", seeds 4 to 7")
    header = ["difference", "seeds", "mean", "last ten", "held out"]
    return study.markdown_table(header, lines)


def holm(runs: study.Runs) -> str:
    """Which differences of the mean are left after a correction for all that have an interval."""
    pairs = {
        f"{a} - {b}": study.gains(runs, a, b, study.training_area)
        for a, b in DIFFERENCES + OF_SERIALS
    }
    pairs = {name: values for name, values in pairs.items() if len(values) >= LEAST}
    return f"Holm, {len(pairs)} differences of the mean: {'; '.join(stats.holm(pairs))}."


def only_seeds(runs: study.Runs, seeds: Collection[int]) -> study.Runs:
    return {key: run for key, run in runs.items() if key[1] in seeds}


def norms() -> str:
    """A table of norms.json."""
    lines = [
        [weights, *(", ".join(f"{value:.2f}" for value in values) for values in columns.values())]
        for weights, columns in json.loads(NORMS.read_text()).items()
    ]
    header = ["weights", "RL", "world model, clipped MAE", "cross entropy"]
    return study.markdown_table(header, lines)


def draw(runs: study.Runs, suffix: str) -> None:
    """Success of WINDOW updates together, each arm over the seeds that it has.

    suffix: "" for the arms without serial numbers, "-serials" for those with them.
    """
    arms = [arm + suffix for arm in PICTURES[suffix]]
    # Seeds differ from each other as much as arms do: only those that all arms have.
    seeds = set.intersection(*(set(study.seeds_of(runs, arm)) for arm in arms))
    runs = only_seeds(runs, seeds)
    curves = {
        arm.removesuffix(suffix): of_seeds
        for arm, of_seeds in study.curves(runs, arms, WINDOW).items()
    }
    updates = range(WINDOW, UPDATES + 1, WINDOW)
    draw_success(FOLDER / f"curves{suffix}.png", updates, curves, PICTURES[suffix])


if __name__ == "__main__":
    with user_errors():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        commands = parser.add_subparsers(dest="command", required=True)
        running = commands.add_parser("run")
        running.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
        running.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
        commands.add_parser("table")
        args = parser.parse_args()
        if args.command == "run":
            # Seed by seed, so that the file has all arms of its seeds.
            jobs = [(arm, seed) for seed in args.seeds for arm in args.arms]
            study.train_missing(RUNS, jobs, train)
        else:
            table()
