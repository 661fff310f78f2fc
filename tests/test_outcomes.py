"""Knowledge of outcomes (research/outcomes.py), and what a loss can teach (teach/measure.py).

    python -m pytest tests/test_outcomes.py
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model.policy import load_policy
from paw_min.rows import TokenRow
from paw_min.running.untrusted import read_json
from paw_min.toy import default_model
from research import outcomes
from research.paper.transitions import TextRow
from research.teach import band
from research.teach import measure as teach
from tests.helpers import EPISODES, make_episodes, make_policy


def row(obs_ids, task="t", observation="o", following="x", **extra) -> TextRow:
    tokens = TokenRow([3, 4], [5, 6], obs_ids, **extra)
    return TextRow(tokens, task, observation, "response", "command", following)


def marks(*rows) -> list[list[int]]:
    return [mark.int().tolist() for mark in outcomes.branch_tokens(list(rows))]


def test_branch_tokens_are_the_first_in_which_outcomes_of_a_state_differ():
    rows = row([1, 2, 3]), row([1, 4, 3]), row([1, 4, 5]), row([1, 2, 3])
    assert marks(*rows) == [[0, 1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 0]]
    # Other states do not count.
    assert marks(row([1, 2]), row([3, 2], task="u"), row([4, 2], observation="p")) == [[0, 0]] * 3
    # The beginning of another outcome has none.
    assert marks(row([1, 2]), row([1, 2, 3])) == [[0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "positive, negative, expected",
    [
        ([2.0, 3.0], [0.0, 1.0], 1.0),
        ([1.0, 1.0], [1.0], 0.5),  # ties count half
        ([1.0, 2.0], [1.0, 0.0], 0.875),
        ([], [1.0], None),
    ],
)
def test_auc(positive, negative, expected):
    assert outcomes.auc(torch.tensor(positive), torch.tensor(negative)) == expected


def test_no_effect_of_each_benchmark():
    def found(env, observation, following):
        changed = row([1], observation=observation, following=following)
        return outcomes.has_no_effect(Config(env=env), changed)

    assert found("alfworld", "You open it.", "Nothing happens.")
    assert not found("alfworld", "You open it.", "You open it.")
    assert found("webshop", "page 1", "page 1") and not found("webshop", "page 1", "page 2")
    assert found("search", "Doc 1", "Doc 1") and not found("search", "Doc 1", "Doc 2")


def test_measures_of_a_model():
    """Against log-probabilities that the model itself gives, one row at a time."""
    policy = make_policy()
    unchanged = policy.encode("red mug")
    contexts = ([3, 4], [8, 4], [9, 9])
    targets = ([9, 11], [10, 11], [9, 11])  # one state: the first tokens are branch tokens
    rows = []
    for prompt_ids, obs_ids, following in zip(contexts, targets, ("red mug", "blue", "red mug")):
        one = row(obs_ids, observation="red mug", following=following, separator_ids=[7])
        one.tokens.prompt_ids = prompt_ids
        rows.append(one)

    def p(prompt_ids: list[int], obs_ids: list[int]) -> list[float]:
        ids = torch.tensor([[*prompt_ids, 5, 6, 7, *obs_ids]])
        logp = policy.model(ids).logits[0].log_softmax(-1)
        return [logp[k - 1, ids[0, k]].exp().item() for k in range(5, ids.shape[1])]

    everything = torch.tensor([p(*pair) for pair in zip(contexts, targets)])  # (3, 2)
    branch = everything[:, 0].contiguous()
    found = outcomes.measure(Config(env="webshop"), policy, rows)
    assert found.transitions == 3 and found.branch_tokens == 3
    assert math.isclose(found.p, everything.mean(), rel_tol=1e-4)
    assert math.isclose(found.p_branch, branch.mean(), rel_tol=1e-4)
    assert found.branch_shares == pytest.approx(outcomes.shares(branch))
    assert found.other_shares == pytest.approx(outcomes.shares(everything[:, 1].contiguous()))
    # Those above 0.01 and up to 0.2.
    counted = replace(found, branch_shares=[0.5, 0.25, 0.0625, 0.0, 0.125, *[0.0] * 5, 0.0625])
    assert counted.band == 0.1875

    assert math.isclose(found.no_effect, 2 / 3, rel_tol=1e-6)
    of_unchanged = torch.tensor([p(context, unchanged) for context in contexts])  # (3, |o|)
    first = of_unchanged[:, 0]
    assert math.isclose(found.p_if_no_effect, (first[0] + first[2]) / 2, rel_tol=1e-4)
    assert math.isclose(found.p_if_effect, first[1], rel_tol=1e-4)
    score = of_unchanged.log().mean(1)
    larger = [(score[0] > score[1]).item(), (score[2] > score[1]).item()]
    assert found.auc == sum(larger) / 2


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--losses", "ce", "cmae-0"], "--rho 0.0 is out of range"),
        (["--losses", "mse"], "use ce"),
        (["--groups", "3"], "3 groups are too few, since every fourth is held out"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_played(monkeypatch, argv, reason):
    monkeypatch.setattr(teach, "play", None)
    with pytest.raises(UserError, match=reason):
        teach.main(["search", *argv])


def test_only_the_world_model_loss_has_a_gradient():
    rows = teach.world_model_rows(EPISODES)
    assert rows.advantage.tolist() == [0.0] * len(rows.tokens)
    observed = [len(tokens.obs_ids) > 0 for tokens in rows.tokens]
    assert (rows.row_weight > 0).tolist() == observed
    assert math.isclose(rows.row_weight.sum().item(), 1.0, rel_tol=1e-6)


def test_every_fourth_group_is_held_out():
    episodes = make_episodes(n_groups=9, size=2)
    train, held_out = teach.split(episodes)
    assert sorted({episode.group for episode in held_out}) == [3, 7]
    assert sorted({episode.group for episode in train}) == [0, 1, 2, 4, 5, 6, 8]
    assert len(train) + len(held_out) == 18


@pytest.mark.slow
def test_cross_entropy_teaches_on_search(tmp_path, capsys):
    """The command, at its smallest: eight epochs of CE raise p on held-out transitions."""
    argv = ["search", "--losses", "ce", "--epochs", "2", "--groups", "8", "--out", str(tmp_path)]
    teach.main([*argv, "--save", str(tmp_path / "models")])
    assert "| ce | 0 |" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "teach-search.json").read_text())
    p = [outcome["p"] for outcome in found["outcomes"]]
    assert len(p) == 3 and p[2] > p[0] + 0.01
    # The saved model is the trained one.
    saved = load_policy(str(tmp_path / "models" / "ce")).state_dict()
    start = load_policy(default_model("search")).state_dict()
    assert any(not torch.equal(weight, start[name]) for name, weight in saved.items())


def test_shares_of_p():
    found = outcomes.shares(torch.tensor([0.0005, 0.001, 0.2, 0.21, 0.95, 1.0, 1.0, 1.0]))
    expected = dict.fromkeys(outcomes.EDGES, 0.0)
    expected |= {0.001: 0.25, 0.2: 0.125, 0.4: 0.125, 0.99: 0.125, 1.0: 0.375}
    assert found == pytest.approx(list(expected.values()))
    assert outcomes.shares(torch.tensor([])) == [0.0] * len(outcomes.EDGES)


def test_the_band_in_which_the_clipped_mae_teaches():
    found = band.weight(np.array([0.0, 0.1, 0.2, 0.21, 1.0]))
    assert found.tolist() == pytest.approx([0, 0.09, 0.16, 0, 0])
    # The axis: one unit for each bin.
    assert band.place(np.array([0.0, 0.001, 0.03, 1.0])).tolist() == pytest.approx([0, 1, 2.5, 11])


def test_the_picture_of_the_band(tmp_path):
    file = Path("research/teach/teach-alfworld.json")
    found = read_json(file, list[teach.Taught])
    shown = band.histograms(found, file)
    assert list(shown) == ["before", "after 276 steps of cmae-0.2", "after 276 steps of ce"]
    by_loss = {taught.loss: taught for taught in found}
    assert shown["before"] == by_loss["ce"].outcomes[0]
    assert shown["after 276 steps of cmae-0.2"] == by_loss["cmae-0.2"].outcomes[-1]
    band.draw([file, file], tmp_path / "band.png")
    assert (tmp_path / "band.png").stat().st_size > 10_000
