"""Curves of one or more runs, from their metrics.jsonl.

    python -m paw_min.running.plot runs/a runs/b ... [--out FOLDER]

Writes curves.png, and paw.png with the panels of the paper's Fig. 10 and 11. One color per run; the
black line is the held-out success averaged over the runs.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.ticker import MaxNLocator

from paw_min.base.console import with_seconds
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replacing, writing
from paw_min.running.runs import read_metrics

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt


def plain(text: str) -> str:
    """A label that matplotlib shows as it is; it would read dollars as math."""
    return text.replace("$", r"\$")


FIGURES = {
    "curves.png": {
        "success": "training success", "eval_success": "held-out success",
        "length": "episode length (steps)", "valid": "well-formed responses (fraction)",
        "entropy": "action entropy (nats per token)", "seconds": "seconds per update",
    },
    "paw.png": {
        "return": "Fig. 10a: training reward", "loss_pg": "Fig. 10b: policy-gradient loss",
        "clip_fraction": "Fig. 10c: clipped updates (fraction)",
        "lambda": "Fig. 11a: adaptive coefficient", "wm_loss": "Fig. 11b: world-model loss",
        "wm_clipped_tokens": "Fig. 11c: clipped tokens (fraction)",
    },
}


def draw(folders: list[Path], out: Path | None = None) -> None:
    """Write curves.png and paw.png of these run folders to `out` (default: the first folder)."""
    out = Path(out or folders[0])
    with writing(f"the folder {out}"):
        out.mkdir(parents=True, exist_ok=True)
    runs = {
        str(folder): [with_seconds(line) for line in read_metrics(folder)] for folder in folders
    }
    for name, panels in FIGURES.items():
        figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
        for axis, (key, title) in zip(axes.flat, panels.items()):
            draw_panel(axis, runs, key, title)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        # Renamed when complete: somebody may be looking at the old picture.
        with replacing(out / name) as partial:
            figure.savefig(partial, dpi=110, format="png")
        plt.close(figure)


def draw_panel(axis, runs: dict[str, list[dict]], key: str, title: str) -> None:
    """One metric of all runs over the updates."""
    curves = []
    for label, lines in runs.items():
        curve = {line["update"]: line[key] for line in lines if key in line}
        axis.plot(list(curve), list(curve.values()), label=plain(label), marker=".", alpha=0.8)
        curves.append(curve)
    if key == "eval_success" and len(runs) > 1:
        shared = sorted(set.intersection(*map(set, curves)))  # updates that all runs have
        average = [np.mean([curve[update] for curve in curves]) for update in shared]
        axis.plot(shared, average, color="black", linewidth=2.5)
    if "success" in key:
        axis.set_ylim(0, 1)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("update", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


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
