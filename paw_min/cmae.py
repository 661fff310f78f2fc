"""The observation losses: what a predicted token costs, Eq. 5-8 of PaW.

With p_i = pi(o'_i | h, a, o'_<i) for each token of the next observation o', its loss is

    cross entropy  (1 / |o'|) sum -log p_i                      Eq. 5      gradient -grad p / p
    MAE            (1 / |o'|) sum (1 - p_i)                     sec. 3.2   gradient -grad p
    clipped MAE    (1 / |o'|) sum [p_i <= rho] (1 - p_i)        Eq. 7-8    0 where p > rho

The gradients are Eq. 6, per token. At the token's own logit, their size is 1 - p for cross entropy
and p (1 - p) for MAE. So cross entropy pulls hardest at improbable tokens, such as the words of a
serial number: at p = 0.001, it pulls 1,000 times as hard as MAE. The price: MAE learns any fact
slowly while it is improbable, even one that could be predicted. And without the clip, MAE is lowest
where the most frequent outcome has all the probability, so no other outcome is learned. Eq. 7 drops
a token at p > rho, before that happens (research/LOG.md). p is the current policy's, at
temperature 1. The functions take log p and a mask. The means over transitions (Eq. 9) and groups
(Eq. 11) are in losses.py.

Legend: N transitions, T columns of tokens (in update.py, the (B, S) of a batch); `mask` is 1 on
observation tokens, else 0. |o'| counts all of them, even those that Eq. 7 drops. The loss of a row
without observation tokens is 0.
"""

import torch
from torch import Tensor


def cross_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """Eq. 5 per transition: logp, mask (N, T) -> (N,), in nats per token."""
    return -_observed(logp, mask).sum(-1) / _length(mask)


def mae(logp: Tensor, mask: Tensor) -> Tensor:
    """The mean of 1 - p per transition (section 3.2): logp, mask (N, T) -> (N,), in [0, 1]."""
    return (mask.bool() * (1.0 - _observed(logp, mask).exp())).sum(-1) / _length(mask)


def clipped_mae(logp: Tensor, mask: Tensor, rho: float) -> Tensor:
    """Eq. 8 per transition: logp, mask (N, T) -> (N,), in [0, 1]."""
    logp = _observed(logp, mask)
    kept = mask.bool() * hard_tokens(logp, rho)
    return (kept * (1.0 - logp.exp())).sum(-1) / _length(mask)


def hard_tokens(logp: Tensor, rho: float) -> Tensor:
    """m_i = [p_i <= rho], Eq. 7: (N, T) -> (N, T) of 0.0 and 1.0.

    The mask is a comparison, so it has no gradient. p = rho is kept; the tolerance of a few ulp
    covers the rounding of exp(log(rho)).
    """
    p = logp.exp()
    return (p <= rho * (1 + 4 * torch.finfo(p.dtype).eps)).to(p.dtype)


def _observed(logp: Tensor, mask: Tensor) -> Tensor:
    """logp on observation tokens, 0 elsewhere: (N, T).

    Padding may hold anything, -inf included. It is replaced first, so that neither a value nor a
    gradient becomes NaN.
    """
    if logp.shape != mask.shape or mask.ndim != 2:
        raise ValueError(f"logp {tuple(logp.shape)}, mask {tuple(mask.shape)}: need (N, T)")
    return logp.masked_fill(~mask.bool(), 0.0)


def _length(mask: Tensor) -> Tensor:
    return mask.bool().sum(-1).clamp(min=1)  # |o'|, at least 1
