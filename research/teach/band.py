"""The band of p in which the clipped MAE teaches, and where the tokens of observations lie.

    python -m research.teach.band research/teach/teach-ENV.json ... --out FILE.png

The gradient of 1 - p with respect to the logit of a token is p (1 - p), and Eq. 7 drops tokens with
p > rho. So a token with p near 0, or above rho, is not taught. The top row has this weight. Below
are histograms of p, of the branch tokens and of all others (outcomes.py), before training and after
each loss of LOSSES alone. teach.py has measured them.
"""

from pathlib import Path

import numpy as np

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.running.plot import plt
from paw_min.running.untrusted import read_json
from research.outcomes import EDGES, Outcomes
from research.paper.figures import save
from research.teach.measure import Taught

RHO = 0.2  # the paper's
LOSSES = ("cmae-0.2", "ce")


def weight(p: np.ndarray, rho: float = RHO) -> np.ndarray:
    """p (1 - p) [p <= rho]: the gradient of the clipped MAE at a token, for its logit."""
    return p * (1 - p) * (p <= rho)


def place(p: np.ndarray) -> np.ndarray:
    """Where a probability stands on the axis: one unit for each bin of EDGES."""
    return np.interp(p, (0, *EDGES), range(len(EDGES) + 1))


def histograms(found: list[Taught], file: Path) -> dict[str, Outcomes]:
    """What is shown of a benchmark: a title for each measurement."""
    by_loss = {taught.loss: taught for taught in found}
    missing = [loss for loss in LOSSES if loss not in by_loss]
    if missing:
        raise UserError(f"{file} has no {', '.join(missing)}: run teach with these --losses.")
    shown = {"before": found[0].outcomes[0]}
    for loss in LOSSES:
        taught = by_loss[loss]
        shown[f"after {taught.steps[-1]} steps of {loss}"] = taught.outcomes[-1]
    return shown


def draw(files: list[Path], out: Path) -> None:
    """A column for each benchmark."""
    columns = [histograms(read_json(file, list[Taught]), file) for file in files]
    rows = 2 + len(LOSSES)
    figure, axes = plt.subplots(
        rows, len(files), figsize=(1 + 4.4 * len(files), 1.4 * rows), squeeze=False, sharex=True,
        sharey="row", layout="constrained",
    )
    p = np.linspace(0, 1, 20001)
    for k, (file, shown) in enumerate(zip(files, columns)):
        axes[0, k].fill_between(place(p), weight(p), color="C1", alpha=0.5, lw=0)
        axes[0, k].set_title(file.stem.removeprefix("teach-"), fontweight="bold")
        for axis, (title, outcome) in zip(axes[1:, k], shown.items()):
            bins = np.arange(len(EDGES))
            axis.bar(bins, outcome.branch_shares, 0.5, align="edge", color="C1", label="branch")
            axis.bar(bins + 0.5, outcome.other_shares, 0.5, align="edge", color="0.7",
                     label="others")
            axis.set_title(title, fontsize=9, loc="left")
        for axis in axes[:, k]:
            axis.axvline(place(RHO), color="black", lw=0.8, ls=":")
        axes[-1, k].set_xticks(range(len(EDGES) + 1), ["0", *(f"{edge:g}" for edge in EDGES)])
        axes[-1, k].tick_params(axis="x", labelsize=7)
        axes[-1, k].set_xlabel("p of a token of the next observation")
    axes[0, 0].set_ylabel(f"p (1 - p) [p ≤ {RHO}]", fontsize=8)
    for axis in axes[1:, 0]:
        axis.set_ylabel("share of tokens", fontsize=8)
    axes[1, 0].legend(fontsize=8)
    save(figure, out)


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("files", nargs="+", type=Path, help="JSON files of teach")
        parser.add_argument("--out", type=Path, required=True, help="picture to write")
        args = parser.parse_args()
        draw(args.files, args.out)
