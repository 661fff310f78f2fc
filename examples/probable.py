"""A world-model loss of one's own: cross entropy on the tokens that the model holds for possible.

    python -m examples.probable alfworld
    python -m examples.probable examples.boxes --wm-scale 1

It is ECHO (arXiv 2605.24517) with one change, Eq. 7 upside down: a token with p < 0.01 is not
trained. Cross entropy pulls hardest at such tokens. Where observations have words of no use, such
as ids, hashes or descriptions, most of its gradient is theirs, and it memorizes those that are
fixed for one item. Where there are none, ECHO does as well.

Its weakness: a fact that starts below the floor is learned late, such as one of 128 names; and
useless words that start above it are memorized, such as 8 of 64 words, where a floor of 0.03 was
better. So change FLOOR to lie between the chance of such a word and that of a fact.
research/README.md has a table of worlds by losses. The stored runs with SmolLM2, at --wm-scale 1,
had a floor of 0.03.

METHOD_PRESETS["echo"] is ECHO's setting: all transitions, lambda_g = 1, weight 0.05. A loss with
PaW's selection, balance and weight has {} in its place. The flags are those of the benchmark's run
script; --wm-loss and --rho do nothing here.
"""

import math

from paw_min import cmae
from paw_min.cli import fork
from paw_min.config import METHOD_PRESETS, Config
from paw_min.model.batches import Batch
from paw_min.model.policy import Scores
from paw_min.rows import Rows
from paw_min.running.session import Session
from paw_min.train import paw
from paw_min.update import ObservationLoss

FLOOR = 0.01  # probability


def probable(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """The update of the package, with another world-model loss -> metrics."""
    return paw(cfg, s, rows, k, loss_of_probable)


def loss_of_probable(cfg: Config, scores: Scores, batch: Batch) -> ObservationLoss:
    """The loss of each row of a batch, from log-probs (B, S)."""
    logp = scores.logp
    counted = batch.obs_mask & (logp >= math.log(FLOOR))
    # A dropped token costs what a certain one does. |o'| still has it, as in Eq. 8.
    kept = logp.masked_fill(~counted, 0.0)
    return ObservationLoss(cmae.cross_entropy(kept, batch.obs_mask), counted)


if __name__ == "__main__":
    fork(probable, METHOD_PRESETS["echo"], __doc__)
