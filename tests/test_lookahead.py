"""Acting with the policy as its own world model: which candidate is played, at what cost.

    python -m pytest tests/test_lookahead.py
"""

import json
import math
import random
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from paw_min.base.errors import UserError
from paw_min.base.seeds import request_seed
from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool
from paw_min.model.policy import Policy, load_policy
from paw_min.model.sampler import HFSampler, Response
from paw_min.rows import TokenRow
from paw_min.running.evaluate import evaluate
from paw_min.running.session import find_tasks
from paw_min.toy.standins import make_model
from paw_min.world_models import trajectories
from paw_min.world_models.world_model import WorldModel, word_tokenizer
from research.lookahead import measure, samplers
from research.lookahead import seeds as several
from research.lookahead.samplers import Candidate, LookaheadSampler, choose
from research.outcomes import has_no_effect
from research.paper.transitions import text_rows
from tests.helpers import make_policy

# ---- the choice ----


def candidate(logps: list[float], unchanged=False, ids=None, scored=0) -> Candidate:
    ids = ids or [int(-10 * x) for x in logps]
    return Candidate(Response(0, ids, logps), unchanged, scored)


@pytest.mark.parametrize(
    "candidates, chosen",
    [
        # The sum decides: the mean of the second is higher.
        ([candidate([-0.9]), candidate([-0.5, -0.5])], 0),
        ([candidate([-2.0]), candidate([-0.5, -0.5])], 1),
        ([candidate([-0.1], unchanged=True), candidate([-3.0])], 1),
        # Without an alternative to vetoed ones, the most likely is played.
        ([candidate([-2.0], True), candidate([-1.0], True), candidate([-3.0], True)], 1),
        # In another batch, the log-probabilities of the same response differ by rounding.
        ([candidate([-1.00001], ids=[7]), candidate([-1.0], ids=[7])], 0),
    ],
)
def test_which_candidate_is_played(candidates, chosen):
    assert choose(candidates) is candidates[chosen]


def test_costs_by_hand():
    step = [
        candidate([-1.0, -1.0], True, [4, 5], scored=3),
        candidate([-2.0], False, [6], scored=3),
    ]
    repeat = [candidate([-1.0], True, [6], scored=3), candidate([-1.0], True, [6])]
    expected = measure.Costs(vetoed=3 / 4, generated=5 / 2, scored=9 / 2, passes=(5 + 3) / 2)
    assert measure.costs([step, repeat]) == expected


# ---- the veto ----


def greedy(policy, before: list[int], n: int) -> list[int]:
    """n tokens of greedy decoding, one by one."""
    ids = list(before)
    for _ in range(n):
        ids.append(policy.model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(before) :]


def sequences(policy, separator: list[int]) -> list[TokenRow]:
    """Rows of several lengths, with the greedy continuation as their target."""
    rng = random.Random(0)
    rows = []
    for length in (1, 3, 6):
        prompt = [rng.randrange(9, 18) for _ in range(3 * length)]
        response = [rng.randrange(9, 18) for _ in range(9 - length)]
        target = greedy(policy, prompt + response + separator, length)
        rows.append(TokenRow(prompt, response, target, separator_ids=separator))
    return rows


@pytest.mark.parametrize("budget", [1, 40])  # a row alone, a few with padding
def test_the_veto_equals_greedy_decoding(config, budget):
    policy = make_policy()
    cfg = config(micro_tokens=budget)
    rows = sequences(policy, [2, 11, 12])
    assert samplers.predicts_text(cfg, policy, rows) == [True] * len(rows)
    # Any other token, anywhere, makes it another text.
    for row in rows:
        others = []
        for k, token in enumerate(row.obs_ids):
            ids = row.obs_ids.copy()
            ids[k] = 9 if token != 9 else 10
            others.append(replace(row, obs_ids=ids))
        found = samplers.predicts_text(cfg, policy, [*others, row])
        assert found == [False] * len(others) + [True]


def test_a_veto_at_a_probability_by_hand(config):
    policy = make_policy()
    rows = sequences(policy, [2, 11, 12])
    probabilities = []
    for row in rows:
        before = row.prompt_ids + row.response_ids + row.separator_ids
        ids = torch.tensor([before + row.obs_ids])
        p = policy.model(ids).logits[0].softmax(-1)
        each = [p[len(before) + k - 1, token].item() for k, token in enumerate(row.obs_ids)]
        probabilities.append(math.prod(each))
    assert max(probabilities) > 1.01 * min(probabilities)
    cfg = config(micro_tokens=40)
    for p in probabilities:
        for at_least in (0.999 * p, 1.001 * p):
            expected = [other >= at_least for other in probabilities]
            assert samplers.predicts_text(cfg, policy, rows, at_least) == expected


