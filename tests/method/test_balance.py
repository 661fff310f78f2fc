"""Balancing, Eq. 10, by hand."""

import math

import pytest
import torch

from paw_min import balance


def test_lambda():
    # Outside of what the environment can pay, lambda stays a weight.
    returns = torch.tensor([0.0, 2.5, 10.0, -1.0, 11.0])
    assert balance.lambda_g(returns, 10.0).tolist() == [1.0, 0.75, 0.0, 1.0, 0.0]
    assert balance.lambda_g(0.25, 1.0) == 0.75


def test_mean_return_counts_episodes():
    found = balance.group_mean_return([10.0, 0.0, 0.0, 10.0], ["a", "a", "a", "b"])
    assert found == {"a": pytest.approx(10 / 3), "b": 10.0}


def test_rows_of_an_episode_count_once():
    """Group a: an episode of three rows, won, and one of one row, lost."""
    found = balance.lambdas_from_rows([10.0, 10, 10, 0, 10], [0, 0, 0, 1, 2], "aaaab", 10.0)
    assert found == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize("r_max", [0, math.nan])
def test_a_highest_return_that_is_not_positive(r_max):
    with pytest.raises(ValueError, match="r_max"):
        balance.lambda_g(1.0, r_max)


def test_a_group_per_episode():
    with pytest.raises(ValueError, match="zip"):
        balance.group_mean_return([1.0, 0.0], "a")
