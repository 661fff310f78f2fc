"""The critic of PPO: values, loss, whitening, one update against a plain version, whole runs."""

import copy
import json

import pytest
import torch

from paw_min import ppo, train
from paw_min.config import Config
from paw_min.model.batches import collate
from paw_min.model.critic import LR_FACTOR
from paw_min.rows import flatten
from paw_min.running.session import open_session
from paw_min.update import mini_batches, optimize, prepare
from tests.helpers import EPISODES, PPO, ROWS, make_critic, make_policy, numbers, optimizer_of

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")


def test_values_belong_to_the_state_before_each_token():
    """Against the decoder run on each prefix alone."""
    policy = make_critic(make_policy())
    rows = ROWS[:4]
    batch = collate(rows, [True, False, True, True], policy.pad_id)
    values = policy.critic(batch)
    for b, row in enumerate(rows):
        for k in range(len(row.response_ids)):
            prefix = torch.tensor([row.prompt_ids + row.response_ids[:k]])
            hidden = policy.critic.decoder(prefix).last_hidden_state[0, -1]
            expected = policy.critic.head(hidden).item()
            assert values[b, k].item() == pytest.approx(expected, abs=1e-5)
        assert not values[b, len(row.response_ids) :].any()


def test_value_loss_takes_the_larger_error():
    value = torch.tensor([0.0, 1.0, 1.0, 3.0])
    old = torch.tensor([0.0, 0.0, 0.0, 2.2])
    returns = torch.tensor([2.0, 2.0, 0.0, 2.0])
    # Clipped to old +- 0.5: 0, 0.5, 0.5, 2.7.
    expected = torch.tensor([4.0, 2.25, 1.0, 1.0])
    torch.testing.assert_close(ppo.value_loss(value, old, returns), expected)


def test_whitening_of_equal_values():
    equal = torch.full((7,), 7.7)  # in float32, their mean is off by enough to matter
    assert ppo.whiten(equal).abs().max() < 1e-6


@pytest.mark.parametrize("score, value, expected", [
    ([10.0, 0.0, 10.0, 0.0], [8.0, 2.0, 8.0, 2.0], 0.84),  # errors of 2, returns of +-5
    ([1e-3, 0.0, 1e-3, 0.0], [0.0, 0.0, 0.0, 0.0], 0.0),  # small, and not equal
    ([7.7] * 4, [0.3, -0.9, 2.1, 123.4], 0.0),  # equal, but for rounding: s - V + V
    ([0.0] * 4, [0.0, 0.0, 0.0, 0.0], 0.0),
    ([7.7], [0.3], 0.0),
])
def test_explained_variance_has_no_quotient_of_roundings(score, value, expected):
    score, value = torch.tensor(score), torch.tensor(value)
    returns = score - value + value
    assert ppo.explained_variance(returns, value) == pytest.approx(expected, abs=1e-6)


def learned(cfg, policy, optimizer=None):
    """The rows with the critic's advantages, and its metrics."""
    rows = prepare(cfg, policy, None, flatten(EPISODES))
    optimizer = optimizer or optimizer_of(policy, cfg)
    return ppo.learn_values(cfg, policy, optimizer, rows, (0, 0))


def test_advantages_are_score_minus_value_whitened_over_the_update():
    cfg = Config(**PPO)
    policy = make_critic(make_policy())
    flat = []
    values = []
    scores = [e.episode_return for e in EPISODES for _ in e.transitions]
    for row, score in zip(ROWS, scores):
        value = policy.critic(collate([row], [False], policy.pad_id))[0].detach()
        values.append(value)
        flat.append(score - 0.1 * (not row.valid) - value)
    everything = torch.cat(flat)
    rows, metrics = learned(cfg, policy)
    for i in range(len(ROWS)):
        expected = (flat[i] - everything.mean()) / everything.std()
        assert rows.advantage[i] == pytest.approx(expected.tolist(), abs=1e-4, rel=1e-4)
    returns = torch.cat([a + v for a, v in zip(flat, values)])
    explained = 1 - everything.var() / returns.var()
    assert metrics["explained_variance"] == pytest.approx(explained.item(), abs=1e-4)
    assert metrics["value"] == pytest.approx(torch.cat(values).mean().item(), abs=1e-5)


@pytest.mark.parametrize("mini_batch", [0, 7])
def test_each_step_of_the_critic_is_adamw_on_the_value_loss(mini_batch):
    cfg = Config(**PPO | {"mini_batch": mini_batch, "micro_tokens": 60})
    policy = make_critic(make_policy())
    twin = copy.deepcopy(policy.critic)
    before = copy.deepcopy(policy.model.state_dict())
    _, metrics = learned(cfg, policy)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=LR_FACTOR * cfg.lr, weight_decay=0.0)
    scores = [e.episode_return for e in EPISODES for _ in e.transitions]
    batches = [collate([row], [False], policy.pad_id) for row in ROWS]
    old = [twin(batch)[0].detach() for batch in batches]
    means = []
    for mini in mini_batches(len(ROWS), cfg.mini_batch, (0, 0)):
        losses = []
        for i in mini:
            returns = torch.full_like(old[i], scores[i] - 0.1 * (not ROWS[i].valid))
            losses.append(ppo.value_loss(twin(batches[i])[0], old[i], returns))
        optimizer.zero_grad()
        means.append(torch.cat(losses).mean())
        means[-1].backward()
        optimizer.step()
    assert metrics["loss_value"] == pytest.approx(sum(means).item() / len(means), rel=1e-3)
    for ours, plain in zip(policy.critic.parameters(), twin.parameters()):
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, before[name])  # the language model has not moved


def test_an_update_of_the_policy_leaves_the_critic_alone():
    cfg = Config(**PPO)
    policy = make_critic(make_policy())
    optimizer = optimizer_of(policy, cfg)
    rows, _ = learned(cfg, policy, optimizer)
    values = copy.deepcopy(policy.critic.state_dict())
    optimize(cfg, policy, optimizer, rows, (0, 0))
    assert all(torch.equal(w, values[n]) for n, w in policy.critic.state_dict().items())


def test_the_critic_starts_from_the_model_with_a_learning_rate_of_its_own(config):
    with open_session(config(algo="ppo", lr=0.002)) as s:
        assert [group["lr"] for group in s.optimizer.param_groups] == [0.002, 0.02]
        ours = dict(s.policy.critic.decoder.named_parameters())
        for name, weight in s.policy.model.get_decoder().named_parameters():
            assert torch.equal(ours[name], weight) and ours[name] is not weight
    with open_session(config()) as s:
        assert s.policy.critic is None and len(s.optimizer.param_groups) == 1


def test_any_learn_gets_the_critics_advantages(config, tmp_path):
    """PPO is around the method, so a fork has it as well, under its own name."""
    seen = []

    def watched(cfg, s, rows, k):
        seen.append(rows)
        return train.paw(cfg, s, rows, k)

    cfg = config(algo="ppo", updates=1)
    train.train(cfg, method=watched)
    (rows,) = seen
    # One per token; GRPO has one per row.
    assert [len(a) for a in rows.advantage] == [len(row.response_ids) for row in rows.tokens]
    line = numbers(tmp_path / "r")[1]
    assert line["loss_value"] > 0 and "loss_pg" in line
    assert json.loads((tmp_path / "r" / "config.json").read_text())["method"] == "watched"
