"""A world-model loss of one's own: predict what an undecided action led to, if it can be predicted.

    python -m examples.predictable alfworld
    python -m examples.predictable examples.boxes --wm-scale 1

It is ECHO (arXiv 2605.24517), cross entropy on o' at a constant weight of 0.05, on two conditions:

- The action was undecided, in place of Eq. 4: its entropy H(a_t | h_t) is at least a quarter of its
  mean over the first update. Forced steps drop out, and none drops out while all are undecided.
- The prediction hesitates between few outcomes, in place of Eq. 7: e^H <= 32, H being the entropy
  of the predicted token. Names and numbers drop out. It does not look at which token came, so a
  fact that seems nearly impossible is still learned.

Of seven losses in eight small worlds, it has the lowest regret: in its worst world it is 4.0 points
of success below the best loss; PaW is 16.2 and ECHO 21.0 below, each in its own. Nothing is decided
between it and `probable` with a floor of 0.01. research/README.md has the other studies of it.

--wm-loss, --rho and --alpha do nothing here. A resumed run reads least_entropy.json, because it has
no first update.
"""

import json
import math
from dataclasses import replace

from paw_min import cmae, losses
from paw_min.cli import fork
from paw_min.config import METHOD_PRESETS, Config
from paw_min.model.batches import Batch
from paw_min.model.policy import Scores
from paw_min.model.scoring import score_responses
from paw_min.rows import Rows
from paw_min.running.session import Session
from paw_min.train import paw
from paw_min.update import ObservationLoss

OUTCOMES = 32  # most outcomes between which a prediction may hesitate, e^H
SHARE = 1 / 4  # least entropy of an action, as a share of the mean over the first update
LEAST = "least_entropy.json"  # in the run folder


def predictable(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """The update of the package on other rows, with another world-model loss -> metrics.

    Two of the metrics are its own: `selected`, the share of rows whose observation is trained, and
    `least_entropy`, of an action of such a row, in nats.
    """
    entropy = rows.entropy  # (N,)
    if entropy is None:  # A single optimizer step with alpha 1 needs no pass of pi_old.
        entropy = score_responses(s.policy, rows.tokens, cfg.micro_tokens).entropy
    if k == 1:
        least = 0.0  # Without any observation, each later one is trained.
        if rows.candidates.any():
            least = SHARE * entropy[rows.candidates].mean().item()
        s.run.write(LEAST, json.dumps(least))
    else:
        least = json.loads((s.run.folder / LEAST).read_text())
    selected = rows.candidates & (entropy >= least)  # (N,)
    weight = losses.row_weights(rows.group, selected, rows.lambdas)
    rows = replace(rows, selected=selected, row_weight=weight)
    metrics = paw(cfg, s, rows, k, loss_of_predictable, obs_entropy=True)
    return metrics | {"selected": selected.float().mean().item(), "least_entropy": least}


def loss_of_predictable(cfg: Config, scores: Scores, batch: Batch) -> ObservationLoss:
    """The loss of each row of a batch, from log-probs and entropies (B, S)."""
    counted = batch.obs_mask & (scores.entropy <= math.log(OUTCOMES))
    # A dropped token costs what a certain one does. |o'| still has it, as in Eq. 8.
    kept = scores.logp.masked_fill(~counted, 0.0)
    return ObservationLoss(cmae.cross_entropy(kept, batch.obs_mask), counted)


if __name__ == "__main__":
    fork(predictable, METHOD_PRESETS["echo"], __doc__)
