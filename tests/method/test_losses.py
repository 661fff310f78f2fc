"""Clipped surrogate, KL, and the weighting that makes Eq. 11 safe to cut into pieces."""

import math

import pytest
import torch

from paw_min import losses


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([[1.5], [0.5], [5.0], [0.5], [1.0]])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    ones = torch.ones(5, 1)
    loss, metrics = losses.clipped_surrogate(ratio.log(), torch.zeros(5, 1), advantage, ones)
    # -1.2 (clipped), -0.5, 3 (dual clip instead of 5), 0.8 (clipped), -2
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 3.0 + 0.8 - 2.0) / 5)
    assert metrics["clip_fraction"].item() == pytest.approx(0.4)
    assert metrics["ratio"].item() == pytest.approx(1.7)
    k3 = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 5.0, 0.5, 1.0)) / 5
    assert metrics["approx_kl"].item() == pytest.approx(k3, rel=1e-5)


def test_clip_bounds_are_arguments():
    logp = torch.tensor([[math.log(2.0)]])
    zero = torch.zeros(1, 1)
    one = torch.ones(1, 1)
    loss = losses.clipped_surrogate(logp, zero, torch.ones(1), one, clip_high=0.5)[0]
    assert loss.item() == pytest.approx(-1.5)
    loss = losses.clipped_surrogate(-logp, zero, -torch.ones(1), one, clip_low=0.3)[0]
    assert loss.item() == pytest.approx(0.7)
    loss = losses.clipped_surrogate(logp, zero, -torch.ones(1), one, dual_clip=1.5)[0]
    assert loss.item() == pytest.approx(1.5)


def test_gradient_is_that_of_the_policy_gradient_and_stops_where_clipped():
    old = torch.zeros(1, 4)
    logp = torch.tensor([[0.0, math.log(1.5), math.log(0.5), 7.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    losses.clipped_surrogate(logp, old, torch.tensor([2.0]), mask)[0].backward()
    # -A * ratio / 3 tokens; nothing beyond 1 + clip_high; nothing from padding
    torch.testing.assert_close(logp.grad, torch.tensor([[-2 / 3, 0.0, -1 / 3, 0.0]]))


def test_padding_may_hold_anything():
    logp = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    old = torch.tensor([[0.0, math.nan]])
    mask = torch.tensor([[True, False]])
    loss, metrics = losses.clipped_surrogate(logp, old, torch.ones(1), mask)
    kl = losses.k3_kl(logp, torch.tensor([[-1.0, math.nan]]), mask)
    (loss + kl).backward()
    assert torch.isfinite(loss) and kl.item() == pytest.approx(math.exp(-1))
    assert torch.isfinite(logp.grad).all()
    assert all(torch.isfinite(value) for value in metrics.values())


def test_k3_has_the_value_of_one_kl_and_the_gradient_of_the_other():
    """In expectation over the policy's samples, here summed over a vocabulary of 6 tokens."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.double, requires_grad=True)
    reference = torch.randn(6)
    logp = logits.log_softmax(-1)
    ref = reference.double().log_softmax(-1)

    def gradient(loss) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    one = torch.ones(1, 1)
    k3 = torch.stack([losses.k3_kl(p.view(1, 1), r.view(1, 1), one) for p, r in zip(logp, ref)])
    probability = logp.exp().detach()  # of the sampler: nothing is differentiated through it
    of_policy = (logp.exp() * (logp - ref)).sum()  # KL(policy || reference)
    of_reference = (ref.exp() * (ref - logp)).sum()  # KL(reference || policy)
    expected = (probability * k3).sum()
    torch.testing.assert_close(expected, of_policy)
    torch.testing.assert_close(gradient(expected), gradient(of_reference))
    off = gradient(expected) - gradient(of_policy)
    assert off.norm() > 0.4 * gradient(of_policy).norm()


def test_k3():
    one = torch.ones(1, 1)
    kl = losses.k3_kl(torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log(), one)
    assert kl.item() == pytest.approx(0.193147, abs=1e-6)
    far = losses.k3_kl(torch.tensor([[-20.0]]), torch.tensor([[0.0]]), one)
    assert far.item() == 10.0


GROUP = ["a", "a", "a", "b", "b", "c"]
SELECTED = torch.tensor([True, True, False, True, False, False])
LAMBDAS = {"a": 0.5, "b": 1.0, "c": 0.25}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_all_floats_has_no_gradient(advantage):
    # exp(100) is infinite in float32, and 0 * inf would be NaN.
    logp = torch.tensor([[0.0, -1.0]], requires_grad=True)
    far = torch.tensor([[100.0, 0.0]])
    mask = torch.ones(1, 2)
    advantages = torch.tensor([advantage])
    loss, metrics = losses.clipped_surrogate(logp, logp.detach() - far, advantages, mask)
    loss = loss + losses.k3_kl(logp, logp.detach() + far, mask)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    # The first is beyond the clips. The other token has the gradient of the surrogate at ratio 1.
    assert gradient.tolist() == [[0.0, -advantage / 2]]


def test_row_weights_equal_eq_11():
    loss = torch.tensor([0.3, 0.5, 9.0, 0.8, 9.0, 9.0])
    weights = losses.row_weights(GROUP, SELECTED, LAMBDAS)
    # c has no selected row: its term is left out, but it still counts as a group.
    by_group = [0.5 * (0.3 + 0.5) / 2, 1.0 * 0.8, 0.0]
    assert (weights * loss).sum().item() == pytest.approx(sum(by_group) / 3)


def test_no_tokens_are_a_loss_of_zero():
    """A rank that repeats another's row has an empty mask."""
    logp = torch.full((1, 2), -1.0)
    none = torch.zeros(1, 2)
    loss, metrics = losses.clipped_surrogate(logp, logp, torch.ones(1), none)
    assert loss == 0 and all(metric == 0 for metric in metrics.values())
    assert losses.k3_kl(logp, logp, none) == 0


def test_each_row_needs_a_group():
    for group in (GROUP[:5], [*GROUP, "c"]):
        with pytest.raises(ValueError):
            losses.row_weights(group, SELECTED, LAMBDAS)