class Recorder(HFSampler):
    """Keeps the requests that it serves."""

    def __init__(self):
        super().__init__()
        self.requests = []

    def _generate(self, batch, temperature, max_tokens):
        self.requests += batch
        return super()._generate(batch, temperature, max_tokens)


def played(cfg, sampler, policy=None):
    """The evaluation panel -> Rollout."""
    policy = policy or load_policy(cfg.model)
    tasks = find_tasks(cfg)
    with closing(tasks.make_pool(len(tasks.held_out))) as pool:
        return evaluate(cfg, policy, sampler, pool, tasks.held_out)


def test_the_scored_sequence_is_that_of_training(config):
    cfg = config(wm_separator="turn", max_obs_tokens=3)
    policy = load_policy(cfg.model)
    recorder = Recorder()
    episodes = played(cfg, recorder, policy).episodes
    requests = {request.seed: request for request in recorder.requests}
    sampler = LookaheadSampler(cfg, recorder, 2)
    sampler.policy = policy
    compared = 0
    for episode in episodes:
        for turn, row in enumerate(text_rows(cfg, [episode])):
            request = requests[request_seed(-1, episode.trajectory, turn)]
            assert request.observation == row.observation
            if has_no_effect(cfg, row):
                response = Response(0, row.tokens.response_ids, [])
                ours = sampler.outcome_row(request, response)
                for name, column in vars(ours).items():
                    assert getattr(row.tokens, name) == column, name
                assert len(ours.obs_ids) == 3 and ours.separator_ids
                compared += 1
    assert compared > 2


# ---- the sampler ----


def test_one_candidate_is_plain_sampling_bit_by_bit(config):
    cfg = config(eval_temperature=1.0, eval_tasks=3)
    plain = played(cfg, HFSampler())
    sampler = LookaheadSampler(cfg, HFSampler(), 1)
    ours = played(cfg, sampler)
    assert ours.episodes == plain.episodes and ours.metrics == plain.metrics
    assert measure.costs(list(sampler.candidates.values())).scored == 0


# ---- the experiment ----


class Door:
    """A closed door: one "open" has an effect, and nothing else has."""

    def reset(self, task):
        self.open = False
        return self.answer("A door.")

    def step(self, command):
        if command == "open" and not self.open:
            self.open = True
            return self.answer("It opens.")
        return self.answer(" Nothing happens.\n")

    def answer(self, text):
        return Step(text, "open the door", "door", [])


def trial(command, *before, unchanged=True):
    return measure.Trial("door", list(before), "A door.", command, unchanged)


def test_a_replay_executes_the_command_in_its_state(config):
    cfg = config()
    every = [trial("push"), trial("open", "open"), trial("open", "push"), trial("open")]
    with EnvPool(Door, 1) as pool:
        outcomes = [measure.changes_nothing(cfg, pool, one) for one in every]
        assert outcomes == [True, True, False, False]
        assert measure.share_without_effect(cfg, pool, every, 9) == 0.5
        assert measure.share_without_effect(cfg, pool, [], 9) is None
        assert measure.share_without_effect(cfg, pool, every, 1) in (0.0, 1.0)


def test_a_separate_world_model_reads_the_episode_so_far(config, monkeypatch):
    """Its rows: the chat, as in `word2world train`, and as the answer that nothing happens."""
    cfg = config(eval_temperature=1.0)
    policy = load_policy(cfg.model)
    world_model = WorldModel(load_policy(cfg.model), 2000)
    asked = []

    def none_of_them(cfg, predictor, rows, at_least):
        assert predictor is world_model.policy and at_least is None
        asked.extend(rows)
        return [False] * len(rows)

    monkeypatch.setattr(samplers, "predicts_text", none_of_them)
    tasks = find_tasks(cfg)
    with closing(trajectories.Recorder(cfg.env, tasks.make_pool(2))) as pool:
        sampler = samplers.WorldModelSampler(cfg, HFSampler(), 3, world_model, pool)
        evaluate(cfg, policy, sampler, pool, tasks.held_out)
        played = pool.trajectories
    nothing = world_model.policy.encode("Nothing happens.")
    assert all(row.obs_ids == nothing and not row.response_ids for row in asked)
    chats = [row.prompt_ids for row in asked]
    for trajectory in played:
        for turn in range(len(trajectory.commands)):
            # system, command, answer, ..., command
            chat, _ = world_model.tokens(trajectory.messages[: 2 * turn + 2])
            assert chat in chats
    assert len(chats) > len(played)


