"""The advantage A_i of Eq. 1: how much better a response was than its group. Pure functions.

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
invalid_penalty. A^E is GRPO's advantage. A^S is the same formula on step returns, among the rows of
a group that acted in the same state: the same observation. delta_k = r_k + gamma * V_{k+1} - V_k,
with the critic's values V. In PPO, k runs over the tokens of one response: the last one is rewarded
with s_i, and nothing follows. update.row_advantages calls these functions, PPO's is called by
ppo.py.

The form is that of verl-agent, on which PaW builds. The mean and std of a group run over its
*rows*, so long trajectories weigh more. In GRPO and RLOO, over="trajectories" counts each
trajectory once, by its first row; GiGPO always counts rows. The std is the unbiased one. In GiGPO,
a state that occurs once has the step advantage 0.

A group whose rows all have equal scores has advantages of 0: nothing says which of its responses
were better. Most often it won, or lost, all its episodes. (GiGPO's step returns may still differ.)
Statistics are float64, because in float32 the mean of equal scores is off by about 1e-6, and
divided by eps = 1e-6 this would be an advantage of about 1.

Differs from verl-agent: two kinds of groups get 0, because there is nothing to compare: one with a
single counted row, which has its raw score there (see in_each_group), and one with a single
trajectory (see compared). And a group of equal scores is not divided by eps (see grpo).

Legend: N rows; every tensor is (N,); in gae(), (M,) over M tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

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


def grpo(
    scores: Tensor, group: Labels, trajectory: Labels | None = None, *, over: str = "rows"
) -> Tensor:
    """Group-relative advantage of each row -> (N,).

    scores: (N,) row scores s_i, the undiscounted return minus the row's own penalty.
    over: "rows" computes the statistics over all rows of the group; "trajectories" over the first
        row of each trajectory (with that row's penalty, if it has one).
    """

    def formula(s: Tensor, counted: Tensor) -> Tensor:  # scores of one group; those that count
        mean, std = counted.mean(), counted.std()
        # Where all counted scores are equal, s - mean is 0, whatever divides it. But with
        # over="trajectories", a row that is not counted may have a penalty of its own: divided by
        # eps, 0.1 would be an advantage of -1e5.
        return s - mean if std < ROUNDING else (s - mean) / (std + EPS)

    return in_each_group(formula, scores, group, trajectory, over)


def rloo(
    scores: Tensor, group: Labels, trajectory: Labels | None = None, *, over: str = "rows"
) -> Tensor:
    """n / (n - 1) * (s_i - mean_g), with n counted rows (or trajectories) in the group -> (N,).

    Over rows: s_i minus the mean of the group's other rows, those of its own trajectory included.
    Over trajectories it is leave-one-out, except for rows whose penalty is not that of the first
    row of their trajectory, the one that counts.
    """

    def formula(s: Tensor, counted: Tensor) -> Tensor:
        n = len(counted)
        return n / (n - 1) * (s - counted.mean())

    return in_each_group(formula, scores, group, trajectory, over)


def gigpo(
    scores: Tensor, step_returns: Tensor, group: Labels, anchor: Labels, *, weight: float = 1.0
) -> Tensor:
    """Episode advantage plus `weight` (omega) times step advantage, GiGPO Eq. 8 -> (N,).

    scores, step_returns: (N,), penalties already applied to both.
    anchor: the environment state that each row acted in, such as its observation o_t. Rows of a
        group with equal anchors form a step group, across trajectories and across time.
    """
    # The same text in two groups is two states: their tasks differ.
    state = list(zip(as_list(group), as_list(anchor), strict=True))
    return grpo(scores, group) + weight * grpo(step_returns, state)  # A^E + omega A^S


def in_each_group(
    formula: Callable[[Tensor, Tensor], Tensor], scores: Tensor, group: Labels,
    trajectory: Labels | None, over: str,
) -> Tensor:
    """formula(s, counted) of each group -> (N,).

    s: (n,) scores of the group's rows. counted: those that its statistics run over. A group in
    which only one counts has nothing to compare, and gets 0.
    """
    if over not in ("rows", "trajectories"):
        raise ValueError(f'over={over!r} is unknown: use "rows" or "trajectories"')
    counts = set(range(len(scores)))  # rows
    if over == "trajectories":
        counts = {rows[0] for rows in rows_of(trajectory).values()}
    exact = scores.double()
    result = torch.zeros_like(exact)  # (N,)
    for rows in rows_of(group).values():
        counted = [i for i in rows if i in counts]
        if len(counted) > 1:
            result[rows] = formula(exact[rows], exact[counted])
    return result.to(float_type(scores))


def compared(advantage: Tensor, group: Labels, trajectory: Labels) -> Tensor:
    """The advantage, and 0 in groups with a single trajectory -> (N,).

    If broken environments leave a group one episode, its rows could only be compared with each
    other.
    """
    result = advantage.clone()
    label = as_list(trajectory)
    for rows in rows_of(group).values():
        if len({label[i] for i in rows}) == 1:
            result[rows] = 0.0
    return result


def discounted_returns(rewards: Tensor, trajectory: Labels, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} within each trajectory (GiGPO Eq. 5) -> (N,).

    rewards: (N,) environment rewards, without penalties. The rows of a trajectory must be in time
    order; rows of different trajectories may be interleaved.
    """
    result = rewards.double().tolist()
    for rows in rows_of(trajectory).values():
        for t, later in reversed(list(zip(rows, rows[1:]))):  # from the end
            result[t] += gamma * result[later]
    return torch.tensor(result, dtype=float_type(rewards), device=rewards.device)


def gae(rewards: Tensor, values: Tensor, trajectory: Labels, *, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates -> (M,); the returns that a critic fits are these + values.

    delta_k = r_k + gamma * V_{k+1} - V_k and A_k = delta_k + gamma * lam * A_{k+1}, zero after the
    end of a trajectory. rewards, values: (M,), in time order within each trajectory. In
    verl-agent (and ppo.py) an entry is a token, and each response is its own trajectory.
    """
    r = rewards.double().tolist()
    v = values.double().tolist()
    result = [0.0] * len(v)
    for entries in rows_of(trajectory).values():
        next_v = next_a = 0.0  # V_{k+1} and A_{k+1}, after the end
        for k in reversed(entries):
            delta = r[k] + gamma * next_v - v[k]
            result[k] = delta + gamma * lam * next_a
            next_v, next_a = v[k], result[k]
    return torch.tensor(result, dtype=float_type(values), device=values.device)


def rows_of(labels: Labels) -> dict[Hashable, list[int]]:
    """{label: its rows, in order}"""
    rows = defaultdict(list)
    for i, label in enumerate(as_list(labels)):
        rows[label].append(i)
    return rows


def as_list(labels: Labels) -> list[Hashable]:
    """Labels as keys of a dictionary, where two tensors of the same number would differ."""
    return labels.tolist() if isinstance(labels, Tensor) else list(labels)


def float_type(values: Tensor) -> torch.dtype:
    """The type of a result: that of the values, but at least float32."""
    return torch.promote_types(values.dtype, torch.float32)
