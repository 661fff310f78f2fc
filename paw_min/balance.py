"""Balancing: the more a group wins, the less it trains the world model, Eq. 10 of PaW.

    lambda_g = 1 - mean return of the group / R_max

From a group that loses all its episodes, group-relative RL learns nothing but the format, but its
observations still show how the environment responds: lambda_g = 1. A group that wins half of them
has 0.5. A solved group has 0: it needs no world model. The mean is over episodes, not rows: a mean
over rows would count long episodes more. The return is the environment's, without format penalties
(the paper does not say), so that lambda_g lies in [0, 1] for returns in [0, R_max]. Other values
are clamped, which the paper does not do.

update.group_lambdas calls `lambdas_from_rows`; losses.row_weights turns the result into the weights
of Eq. 11.
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


def lambdas_from_rows(
    returns: Sequence[float], trajectory: Sequence[Hashable], group: Sequence[Hashable],
    r_max: float,
) -> dict[Hashable, float]:
    """Eq. 10 of the groups of an update: {group: lambda_g}.

    returns, trajectory, group: one entry per row; all rows of an episode have its return and group.
    A trajectory's number occurs in one group only.
    """
    # One entry per episode: each row writes the same.
    return_of = dict(zip(trajectory, returns, strict=True))
    group_of = dict(zip(trajectory, group, strict=True))
    mean_return = group_mean_return(list(return_of.values()), list(group_of.values()))
    return {g: float(lambda_g(mean, r_max)) for g, mean in mean_return.items()}
