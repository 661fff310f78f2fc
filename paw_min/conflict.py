"""Gradient conflict: the norms of the two losses' gradients, and their cosine.

Both are gradients of the same mini-batch of an update, the first that learn() takes, at the weights
before its step: of the RL terms of Eq. 11 together, and of the weighted world-model term. A cosine
near -1: the world-model step undoes the RL step. Near 0: the gradients are orthogonal. Costs two
passes over one mini-batch and a copy of the gradient, every --conflict-every updates.
"""

from torch import Tensor

from paw_min.base import distributed
from paw_min.config import Config
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.rows import Rows
from paw_min.update import loss_parts, mini_batches


def gradient_conflict(cfg: Config, policy: Policy, rows: Rows, seed_key: tuple) -> dict[str, float]:
    """Measure it -> grad_norm_rl, grad_norm_wm, grad_cosine (0 if one of the norms is 0)."""
    mini = mini_batches(cfg, len(rows.tokens), seed_key)[0]
    rl = gradient(cfg, policy, rows, mini, of_world_model=False)
    wm = gradient(cfg, policy, rows, mini, of_world_model=True)
    rl_norm = dot(rl, rl) ** 0.5
    wm_norm = dot(wm, wm) ** 0.5
    cosine = dot(rl, wm) / (rl_norm * wm_norm) if rl_norm and wm_norm else 0.0
    return {"grad_norm_rl": rl_norm, "grad_norm_wm": wm_norm, "grad_cosine": cosine}


def dot(a: list[Tensor], b: list[Tensor]) -> float:
    """The inner product of two gradients, over all parameters; collective if they are sharded."""
    return sum(distributed.whole((x * y).sum()).item() for x, y in zip(a, b))


def gradient(
    cfg: Config, policy: Policy, rows: Rows, mini: list[int], of_world_model: bool
) -> list[Tensor]:
    """The gradient of the world-model term, or of all others: one tensor per parameter."""
    policy.zero_grad()
    with_obs = (rows.row_weight > 0).tolist()
    for batch in micro_batches(policy, rows.tokens, mini, with_obs, cfg.micro_tokens):
        terms = loss_parts(cfg, policy, rows, mini, batch).terms
        wm = terms.pop("wm", 0.0)
        rest = sum(terms.values())
        if of_world_model:
            # A batch may have no world-model term, but FSDP needs a backward pass after every
            # forward pass on all ranks: here one of zeros.
            loss = 0.0 * rest + wm
        else:
            loss = rest
        loss.backward()
    gradients = [p.grad for p in policy.model.parameters() if p.grad is not None]
    if not cfg.shard:
        distributed.all_reduce(gradients)
    policy.zero_grad()
    return gradients
