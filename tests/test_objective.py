"""The losses of research/objective, by their gradients on the logit of the true token."""

import pytest
import torch

from research.objective import mask
from research.objective.study import ARMS, gce, probable


def gradients(loss, probabilities: list[float]) -> torch.Tensor:
    """Of tokens with these probabilities, each against one other word, times -O: (O,)."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    logits = torch.stack([p.log(), (1 - p).log()], -1).requires_grad_()  # (O, 2)
    loss(logits.log_softmax(-1)[None, :, 0]).sum().backward()
    return -len(p) * logits.grad[:, 0]


@pytest.mark.parametrize("q", [0.3, 0.5, 1.0])
def test_generalized_cross_entropy_weighs_a_token_by_p_to_the_q(q):
    p = torch.tensor([1 / 256, 1 / 8, 0.9], dtype=torch.float64)
    found = gradients(lambda logp: gce(logp, 0.2, q), p.tolist())
    torch.testing.assert_close(found, p**q * (1 - p))


def test_probable_is_cross_entropy_without_the_words_below_its_floor():
    found = gradients(lambda logp: probable(logp, 0.2, 0.03), [1 / 256, 0.02, 0.04, 1 / 8, 0.9])
    expected = torch.tensor([0, 0, 0.96, 7 / 8, 0.1], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_the_candidates_have_echos_scale_selection_and_weight():
    echo, _ = ARMS["echo 0.05"]
    for name in ("probable 0.03 x0.05, all", "gce 0.5 x0.05, all"):
        arm, _ = ARMS[name]
        assert (arm.scale, arm.alpha, arm.lambda_g) == (echo.scale, echo.alpha, echo.lambda_g)


def test_three_of_four_observations_are_fog():
    world = mask.WORLDS["fog"][1](1)
    (name, *_) = world.material_of
    seen = [world.observation(name, "saw")[1] for _ in range(4000)]
    assert set(seen) == {"fog", world.material_of[name]}
    assert seen.count("fog") / len(seen) == pytest.approx(0.75, abs=0.03)
