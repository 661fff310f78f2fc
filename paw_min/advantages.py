"""How much better was a response than its group? The advantage A_i of Eq. 1, as pure functions.

A row is one environment step. Its response gets one number, shared by all its tokens (PPO: one per
token). PaW does not define A: it keeps that of the RL algorithm to which it is added.

    row score      s_i = R(tau_i) - c * [row i is badly formatted]        penalized()
    step return    G_t = r_t + gamma * G_{t+1}                            discounted_returns()
    GRPO           A_i = (s_i - mean_g) / (std_g + eps)                   grpo()
    RLOO           A_i = n / (n - 1) * (s_i - mean_g)                     rloo()
    GiGPO          A_i = A^E_i + weight * A^S_i                           gigpo(), its Eq. 8
    PPO            A_k = sum_j (gamma * lam)^j * delta_{k+j}              gae()

from GRPO (arXiv 2402.03300), RLOO (2402.14740), GiGPO (2505.10978) and PPO's GAE (1506.02438).

Row i belongs to a group g of n rows, whose scores have the mean mean_g and the std std_g; c is
invalid_penalty. A^E is GRPO's advantage. A^S compares step returns of rows in the same state;
update.row_advantages gives them to penalized() first. delta_k = r_k + gamma * V_{k+1} - V_k, with
the critic's values V. In PPO, k runs over the tokens of one response: the last one is rewarded with
s_i, and nothing follows.

The form is that of verl-agent, on which PaW builds. The mean and std of a group run over its
*rows*, so long trajectories weigh more. In GRPO and RLOO, over="trajectories" counts each
trajectory once, by its first row; GiGPO always counts rows. The std is the unbiased one. In GiGPO,
a state that occurs once has the step advantage 0.

A group of equal scores has advantages of 0: nothing says which of its responses were better. A
group has equal scores if it won, or lost, all its episodes and no response was badly formatted.
(GiGPO's step returns may still differ.) Statistics are float64, because in float32 the mean of
equal scores is off by about 1e-6, and divided by eps = 1e-6 this would be an advantage of about 1.

Differs from verl-agent: a group with a single counted row gets 0, because there is nothing to
compare it with (there, it gets its raw score), and so does a group with a single trajectory
(compared). And a group of equal scores is not divided by eps (Relative.standardized).

Legend: N rows; every tensor is (N,); in gae(), (M,) over M tokens.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Labels = Sequence[Hashable] | Tensor  # of groups, trajectories or states, one per row
EPS = 1e-6  # added to the std
ROUNDING = 1e-9  # A std below it is that of equal scores.


def penalized(values: Tensor, valid: Tensor, penalty: float) -> Tensor:
    """values - penalty where the row's own response is badly formatted -> (N,).

    Used for scores and for step returns. It is applied after discounting, so that an invalid
    response does not lower the step returns of earlier rows.
    """
    return values - penalty * (1.0 - valid.to(values.dtype))


def discounted_returns(rewards: Tensor, trajectory: Labels, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} within each trajectory (GiGPO Eq. 5) -> (N,).

    rewards: (N,) environment rewards, without penalties. The rows of a trajectory must be in time
    order; rows of different trajectories may be interleaved.
    """
    return gae(rewards, torch.zeros_like(rewards), trajectory, gamma=gamma, lam=1.0)


def grpo(
    scores: Tensor, group: Labels, trajectory: Labels | None = None, *, over: str = "rows"
) -> Tensor:
    """Group-relative advantage of each row -> (N,).

    scores: (N,) row scores s_i, the undiscounted return minus the row's own penalty.
    over: "rows" computes the statistics over all rows of the group; "trajectories" over the first
        row of each trajectory (with that row's penalty, if it has one).
    """
    return relative(scores, group, trajectory, over).standardized().to(float_type(scores))


def rloo(
    scores: Tensor, group: Labels, trajectory: Labels | None = None, *, over: str = "rows"
) -> Tensor:
    """n / (n - 1) * (s_i - mean_g), with n counted rows (or trajectories) in the group -> (N,).

    Over rows: s_i minus the mean of the group's other rows, those of its own trajectory included.
    Over trajectories it is leave-one-out, but for rows whose penalty is not that of the first row
    of their trajectory, the one that counts.
    """
    found = relative(scores, group, trajectory, over)
    factor = found.n / (found.n - 1).clamp(min=1)
    return found.centered.to(float_type(scores)) * factor.to(float_type(scores))


