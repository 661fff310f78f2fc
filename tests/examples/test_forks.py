"""Methods over the seam `train(cfg, method=...)`: each file of examples/ against its own oracle."""

import importlib
import math
import re
import runpy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
import torch
from transformers import AutoTokenizer

from examples import inverse_dynamics, multi_step, probable, tapo
from paw_min import cli, losses, train
from paw_min.base.errors import UserError
from paw_min.cli import parse_args
from paw_min.config import METHOD_PRESETS, Config
from paw_min.envs.benchmarks import NAMES
from paw_min.model.batches import collate
from paw_min.model.policy import Policy, Scores
from paw_min.rows import TokenRow, Transition, flatten
from paw_min.running.runs import read_metrics
from paw_min.toy import standins
from paw_min.update import ObservationLoss, mini_batches, optimize, prepare
from tests.helpers import (
    BASE,
    EPISODES,
    ROWS,
    SMOLLM2,
    make_policy,
    plain_logp,
    weights_of,
    with_adapters,
)

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")
EXAMPLES = Path(__file__).parents[2] / "examples" / "README.md"
PAGE = Path(__file__).parents[2] / "paw_min" / "envs" / "README.md"


def session(lr=0.0) -> SimpleNamespace:
    """What of a Session these methods use. With lr 0, the weights stay as they are."""
    policy = make_policy()
    return SimpleNamespace(policy=policy, optimizer=torch.optim.SGD(policy.parameters(), lr=lr))


def prepared(cfg: Config, s: SimpleNamespace, kl: bool = False):
    reference = None
    if kl:
        reference = make_policy()
        with torch.no_grad():  # somewhere else, so that the KL term has a gradient
            for p in reference.parameters():
                p.mul_(1.1)
    return prepare(cfg, s.policy, reference, flatten(EPISODES))


def gradient_of(policy) -> torch.Tensor:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.model.parameters()]
    return torch.cat([grad.flatten() for grad in found]).clone()


def gradients_of_steps(s: SimpleNamespace) -> list[torch.Tensor]:
    """The gradient of each optimizer step from now on; the weights stay as they are."""
    steps = []
    s.optimizer.step = lambda: steps.append(gradient_of(s.policy))
    return steps


def add_answers(policy, rows, weights, loss_of=torch.neg) -> None:
    """Add the gradient of sum_i w_i * (mean loss over the answer of row i), row by row.

    Given tokens are not a part of an answer. loss_of: of log p of the tokens; -log p.
    """
    for row, weight in zip(rows, weights, strict=True):
        answer = [k for k in range(len(row.obs_ids)) if k not in row.context_positions]
        if answer:
            logp = plain_logp(policy, row)[len(row.response_ids) :][answer]
            (weight * loss_of(logp).mean()).backward()


def recipe() -> dict:
    """The names of the page's code that selects by another signal."""
    (code,) = re.findall(r"```python\n([^`]*response_batches[^`]*)```", EXAMPLES.read_text("utf-8"))
    names = {}
    exec(code, names)
    return names


def test_the_recipe_runs_with_adapters_in_bf16():
    cfg, s = Config(**BASE | dict(alpha=0.5, precision="bf16")), session()
    with_adapters(s.policy, "bf16")
    assert recipe()["margin"](cfg, s, prepared(cfg, s), 1)["wm_loss"] > 0


def test_the_recipe_of_another_signal_selects_by_the_margin():
    """The page's own code, against a plain pass of each row."""
    names = recipe()
    cfg, s = Config(**BASE | dict(temperature=0.7, alpha=0.5)), session()
    rows = prepared(cfg, s)
    expected = torch.full((len(ROWS),), -torch.inf)
    for i, row in enumerate(ROWS):
        if row.obs_ids:
            ids = torch.tensor([row.prompt_ids + row.response_ids])
            logits = s.policy.model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
            two = (logits / 0.7).softmax(-1).topk(2).values
            expected[i] = (two[:, 1] - two[:, 0]).mean()
    count = math.ceil(0.5 * sum(rows.candidates.tolist()))
    selected = set(expected.argsort(descending=True)[:count].tolist())
    assert selected != set(rows.selected.nonzero()[:, 0].tolist())
    learned = Mock()
    names["paw"] = learned
    names["margin"](cfg, s, rows, 1)
    given = learned.call_args.args[2]
    assert set(given.selected.nonzero()[:, 0].tolist()) == selected
    weights = losses.row_weights(rows.group, given.selected, rows.lambdas)
    assert torch.equal(given.row_weight, weights) and not torch.equal(weights, rows.row_weight)
    names["paw"] = train.paw
    assert names["margin"](cfg, s, rows, 1)["wm_loss"] > 0  # with a gradient


