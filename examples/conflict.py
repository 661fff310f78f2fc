"""PaW with a measurement in each update: do the gradients of its two losses agree?

    python -m examples.conflict alfworld --updates 10

The metrics get the norms of both gradients and their cosine; nothing else changes. Both are
gradients of the same mini-batch, the first of the update, at the weights before its step: of the RL
terms of Eq. 11 together, and of the weighted world-model term. A cosine near -1: the world-model
step undoes the RL step. Near 0: the gradients are orthogonal. The two norms say how to choose
--wm-scale for a start model of your own (RUNNING.md).

Costs two passes over one mini-batch and a copy of the gradient per update. The flags are those of
the benchmark's run script.
"""

from torch import Tensor

from paw_min.base import distributed
from paw_min.cli import fork
from paw_min.config import Config
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.rows import Rows
from paw_min.running.session import Session
from paw_min.train import paw
from paw_min.update import loss_parts, mini_batches


def conflict(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """Measure, then learn as PaW does -> metrics of both."""
    measured = gradient_conflict(cfg, s.policy, rows, seed_key=(cfg.seed, k))
    return measured | paw(cfg, s, rows, k)


def gradient_conflict(cfg: Config, policy: Policy, rows: Rows, seed_key: tuple) -> dict[str, float]:
    """Measure it -> grad_norm_rl, grad_norm_wm, grad_cosine (0 if one of the norms is 0)."""
    mini = mini_batches(len(rows.tokens), cfg.mini_batch, seed_key)[0]
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


if __name__ == "__main__":
    fork(conflict, {}, __doc__)
