"""Algorithm 1, lines 3-11, on a fixed rollout: what each switch does to the numbers."""

import copy
from dataclasses import replace
from statistics import mean, stdev
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from paw_min import advantages, select
from paw_min import update as update_module
from paw_min.config import Config
from paw_min.model.head import token_scores
from paw_min.model.policy import Scores
from paw_min.model.scoring import score_responses
from paw_min.rows import Episode, Rows, Transition, flatten
from paw_min.update import (
    NonFinite,
    group_lambdas,
    mini_batches,
    observation_loss,
    optimize,
    prepare,
    row_advantages,
)
from tests.helpers import (
    BASE,
    EPISODES,
    ROWS,
    make_policy,
    plain_logp,
    run,
    update,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")


def start() -> torch.Tensor:
    return weights_of(make_policy())


def step_of(**settings) -> torch.Tensor:
    """-lr * gradient: the weight change of one SGD step, in units of lr."""
    return (run(**settings)[0] - start()) / BASE["lr"]


def test_paw_off_is_plain_grpo():
    """GRPO without the code of paw_min.update, row by row, gives the same weights.

    Up to the rounding of float32: the two add the same numbers in another order. The next test
    compares bit for bit.
    """
    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=BASE["lr"])
    scores = torch.tensor([e.episode_return for e in EPISODES for _ in e.transitions])
    scores = scores - 0.1 * torch.tensor([not t.valid for t in ROWS]).float()
    advantage = advantages.grpo(scores, [t.group for t in ROWS])
    n_tokens = sum(len(t.response_ids) for t in ROWS)
    for _ in range(2):
        optimizer.zero_grad()
        for t, a in zip(ROWS, advantage):
            logp = plain_logp(policy, replace(t, obs_ids=[]))
            ratio = (logp - logp.detach()).exp()
            (-a * ratio.sum() / n_tokens).backward()
        optimizer.step()
    ours, metrics = run(updates=2, paw=False)
    torch.testing.assert_close(ours, weights_of(policy), atol=2e-7, rtol=0)
    assert "loss_wm" not in metrics and "lambda" not in metrics


@pytest.mark.parametrize("mini_batch", [0, 8])
def test_lambda_zero_gives_exactly_the_baseline(mini_batch):
    """Every group at R_max: PaW is on, and does not change a bit, update by update."""
    episodes = copy.deepcopy(EPISODES)
    for episode in episodes:
        for t in episode.transitions:
            t.reward = 0.0
        episode.transitions[-1].reward = 10.0
    # alpha = 1: with one mini-batch, selection would ask for an old pass that the baseline skips.
    settings = dict(
        episodes=episodes, updates=3, mini_batch=mini_batch, micro_tokens=100, alpha=1.0
    )
    on, metrics = run(paw=True, **settings)
    off, _ = run(paw=False, **settings)
    assert torch.equal(on, off) and metrics["lambda"] == 0.0
    assert not torch.equal(on, start())  # the format penalties still teach


@pytest.mark.parametrize("micro_tokens", [1, 20, 50, 70])
def test_any_micro_batch_split_gives_the_same_gradient(micro_tokens):
    settings = dict(entropy_coef=0.1)
    whole = step_of(**settings)
    micro = step_of(micro_tokens=micro_tokens, **settings)
    torch.testing.assert_close(micro, whole, atol=2e-4, rtol=2e-4)  # rounding, divided by lr
    # The policy differs from the reference in the second update: the KL term has a gradient.
    settings = dict(kl_coef=1.0, updates=2, lr=0.05, paw=False)
    whole = run(**settings)[0]
    micro = run(micro_tokens=micro_tokens, **settings)[0]
    effect = (whole - run(**settings | {"kl_coef": 0.0})[0]).norm()
    assert effect > 1e-3 and (micro - whole).norm() < 0.02 * effect


def test_advantages_per_token():
    """Constant ones equal one per response, and each token is trained by its own."""
    cfg = Config(**BASE | {"paw": False, "micro_tokens": 40})
    steps = {}
    for name in ("per row", "per token", "first token only"):
        policy = make_policy()
        rows = prepare(cfg, policy, None, flatten(EPISODES))
        if name != "per row":
            last = 1.0 if name == "per token" else 0.0  # factor of all tokens but the first
            rows.advantage = [
                [a] + [last * a] * (len(t.response_ids) - 1)
                for t, a in zip(ROWS, rows.advantage.tolist())
            ]
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        optimize(cfg, policy, optimizer, rows, (0,))
        steps[name] = weights_of(policy) - start()
    assert torch.equal(steps["per row"], steps["per token"])
    assert (steps["per row"] - steps["first token only"]).norm() > 1e-3


