"""A run of examples/boxes.py that also measures what it predicts as material, the first of o'.

    python -m research.boxes.material --seed 0             learns as PaW does
    python -m research.boxes.material probable --seed 0    with the loss of examples/probable.py

The flags are those of examples.boxes. The metrics:

    wm_p_first   probability of the true one, mean over the rows whose observation is trained
    wm_p_most    of the most predicted one, mean over all boxes after a hammer, after every fifth
                 update. 1/8: the boxes are told apart, or nothing is known. 1: always the same.
"""

import sys
from functools import partial

import torch

from examples import boxes
from examples.probable import loss_of_probable
from paw_min.config import METHOD_PRESETS, Config
from paw_min.model.batches import Batch
from paw_min.model.policy import Policy, Scores
from paw_min.rows import Rows
from paw_min.running.session import Session
from paw_min.train import paw
from paw_min.update import ObservationLoss, WorldModelLoss, observation_loss


def material(
    cfg: Config, s: Session, rows: Rows, k: int, loss: WorldModelLoss = observation_loss,
    obs_entropy: bool = False,
) -> dict[str, float]:
    """Optimize -> the metrics of the update, and those of this file."""
    noted = []  # (mean p of its rows, their number) of each micro-batch
    metrics = paw(cfg, s, rows, k, partial(noting_p, noted, loss), obs_entropy)
    n = sum(count for _, count in noted)
    # In an update in which all groups win everything, no observation is trained.
    if n:
        metrics["wm_p_first"] = sum(p * count for p, count in noted) / n
    if k % 5 == 0:
        metrics["wm_p_most"] = most_predicted(s.policy)
    return metrics


@torch.no_grad()
def most_predicted(policy: Policy) -> float:
    """The mean probability of the most predicted material over all boxes, after a hammer."""
    asked = torch.tensor([policy.encode(f"{boxes.ask(name)} hammer") for name in boxes.NAMES])
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=policy.precision == "bf16"):
        logits = policy.model(asked.to(policy.device)).logits[:, -1]  # (boxes, V)
    p = logits.softmax(-1)
    materials = [token for name in boxes.MATERIALS for token in policy.encode(f" {name}")]
    return p[:, materials].mean(0).max().item()


def probable_material(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """The same with another world-model loss."""
    return material(cfg, s, rows, k, loss_of_probable)


def noting_p(
    noted: list, loss: WorldModelLoss, cfg: Config, scores: Scores, batch: Batch
) -> ObservationLoss:
    """`loss`; `noted` gets p of the first tokens."""
    scored = batch.obs_mask.any(-1)  # (B,) rows with an observation
    first = batch.obs_mask.int().argmax(-1, keepdim=True)  # (B, 1); 0 in rows without
    p = scores.logp.detach().gather(-1, first)[:, 0].exp()  # (B,)
    noted.append((p[scored].mean().item(), int(scored.sum())))
    return loss(cfg, scores, batch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["probable"]:
        echo = {name: preset | METHOD_PRESETS["echo"] for name, preset in boxes.PRESETS.items()}
        boxes.run(echo, __doc__, probable_material, sys.argv[2:])
    else:
        boxes.run(doc=__doc__, method=material)
