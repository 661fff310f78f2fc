"""The rule of research/predictable: which actions and which words of o' it trains."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples import one_file
from examples.one_file import Size
from paw_min.config import METHOD_PRESETS, Config
from paw_min.rows import flatten
from paw_min.train import paw
from paw_min.update import mini_batches, prepare
from research.one_file_runs import Cell
from research.predictable import in_package, study
from research.stats import t_quantile
from tests.helpers import BASE, EPISODES, make_policy, plain_logp

TINY = Size(width=16, layers=1, heads=2, warm_steps=30, warm_rows=32, updates=4, evaluate_every=2)


# ---- small worlds ----


def curve(arm: str, world: str = "serials", seed: int = 1, **instead) -> list[float]:
    """Success of a short run."""
    loss, setting = study.ARMS[arm], study.SETTINGS[world]
    cell = Cell(loss.arm, setting.make_world, loss.instead | instead, TINY)
    return [point.success for point in cell.run(seed)]


def test_without_its_conditions_the_rule_is_echo(monkeypatch):
    """Bit by bit; and each condition alone changes the run."""
    echo = curve("echo")
    assert curve("prediction") != echo
    monkeypatch.setattr(study, "MOST", 1e9)
    assert curve("prediction") == echo
    assert curve("predictable") == echo  # in four updates, everything stays undecided
    assert curve("prediction", top_alpha=lambda entropy, alpha: entropy > 1e9) == curve("grpo")


def test_few_outcomes_are_those_of_the_prediction():
    """Uniform over 31 words counts, over 33 does not, whichever word came."""
    logits = torch.full((2, 40), -torch.inf)
    logits[0, :31] = 0.0
    logits[1, :33] = 0.0
    logp = logits.log_softmax(-1).clamp(min=-1e4)
    assert study.few_outcomes(logp).tolist() == [True, False]


def test_an_action_is_undecided_down_to_a_quarter_of_the_first_updates_mean():
    undecided = study.Undecided()
    undecided(torch.tensor([1.0, 3.0]), 1.0)  # 0.5
    later = torch.tensor([0.49, 0.5, 0.0, 4.0])
    assert undecided(later, 1.0).tolist() == [False, True, False, True]
    assert study.Undecided().least is None


def test_each_run_has_a_first_update_of_its_own():
    """Cell copies the function with the state."""
    first = curve("predictable", seed=3)
    curve("predictable", "polish", seed=4)
    assert curve("predictable", seed=3) == first
    assert study.ARMS["predictable"].instead["top_alpha"].least is None


@pytest.mark.parametrize("world", study.WORLDS)
def test_every_world_has_every_loss_and_the_placebos(world):
    assert study.SETTINGS[world].arms == tuple(study.ARMS)
    assert study.SETTINGS[world].make_world(1) is not study.SETTINGS[world].make_world(1)


def test_all_arms_have_echos_settings_and_placebos_only_other_targets():
    echo = study.LOSSES["echo"].arm
    for name in ("probable 0.03", "probable 0.01", "prediction", "predictable"):
        arm = study.LOSSES[name].arm
        assert replace(arm, loss="ce") == echo
        assert name == "probable 0.03" or (
            study.ARMS[name + study.PLACEBO].arm == replace(arm, placebo=True)
            and study.ARMS[name + study.PLACEBO].instead == study.ARMS[name].instead
        )


def test_a_run_of_the_study_is_that_of_one_file(monkeypatch):
    """Two seeds in one process: neither start model nor world is shared."""
    setting = replace(study.SETTINGS["fog"], size=TINY)
    monkeypatch.setitem(study.SETTINGS, "fog", setting)
    for seed in (9100, 9101):
        for arm in ("paw", "echo"):
            line = study.train(("fog", arm, seed))
            world = setting.make_world(seed)
            alone = one_file.run(seed, study.ARMS[arm].arm, world, TINY)
            assert line["success"] == [float(f"{point.success:.5g}") for point in alone]


# ---- tables ----


def test_regret_is_the_largest_shortfall_from_the_best_loss():
    """Two worlds, two seeds; a placebo that is best of all is no loss to fall short of."""
    names = list(study.ARMS)
    found = np.full((2, len(names), 2), 50.0)
    found[0, names.index("echo")] = 60.0, 80.0
    found[1, names.index("echo")] = 10.0, 0.0
    found[:, names.index("echo placebo")] = 99.0
    regret = dict(zip(names, study.regrets(found), strict=True))
    assert regret["echo"] == 45.0  # in the second world
    assert regret["paw"] == regret["predictable"] == 20.0  # in the first
    assert regret["echo placebo"] < 0


def test_the_seeds_of_a_draw_are_the_same_in_all_worlds():
    """Each seed has one shortfall, in a world of its own: a mean over the seeds is at most half."""
    names = list(study.ARMS)
    found = np.full((2, len(names), 2), 50.0)
    found[0, names.index("echo"), 0] = 70.0
    found[1, names.index("echo"), 1] = 70.0
    drawn = study.drawn_regrets(found)[:, names.index("paw")]
    assert set(drawn.round(6)) == {10.0, 20.0}
    assert (drawn == 20.0).mean() == pytest.approx(0.5, abs=0.02)  # both seeds are the same one


def test_a_difference_that_a_test_finds_four_times_of_five():
    """By simulation: the paired t test of eight normal values, shifted by this difference."""
    rng = np.random.default_rng(0)
    spread = [*np.linspace(-1, 1, 8)]
    shift = study.detectable(spread)
    values = rng.normal(shift, np.std(spread, ddof=1), (4000, 8))
    low = values.mean(1) - t_quantile(7) * values.std(1, ddof=1) / 8**0.5
    assert (low > 0).mean() == pytest.approx(0.8, abs=0.03)


# ---- in the package ----


def session(tmp_path) -> SimpleNamespace:
    """What of a Session the rule uses; with a rate of 0, the weights stay as they are."""
    policy = make_policy()

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    return SimpleNamespace(
        policy=policy, optimizer=torch.optim.SGD(policy.parameters(), lr=0.0),
        run=SimpleNamespace(folder=tmp_path, write=write),
    )


def prepared(cfg: Config, s: SimpleNamespace):
    rows = prepare(cfg, s.policy, None, flatten(EPISODES))
    return replace(rows, advantage=torch.zeros_like(rows.advantage))


def gradient_of(policy) -> torch.Tensor:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.model.parameters()]
    return torch.cat([grad.flatten() for grad in found]).clone()


ECHO = BASE | METHOD_PRESETS["echo"] | dict(mini_batch=8, micro_tokens=40, wm_scale=2.0)


@pytest.mark.usefixtures("without_gradient_clipping")
def test_the_gradient_of_the_rule_is_that_of_a_plain_loop(tmp_path, monkeypatch):
    """Row by row, without batches. Some actions and some words are left out."""
    cfg = Config(**ECHO)
    s = session(tmp_path)
    rows = prepared(cfg, s)
    least = rows.entropy[rows.candidates].median().item()
    (tmp_path / in_package.LEAST).write_text(json.dumps(least))
    # e^H of each word of o', one row at a time
    outcomes = []
    for row in rows.tokens:
        ids = torch.tensor([row.prompt_ids + row.response_ids + row.separator_ids + row.obs_ids])
        logp = s.policy.model(ids).logits[0].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        outcomes.append(entropy[len(ids[0]) - len(row.obs_ids) - 1 : -1].exp())
    most = torch.cat(outcomes).median().item() * (1 + 1e-5)
    monkeypatch.setattr(in_package, "MOST", most)
    steps = []
    s.optimizer.step = lambda: steps.append(gradient_of(s.policy))
    metrics = in_package.predictable(cfg, s, rows, 2)
    minis = mini_batches(len(rows.tokens), cfg.mini_batch, (cfg.seed, 2))
    shares = [len(mini) / len(rows.tokens) for mini in minis]
    ours = sum(share * step for share, step in zip(shares, steps, strict=True))

    s.policy.zero_grad()
    kept = rows.candidates & (rows.entropy >= least)
    assert 0 < kept.sum() < rows.candidates.sum() and 0 < metrics["wm_clipped_tokens"] < 1
    groups = set(rows.group)
    for i, row in enumerate(rows.tokens):
        if kept[i]:
            logp = plain_logp(s.policy, row)[len(row.response_ids) :]
            size = sum(bool(kept[j]) for j in range(len(kept)) if rows.group[j] == rows.group[i])
            loss = -(logp * (outcomes[i] <= most)).mean()
            (cfg.wm_scale * loss / size / len(groups)).backward()
    torch.testing.assert_close(ours, gradient_of(s.policy), atol=2e-5, rtol=1e-4)
    assert metrics["selected"] == pytest.approx(kept.float().mean().item())


def test_the_least_entropy_is_written_in_the_first_update(tmp_path):
    cfg = Config(**ECHO)
    s = session(tmp_path)
    rows = prepared(cfg, s)
    found, least = in_package.undecided(s, rows, 1)
    assert least == pytest.approx(rows.entropy[rows.candidates].mean().item() / 4)
    halved = replace(rows, entropy=rows.entropy / 8)
    later, same = in_package.undecided(s, halved, 7)
    assert same == least and later.selected.sum() < found.selected.sum()
    assert not later.row_weight[~later.selected].any()


def test_entropies_of_observations_change_no_bit_of_an_update(tmp_path, monkeypatch):
    """With all conditions fulfilled, the rule's metrics and gradients are ECHO's."""
    cfg = Config(**ECHO)
    found = []
    monkeypatch.setattr(in_package, "MOST", 1e9)
    for method in (paw, in_package.predictable):
        s = session(tmp_path)
        rows = prepared(cfg, s)
        (tmp_path / in_package.LEAST).write_text("0")
        steps = []
        s.optimizer.step = lambda: steps.append(gradient_of(s.policy))
        metrics = method(cfg, s, rows, 2)
        found.append((steps, {name: metrics[name] for name in ("wm_loss", "grad_norm", "entropy")}))
    (steps, metrics), (ours, our_metrics) = found
    assert metrics == our_metrics
    assert all(torch.equal(a, b) for a, b in zip(steps, ours, strict=True))