def compared(advantage: Tensor, group: Labels, trajectory: Labels) -> Tensor:
    """The advantage, and 0 in groups with a single trajectory -> (N,).

    If broken environments leave a group one episode, its rows could only be compared with each
    other.
    """
    n_trajectories = relative(advantage, group, trajectory, over="trajectories").n
    return advantage.masked_fill(n_trajectories == 1, 0.0)


def gae(rewards: Tensor, values: Tensor, trajectory: Labels, *, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates -> (M,); the returns that a critic fits are these + values.

    delta_k = r_k + gamma * V_{k+1} - V_k and A_k = delta_k + gamma * lam * A_{k+1}, zero after the
    end of a trajectory. rewards, values: (M,), in time order within each trajectory. In
    verl-agent (and ppo.py) an entry is a token, and each response is its own trajectory.
    """
    label = numbered(trajectory)
    reward = rewards.double().tolist()
    value = values.double().tolist()
    result = [0.0] * len(label)
    next_value = defaultdict(float)  # trajectory -> V_{k+1}; 0 after its end
    next_advantage = defaultdict(float)  # trajectory -> A_{k+1}
    for k in reversed(range(len(label))):
        delta = reward[k] + gamma * next_value[label[k]] - value[k]
        result[k] = delta + gamma * lam * next_advantage[label[k]]
        next_value[label[k]] = value[k]
        next_advantage[label[k]] = result[k]
    return torch.tensor(result, dtype=float_type(values), device=values.device)


def gigpo(
    scores: Tensor, step_returns: Tensor, group: Labels, anchor: Labels, *, weight: float = 1.0
) -> Tensor:
    """Episode advantage plus `weight` (omega) times step advantage, GiGPO Eq. 8 -> (N,).

    scores, step_returns: (N,), penalties already applied to both.
    anchor: the environment state that each row acted in, such as its observation o_t. Rows of a
        group with equal anchors form a step group, across trajectories and across time.
    """
    groups = numbered(group)
    states = numbered(anchor)
    step = relative(step_returns, list(zip(groups, states))).standardized()  # A^S
    return grpo(scores, groups) + weight * step.to(float_type(step_returns))  # A^E + omega A^S


class Relative(NamedTuple):
    """Each value compared with the counted values of its label: float64, (N,) each."""

    centered: Tensor  # value - mean; 0 where one value counts: nothing to compare it with
    n: Tensor  # how many count
    std: Tensor  # unbiased; 0 of a single value

    def standardized(self) -> Tensor:
        """centered / (std + eps), without the division where there is no spread -> (N,)."""
        # Where all counted scores are equal, their centered values are 0, whatever divides them.
        # But with over="trajectories", a row that is not counted may have a penalty of its own:
        # divided by eps, 0.1 would be an advantage of -1e5.
        return self.centered / (self.std + EPS).masked_fill(self.std < ROUNDING, 1.0)


def relative(
    values: Tensor, label: Labels, trajectory: Labels | None = None, over: str = "rows"
) -> Relative:
    """Compare each value with the counted ones of its label: all rows, or one per trajectory."""
    if over not in ("rows", "trajectories"):
        raise ValueError(f'over={over!r} is unknown: use "rows" or "trajectories"')
    values = values.double()
    counts = torch.ones_like(values)  # (N,) 1 or 0
    if over == "trajectories":
        first = {}  # trajectory -> its first row
        for i, tau in enumerate(numbered(trajectory)):
            first.setdefault(tau, i)
        counts.zero_()[list(first.values())] = 1.0
    of = torch.tensor(numbered(label), device=values.device)  # (N,)
    zeros = values.new_zeros(int(of.max()) + 1)  # (L,), one per label

    def total(x: Tensor) -> Tensor:  # (N,) -> (N,), of the label of each row
        return zeros.index_add(0, of, counts * x)[of]

    n = total(torch.ones_like(values))
    centered = (values - total(values) / n).masked_fill(n == 1, 0.0)
    std = (total(centered.square()) / (n - 1).clamp(min=1)).sqrt()
    return Relative(centered, n, std)


def numbered(labels: Labels) -> list[int]:
    """Labels as numbers from 0, in the order in which they occur first."""
    if isinstance(labels, Tensor):
        labels = labels.tolist()  # As keys, two tensors of the same number differ.
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return [number[label] for label in labels]


def float_type(values: Tensor) -> torch.dtype:
    """The type of a result: that of the values, but at least float32."""
    return torch.promote_types(values.dtype, torch.float32)