def make_world_model(folder: Path) -> Path:
    """An untrained one, as `word2world train` leaves it."""
    tokenizer = word_tokenizer(["Nothing happens."])
    Policy(make_model(tokenizer, 0, 32), tokenizer).save(folder)
    record = {"env": "alfworld", "marker": trajectories.MARKER, "context": 2000}
    record |= dict(trajectories=1, rows=1, parameters=1, steps=1, loss=[1.0])
    (folder / "train.json").write_text(json.dumps(record))
    return folder


def measured_again(*_):
    raise AssertionError


def test_the_experiment(finished, config, tmp_path, monkeypatch, capsys):
    """Every rule once, on the newest checkpoint of a run. The policy vetoes nothing."""

    def above_a_half(cfg, policy, rows, at_least=None):
        return [at_least is not None and at_least <= 0.5] * len(rows)

    monkeypatch.setattr(samplers, "predicts_text", above_a_half)
    folder = make_world_model(tmp_path / "wm")
    out = tmp_path / "out"
    argv = ["alfworld", "--models", f"mine={finished}", "--k", "1", "2", "--out", str(out)]
    argv += ["--world-model", str(folder), "--veto-at", "0.6", "0.5", "--data", config().data]
    argv += ["--eval-tasks", "2", "--max-turns", "3", "--groups", "2", "--replays", "5"]
    argv += ["--max-response-tokens", "4", "--eval-temperature", "1"]
    measure.main(argv)
    found = json.loads((out / "lookahead-alfworld.json").read_text())
    assert [(one["rule"], one["k"]) for one in found] == [
        ("plain", 1), ("likelihood", 2), ("veto", 2), ("world model", 2),
        ("world model, p >= 0.5", 2), ("world model, p >= 0.6", 2),
    ]
    plain, likelihood, veto, greedy, separate, high = found
    assert [one["vetoed"] for one in (veto, greedy, separate, high)] == [0, 0, 1, 0]
    # No veto, and a veto on everything, decide nothing: the same episodes.
    for name in ("success", "no_effect", "step_generated"):
        assert likelihood[name] == veto[name] == separate[name]
    assert separate["precision"] == separate["base_rate"] and separate["replays"] == 5
    assert veto["step_scored"] > 0 == likelihood["step_scored"]
    assert plain["vetoed"] is plain["precision"] is plain["base_rate"] is None
    assert measure.table([measure.Played(**one) for one in found]) in capsys.readouterr().out
    # A rerun measures nothing. Other settings would mix.
    monkeypatch.setattr(measure, "played", measured_again)
    measure.main(argv)
    assert json.loads((out / "lookahead-alfworld.json").read_text()) == found
    with pytest.raises(UserError, match="was made with command .* choose another --out"):
        measure.main([*argv, "--replays", "4"])


# ---- several seeds ----


def line(rule: str, k: int, success: float, tokens: float, precision=None) -> measure.Played:
    """Of the model PaW. Without a precision, no veto was replayed."""
    others = dict.fromkeys(("games", "success_se", "no_effect", "replays", "episode_tokens"), 0)
    return measure.Played(
        model="PaW", rule=rule, k=k, success=success, vetoed=0.5, precision=precision,
        base_rate=0.2, step_generated=tokens, step_scored=0.0, step_passes=tokens, **others,
    )


def test_seeds_by_hand():
    """Differences at the same K and at the same tokens, on the seeds that have both."""
    files = [
        [
            line("plain", 1, 0.2, 10.0),
            line("likelihood", 4, 0.4, 40.0),
            # Halfway between 10 and 40 on a logarithmic axis: likelihood has 0.3 there.
            line("veto", 2, 0.5, 20.0, precision=0.9),
            line("veto", 4, 0.5, 50.0, precision=0.9),
        ],
        [
            line("plain", 1, 0.4, 10.0),
            line("likelihood", 4, 0.6, 40.0),
            line("veto", 2, 0.4, 20.0, precision=0.3),
            line("veto", 4, 0.6, 50.0),
        ],
    ]
    seeds = [{(one.model, one.rule, one.k): one for one in lines} for lines in files]
    two, four = (several.averaged(seeds, ("PaW", "veto", k)) for k in (2, 4))
    assert two.same_k is None  # likelihood has no K = 2
    assert two.same_tokens.mean == pytest.approx(((0.5 - 0.3) + (0.4 - 0.5)) / 2)
    assert two.above_base.mean == pytest.approx((0.7 + 0.1) / 2)
    assert four.same_k.mean == pytest.approx(0.05)
    # t(1) = 12.706; the differences 0.1 and 0 have the standard error 0.05.
    assert four.same_k.t == pytest.approx([0.05 - 12.706 * 0.05, 0.05 + 12.706 * 0.05], 1e-3)
    assert four.same_tokens is None  # more than likelihood's 40
    assert asdict(four.above_base) == {"mean": pytest.approx(0.7), "t": None, "seeds": 1}
