"""The observation losses, Eq. 5 to 8, by hand and by autograd."""

import math

import pytest
import torch

from paw_min import cmae


def test_losses_by_hand():
    logp = torch.tensor([[0.1, 0.2, 0.9, 0.5], [0.05, 0.8, 0.3, 0.3]]).log()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    expected = -torch.tensor([math.log(0.1 * 0.2 * 0.9) / 3, math.log(0.05 * 0.8) / 2])
    torch.testing.assert_close(cmae.cross_entropy(logp, mask), expected)
    expected = torch.tensor([(0.9 + 0.8 + 0.1) / 3, (0.95 + 0.2) / 2])
    torch.testing.assert_close(cmae.mae(logp, mask), expected)
    # rho = 0.2 keeps 0.1, 0.2 and 0.05; the denominator still counts every observation token.
    expected = torch.tensor([(0.9 + 0.8) / 3, 0.95 / 2])
    torch.testing.assert_close(cmae.clipped_mae(logp, mask, 0.2), expected)


@pytest.mark.parametrize("rho", [0.05, 0.1, 0.2, 0.3, 1 / 3, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_boundary_is_inside(rho, dtype):
    one = torch.ones(1, 1)
    at = torch.tensor([[math.log(rho)]], dtype=dtype)
    assert cmae.clipped_mae(at, one, rho).item() == pytest.approx(1 - rho)
    above = torch.tensor([[math.log(rho * 1.0001)]], dtype=dtype)
    assert cmae.clipped_mae(above, one, rho).item() == 0.0


def clipped(logp, mask):
    return cmae.clipped_mae(logp, mask, 0.2)


@pytest.mark.parametrize("loss, expected", [
    (cmae.cross_entropy, [-100.0, -10, -5, -1 / 0.21, -1 / 0.99]),  # - grad p / p
    (cmae.mae, [-1.0, -1, -1, -1, -1]),  # - grad p
    (clipped, [-1.0, -1, -1, 0, 0]),  # zero above rho; none flows through the mask
])
def test_gradients_of_eq_6(loss, expected):
    """With respect to the p of each token, through log p as the model delivers it."""
    p = torch.tensor([[0.01, 0.1, 0.2, 0.21, 0.99]], requires_grad=True)
    loss(p.log(), torch.ones_like(p)).sum().backward()
    torch.testing.assert_close(p.grad, torch.tensor([expected]) / 5)


def test_gradient_on_the_logits_is_p_times_1_minus_p():
    """Appendix A.4: on the target's logit, CE pulls with 1 - p and MAE with p (1 - p)."""
    logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    p = logits.softmax(-1)[0, 2].item()
    for loss, expected in ((cmae.cross_entropy, 1 - p), (cmae.mae, p * (1 - p))):
        logits.grad = None
        loss(logits.log_softmax(-1)[:, 2:], torch.ones(1, 1)).sum().backward()
        assert -logits.grad[0, 2].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss, expected", [
    (cmae.cross_entropy, math.log(10)), (cmae.mae, 0.9), (clipped, 0.9),
])
def test_empty_observations_and_padding_do_no_harm(loss, expected):
    logp = torch.tensor([[-math.inf, math.nan], [math.log(0.1), -math.inf]], requires_grad=True)
    value = loss(logp, torch.tensor([[False, False], [True, False]]))
    assert value.tolist() == [0.0, pytest.approx(expected)]
    value.sum().backward()
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("logp, mask", [
    (torch.zeros(2, 4), torch.ones(2, 3)), (torch.zeros(3), torch.ones(3)),
])
def test_wrong_shapes(logp, mask):
    with pytest.raises(ValueError, match="need .N, T."):
        cmae.mae(logp, mask)
