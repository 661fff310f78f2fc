"""The rule in the package: what the runs with SmolLM2 and in ALFWorld's engine train on.

    python -m research.predictable.in_package boxes --seed 0     SmolLM2
    python -m research.predictable.in_package hidden --seed 2    the games of examples/hidden.py

The other flags are those of the example. Settings of ECHO are added to its presets. The metrics are
those of a run with its world (research/boxes/material.py), and

    least_entropy    of an action whose observation is trained, in nats
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

from examples import boxes, hidden
from paw_min import cmae, losses
from paw_min.config import METHOD_PRESETS, Config
from paw_min.model.batches import Batch
from paw_min.model.policy import Scores
from paw_min.rows import Rows
from paw_min.running.session import Session
from paw_min.train import paw
from paw_min.update import ObservationLoss, WorldModelLoss
from research.boxes.material import material
from research.predictable.study import MOST

LEAST = "least_entropy.json"  # in the run folder, because a resumed run has no first update


def undecided(s: Session, rows: Rows, k: int) -> tuple[Rows, float]:
    """Select the rows whose action has a quarter of the first update's mean entropy, or more.

    Returns the rows with other weights, and this least entropy in nats.
    """
    if k == 1:
        least = rows.entropy[rows.candidates].mean().item() / 4
        s.run.write(LEAST, json.dumps(least))
    else:
        least = json.loads((s.run.folder / LEAST).read_text())
    selected = rows.candidates & (rows.entropy >= least)
    weight = losses.row_weights(rows.group, selected, rows.lambdas)
    return replace(rows, selected=selected, row_weight=weight), least


def loss_of_predictable(cfg: Config, scores: Scores, batch: Batch) -> ObservationLoss:
    """Cross entropy of the tokens of o' with few outcomes."""
    counted = batch.obs_mask & (scores.entropy.exp() <= MOST)
    # A dropped token costs what a certain one does. It still counts in |o|, as in Eq. 8.
    kept = scores.logp.masked_fill(~counted, 0.0)
    return ObservationLoss(cmae.cross_entropy(kept, batch.obs_mask), counted)


# paw of train.py, or research.boxes.material.material
WithLoss = Callable[[Config, Session, Rows, int, WorldModelLoss, bool], dict[str, float]]


def with_the_rule(method: WithLoss, cfg: Config, s: Session, rows: Rows, k: int) -> dict:
    """An update of `method` on the rows and tokens of the rule -> its metrics."""
    rows, least = undecided(s, rows, k)
    metrics = method(cfg, s, rows, k, loss_of_predictable, True)
    return metrics | {"selected": rows.selected.float().mean().item(), "least_entropy": least}


def predictable(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """The update in ALFWorld's engine -> metrics."""
    return with_the_rule(paw, cfg, s, rows, k)


def predictable_boxes(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """The update with SmolLM2 -> metrics, with those of the material."""
    return with_the_rule(material, cfg, s, rows, k)


if __name__ == "__main__":
    world, *flags = sys.argv[1:]
    example, method = {"boxes": (boxes, predictable_boxes), "hidden": (hidden, predictable)}[world]
    echo = {name: preset | METHOD_PRESETS["echo"] for name, preset in example.PRESETS.items()}
    example.run(echo, __doc__, method, flags)
