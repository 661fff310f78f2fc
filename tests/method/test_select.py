"""Selection, Eq. 4, by hand."""

import math

import pytest
import torch

from paw_min import select


def test_top_alpha_keeps_the_highest_and_the_earlier_of_equals():
    entropy = torch.tensor([0.1, 0.9, 0.5, 0.7])
    assert select.top_alpha(entropy, 0.5).tolist() == [False, True, False, True]
    equal = torch.tensor([1.0, 2, 1, 1])
    assert select.top_alpha(equal, 0.5).tolist() == [True, True, False, False]
    many = select.top_alpha(torch.zeros(5000), 0.5)
    assert many[:2500].all() and not many[2500:].any()


@pytest.mark.parametrize("n, alpha, count", [
    (5, 0.75, 4), (1, 1e-10, 1), (100, 0.07, 7), (4, 1.0, 4), (0, 0.5, 0),
])
def test_top_alpha_counts_rounding_up(n, alpha, count):
    assert select.top_alpha(torch.arange(n).float(), alpha).sum() == count


def test_both_readings_of_the_entropy():
    p = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])  # (B, S, V)
    logits = p.log() + 3.0  # a shift changes nothing; a token may be masked
    expected = torch.tensor([[1.5 * math.log(2), 0.0]])
    torch.testing.assert_close(select.full_entropy(logits), expected)
    # The printed formula sees the sampled token alone.
    q = torch.tensor([0.001, 1 / math.e, 0.999])
    torch.testing.assert_close(select.sampled_entropy(q.log()), -q * q.log())


def test_action_entropy_is_a_mean_over_action_tokens():
    tokens = torch.tensor([[1.0, 2.5, 99.0], [2.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert select.action_entropy(tokens, mask).tolist() == [1.75, 2.0, 0.0]


def test_alpha_is_a_fraction_of_the_candidates():
    candidates = torch.tensor([True, False, True, False, True])
    entropy = torch.tensor([0.1, 9.0, 0.5, 8.0, 0.2])  # rows of 9 and 8 have no observation
    selected = select.select_transitions(candidates, entropy, 0.5)
    assert selected.tolist() == [False, False, True, False, True]
    assert select.select_transitions(candidates, None, 1.0) is candidates


@pytest.mark.parametrize("alpha", [0.0, 1.1, math.nan])
def test_a_fraction_out_of_range(alpha):
    with pytest.raises(ValueError, match="alpha"):
        select.top_alpha(torch.ones(3), alpha)


def test_a_wrong_shape():
    with pytest.raises(ValueError, match="expected .N,."):
        select.top_alpha(torch.ones(2, 2), 0.5)