def test_one_mini_batch_is_eq_11():
    """The world-model part of the loss, recomputed group by group as Eq. 11 is printed."""
    cfg = Config(**BASE)
    policy = make_policy()
    _, metrics = run()
    entropy = score_responses(policy, ROWS, cfg.micro_tokens).entropy
    pool = [i for i, t in enumerate(ROWS) if t.obs_ids]
    kept = [pool[k] for k in select.top_alpha(entropy[pool], 0.75).nonzero()[:, 0].tolist()]
    total = 0.0
    raw = []
    of_group = {}
    for g in range(3):
        returns = [e.episode_return for e in EPISODES if e.group == g]
        lambdas = of_group[g] = 1 - sum(returns) / len(returns) / 10
        row_losses = []
        for i in (i for i in kept if ROWS[i].group == g):
            p = plain_logp(policy, ROWS[i])[len(ROWS[i].response_ids) :].exp().tolist()
            row_losses.append(sum(1 - x for x in p if x <= 0.2) / len(p))  # Eq. 8
        if lambdas > 0:  # rows of weight 0 are not even scored
            raw += row_losses
        if row_losses:
            total += lambdas * sum(row_losses) / len(row_losses) / 3  # Eq. 9-11
    assert metrics["loss_wm"] == pytest.approx(total, rel=1e-5)
    _, scaled = run(wm_scale=3.0)
    assert scaled["loss_wm"] == pytest.approx(3 * total, rel=1e-5)
    assert metrics["wm_loss"] == pytest.approx(sum(raw) / len(raw), rel=1e-5)
    assert metrics["selected"] == pytest.approx(len(kept) / len(ROWS))
    # Observations of rows that teach nothing are not even appended.
    taught = sum(len(ROWS[i].obs_ids) for i in kept if of_group[ROWS[i].group] > 0)
    sampled = sum(len(row.response_ids) for row in ROWS)
    assert metrics["tokens_trained"] == sampled + taught


def test_mini_batches_are_random_parts():
    """Every row once, in parts of nearly equal size, in an order that the seed determines."""
    order = list(range(30))
    minis = mini_batches(30, 8, (0, 1))
    assert sorted(i for mini in minis for i in mini) == order
    assert [len(mini) for mini in minis] == [7, 8, 7, 8]
    assert minis == mini_batches(30, 8, (0, 1)) != mini_batches(30, 8, (0, 2))
    # Rows of one episode are neighbors: without shuffling, a mini-batch is one or two groups.
    assert all(max(mini) - min(mini) > 15 for mini in minis)
    assert [len(mini) for mini in mini_batches(30, 0, (0,))] == [30]


def of_mini(rows: Rows, mini: list[int]) -> Rows:
    """The rows of one mini-batch alone."""

    def cut(column):
        if column is None or isinstance(column, dict):  # lambdas are of the whole update
            return column
        return column[mini] if isinstance(column, torch.Tensor) else [column[i] for i in mini]

    return Rows(**{name: cut(column) for name, column in vars(rows).items()})


@pytest.mark.parametrize("paw, metric", [(False, "grad_norm"), (True, "loss_wm")])
def test_each_mini_batch_takes_a_step_of_its_own(paw, metric):
    """Its gradient is that of its rows alone; nothing of the one before is left.

    The loss of the world model is scaled up by its share of the rows; the sizes are unequal.
    """
    cfg = Config(**BASE | dict(mini_batch=6, lr=1e-12, paw=paw))
    policy = make_policy()
    rows = prepare(cfg, policy, None, flatten(EPISODES))
    optimizer = torch.optim.SGD(policy.parameters(), lr=cfg.lr)  # the policy stays as it is
    alone = []
    for mini in mini_batches(len(ROWS), cfg.mini_batch, (0,)):
        mini_rows = of_mini(rows, mini)
        metrics = optimize(replace(cfg, mini_batch=0), policy, optimizer, mini_rows, (0,))
        alone.append(metrics[metric] * (len(ROWS) / len(mini) if paw else 1))
    together = optimize(cfg, policy, optimizer, rows, (0,))
    assert len(alone) == 4 and max(alone) > 0.01
    assert together[metric] == pytest.approx(sum(alone) / len(alone), rel=1e-4)


