"""Selection: the transitions with the highest action entropy train the world model, Eq. 4 of PaW.

    H(a_t | h_t) = mean over the response's tokens of the entropy of pi_old at that token
    S_alpha      = the ceil(alpha * N) with the highest H, of N transitions with an observation

Why the entropy? It is high where the policy has not decided yet. The paper argues that the policy
learns more there from what its action causes. With alpha = 0.75, a quarter of the transitions is
left out. update.prepare calls `select_transitions` with all rows of an update, of all groups,
before mini-batches are drawn.

Two choices. a_t is the whole response, reasoning and end token included (the paper does not say).
And the paper's text has the entropy of the token's distribution, but its formula has -q log q of
the *sampled* token. Here it is the entropy, over the full vocabulary: -q log q is near 0 for very
unlikely tokens as well as for certain ones. `full_entropy` and `sampled_entropy` are the two
definitions; a run takes the first from model/head.py, which computes it tile by tile.

Legend: N transitions, T tokens, V vocabulary.
"""

import math

import torch
from torch import Tensor


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution, in nats: (..., V) -> (...)."""
    # entr(p) is -p log p, and 0 at p = 0: a token that is masked with -inf adds nothing.
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def sampled_entropy(logp: Tensor) -> Tensor:
    """The printed summand -q log q, with q the probability of the sampled token: (...) -> (...)."""
    return -logp.exp() * logp


def action_entropy(token_entropy: Tensor, action_mask: Tensor) -> Tensor:
    """H(a_t | h_t): mean over the action tokens, (N, T), (N, T) -> (N,)."""
    mask = action_mask.bool()
    return token_entropy.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)  # / |a_t|


def top_alpha(entropy: Tensor, alpha: float) -> Tensor:
    """Eq. 4: True for the ceil(alpha * N) rows of highest entropy -> bool (N,).

    Rounded up, so that a pool that is not empty always has a selected row. Of rows with equal
    entropy the earlier one is selected, on every device.
    """
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha={alpha} must lie in (0, 1]: it is the fraction of rows to keep")
    if entropy.ndim != 1:
        raise ValueError(f"entropy has shape {tuple(entropy.shape)}, expected (N,)")
    count = math.ceil(alpha * len(entropy) * (1 - 1e-9))  # 0.07 * 100 is slightly above 7
    order = torch.sort(entropy, descending=True, stable=True).indices
    selected = torch.zeros_like(entropy, dtype=torch.bool)  # (N,)
    selected[order[:count]] = True
    return selected


def select_transitions(candidates: Tensor, entropy: Tensor | None, alpha: float) -> Tensor:
    """S_alpha, the top alpha of the candidates: bool (N,), (N,) -> bool (N,).

    candidates: rows with an observation. The others do not compete, so alpha is a fraction of those
        that could train the world model.
    entropy: None keeps all candidates (alpha = 1).
    """
    if entropy is None:
        return candidates
    selected = torch.zeros_like(candidates)
    selected[candidates] = top_alpha(entropy[candidates], alpha)
    return selected
