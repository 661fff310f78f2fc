"""Gradient conflict: the norms of the two losses' gradients, and their cosine.

Both are gradients of the same mini-batch of an update, the first that learn() takes, at the weights
before its step: of the RL terms of Eq. 11 together, and of the weighted world-model term. A cosine
near -1: the world-model step undoes the RL step. Near 0: the gradients are orthogonal. Costs two
passes over one mini-batch and a copy of the gradient, every --conflict-every updates.
"""

from torch import Tensor

from paw_min.config import Config
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.running import distributed
from paw_min.running.metrics import UpdateMetrics
from paw_min.update import Rows, loss_terms, mini_batches


def gradient_conflict(cfg: Config, policy: Policy, rows: Rows, seed_key: tuple) -> dict[str, float]:
    """Measure it -> grad_norm_rl, grad_norm_wm, grad_cosine (0 if one of the norms is 0)."""
    mini = mini_batches(cfg, len(rows.tokens), seed_key)[0]
    rl, wm = (_gradient(cfg, policy, rows, mini, world_model) for world_model in (False, True))
    product = sum(distributed.whole((a * b).sum()).item() for a, b in zip(rl, wm))
    rl, wm = (sum(distributed.whole((g * g).sum()).item() for g in x) ** 0.5 for x in (rl, wm))
    cosine = product / (rl * wm) if rl and wm else 0.0
    return {"grad_norm_rl": rl, "grad_norm_wm": wm, "grad_cosine": cosine}


def _gradient(cfg: Config, policy: Policy, rows: Rows, mini, world_model: bool) -> list[Tensor]:
    policy.zero_grad()
    with_obs = (rows.row_weight > 0).tolist()
    for batch in micro_batches(policy, rows.tokens, mini, with_obs, cfg.micro_tokens):
        terms = loss_terms(cfg, policy, rows, mini, batch, UpdateMetrics(1))
        wm = terms.pop("wm", 0.0)
        rest = sum(terms.values())
        # Every pass needs a backward pass on all ranks, with FSDP: here one of zeros.
        (0.0 * rest + wm if world_model else rest).backward()
    gradients = [p.grad for p in policy.model.parameters() if p.grad is not None]
    if not cfg.shard:
        distributed.all_reduce(gradients)
    policy.zero_grad()
    return gradients