# ---- the command ----


ECHO = METHOD_PRESETS["echo"]
SETTINGS = {  # of each fork, beyond a preset
    "tapo": tapo.SETTINGS, "inverse_dynamics": inverse_dynamics.SETTINGS, "multi_step": {},
    "probable": ECHO,
}


@pytest.mark.parametrize("env", NAMES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_fork_is_the_run_script_with_another_method(env, name, monkeypatch):
    """Its settings are added to the presets, its name to those of its runs."""
    monkeypatch.setattr("sys.argv", ["x", env, "--seed", "3"])
    trained = Mock()
    monkeypatch.setattr("paw_min.train.train", trained)
    runpy.run_module(f"examples.{name}", run_name="__main__")
    cfg, _, method = trained.call_args.args
    assert method.__name__ == name
    plain, _ = parse_args(env, cli.presets_of(env), "", ["--seed", "3"])
    dashed = name.replace("_", "-")
    assert cfg.name == plain.name.replace("-grpo-paw-", f"-grpo-{dashed}-") != plain.name
    assert asdict(cfg) == asdict(plain) | SETTINGS[name] | {"method": name, "name": cfg.name}


@pytest.mark.parametrize("argv, part", [
    ([], "the first word must be one of alfworld, websh"),
    (["examples.kitchen"], "examples.kitchen is not a module here"),
    (["./examples/locks.py"], "the first word must be one of alfworld, websh"),
    (["paw_min.envs.search.presets"], "has no function run"),
    (["examples.one_file"], "examples.one_file is no environment, it has no PRESETS"),
    (["alfworld", "--no-paw"], "--no-paw leaves this method no world model"),
    (["examples.locks", "--no-paw"], "--no-paw leaves this method no world model"),
])
def test_what_no_fork_takes_is_refused_before_a_start_model_is_made(
    argv, part, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["x", *argv])
    with pytest.raises(SystemExit, match=f"^error: .*{part}"):
        cli.fork(probable.probable, {}, "doc")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["locks", "hidden", "boxes"])
def test_a_world_of_examples_takes_a_fork_like_a_benchmark(name, monkeypatch):
    """It is checked and prepared with the fork's flags, then trained by the fork's method."""
    world = importlib.import_module(f"examples.{name}")
    own = Config(seed=7, model=str(getattr(world, "START", "")))
    monkeypatch.setattr(world, "check_command", lambda env, presets, *_: own)
    prepare, main = Mock(), Mock()
    monkeypatch.setattr(world, "prepare", prepare)
    monkeypatch.setattr(world, "main", main)
    monkeypatch.setattr("sys.argv", ["x", f"examples.{name}", "--seed", "7"])
    cli.fork(probable.probable, dict(wm_scale=3.0), "doc")
    main.assert_called_once_with(name, ANY, "doc", probable.probable, ["--seed", "7"])
    assert {preset["wm_scale"] for preset in main.call_args.args[1].values()} == {3.0}
    made = dict(hidden=(7,), boxes=(Path("data/boxes"),))  # a world of a seed, a start model
    prepare.assert_called_once_with(*made.get(name, ()))


