"""How much should a group train the world model? The more it wins, the less: Eq. 10 of PaW.

    lambda_g = 1 - mean return of the group / R_max

From a group that loses all its episodes, group-relative RL learns nothing but the format, but its
observations still show how the environment responds: lambda_g = 1. A group that wins half of them
has 0.5. A solved group has 0: it needs no world model. `group_mean_return` takes one return per
episode, not per row (update.group_lambdas): a mean over rows would count long episodes more. The
return is the environment's, without format penalties (the paper does not say), so that lambda_g
lies in [0, 1] for returns in [0, R_max]. Other values are clamped, which the paper does not do.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def lambda_g(mean_return: Tensor | float, r_max: float) -> Tensor:
    """Eq. 10, elementwise: mean episode return of each group -> lambda_g in [0, 1]."""
    if not r_max > 0:
        raise ValueError(f"r_max={r_max} must be positive: it is the highest episode return")
    return (1.0 - torch.as_tensor(mean_return) / r_max).clamp(0.0, 1.0)


def group_mean_return(
    returns: Sequence[float], group: Sequence[Hashable]
) -> dict[Hashable, float]:
    """Mean over the *episodes* of each group, not over their steps: {group: R-bar_g}.

    returns, group: one entry per episode.
    """
    members = defaultdict(list)
    for value, label in zip(returns, group, strict=True):
        members[label].append(value)
    return {label: sum(values) / len(values) for label, values in members.items()}
