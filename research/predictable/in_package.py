"""The rule in the package: what the runs with SmolLM2 and in ALFWorld's engine train on.

    python -m research.predictable.in_package boxes --seed 0     SmolLM2
    python -m research.predictable.in_package hidden --seed 2    the games of examples/hidden.py

The other flags are those of the example. Settings of ECHO are added to its presets. The metrics are
those of a run with its world (research/boxes/material.py), and

    least_entropy    of an action whose observation is trained, in nats
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from examples import boxes, hidden
from paw_min import cmae, losses
from paw_min.config import METHOD_PRESETS, Config
from paw_min.model import policy
from paw_min.model.batches import Batch
from paw_min.model.head import token_scores
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


@contextmanager
def entropies() -> Iterator[list[Tensor]]:
    """Yields a list whose first entry has the entropies (M,) of the newest pass, those of o' too.

    The pass has the same log-probabilities and gradients as without it.
    """
    newest = [torch.empty(0)]

    def scores(hidden: Tensor, weight: Tensor, target: Tensor, n_entropy: int):
        logp, entropy = token_scores(hidden, weight, target, len(hidden))
        newest[0] = entropy.detach()
        return logp, entropy

    with patch.object(policy, "token_scores", scores):
        yield newest


def loss_of_predictable(
    newest: list[Tensor], cfg: Config, logp: Tensor, batch: Batch
) -> ObservationLoss:
    """Cross entropy of the tokens of o' with few outcomes, from log-probs (B, S)."""
    entropy = torch.zeros_like(logp).index_put((batch.row, batch.column), newest[0])  # (B, S)
    counted = batch.obs_mask & (entropy.exp() <= MOST)
    # A dropped token costs what a certain one does. It still counts in |o|, as in Eq. 8.
    kept = logp.masked_fill(~counted, 0.0)
    return ObservationLoss(cmae.cross_entropy(kept, batch.obs_mask), counted)


# paw of train.py, or research.boxes.material.material
WithLoss = Callable[[Config, Session, Rows, int, WorldModelLoss], dict[str, float]]


def with_the_rule(method: WithLoss, cfg: Config, s: Session, rows: Rows, k: int) -> dict:
    """An update of `method` on the rows and tokens of the rule -> its metrics."""
    rows, least = undecided(s, rows, k)
    with entropies() as newest:
        metrics = method(cfg, s, rows, k, partial(loss_of_predictable, newest))
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