def test_the_environment_on_the_page_trains_as_printed(monkeypatch, tmp_path):
    """paw_min/envs/README.md: its template is a module, a command and a world that takes a fork."""
    (printed,) = re.findall("```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "doors.py").write_text(printed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(standins, "imitate", partial(standins.imitate, stop=2))
    monkeypatch.setattr("sys.argv", ["x", "own.doors", "--updates", "1", "--eval-tasks", "2"])
    cli.fork(probable.probable, {}, "doc")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("doors-grpo-probable")
    line = read_metrics(folder)[1]
    assert line["rows"] == 16 * 8 and line["wm_loss"] > 0


# ---- a loss of one's own ----


def test_only_tokens_above_the_floor_teach(monkeypatch):
    """The gradient of the world model's term: a plain loop, row by row, without batches."""
    cfg = Config(**BASE | dict(micro_tokens=40, wm_scale=2.0))
    s = session()
    rows = prepared(cfg, s)
    # All of the gradient is the world model's: advantages are 0, and there is no other term.
    rows = replace(rows, advantage=torch.zeros_like(rows.advantage))
    p = torch.cat([plain_logp(s.policy, row)[len(row.response_ids) :] for row in rows.tokens]).exp()
    floor = p.median().item()  # some tokens are above it, some below
    monkeypatch.setattr(probable, "FLOOR", floor)
    steps = gradients_of_steps(s)
    metrics = probable.probable(cfg, s, rows, 1)
    s.policy.zero_grad()

    def loss_of(logp):
        return -logp * (logp.exp() >= floor)

    add_answers(s.policy, rows.tokens, (cfg.wm_scale * rows.row_weight).tolist(), loss_of)
    assert torch.allclose(steps[0], gradient_of(s.policy), atol=1e-6)
    assert metrics["wm_loss"] > 0 and 0 < metrics["wm_clipped_tokens"] < 1


def test_the_floor_of_probable_is_one_percent():
    """A token at the floor is trained, one below it costs nothing and counts in the mean."""
    batch = collate([TokenRow([1], [2], [3, 4, 5])], [True], pad_id=0)
    logp = torch.zeros(batch.obs_mask.shape)
    logp[batch.obs_mask] = torch.tensor([0.0099, 0.01, 0.0101]).log()
    found = probable.loss_of_probable(Config(), Scores(logp, torch.zeros_like(logp)), batch)
    assert found.counted[batch.obs_mask].tolist() == [False, True, True]
    assert found.per_row.tolist() == [pytest.approx(-math.log(0.01 * 0.0101) / 3)]


def test_a_rank_that_repeats_a_row_of_another_adds_no_loss():
    """Its batch has empty masks (batches.py: micro_batches)."""
    batch = collate(ROWS[1:3], [True, True], pad_id=0)
    logp = torch.full(batch.obs_mask.shape, -2.0)
    scores = Scores(logp, torch.ones_like(logp))
    assert probable.loss_of_probable(Config(), scores, batch).per_row.any()
    batch.obs_mask.zero_()
    found = probable.loss_of_probable(Config(), scores, batch)
    assert not found.per_row.any() and not found.counted.any()


def test_a_loss_of_a_wrong_shape_is_one_sentence():
    """A value per token instead of one per row: its sum would be a loss."""
    def per_token(cfg, scores, batch):
        return ObservationLoss(-scores.logp * batch.obs_mask, batch.obs_mask)

    cfg = Config(**BASE)
    s = session()
    rows = prepared(cfg, s)
    sentence = r"world-model loss returns the shape \(\d+, \d+\) instead of \(\d+,\): one value"
    with pytest.raises(UserError, match=sentence):
        train.paw(cfg, s, rows, 1, per_token)


def test_a_negative_weight_trains_against_an_observation():
    cfg = Config(**BASE)
    s = session()
    rows = prepared(cfg, s)
    rows = replace(rows, advantage=torch.zeros_like(rows.advantage))
    steps = gradients_of_steps(s)
    train.paw(cfg, s, rows, 1)
    train.paw(cfg, s, replace(rows, row_weight=-rows.row_weight), 1)
    assert torch.equal(steps[0], -steps[1]) and steps[0].any()


# ---- TAPO ----


def test_tapo_trains_on_rl_alone_and_then_on_the_world_model_alone(monkeypatch):
    monkeypatch.setattr(tapo, "EVERY", 2)
    cfg = Config(**BASE | tapo.SETTINGS)
    s, baseline = session(cfg.lr), session(cfg.lr)
    metrics = tapo.tapo(cfg, s, prepared(cfg, s), 1)
    plain = replace(cfg, paw=False)
    rows = prepared(plain, baseline)
    optimize(plain, baseline.policy, baseline.optimizer, rows, (cfg.seed, 1))
    assert torch.equal(weights_of(s.policy), weights_of(baseline.policy))
    assert "wm_loss" not in metrics
    metrics = tapo.tapo(cfg, s, prepared(cfg, s), 2)
    assert metrics["wm_loss"] > 0 and metrics["grad_norm_wm_alone"] > 0


def test_tapo_makes_no_step_without_a_target(monkeypatch):
    """AdamW would move by its moments and its decay."""
    monkeypatch.setattr(tapo, "EVERY", 1)
    cfg = Config(**BASE | tapo.SETTINGS)
    s = session(cfg.lr)
    rows = prepared(cfg, s)
    nothing = replace(rows, selected=torch.zeros_like(rows.selected))
    steps = gradients_of_steps(s)
    tapo.tapo(cfg, s, nothing, 1)
    assert len(steps) == len(mini_batches(len(ROWS), cfg.mini_batch, (0, 1)))  # RL's


@pytest.mark.parametrize("settings", [{}, dict(micro_tokens=1), dict(mini_batch=8)])
def test_tapos_gradient_is_that_of_a_plain_loop(settings, monkeypatch):
    """-1/M of the sum of log p over all tokens of all M answers (Eq. 6), row by row.

    No part of it is RL's, nor of the KL term or the entropy bonus.
    """
    monkeypatch.setattr(tapo, "EVERY", 1)
    cfg = Config(**BASE | tapo.SETTINGS | dict(kl_coef=0.1, entropy_coef=0.1) | settings)
    s = session()
    rows = prepared(cfg, s, kl=True)
    steps = gradients_of_steps(s)
    tapo.tapo(cfg, s, rows, 1)
    # Half of the steps are RL's. A mini-batch estimates the whole gradient from its rows.
    n = sum(bool(t.obs_ids) for t in ROWS)
    minis = mini_batches(n, cfg.mini_batch, (0, 1, "world model"))
    parts = zip(minis, steps[-len(minis) :], strict=True)
    ours = sum(len(mini) / n * step for mini, step in parts)

    plain = make_policy()
    answers = [tapo.transition_row(cfg, plain, t, t.obs_ids) for t in ROWS if t.obs_ids]
    assert 0 < len(answers) < len(ROWS)
    add_answers(plain, answers, [len(row.obs_ids) / len(answers) for row in answers])
    torch.testing.assert_close(ours, gradient_of(plain), atol=2e-5, rtol=1e-4)


@pytest.fixture
def two_steps() -> tuple[Policy, list[Transition]]:
    """A search through a room in braces, in published tokens; the second has no observation."""
    policy = make_policy()
    policy.tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    policy.eos_ids = [policy.tokenizer.eos_token_id]
    steps = [
        Transition(
            [3], [4], policy.encode(following), sampler_logp=[], reward=0.0, valid=True,
            observation=observation, group=0, trajectory=0, command=command,
            next_observation=following, admissible=["go to shelf 1", "look"],
        )
        for observation, command, following in (
            ("You are in a {room}.", "go to shelf 1", "A mug is on it."),
            ("A mug is on it.", "look", ""),
        )
    ]
    return policy, steps


def test_tapos_rows_token_by_token(two_steps):
    policy, steps = two_steps
    first, second = [tapo.transition_row(Config(), policy, t, t.obs_ids) for t in steps]
    shown = tapo.transition_prompt(Config(), steps[0])
    assert "is: You are in a {room}.\n" in shown and "executed now: go to shelf 1\n" in shown
    assert "['go to shelf 1', 'look']" in shown and "mug" not in shown
    assert first.prompt_ids == policy.encode_chat(shown)
    opening, closing = map(policy.encode, ("<prediction>", "</prediction>"))
    assert first.obs_ids == [*opening, *steps[0].obs_ids, *closing, policy.eos_ids[0]]
    assert (first.response_ids, first.separator_ids, first.context_positions) == ([], [], [])
    # No observation, no target; its state is the observation of the step before.
    assert second.obs_ids == [] and "is: A mug is on it.\n" in policy.decode(second.prompt_ids)


# ---- several steps, equal transitions once ----


def test_equal_transitions_compete_once():
    cfg = Config(**BASE | dict(alpha=0.4))
    s = session()
    rows = prepare(cfg, s.policy, None, flatten(EPISODES + EPISODES))
    once = multi_step.without_repeats(cfg, rows)
    n = len(ROWS)
    candidates = [bool(t.obs_ids) for t in ROWS]
    assert once.candidates.tolist() == candidates + [False] * n
    assert int(once.selected.sum()) == math.ceil(0.4 * sum(candidates))
    assert torch.equal(once.selected[:n], prepared(cfg, s).selected)
    expected = losses.row_weights(rows.group, once.selected, rows.lambdas)
    assert torch.equal(once.row_weight, expected) and not torch.equal(expected, rows.row_weight)


def test_the_next_observations_are_targets(monkeypatch):
    """The gradient of an update is that of a plain loop over the longer targets."""
    cfg = Config(**BASE | dict(wm_loss="ce"))
    s = session()
    rows = prepared(cfg, s)
    assert all(multi_step.first_occurrences(ROWS))  # so the selection is PaW's
    steps = gradients_of_steps(s)
    metrics = multi_step.multi_step(cfg, s, replace(rows, advantage=torch.zeros(len(ROWS))), 1)
    plain = make_policy()
    longer = multi_step.with_later_observations(ROWS, rows.trajectory, 2)
    add_answers(plain, longer, rows.row_weight.tolist())
    torch.testing.assert_close(steps[0], gradient_of(plain), atol=2e-5, rtol=1e-4)
    monkeypatch.setattr(multi_step, "STEPS", 1)
    s = session()
    assert multi_step.multi_step(cfg, s, rows, 1)["tokens_trained"] < metrics["tokens_trained"]


def test_longer_targets_end_at_the_models_positions():
    s = session()
    cfg = Config(**BASE)
    rows = prepared(cfg, s)
    longer = multi_step.with_later_observations(ROWS, rows.trajectory, 2)
    s.policy.positions = -1 + max(
        len(row.prompt_ids + row.response_ids + row.obs_ids) for row in longer
    )
    passes = []
    s.policy.register_forward_pre_hook(lambda _, batch: passes.append(batch[0].ids.shape[1]))
    multi_step.multi_step(cfg, s, rows, 1)
    assert max(passes) == s.policy.positions
    row = TokenRow([3, 4], [5], [6, 7, 8, 9], context_positions=[1, 2])
    assert multi_step.cut(row, 5) == TokenRow([3, 4], [5], [6, 7], context_positions=[1])
    separated = replace(row, separator_ids=[2])
    assert multi_step.cut(separated, 7) == replace(separated, obs_ids=[6, 7, 8])


# ---- inverse dynamics ----


def test_the_row_of_an_action(two_steps):
    policy, (first, second) = two_steps
    row = inverse_dynamics.inverse_row(Config(), policy, first)
    text = policy.decode(row.prompt_ids)
    assert "observed: You are in a {room}.\n" in text and "observed: A mug is on it.\n" in text
    assert row.obs_ids == [*policy.encode("go to shelf 1"), policy.eos_ids[0]]
    assert (row.response_ids, row.separator_ids) == ([], []) and "go to shelf" not in text
    compact = inverse_dynamics.inverse_row(Config(prompt="compact"), policy, first)
    assert compact.prompt_ids == policy.encode_chat("You are in a {room}.\nA mug is on it.\n>")
    for without in (second, replace(first, valid=False)):  # no next observation; malformed
        assert inverse_dynamics.inverse_row(Config(), policy, without).obs_ids == []
    short = inverse_dynamics.inverse_row(Config(max_prompt_tokens=9), policy, first)
    assert short.prompt_ids == row.prompt_ids[-9:]


@pytest.mark.parametrize("settings", [{}, dict(micro_tokens=1), dict(algo="gigpo")])
def test_the_gradient_of_inverse_dynamics_is_that_of_a_plain_loop(settings):
    """RL's, and the weight of this update times both cross entropies, row by row."""
    own = dict(kl_coef=0.1, entropy_coef=0.1, updates=9)
    cfg = Config(**BASE | inverse_dynamics.SETTINGS | own | settings)
    s = session()
    rows = prepared(cfg, s, kl=True)
    steps = gradients_of_steps(s)
    metrics = inverse_dynamics.inverse_dynamics(cfg, s, rows, 4)
    scale = 0.2 * (1 + math.cos(math.pi / 3)) / 2
    assert len(steps) == 1 and metrics["wm_scale"] == pytest.approx(scale) == pytest.approx(0.15)

    plain = session()
    no_weight = torch.zeros_like(rows.row_weight)
    optimize(cfg, plain.policy, plain.optimizer, replace(rows, row_weight=no_weight), (0, 4))
    asked = [inverse_dynamics.inverse_row(cfg, plain.policy, t) for t in ROWS]
    has_answer = torch.tensor([t.valid and len(t.obs_ids) > 0 for t in ROWS])
    assert [bool(row.obs_ids) for row in asked] == has_answer.tolist()
    groups = len(set(rows.group))
    for tokens, has in ((ROWS, [bool(t.obs_ids) for t in ROWS]), (asked, has_answer.tolist())):
        sizes = {g: sum(x for x, of in zip(has, rows.group) if of == g) for g in rows.group}
        weights = [scale / (groups * max(1, sizes[g])) for g in rows.group]
        add_answers(plain.policy, tokens, weights)
    torch.testing.assert_close(steps[0], gradient_of(plain.policy), atol=2e-5, rtol=1e-4)


def test_inverse_dynamics_makes_a_step_per_mini_batch():
    cfg = Config(**BASE | inverse_dynamics.SETTINGS | dict(mini_batch=5))
    s = session()
    steps = gradients_of_steps(s)
    inverse_dynamics.inverse_dynamics(cfg, s, prepared(cfg, s), 1)
    assert len(steps) == len(mini_batches(len(ROWS), cfg.mini_batch, (0,))) > 1
