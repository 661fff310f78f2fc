"""Advantages of multi-turn, group-based RL, as pure functions over rows.

A row is one environment step of one trajectory (GiGPO's step-independent rollout). Its response
gets one number A_i, shared by all its tokens (PPO: one per token). PaW (Eq. 1) takes A_i from the
base algorithm. These are GRPO (arXiv 2402.03300), RLOO (2402.14740), GiGPO (2505.10978) and PPO's
GAE (1506.02438) in the multi-turn form that PaW builds on:

    row score      s_i = R(tau_i) - c * [row i is badly formatted]        penalized()
    step return    G_t = r_t + gamma * G_{t+1}, then the same penalty     discounted_returns()
    GRPO           A_i = (s_i - mean_g) / (std_g + eps)                   grpo()
    RLOO           A_i = n / (n - 1) * (s_i - mean_g)                     rloo()
    GiGPO          A_i = A^E_i + weight * A^S_i                           gigpo()
    PPO            A_k = sum_j (gamma * lam)^j * delta_{k+j}              gae()

Three properties of that form are kept. The mean and std of a group run over its *rows*, so that
long trajectories weigh more (over="trajectories" counts each trajectory once). The std is the
unbiased one. A group with a single row keeps its raw score in GRPO and RLOO (mean 0, std 1), but a
step group with a single row gets 0 in GiGPO (its own value is the mean). Statistics are computed in
float64: in float32, the rounding error of a mean of equal scores, divided by eps = 1e-6, would be
an advantage of order one.

Legend: N rows; every tensor is (N,); in gae(), (M,) over M tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

Keys = Sequence[Hashable] | Tensor  # one label per row: hashables or an integer tensor


def penalized(values: Tensor, valid: Tensor, penalty: float) -> Tensor:
    """values - penalty where the row's own response is badly formatted -> (N,).

    Used for scores and for step returns. It is applied after discounting, so that an invalid
    response does not lower the step returns of earlier rows.
    """
    return values - penalty * (1.0 - valid.to(values.dtype))


def discounted_returns(rewards: Tensor, trajectory: Keys, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} within each trajectory (GiGPO Eq. 5) -> (N,).

    rewards: (N,) environment rewards, without penalties. The rows of a trajectory must be in time
    order; rows of different trajectories may be interleaved.
    """
    labels = _labels(trajectory, len(rewards), "trajectory")
    returns = rewards.tolist()
    after = defaultdict(float)  # trajectory -> G_{t+1}
    for i in reversed(range(len(returns))):
        after[labels[i]] = returns[i] = returns[i] + gamma * after[labels[i]]
    dtype = rewards.dtype if rewards.is_floating_point() else None  # None: the default float type
    return torch.tensor(returns, dtype=dtype, device=rewards.device)


