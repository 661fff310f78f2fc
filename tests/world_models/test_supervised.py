"""Supervised fine-tuning: the loss is the mean over targets, and context is no target."""

import pytest
import torch

from paw_min.base.errors import UserError
from paw_min.rows import TokenRow
from tests.helpers import make_policy, plain_logp
from world_models.supervised import fit, fit_step, n_target_tokens

ROWS = [TokenRow([3, 4, k], [k + 4], [k + 5]) for k in range(5, 9)]
FIT = dict(micro_tokens=64, seed_key=(0,))


def test_loss_is_the_mean_over_targets_and_given_tokens_do_not_count():
    policy = make_policy()
    rows = [
        TokenRow([3, 4, 5], [6, 7], []),
        TokenRow([3, 4], [], [8, 9, 10, 11], context_positions=[1, 2]),
        TokenRow([3, 4, 5, 6, 7], [8], [9, 10]),
    ]
    assert [n_target_tokens(row) for row in rows] == [2, 2, 3]
    expected = 0.0
    for row in rows:
        for k, logp in enumerate(plain_logp(policy, row).tolist()):
            if k - len(row.response_ids) not in row.context_positions:
                expected -= logp / 7
    still = torch.optim.SGD(policy.parameters(), lr=0.0)
    gradients = []
    for budget in (1000, 1):  # in one pass, and in one for each row
        loss = fit_step(policy, still, rows, [0, 1, 2], budget, step=1)
        assert loss == pytest.approx(expected, abs=1e-5)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_the_rate_rises_linearly_and_then_stays():
    rates = []

    class Recording(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])

    policy = make_policy()
    optimizer = Recording(policy.parameters(), lr=0.8)
    fit(policy, optimizer, ROWS, epochs=3, batch=2, warm_up=4, **FIT)
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_labels_have_no_sampling_temperature():
    losses = []
    for temperature in (1.0, 2.0):
        policy = make_policy(temperature=temperature)
        still = torch.optim.SGD(policy.parameters(), lr=0.0)
        losses += fit(policy, still, ROWS, epochs=1, batch=4, warm_up=0, **FIT)
        assert policy.temperature == temperature  # for the samples after it
    assert losses[0] == losses[1]


@pytest.mark.parametrize("layer, message", [
    ("get_output_embeddings", "step 1: the loss is nan and .* rate of 0.5: lower it"),
    ("get_input_embeddings", r"step 1: the loss is \d.* gradient (inf|nan) at"),
])
def test_what_is_no_number_stops_before_the_step(layer, message):
    policy = make_policy()
    weight = getattr(policy.model, layer)().weight
    if "loss is nan" in message:
        with torch.no_grad():
            weight[3, 3] = float("nan")
    else:
        weight.register_hook(lambda grad: grad * float("inf"))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(UserError, match=message):
        fit(policy, optimizer, ROWS, epochs=1, batch=2, warm_up=0, **FIT)
    for one, other in zip(before, policy.parameters()):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