def test_at_rho_1_clipped_mae_is_mae():
    assert torch.equal(run(rho=1.0)[0], run(wm_loss="mae")[0])


def test_constant_or_adaptive_lambda():
    adaptive = run(lambda_g="adaptive")[1]
    constant = run(lambda_g="constant")[1]
    assert constant["lambda"] == constant["lambda_min"] == constant["lambda_max"] == 1.0
    assert 0 <= adaptive["lambda_min"] < adaptive["lambda_max"] <= 1
    rows = flatten(golden_episodes())  # one group; its mean return is 5
    of = {env: group_lambdas(Config(env=env), rows) for env in ("webshop", "search")}
    assert of == {"webshop": {0: 0.5}, "search": {0: 0.0}}  # R_max 10 and 1


def test_tokens_that_count_are_those_with_a_gradient():
    """Clipped MAE: the observation tokens with p <= rho, p = rho included. The others: all."""
    p = torch.tensor([[0.1, 0.2, 0.9, 0.05], [0.7, 0.15, 0.3, 0.1]])
    obs_mask = torch.tensor([[True, True, True, False], [False, True, True, False]])
    for loss, expected in (("cmae", obs_mask & (p <= 0.2)), ("mae", obs_mask), ("ce", obs_mask)):
        logp = p.log().requires_grad_()
        cfg = Config(wm_loss=loss, rho=0.2)
        result = observation_loss(cfg, Scores(logp, None), SimpleNamespace(obs_mask=obs_mask))
        result.per_row.sum().backward()
        assert torch.equal(result.counted, expected), loss
        assert torch.equal(logp.grad != 0, expected), loss


# Rewards and validity: three steps, won, the second one badly formatted; and two steps, not won.
GOLDEN = (((0, 0, 10), (1, 0, 1)), ((0, 0), (1, 1)))


def golden_episodes(played=GOLDEN) -> list[Episode]:
    """One group; step t of every episode is in the state s{t}."""
    episodes = []
    for trajectory, (rewards, valid) in enumerate(played):
        episode = Episode("toy", 0, trajectory)
        episode.transitions = [
            Transition([3], [5], [9], [-1.0], float(r), bool(v), f"s{t}", 0, trajectory)
            for t, (r, v) in enumerate(zip(rewards, valid))
        ]
        episodes.append(episode)
    return episodes


@pytest.mark.parametrize("settings, expected", [
    (dict(algo="grpo"), [0.736382, 0.718064, 0.736382, -1.095414, -1.095414]),
    (dict(algo="grpo", statistics="trajectories"),
     [0.707107, 0.692964, 0.707107, -0.707107, -0.707107]),
    (dict(algo="rloo"), [5.025, 4.9, 5.025, -7.475, -7.475]),
    (dict(algo="rloo", statistics="trajectories"), [10.0, 9.8, 10.0, -10.0, -10.0]),
    (dict(algo="gigpo"), [1.443489, 1.425171, 0.736382, -1.802521, -1.802521]),
])
def test_advantages_equal_those_of_the_original_code(settings, expected):
    """verl-agent's functions on these rows."""
    found = row_advantages(Config(**BASE | settings), flatten(golden_episodes()))
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("algo", ["grpo", "gigpo"])
def test_a_lone_trajectory_is_not_compared_with_itself(algo):
    """As where the others of its group are lost. Its rows differ by a penalty."""
    rows = flatten(golden_episodes(GOLDEN[:1]))
    assert row_advantages(Config(**BASE | dict(algo=algo)), rows).eq(0).all()


def test_step_returns_of_gigpo_are_discounted_and_then_penalized():
    """Three episodes meet in s0 and s1: of two, A^S is 0.7071 and -0.7071 for all returns."""
    rows = flatten(golden_episodes((*GOLDEN, ((0, 10), (1, 1)))))
    both, episode = (row_advantages(Config(**BASE | dict(algo=a)), rows) for a in ("gigpo", "grpo"))
    expected = {}
    for state, returns in (("s0", [9.025, 0.0, 9.5]), ("s1", [9.5 - 0.1, 0.0, 10.0])):
        deviation = stdev(returns) + 1e-6
        expected[state] = [(value - mean(returns)) / deviation for value in returns]
    (a0, b0, c0), (a1, b1, c1) = expected.values()
    assert (both - episode).tolist() == pytest.approx([a0, a1, 0.0, b0, b1, c0, c1], abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"paw": False}, {"alpha": 1.0}])
