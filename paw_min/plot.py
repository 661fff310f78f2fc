"""Curves of one or more runs, from their metrics.jsonl.

    python -m paw_min.plot runs/a runs/b ... [--out FOLDER]

curves.png  success in training and on the held-out panel, length, format, entropy, seconds
paw.png     the panels of the paper's Fig. 10 (training reward, policy-gradient loss, clipped
            updates) and Fig. 11 (adaptive coefficient, world-model loss, clipped tokens)

Several runs share a figure, one color each; the black line is their average held-out success.
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib.ticker import MaxNLocator

from paw_min.runs import read_metrics

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

CURVES = {
    "success": "training success",
    "eval_success": "held-out success",
    "length": "episode length (steps)",
    "valid": "well-formed responses (fraction)",
    "entropy": "action entropy (nats per token)",
    "seconds": "seconds per update",
}
PAW = {
    "return": "Fig. 10a: training reward",
    "loss_pg": "Fig. 10b: policy-gradient loss",
    "clip_fraction": "Fig. 10c: clipped updates (fraction)",
    "lambda": "Fig. 11a: adaptive coefficient",
    "wm_loss": "Fig. 11b: world-model loss",
    "wm_clipped_tokens": "Fig. 11c: clipped tokens (fraction)",
}


def draw(folders: list[Path], out: Path | None = None) -> None:
    """Write curves.png and paw.png of these run folders to `out` (default: the first folder)."""
    out = Path(out or folders[0])
    out.mkdir(parents=True, exist_ok=True)
    runs = {Path(folder).name: read_metrics(folder) for folder in folders}
    for lines in runs.values():
        for line in lines:
            parts = [line.get(f"seconds_{p}") for p in ("rollout", "old_pass", "update")]
            if None not in parts:
                line["seconds"] = sum(parts)
    for name, panels in (("curves.png", CURVES), ("paw.png", PAW)):
        figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
        for axis, (key, title) in zip(axes.flat, panels.items()):
            _panel(axis, runs, key, title)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        partial = out / f"{name}.partial"
        figure.savefig(partial, dpi=110, format="png")
        partial.replace(out / name)
        plt.close(figure)


def _panel(axis, runs: dict[str, list[dict]], key: str, title: str) -> None:
    at = {}  # update -> values of the runs
    for name, lines in runs.items():
        points = [(line["update"], line[key]) for line in lines if key in line]
        axis.plot(*zip(*points) if points else ([], []), label=name, marker=".", alpha=0.8)
        for update, value in points:
            at.setdefault(update, []).append(value)
    shared = {u: sum(v) / len(v) for u, v in sorted(at.items()) if len(v) == len(runs)}
    if key == "eval_success" and len(runs) > 1 and shared:
        axis.plot(list(shared), list(shared.values()), color="black", linewidth=2.5)
    if key in ("success", "eval_success"):
        axis.set_ylim(0, 1)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("update", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, runs/<name>")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: first run)")
    args = parser.parse_args()
    empty = [str(f) for f in args.folders if not read_metrics(f)]
    if empty:
        parser.error(f"no metrics.jsonl with a complete line in {', '.join(empty)}")
    draw(args.folders, args.out)
