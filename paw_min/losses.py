"""The joint loss, Eq. 11 of PaW: its surrogate, its KL term, and the weights of its rows.

    L = token mean over the mini-batch of  [clipped surrogate + beta * KL - c_H * entropy]
      + wm_scale * mean over all groups g of
                   [lambda_g * mean over S_alpha,g of the world-model loss]

"All groups g" are those of the update, even those without a selected row. update.loss_terms
computes these terms for a micro-batch, and update.optimize adds them up.

The second term is computed as a sum over rows, each with a weight (`row_weights`). With 16 groups,
a selected row of a lost group that has 100 of them weighs 1 / 1,600. A sum may be cut anywhere:
micro-batches add up to their mini-batch, and a mini-batch of random rows, times (rows of the
update / rows of the mini-batch), estimates the sum of the whole update without bias, as long as the
parameters stay the same.

The first term differs from the paper, which prints a sum over tokens and a mean over groups, and
from verl-agent, which averages over micro-batches. As a mean over tokens it is smaller than the
paper's, so the second term weighs more beside it. wm_scale, which the paper does not have, can
change that; its default is 1 (CHOICES.md).

Legend: N rows, T tokens (update.py calls these functions with its (B, S) columns), G groups; masks
are 1 on the tokens that count. beta is --kl-coef, c_H is entropy_coef.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A difference of log-probabilities is clamped to this many nats before exp(), as in verl: exp(89)
# overflows in float32, and its gradient is NaN. With the default clips, both losses are already
# constant there, so the clamp changes no result.
MAX_LOG_RATIO = 20.0


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over all positions where mask is 1: (N, T), (N, T) -> ()."""
    return x.masked_fill(~mask.bool(), 0.0).sum() / mask.sum().clamp(min=1)  # / tokens


class Surrogate(NamedTuple):
    loss: Tensor  # ()
    metrics: dict[str, Tensor]  # () each


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0,
) -> Surrogate:
    """PPO's clipped policy loss with dual clip, token mean. The clips are verl-agent's.

    logp, old_logp, mask: (N, T), of the action tokens. advantage: (N,) per response, or (N, T).
    Where A < 0 and the ratio is large, the loss is bounded by dual_clip * |A| (Ye et al. 2020,
    arXiv 1912.09729).
    metrics: clip_fraction, the fraction of tokens whose ratio was clipped; approx_kl, the k3
    estimate of KL(old || new) in nats per token; ratio, its mean.
    """
    if advantage.ndim == 1:
        advantage = advantage[:, None]  # (N, 1)
    # Padding may hold anything: a difference of 0 keeps exp() and its gradient finite there.
    log_ratio = (logp - old_logp).masked_fill(~mask.bool(), 0.0)  # (N, T)
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    # The larger loss is the pessimistic one. Once the ratio has moved as far as the clip in the
    # direction that A rewards, the loss is constant and has no gradient: no reason to go farther.
    # A ratio that moved the wrong way keeps its gradient, which brings it back.
    loss = torch.maximum(plain, clipped)
    # The plain loss has no bound for A < 0 as the ratio grows: the second clip gives it one.
    loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * dual_clip), loss)
    with torch.no_grad():
        values = {
            "clip_fraction": (clipped > plain).float(),
            "approx_kl": ratio - 1 - log_ratio,
            "ratio": ratio,
        }
        metrics = {name: masked_mean(value, mask) for name, value in values.items()}
    return Surrogate(masked_mean(loss, mask), metrics)


def k3_kl(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """KL(policy || reference) by Schulman's k3, exp(d) - d - 1, token mean -> (), in nats.

    d = ref_logp - logp. Values are clamped to [-10, 10], as in verl-agent: where the policy gives
    a token less than 1/13 of the reference's probability (d > 2.6), there is no gradient.

    On the policy's own samples, the value is an unbiased estimate of the KL, but its gradient is
    not one of the KL's gradient: differentiated as a loss term, as in verl-agent, k3 has in
    expectation the gradient of KL(reference || policy).
    """
    d = (ref_logp - logp).masked_fill(~mask.bool(), 0.0)  # (N, T)
    d = d.clamp(max=MAX_LOG_RATIO)
    return masked_mean((d.exp() - d - 1).clamp(-10, 10), mask)


def row_weights(
    group: Sequence[Hashable], selected: Tensor, lambdas: dict[Hashable, float]
) -> Tensor:
    """The weight of each row in the second term of Eq. 11, with the mean of Eq. 9 -> (N,).

        w_i = lambda_g / (G * |S_alpha,g|) for a selected row of group g, else 0

    The sum of w_i * loss_i over all rows is that term; update.loss_terms adds it up.
    selected: bool (N,), Eq. 4. lambdas: {group: lambda_g} of balance.py, for every group of the
    update; G is their number, so a group without selected rows adds 0 and does not change the
    weight of the others.
    """
    sizes = Counter(g for g, keep in zip(group, selected.tolist(), strict=True) if keep)
    weights = [
        float(lambdas[g]) / (len(lambdas) * sizes[g]) if keep else 0.0
        for g, keep in zip(group, selected.tolist())
    ]
    return torch.tensor(weights, device=selected.device)
