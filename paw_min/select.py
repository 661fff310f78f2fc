"""Which transitions teach the world model: action-entropy selection, Eq. 4 of PaW.

    H(a_t | h_t) = mean over action tokens of the policy's uncertainty there
    S_alpha      = the alpha share of all transitions of the update with the highest H

The pool is global: every transition of every rollout group of the update competes at once,
before any mini-batch is cut. Transitions without an observation (|o| = 0) do not compete.

Paper: the text speaks of the entropy of the action-token distributions, the printed formula has
-q log q of the *sampled* token only. Here: both, `full_entropy` by default, because -q log q falls
to 0 for very unlikely tokens too, where the policy is anything but certain.

Legend: N transitions, T tokens, V vocabulary.
"""

import math

import torch
from torch import Tensor


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution, in nats: (..., V) -> (...)."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def sampled_entropy(logp: Tensor) -> Tensor:
    """The paper's printed summand -q log q, q the probability of the sampled token: (...)."""
    return -logp.exp() * logp


def action_entropy(token_entropy: Tensor, action_mask: Tensor) -> Tensor:
    """H(a_t | h_t): mean over the action tokens, (N, T), (N, T) -> (N,).

    The action is the whole response, its reasoning and closing tokens included (the paper does
    not say; this is the row that the RL loss trains).
    """
    mask = action_mask.bool()
    return token_entropy.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)  # / |a_t|


def top_alpha(entropy: Tensor, alpha: float) -> Tensor:
    """Eq. 4: True for the ceil(alpha * N) rows of highest entropy -> bool (N,).

    The count is rounded up, so that a pool with a row in it always teaches something. Among
    equal entropies the earlier row wins, whatever the device.
    """
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha={alpha} must lie in (0, 1]: it is the share of rows that is kept")
    if entropy.ndim != 1:
        raise ValueError(f"entropy has shape {tuple(entropy.shape)}, expected (N,)")
    count = math.ceil(alpha * len(entropy) - 1e-9)  # 0.07 * 100 is a hair above 7
    order = torch.sort(entropy, descending=True, stable=True).indices
    selected = torch.zeros_like(entropy, dtype=torch.bool)  # (N,)
    selected[order[:count]] = True
    return selected
