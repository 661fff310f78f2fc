"""The head in tiles, its gradient by hand: equal to the plain formula, and never wide.

Fourteen words, seven positions, tiles of one to thirty words.
"""

from itertools import islice

import pytest
import torch

from paw_min.model import head
from paw_min.select import full_entropy

M = 7
D = 5
V = 14
N_ENTROPY = 4


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (M,), generator=generator)


def plain(hidden, weight, target, n_entropy):
    logits = hidden @ weight.T
    logp = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    entropy = full_entropy(logits[:n_entropy])
    return logp, torch.cat([entropy, entropy.new_zeros(len(hidden) - n_entropy)])


@pytest.fixture(params=[1, 3, 7, 30])
def words(request, monkeypatch):
    """Words of a tile; 3 leave a remainder, 30 are more than the vocabulary."""
    monkeypatch.setattr(head, "TILE", request.param * M + M // 2)
    return request.param


@pytest.mark.parametrize("n_entropy", [0, N_ENTROPY, M])
def test_values_and_gradients_equal_the_plain_formula(words, n_entropy):
    results = []
    for function in (head.token_scores, plain):
        hidden, weight, target = inputs()
        logp, entropy = function(hidden, weight, target, n_entropy)
        weights = torch.linspace(-1, 2, M)  # another upstream gradient for each position
        ((weights * logp).sum() + (weights * entropy.square()).sum()).backward()
        results.append([logp, entropy, hidden.grad, weight.grad])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_no_logits_are_wider_than_a_tile(words, with_gradient):
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() != V * D:  # nor W, nor its gradient
                largest = max(largest, out.numel())
            return out

    hidden, weight, target = inputs()
    with Watch(), torch.set_grad_enabled(with_gradient):
        logp, entropy = head.token_scores(hidden, weight, target, N_ENTROPY)
        if with_gradient:
            (logp.sum() + entropy.sum()).backward()
    assert largest == max(M * min(words, V), M * D * with_gradient)
    assert logp.requires_grad == with_gradient


@pytest.mark.parametrize("n, expected", [
    (1000, 4160),  # of 4,194
    (16_384, 256), (40_000, 64), (65_600, 63), (2**23, 1),
])
def test_the_width_of_a_tile_is_a_multiple_of_64(n, expected):
    """Of fewer tokens it is what fits. No logits: the tensors are without numbers."""
    hidden, weight, target = (torch.empty(rows, 8, device="meta") for rows in (n, 10_000, n))
    parts = [part for part, *_ in islice(head.tiles(hidden, weight, target[:, 0]), 2)]
    assert [part.stop - part.start for part in parts] == [expected] * 2


def test_bf16_rounds_the_factors_and_not_the_logits(words):
    """Rounded, logits of 40 would change p by 13 %. Both passes; gradients of W are fp32."""
    hidden, weight, target = inputs()
    found = []
    for kind in (torch.bfloat16, torch.float32):
        # The same numbers: those that bf16 has.
        leaves = [(3 * x).detach().bfloat16().to(of).requires_grad_()
                  for x, of in ((hidden, kind), (weight, torch.float32))]
        logp, entropy = head.token_scores(*leaves, target, N_ENTROPY)
        (logp.sum() + entropy.pow(2).sum()).backward()
        found.append([logp, entropy, *(leaf.grad for leaf in leaves)])
    assert [part.dtype for part in found[0]] == [
        torch.float32, torch.float32, torch.bfloat16, torch.float32,
    ]
    for ours, exact, most in zip(*found, (1e-5, 1e-5, 1e-2, 1e-2), strict=True):
        assert (ours.float() - exact).norm() < most * exact.norm()


def test_the_gradient_of_a_state_is_summed_over_tiles_in_fp32(monkeypatch):
    """In bf16, the sum over 2,000 tiles would be off by far more than a rounding of 0.004."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, D, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(2000, D, generator=generator)
    monkeypatch.setattr(head, "TILE", M)  # a word
    head.token_scores(hidden, weight, torch.arange(M), M)[0].sum().backward()
    exact = hidden.detach().float().requires_grad_()
    plain(exact, weight.bfloat16().float(), torch.arange(M), M)[0].sum().backward()
    assert (hidden.grad.float() - exact.grad).norm() < 0.004 * exact.grad.norm()


def test_the_logits_of_the_sampler_are_fp32_under_autocast():
    hidden, weight, _ = inputs()
    module = head.Head(torch.nn.Parameter(weight.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        logits = module(hidden)
    assert logits.dtype == torch.float32
    expected = hidden.bfloat16().float() @ weight.bfloat16().float().T
    torch.testing.assert_close(logits, expected)
