"""Advantages against the golden vector, a plain-loop twin, and the singleton rules.

The worked example is one group of two trajectories. A takes 3 steps with environment rewards
0, 0, 10 and its second response is badly formatted; B takes 2 steps and earns nothing. Penalty
0.1, gamma 0.95. The numbers are those that the original GiGPO functions print.
"""

import math
import random
import statistics

import pytest
import torch

from paw_min import advantages

TRAJECTORY = ["A", "A", "A", "B", "B"]
GROUP = [0, 0, 0, 0, 0]
ANCHOR = ["s0", "s1", "s2", "s0", "s1"]
VALID = torch.tensor([1, 0, 1, 1, 1])
SCORES = torch.tensor([10.0, 9.9, 10.0, 0.0, 0.0])
RETURNS = torch.tensor([9.025, 9.4, 10.0, 0.0, 0.0])


def close(actual, expected, **how):
    torch.testing.assert_close(
        actual, torch.tensor(expected), **({"atol": 2e-6, "rtol": 2e-6} | how)
    )


def test_scores_and_step_returns():
    close(advantages.penalized(torch.tensor([10.0, 10, 10, 0, 0]), VALID, 0.1), SCORES.tolist())
    rewards = torch.tensor([0.0, 0, 10, 0, 0])
    raw = advantages.discounted_returns(rewards, TRAJECTORY, 0.95)
    close(raw, [9.025, 9.5, 10.0, 0.0, 0.0])
    # The penalty comes after discounting: A1 is not touched by A2's.
    close(advantages.penalized(raw, VALID, 0.1), RETURNS.tolist())


def test_step_returns_of_interleaved_trajectories():
    rewards = torch.tensor([1, 0, 0, 2, 4])
    returns = advantages.discounted_returns(rewards, torch.tensor([7, 9, 7, 9, 7]), 0.5)
    close(returns, [2.0, 1.0, 2.0, 2.0, 4.0])


@pytest.mark.parametrize("options, expected", [
    ({}, [1.443489, 1.425171, 0.736382, -1.802521, -1.802521]),
    # weight 0 leaves the episode advantage, GRPO's, alone
    ({"weight": 0.0}, [0.736382, 0.718064, 0.736382, -1.095414, -1.095414]),
])
def test_gigpo_golden(options, expected):
    close(advantages.gigpo(SCORES, RETURNS, GROUP, ANCHOR, **options), expected)


def test_gigpo_compares_states_within_a_group():
    """Two groups meet in a state of one name; the returns of each are compared among themselves."""
    returns = torch.tensor([1.0, 3.0, 10.0, 30.0])
    found = advantages.gigpo(torch.zeros(4), returns, [0, 0, 1, 1], ["s"] * 4)
    half = math.sqrt(0.5)  # (3 - 2) / std(1, 3)
    close(found, [-half, half, -half, half])


@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.rloo])
def test_what_nothing_can_be_compared_with_has_no_advantage(estimator):
    """A lone row, and with statistics of trajectories a lone trajectory."""
    scores = torch.tensor([10.0, 9.9, 0.0, 4.0])
    close(estimator(scores, ["a", "b", "c", "d"]), [0.0] * 4)
    group = [0, 0, 1, 1]
    trajectory = [0, 0, 1, 2]
    lone = estimator(scores, group, trajectory, over="trajectories")
    close(lone[:2], [0.0, 0.0])
    assert lone[2] < 0 < lone[3]


def test_a_penalty_is_not_divided_by_eps():
    """Two lost episodes; the second row of the first one is malformed, and is not counted."""
    scores = torch.tensor([0.0, -0.1, 0.0])
    result = advantages.grpo(scores, [0, 0, 0], [0, 0, 1], over="trajectories")
    close(result, [0.0, -0.1, 0.0])


def test_equal_scores_have_no_advantage_whatever_the_rounding():
    # The mean of seven 9.9 misses 9.9 in float32, and 1e-6 in the denominator magnifies that.
    for n in range(2, 50):
        close(advantages.grpo(torch.full((n,), 9.9), [0] * n), [0.0] * n, atol=1e-6)


def test_grpo_equals_a_plain_loop():
    rng = random.Random(0)
    group = [rng.randrange(5) for _ in range(40)]
    scores = [rng.uniform(0, 10) for _ in group]
    expected = []
    for g, s in zip(group, scores):
        members = [x for h, x in zip(group, scores) if h == g]
        expected.append((s - statistics.mean(members)) / (statistics.stdev(members) + 1e-6))
    actual = advantages.grpo(torch.tensor(scores), torch.tensor(group))
    close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_group_with_one_trajectory_is_not_compared():
    """Its rows could only be compared with each other."""
    advantage = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    close(advantages.compared(advantage, [0, 0, 1, 1, 1], [0, 0, 1, 2, 2]), [0.0, 0, 3, 4, 5])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="over='turns'"):
        advantages.grpo(SCORES, GROUP, TRAJECTORY, over="turns")


# ---- RLOO, GAE ----


def test_rloo_is_the_score_minus_the_mean_of_the_others():
    rng = random.Random(0)
    for _ in range(20):
        n = rng.randint(2, 12)
        scores = [rng.gauss(0, 5) for _ in range(n)]
        group = [rng.randint(0, 3) for _ in range(n)]
        expected = []
        for i in range(n):
            others = [scores[j] for j in range(n) if group[j] == group[i] and j != i]
            expected.append(scores[i] - statistics.mean(others) if others else 0.0)
        close(advantages.rloo(torch.tensor(scores), group), expected, atol=1e-5, rtol=1e-5)


def test_rloo_counts_each_trajectory_once():
    """Leave-one-out over trajectories: three of lengths 1, 3 and 2, with scores 1, 2, 6.

    A trajectory counts with its first row: the second row of the last has a penalty.
    """
    scores = torch.tensor([1.0, 2, 2, 2, 6, 5.9])
    trajectory = [0, 1, 1, 1, 2, 2]
    result = advantages.rloo(scores, [0] * 6, trajectory, over="trajectories")
    close(result, [1 - 4.0, 2 - 3.5, 2 - 3.5, 2 - 3.5, 6 - 1.5, 6 - 1.65])


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_gae_is_the_discounted_sum_of_td_errors(gamma, lam):
    """Against the definition, on interleaved trajectories of lengths 1 to 6."""
    rng = random.Random(1)
    label = [t for t in range(5) for _ in range(t + 2)] + [9]
    rng.shuffle(label)
    rewards, values = ([rng.gauss(0, 1) for _ in label] for _ in range(2))
    expected = [0.0] * len(label)
    for t in set(label):
        own = [k for k in range(len(label)) if label[k] == t]
        later = [values[k] for k in own[1:]] + [0.0]
        delta = [rewards[k] + gamma * v - values[k] for k, v in zip(own, later)]
        for n, k in enumerate(own):
            expected[k] = sum((gamma * lam) ** j * d for j, d in enumerate(delta[n:]))
    estimate = advantages.gae(
        torch.tensor(rewards), torch.tensor(values), label, gamma=gamma, lam=lam
    )
    close(estimate, expected, atol=1e-5, rtol=1e-5)
    assert estimate.dtype == torch.float32


def test_gigpo_adds_eps_to_both_stds(monkeypatch):
    monkeypatch.setattr(advantages, "EPS", 1.0)
    ones = torch.tensor([1.0, 0.0])
    half = 0.5 / (math.sqrt(0.5) + 1)
    close(advantages.gigpo(ones, ones, [0, 0], ["s", "s"]), [2 * half, -2 * half])