def test_first_ratio_is_one_and_later_ones_are_not(settings):
    _, metrics = run(**settings)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6) and metrics["clip_fraction"] == 0
    _, metrics = run(mini_batch=4, lr=0.3, **settings)
    assert metrics["approx_kl"] > 1e-3 and metrics["clip_fraction"] > 0


def test_skipping_the_old_pass_changes_nothing(monkeypatch):
    """alpha = 1 and one mini-batch need none; with it, the numbers are the same."""
    with monkeypatch.context() as patch:
        patch.setattr(update_module, "score_responses", None)  # would fail if it were called
        skipped, _ = run(alpha=1.0)
        baseline, _ = run(paw=False, mini_batch=len(ROWS))
    taken, _ = run(alpha=1.0 - 1e-9)  # keeps every row all the same
    torch.testing.assert_close(skipped, taken, atol=1e-7, rtol=0)
    assert not torch.equal(skipped, baseline)


def test_observations_cost_no_entropies(monkeypatch):
    """An update computes as many entropies as it has response tokens."""
    scored = Mock(wraps=token_scores)
    monkeypatch.setattr("paw_min.model.policy.token_scores", scored)
    policy = make_policy()
    rows = prepare(Config(**BASE), policy, None, flatten(EPISODES))
    optimize(Config(**BASE), policy, torch.optim.SGD(policy.parameters(), lr=1e-3), rows, (0,))
    n_response = sum(len(row.response_ids) for row in rows.tokens)
    entropies = [n_entropy for _, _, _, n_entropy in (one.args for one in scored.call_args_list)]
    assert entropies == [n_response, n_response]  # the pass before the update, and its own


def test_kl_and_entropy_terms():
    _, metrics = run(kl_coef=0.5, updates=2, lr=0.05)
    assert metrics["ref_kl"] > 0
    assert metrics["loss_kl"] == pytest.approx(0.5 * metrics["ref_kl"], rel=1e-4)
    _, metrics = run(entropy_coef=0.5)
    assert metrics["loss_entropy"] == pytest.approx(-0.5 * metrics["entropy"], rel=1e-4)


def test_losses_add_up_and_gradients_are_clipped(monkeypatch):
    _, metrics = run()
    assert metrics["grad_norm"] == pytest.approx(step_of().norm().item(), rel=1e-3)
    monkeypatch.setattr(update_module, "GRAD_CLIP", 0.01)
    assert step_of().norm().item() == pytest.approx(0.01, rel=0.02)


def test_similar_anchors_reach_the_advantages():
    """Of search alone: there, "s" * 20 and "s" * 19 + "t" are one state."""
    cfg = Config(**BASE | dict(algo="gigpo"))
    episodes = golden_episodes()
    episodes[0].transitions[0].observation = "s" * 20
    episodes[1].transitions[0].observation = "s" * 19 + "t"
    rows = flatten(episodes)
    exact, similar = (
        row_advantages(replace(cfg, env=env), rows) for env in ("webshop", "search")
    )
    assert not torch.equal(exact, similar)


@pytest.mark.parametrize("entropy_coef, message", [
    (0.0, r"^the loss became nan \(pg nan, entropy "),  # a weight is NaN
    (1e38, "the gradient norm became (inf|nan)"),  # the loss is finite
])
def test_what_is_no_number_stops_before_the_step(entropy_coef, message):
    policy = make_policy()
    if not entropy_coef:
        with torch.no_grad():
            policy.model.get_output_embeddings().weight[3, 3] = float("nan")
    before = [p.nan_to_num() for p in policy.model.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    cfg = Config(**BASE | {"entropy_coef": entropy_coef})
    with pytest.raises(NonFinite, match=message):
        update(cfg, policy, None, optimizer, EPISODES, (0,))
    assert all(torch.equal(a, p.nan_to_num()) for a, p in zip(before, policy.model.parameters()))
