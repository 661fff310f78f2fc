"""The losses of research/objective, by their gradients on the logit of the true token."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from examples import one_file
from examples.one_file import MATERIALS, Size
from research.objective import mask, study
from research.objective.study import ARMS, gce, probable

TINY = Size(width=16, layers=1, heads=2, warm_steps=30, warm_rows=32, updates=4, evaluate_every=2)


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


@pytest.mark.parametrize("name", ["probable 0.03 x0.05, all", "gce 0.5 x0.05, all"])
def test_a_run_of_a_candidate_has_its_loss(name, monkeypatch):
    """It is one_file's with the function replaced, on two seeds in one process."""
    lesson = replace(study.WORLDS["serials"], size=TINY)
    monkeypatch.setitem(study.WORLDS, "serials", lesson)
    monkeypatch.setitem(mask.WORLDS, "fog", (TINY, mask.WORLDS["fog"][1]))
    arm, loss = ARMS[name]

    def alone(seed: int, world, loss) -> list[float]:
        with patch.object(one_file, "clipped_mae", loss):
            curve = one_file.run(seed, arm, world, TINY)
        return [float(f"{point.success:.5g}") for point in curve]

    for seed in (1, 2):
        found = study.train(("serials", name, seed))["success"]
        world = lesson.make_world
        assert found == alone(seed, world(seed), loss)
        assert found != alone(seed, world(seed), one_file.clipped_mae)
    if name in mask.BORROWED:
        found = mask.train(("fog", name, 1))["success"]
        make = mask.WORLDS["fog"][1]
        assert found == alone(1, make(1), loss) != alone(1, make(1), one_file.clipped_mae)


def test_what_is_predicted_in_fog_by_known_logits(monkeypatch):
    """The material is asked behind the outcome that would come. `most` is a mean over all locks."""
    world = mask.make_fog(1, 16)
    words = world.words()
    locks = list(world.material_of)
    monkeypatch.setattr(mask, "plain_evaluate", lambda *_: one_file.Evaluation(0, 0.5, 0.0, 0.0))

    class Known:
        """Sure of the first material for half of the locks, else of the second; and of fog
        behind an outcome that does not come."""

        encode, id_of = one_file.Model.encode, {word: i for i, word in enumerate(words)}

        def __call__(self, tokens):
            logits = torch.zeros(*tokens.shape, len(words))
            for row, text in enumerate(tokens.tolist()):
                _, name, _, tool, outcome = (words[token] for token in text)
                comes = "opens" if world.opens(name, tool) else "shut"
                guess = MATERIALS[locks.index(name) % 2] if outcome == comes else "fog"
                logits[row, -1, self.id_of[guess]] = 100.0
            return logits.log_softmax(-1)

    found = mask.evaluate(Known(), world, 0)
    assert found.most == pytest.approx(0.5)  # not 1, which is the mean of each lock's own
    right = [world.material_of[name] == MATERIALS[i % 2] for i, name in enumerate(locks)]
    assert 0 < sum(right) < len(locks)
    assert found.material == found.first == pytest.approx(sum(right) / len(locks))
