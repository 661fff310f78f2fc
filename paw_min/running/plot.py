"""Curves of one or more runs, from their metrics.jsonl.

    python -m paw_min.running.plot runs/a runs/b ... [--out FOLDER]

Writes curves.png, and paw.png with the panels of the paper's Fig. 10 and 11. Runs whose settings
differ in the seed alone share a color: each is a thin line, and their mean a thick one. (In
examples.hidden, the seed is a part of data and model, too, so each seed has a color.)
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure  # without pyplot, a notebook keeps its backend
from matplotlib.ticker import MaxNLocator

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import replacing, writing
from paw_min.base.flags import Parser
from paw_min.config import Config
from paw_min.running.runs import read_metrics


class Style(NamedTuple):
    """How all figures name and draw a method."""

    name: str
    color: str


# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = {
    "grpo": Style("GRPO", "#E69F00"),
    "paw": Style("PaW", "#0072B2"),
    "placebo": Style("placebo", "#7F7F7F"),
    "echo": Style("ECHO", "#009E73"),
    "ce": Style("PaW with cross entropy", "#CC79A7"),
}
OTHERS = ["#D55E00", "#56B4E9", "#332288", "#882255", "#999933", "#000000"]

FIGURES = {
    "curves.png": {
        "success": "training success", "eval_success": "held-out success",
        "length": "episode length (steps)", "valid": "well-formed responses (fraction)",
        "entropy": "action entropy (nats per token)", "grad_norm": "gradient norm before clipping",
    },
    "paw.png": {
        "return": "Fig. 10a: training reward", "loss_pg": "Fig. 10b: policy-gradient loss",
        "clip_fraction": "Fig. 10c: clipped updates (fraction)",
        "lambda": "Fig. 11a: adaptive coefficient", "wm_loss": "Fig. 11b: world-model loss",
        "wm_clipped_tokens": "Fig. 11c: clipped tokens (fraction)",
    },
}
FRACTIONS = {"success", "eval_success", "valid", "lambda", "wm_clipped_tokens"}


class Arm(NamedTuple):
    """Runs that differ in the seed alone."""

    style: Style
    runs: list[list[dict]]  # the lines of metrics.jsonl of each


def label_of(name: str) -> str:
    """A label of a legend. matplotlib reads dollars as math, and hides what begins with "_"."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def method_of(config: dict) -> str | None:
    """The key in COLORS of a run with these settings. None: it has another method."""
    if config["method"] != Config.method:
        return None
    if not config["paw"]:
        return "grpo"
    if config["wm_target"] != Config.wm_target:
        return "placebo"
    if config["wm_loss"] != "ce":
        return "paw"
    is_echo = config["alpha"] == 1 and config["lambda_g"] == "constant"
    return "echo" if is_echo else "ce"


def find_arms(folders: list[Path]) -> list[Arm]:
    """The arms of run folders, each with a name and a color of its own."""
    together = {}  # settings without the seed -> (its first folder, settings, lines of each run)
    for folder in folders:
        # An older run has today's defaults of newer settings.
        config = asdict(Config()) | json.loads((folder / "config.json").read_text("utf-8"))
        same = json.dumps(config | dict(seed="", name="", out=""))
        _, _, runs = together.setdefault(same, (folder.resolve(), config, []))
        runs.append(read_metrics(folder))
    names = [folder.resolve().name for folder in folders]
    others = iter(OTHERS * len(folders))
    arms, taken = [], set()
    for folder, config, runs in together.values():
        name = folder.name
        if names.count(name) > 1:
            name = f"{folder.parent.name}/{name}"
        if len(runs) > 1:
            name = re.sub(r"-?seed[0-9]+$", "", name) + f": mean of {len(runs)} runs (thin: each)"
        known = COLORS.get(method_of(config))
        color = known.color if known and known.color not in taken else next(others)
        taken.add(color)
        arms.append(Arm(Style(name, color), runs))
    return arms


def draw(folders: list[Path], out: Path | None = None) -> None:
    """Write curves.png and paw.png of these run folders to `out` (default: the first folder)."""
    out = out or folders[0]
    with writing(f"the folder {out}"):
        out.mkdir(parents=True, exist_ok=True)
    arms = find_arms(folders)
    for name, panels in FIGURES.items():
        figure = Figure(figsize=(11, 6), layout="constrained")
        axes = figure.subplots(2, 3)
        for axis, (key, title) in zip(axes.flat, panels.items()):
            draw_panel(axis, arms, key, title)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        # Renamed when complete: somebody may be looking at the old picture.
        with replacing(out / name) as partial:
            figure.savefig(partial, dpi=110, format="png")


def draw_panel(axis, arms: list[Arm], key: str, title: str) -> None:
    """One metric of all runs over the updates."""
    for (name, color), runs in arms:
        curves = [{line["update"]: line[key] for line in run if key in line} for run in runs]
        if len(runs) > 1:
            for curve in curves:
                axis.plot(list(curve), list(curve.values()), color=color, lw=0.8, alpha=0.6)
            shared = sorted(set.intersection(*map(set, curves)))  # updates that all runs have
            curves = [{update: np.mean([curve[update] for curve in curves]) for update in shared}]
        (curve,) = curves
        axis.plot(list(curve), list(curve.values()), color=color, label=label_of(name),
                  marker=".", lw=2.2 if len(runs) > 1 else 1.5)
    set_limits(axis, key)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("update", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(alpha=0.3)


def set_limits(axis, key: str) -> None:
    """The whole range of a fraction, and 0 below what is never negative, with a margin.

    An axis that ends at the values would make a collapse of 0.997 after 1.0.
    """
    top = 1 if key in FRACTIONS else max(0, axis.dataLim.ymax) or 1
    if axis.dataLim.ymin >= 0:
        axis.set_ylim(-0.03 * top, 1.03 * top)


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__.split("\n\n")[0])
        parser.add_argument("folders", nargs="+", type=Path, help="run folders, runs/<name>")
        parser.add_argument("--out", type=Path, help="folder of the figures (default: first run)")
        args = parser.parse_args()
        empty = [str(folder) for folder in args.folders if not read_metrics(folder)]
        if empty:
            raise UserError(f"no metrics.jsonl with a complete line in {', '.join(empty)}")
        draw(args.folders, args.out)
        print(f"wrote {' and '.join(FIGURES)} in {args.out or args.folders[0]}")