def grpo(
    scores: Tensor, group: Keys, trajectory: Keys | None = None, *,
    normalize: str = "std", over: str = "rows", eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Group-relative advantage of each row -> (N,).

    scores: (N,) row scores s_i, the undiscounted return minus the row's own penalty.
    normalize: "std" divides by std_g + eps, "mean" only subtracts mean_g (Dr. GRPO).
    over: "rows" computes the statistics over all rows of the group; "trajectories" over the first
        row of each trajectory (with that row's penalty, if it has one).
    """
    counted = _counted(trajectory, len(scores), over)
    return _standardize(scores, _labels(group, len(scores), "group"), counted, normalize, eps, 0.0)


def rloo(
    scores: Tensor, group: Keys, trajectory: Keys | None = None, *, over: str = "rows"
) -> Tensor:
    """n / (n - 1) * (s_i - mean_g), with n counted rows (or trajectories) in the group -> (N,).

    Over rows: s_i minus the mean of the group's other rows, those of its own trajectory included.
    Over trajectories: leave-one-out, for rows with the penalty of their trajectory's first row.
    """
    labels, counted = _labels(group, len(scores), "group"), _counted(trajectory, len(scores), over)
    n = Counter(labels[i] for i in counted)
    centered = _standardize(scores, labels, counted, "mean", 0.0, 0.0)
    return centered * torch.tensor([n[g] / max(1, n[g] - 1) for g in labels]).to(centered)


def gae(rewards: Tensor, values: Tensor, trajectory: Keys, *, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates -> (M,); the returns that a critic fits are these + values.

    delta_k = r_k + gamma * V_{k+1} - V_k and A_k = delta_k + gamma * lam * A_{k+1}, zero after the
    end of a trajectory. rewards, values: (M,), in time order within each trajectory. In
    verl-agent (and critic.py) an entry is a token, and each response is its own trajectory.
    """
    labels = _labels(trajectory, len(rewards), "trajectory")
    reward, value = rewards.double().tolist(), values.double().tolist()
    result, after = [0.0] * len(labels), defaultdict(lambda: (0.0, 0.0))  # V_{k+1}, A_{k+1}
    for k in reversed(range(len(labels))):
        next_value, next_advantage = after[labels[k]]
        delta = reward[k] + gamma * next_value - value[k]
        result[k] = delta + gamma * lam * next_advantage
        after[labels[k]] = value[k], result[k]
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.tensor(result, dtype=dtype, device=values.device)


def gigpo(
    scores: Tensor, step_returns: Tensor, group: Keys, anchor: Keys, *,
    normalize: str = "std", weight: float = 1.0, similarity: float | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Episode advantage plus `weight` (omega) times step advantage, GiGPO Eq. 8 -> (N,).

    scores, step_returns: (N,), penalties already applied to both.
    anchor: the environment state that each row acted in, here its observation o_t. Rows of a group
        with equal anchors form a step group, across trajectories and across time.
    similarity: None compares anchors exactly; a ratio in (0, 1] merges texts at least that similar
        (by envs/anchors.py; everything else in this file stands alone).
    """
    groups = _labels(group, len(scores), "group")
    anchors = _labels(anchor, len(scores), "anchor")
    if similarity is not None:
        from .envs.anchors import similar_anchors

        anchors = similar_anchors(groups, anchors, similarity)
    episode = grpo(scores, groups, normalize=normalize, eps=eps)  # A^E
    step = _standardize(
        step_returns, list(zip(groups, anchors)), range(len(groups)), normalize, eps, None
    )  # A^S
    return episode + weight * step  # Eq. 8


def _counted(trajectory: Keys | None, n: int, over: str) -> Sequence[int]:
    """The rows that enter the statistics of a group: all, or the first of each trajectory."""
    if over not in ("rows", "trajectories"):
        raise ValueError(f'over={over!r} is unknown: use "rows" or "trajectories"')
    if over == "trajectories" and trajectory is None:
        raise ValueError('over="trajectories" needs the trajectory label of each row')
    if over == "rows":
        return range(n)
    first = {}
    for i, label in enumerate(_labels(trajectory, n, "trajectory")):
        first.setdefault(label, i)
    return list(first.values())


def _standardize(values, labels, counted, normalize, eps, lone_mean) -> Tensor:
    """(value - mean) / (std + eps) per label -> (N,), with statistics of the `counted` rows.

    A label with one counted row has no spread: std is 1 and the mean is lone_mean (None: the row's
    own value).
    """
    if normalize not in ("std", "mean"):
        raise ValueError(f'normalize={normalize!r} is unknown: use "std" or "mean"')
    members = defaultdict(list)
    for i in counted:
        members[labels[i]].append(i)
    exact = values.double()
    mean, scale = torch.zeros_like(exact), torch.ones_like(exact)  # (N,)
    index = defaultdict(list)
    for i, label in enumerate(labels):
        index[label].append(i)
    for label, rows in members.items():
        sample = exact[rows]
        if len(rows) > 1:
            mean[index[label]] = sample.mean()
            if normalize == "std":
                scale[index[label]] = sample.std(unbiased=True) + eps
        else:
            mean[index[label]] = sample[0] if lone_mean is None else lone_mean
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    return ((exact - mean) / scale).to(dtype)


def _labels(keys: Keys, n: int, name: str) -> list:
    labels = keys.tolist() if isinstance(keys, Tensor) else list(keys)
    if len(labels) != n:
        raise ValueError(f"{name} labels {len(labels)} rows, but there are {n}")
    return labels
