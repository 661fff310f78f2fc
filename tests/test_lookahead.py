"""Acting with the policy as its own world model: which candidate is played, at what cost.

    python -m pytest tests/test_lookahead.py
"""

import json
import math
import random
import re
from collections import deque
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paw_min.base.errors import UserError
from paw_min.base.seeds import request_seed
from paw_min.config import check
from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool
from paw_min.metrics import mean
from paw_min.model.policy import Policy, load_policy
from paw_min.model.sampler import HFSampler, Request, Response
from paw_min.rows import TokenRow
from paw_min.running import lookahead
from paw_min.running.evaluate import evaluate
from paw_min.running.lookahead import Candidate, LookaheadSampler, choose, costs, unchanged_row
from paw_min.running.session import find_tasks
from paw_min.toy.standins import make_model
from paw_min.world_models import trajectories
from paw_min.world_models.world_model import WorldModel, word_tokenizer
from research.curves import t_interval
from research.lookahead import measure as experiment
from research.lookahead import samplers as lookahead_samplers
from research.lookahead import seeds as lookahead_seeds
from research.outcomes import has_no_effect
from research.paper.table import markdown_table
from research.paper.transitions import text_rows
from tests.helpers import make_policy

# ---- the choice ----


def candidate(logps: list[float], unchanged=False, ids=None, scored=0) -> Candidate:
    ids = ids or [int(-10 * x) for x in logps]
    return Candidate(Response(0, ids, logps), unchanged, scored)


def test_the_most_likely_response_is_played():
    # The sum decides: the mean of the second is higher.
    assert choose([candidate([-0.9]), candidate([-0.5, -0.5])]) == 0
    assert choose([candidate([-2.0]), candidate([-0.5, -0.5])]) == 1


def test_a_vetoed_candidate_is_dropped():
    likely, unlikely = candidate([-0.1], unchanged=True), candidate([-3.0])
    assert choose([likely, unlikely]) == 1
    assert choose([replace(likely, unchanged=False), unlikely]) == 0


def test_without_an_alternative_the_most_likely_is_played():
    candidates = [candidate([-2.0], True), candidate([-1.0], True), candidate([-3.0], True)]
    assert choose(candidates) == 1


def test_a_repeat_is_dropped():
    # In another batch, the log-probabilities of the same response differ by rounding.
    first, repeat = candidate([-1.00001], ids=[7]), candidate([-1.0], ids=[7])
    assert choose([first, repeat]) == 0
    assert choose([first, candidate([-0.5]), repeat]) == 1


def test_costs_by_hand():
    step = [
        candidate([-1.0, -1.0], True, [4, 5], scored=3),
        candidate([-2.0], False, [6], scored=3),
    ]
    repeat = [candidate([-1.0], True, [6], scored=3), candidate([-1.0], True, [6])]
    decisions = [lookahead.Decision(0, candidates, 0) for candidates in (step, repeat)]
    assert costs(decisions) == lookahead.Costs(
        vetoed=3 / 4,
        step_generated=5 / 2,
        step_scored=9 / 2,
        step_passes=(5 + 3) / 2,
    )


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
    for length in (1, 2, 3, 5, 8, 4):
        prompt = [rng.randrange(9, 18) for _ in range(3 * length)]
        response = [rng.randrange(9, 18) for _ in range(9 - length)]
        target = greedy(policy, prompt + response + separator, length)
        rows.append(TokenRow(prompt, response, target, separator_ids=separator))
    return rows


@pytest.mark.parametrize("separator", [[], [2, 11, 12]])
@pytest.mark.parametrize("budget", [1, 40, 10_000])  # a row alone, a few with padding, all
def test_the_veto_equals_greedy_decoding(config, separator, budget):
    policy = make_policy()
    cfg = config(micro_tokens=budget)
    rows = sequences(policy, separator)
    assert lookahead.predicts_text(cfg, policy, rows) == [True] * len(rows)
    # Any other token, anywhere, makes it another text.
    for row in rows:
        others = []
        for k, token in enumerate(row.obs_ids):
            ids = row.obs_ids.copy()
            ids[k] = 9 if token != 9 else 10
            others.append(replace(row, obs_ids=ids))
        found = lookahead.predicts_text(cfg, policy, [*others, row])
        assert found == [False] * len(others) + [True]
    assert lookahead.predicts_text(cfg, policy, []) == []


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_a_veto_at_a_probability_by_hand(config, budget):
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
    cfg = config(micro_tokens=budget)
    for p in probabilities:
        for at_least in (0.999 * p, 1.001 * p):
            expected = [other >= at_least for other in probabilities]
            assert lookahead.predicts_text(cfg, policy, rows, at_least) == expected
    assert lookahead.predicts_text(cfg, policy, [], 0.5) == []


def test_the_veto_equals_the_samplers_greedy_decoding(config):
    """The rule against generation by transformers, on texts that it may or may not write."""
    policy = make_policy()
    rng = random.Random(1)
    rows = []
    for _ in range(60):
        prompt = [rng.randrange(9, 18) for _ in range(rng.randint(2, 9))]
        text = [rng.randrange(9, 18)]
        rows.append(TokenRow(prompt, [rng.randrange(9, 18)], text, separator_ids=[2]))
    queue = deque()
    for n, row in enumerate(rows):
        queue.append(Request(n, row.prompt_ids + row.response_ids + row.separator_ids, 0))
    sampler = HFSampler(batch_size=7)
    with sampler.sync(policy):
        written = {r.slot: r.ids for part in sampler.generate(queue, 0.0, 1) for r in part}
    expected = [written[n] == row.obs_ids for n, row in enumerate(rows)]
    assert lookahead.predicts_text(config(), policy, rows) == expected
    assert 0 < sum(expected) < len(rows)


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


@pytest.mark.parametrize("separator", ["turn", "none"])
def test_the_scored_sequence_is_that_of_training(config, separator):
    cfg = config(wm_separator=separator, max_obs_tokens=3)
    policy = load_policy(cfg.model)
    recorder = Recorder()
    episodes = played(cfg, recorder, policy).episodes
    requests = {request.seed: request for request in recorder.requests}
    compared = 0
    for episode in episodes:
        for turn, row in enumerate(text_rows(cfg, [episode])):
            request = requests[request_seed(-1, episode.trajectory, turn)]
            assert request.observation == row.observation
            if has_no_effect(cfg, row):
                ours = unchanged_row(cfg, policy, request, Response(0, row.tokens.response_ids, []))
                for name, column in vars(ours).items():
                    assert getattr(row.tokens, name) == column, name
                assert len(ours.obs_ids) == 3 and bool(ours.separator_ids) == (separator == "turn")
                compared += 1
    assert compared > 2


def test_equal_candidates_share_a_prediction(config, monkeypatch):
    rows = []

    def the_second(cfg, policy, asked):
        rows.extend(asked)
        return [False, True]

    monkeypatch.setattr(lookahead, "predicts_text", the_second)
    sampler = LookaheadSampler(config(wm_separator="none"), HFSampler(), 4)
    sampler.policy = make_policy()
    candidates = [candidate([-1.0], ids=ids) for ids in ([5], [6], [6], [5])]
    sampler.mark_vetoes([Request(0, [9, 10], 1)], [candidates])
    assert [row.response_ids for row in rows] == [[5], [6]]
    assert [one.unchanged for one in candidates] == [False, True, True, False]
    n = len(rows[0].obs_ids)
    assert n > 0 and [one.scored for one in candidates] == [n, n, 0, 0]


def test_a_text_without_tokens_gives_no_veto(config):
    cfg = config(env="search", eval_temperature=1.0)  # there, the same observation: none
    policy = make_policy()
    sampler = LookaheadSampler(cfg, HFSampler(), 3)
    with sampler.sync(policy):
        list(sampler.generate(deque([Request(0, [9, 10, 11], 5)]), 1.0, 3))
    (decision,) = sampler.decisions
    assert [(c.unchanged, c.scored) for c in decision.candidates] == [(False, 0)] * 3


# ---- the sampler ----


def test_one_candidate_is_plain_sampling_bit_by_bit(config):
    cfg = config(eval_temperature=1.0, eval_tasks=3)
    plain = played(cfg, HFSampler())
    sampler = LookaheadSampler(cfg, HFSampler(), 1)
    ours = played(cfg, sampler)
    assert ours.episodes == plain.episodes and ours.metrics == plain.metrics
    assert costs(sampler.decisions).step_scored == 0


class OneByOne:
    """Another sampler: one response per unit of work, the newest request first, nothing between."""

    @contextmanager
    def sync(self, policy):
        yield

    def generate(self, queue, temperature, max_tokens):
        while queue:
            request = queue.pop()
            yield []
            # The log-probability is that of the seed: any number that the test can compute.
            yield [Response(request.slot, [request.seed % 1000], [-(request.seed % 1000) / 1000])]


def test_requests_are_answered_when_all_their_candidates_are_there(config):
    sampler = LookaheadSampler(config(), OneByOne(), 3, veto=False)
    queue = deque([Request(4, [9], 100), Request(2, [9], 200)])
    answers = []
    with sampler.sync(None):
        for finished in sampler.generate(queue, 1.0, 5):
            answers += finished
            if finished and finished[0].slot == 2:
                queue.append(Request(7, [9], 300))  # while slot 4 waits
    by_slot = {response.slot: response for response in answers}
    assert list(by_slot) == [2, 7, 4]
    for slot, seed in ((4, 100), (2, 200), (7, 300)):
        ids = [seed % 1000, *(request_seed(-3, seed, n) % 1000 for n in (1, 2))]
        assert by_slot[slot].ids == [min(ids)]
    assert {decision.seed for decision in sampler.decisions} == {100, 200, 300}


class Counting(HFSampler):
    """Counts the tokens that it generates."""

    tokens = 0

    def _generate(self, *args):
        responses = super()._generate(*args)
        self.tokens += sum(len(response.ids) for response in responses)
        return responses


def test_an_evaluation_counts_what_it_costs(config, monkeypatch):
    cfg = config(eval_temperature=0.3, lookahead=4)
    policy = load_policy(cfg.model)
    passes = []
    is_greedy = policy.is_greedy

    def spy(batch):
        # The tail without the response: separator and text.
        lengths = (batch.obs_mask * torch.arange(1, 1 + batch.obs_mask.shape[1])).max(1).values
        passes.extend((lengths - batch.response_mask.sum(1)).tolist())
        return is_greedy(batch)

    monkeypatch.setattr(policy, "is_greedy", spy)
    made = []

    class Kept(LookaheadSampler):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("paw_min.running.evaluate.LookaheadSampler", Kept)
    sampler = Counting()
    found = played(cfg, sampler, policy)
    steps = sum(len(episode.transitions) for episode in found.episodes)
    metrics = found.metrics
    assert metrics["eval_step_generated"] * steps == pytest.approx(sampler.tokens)
    assert metrics["eval_step_scored"] * steps == pytest.approx(sum(passes))
    assert metrics["eval_step_passes"] * steps == pytest.approx(sampler.tokens + len(passes))

    (decisions,) = [one.decisions for one in made]
    assert len(decisions) == steps
    repeats = 0
    for decision in decisions:
        seen = {}
        for one in decision.candidates:
            first = seen.setdefault(tuple(one.response.ids), one)
            assert one.unchanged == first.unchanged and (one.scored > 0) == (one is first)
            repeats += one is not first
        assert len(decision.candidates) == 4
    assert len(passes) == 4 * steps - repeats and repeats > 0
    # The candidate that was played is the one in the episode.
    for episode in found.episodes:
        for turn, row in enumerate(episode.transitions):
            seed = request_seed(-1, episode.trajectory, turn)
            (decision,) = [one for one in decisions if one.seed == seed]
            assert decision.candidates[decision.chosen].response.ids == row.response_ids


def test_without_lookahead_there_are_no_new_metrics(config):
    plain = played(config(), HFSampler()).metrics
    looking = played(config(lookahead=2), HFSampler()).metrics
    new = ["eval_vetoed", "eval_step_generated", "eval_step_scored", "eval_step_passes"]
    assert list(looking)[-4:] == new and not set(new) & set(plain)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(eval_temperature=0.0), "--lookahead 4 draws equal candidates with --eval-temperat"),
        (dict(shard=True, sampler="vllm"), "--lookahead 4 needs all weights on every rank: omit"),
        (dict(lookahead=0), "--lookahead 0 is out of range: it must be at least 1 and at most"),
    ],
)
def test_refused(config, settings, message):
    check(config(lookahead=4))
    with pytest.raises(UserError, match=f"^{message}"):
        check(config(**{"lookahead": 4} | settings))
    check(config(**settings | {"lookahead": 1}))


# ---- the experiment ----


class Door:
    """A closed door: one "open" has an effect, and nothing else has."""

    def reset(self, task):
        self.open = False
        return self.answer("A door.")

    def step(self, command):
        if command == "break":
            raise OSError("broken")
        if command == "open" and not self.open:
            self.open = True
            return self.answer("It opens.")
        return self.answer(" Nothing happens.\n")

    def answer(self, text):
        return Step(text, "open the door", "door", [])


def trial(command, *before, unchanged=True):
    return experiment.Trial("door", list(before), "A door.", command, unchanged)


def test_a_replay_executes_the_command_in_its_state(config):
    cfg = config()
    every = [trial("push"), trial("open", "open"), trial("open", "push"), trial("open")]
    with EnvPool(Door, 1) as pool:
        outcomes = [experiment.changes_nothing(cfg, pool, one) for one in every]
        assert outcomes == [True, True, False, False]
        assert experiment.share_without_effect(cfg, pool, every, 9) == 0.5
        assert experiment.share_without_effect(cfg, pool, [], 9) is None
        assert experiment.share_without_effect(cfg, pool, every, 1) in (0.0, 1.0)
        # A broken environment says nothing.
        assert experiment.changes_nothing(cfg, pool, trial("break")) is None
        assert experiment.share_without_effect(cfg, pool, [*every, trial("break")], 9) == 0.5


def test_what_was_played_has_the_same_effect_in_the_replay(config):
    cfg = config(eval_temperature=1.0)
    policy = load_policy(cfg.model)
    sampler = LookaheadSampler(cfg, HFSampler(), 2)
    tasks = find_tasks(cfg)
    with closing(tasks.make_pool(2)) as pool:
        episodes = evaluate(cfg, policy, sampler, pool, tasks.held_out).episodes
        every = experiment.trials(cfg, policy, episodes, sampler.decisions)
        rows = text_rows(cfg, episodes)
        assert len(every) == 2 * len(rows)
        for n, row in enumerate(rows):
            mine = [one for one in every[2 * n : 2 * n + 2] if one.command == row.command]
            assert mine[0].observation == row.observation
            assert experiment.changes_nothing(cfg, pool, mine[0]) == has_no_effect(cfg, row)


@pytest.mark.parametrize("context, read", [(2000, True), (3, False)])
def test_a_separate_world_model_reads_the_episode_so_far(config, monkeypatch, context, read):
    """Its rows: the chat, as in `word2world train`, and as the answer that nothing happens."""
    cfg = config(eval_temperature=1.0)
    policy = load_policy(cfg.model)
    world_model = WorldModel(load_policy(cfg.model), context)
    asked = []

    def none_of_them(cfg, predictor, rows, at_least):
        assert predictor is world_model.policy and at_least is None
        asked.extend(rows)
        return [False] * len(rows)

    monkeypatch.setattr(lookahead_samplers, "predicts_text", none_of_them)
    tasks = find_tasks(cfg)
    with closing(trajectories.Recorder(cfg.env, tasks.make_pool(2))) as pool:
        sampler = lookahead_samplers.WorldModelSampler(cfg, HFSampler(), 3, world_model, pool)
        evaluate(cfg, policy, sampler, pool, tasks.held_out)
        played = pool.trajectories
    # A chat that is too long for the world model gives no veto.
    assert bool(asked) == read
    nothing = world_model.policy.encode("Nothing happens.")
    assert all(row.obs_ids == nothing and not row.response_ids for row in asked)
    chats = [row.prompt_ids for row in asked]
    steps = 0
    for trajectory in played:
        for turn in range(len(trajectory.commands)):
            # system, command, answer, ..., command
            chat, _ = world_model.tokens(trajectory.messages[: 2 * turn + 2])
            assert (chat in chats) == read
            steps += 1
    assert steps > len(played)


@pytest.mark.parametrize(
    "pattern, compared",
    [
        (r"\w+|\n|[^\w\n]", "Nothing happens."),
        (r"\w+|\.\n|[^\w\n]", "Nothing happens"),  # as Qwen's, which joins the dot and the line end
    ],
)
def test_a_token_that_spans_the_end_of_the_text_is_not_compared(config, pattern, compared):
    vocab = {}

    def encode(text: str) -> list[int]:
        return [vocab.setdefault(piece, len(vocab)) for piece in re.findall(pattern, text)]

    world_model = SimpleNamespace(policy=SimpleNamespace(encode=encode))
    sampler = lookahead_samplers.WorldModelSampler(config(), HFSampler(), 2, world_model, None)
    assert sampler.beginning("Nothing happens.") == encode(compared)


def make_world_model(folder: Path) -> Path:
    """An untrained one, as `word2world train` leaves it."""
    tokenizer = word_tokenizer(["Nothing happens."])
    Policy(make_model(tokenizer, 0, 32), tokenizer).save(folder)
    command = "word2world train alfworld"
    record = {"command": command, "marker": trajectories.MARKER, "context": 2000}
    record |= dict(trajectories=1, rows=1, parameters=1, steps=1, loss=[1.0])
    (folder / "train.json").write_text(json.dumps(record))
    return folder


def test_the_experiment_with_a_separate_world_model(config, tmp_path, monkeypatch):
    def above_a_half(cfg, policy, rows, at_least):
        return [at_least is not None and at_least <= 0.5] * len(rows)

    monkeypatch.setattr(lookahead_samplers, "predicts_text", above_a_half)
    folder = make_world_model(tmp_path / "wm")
    flags = ["--k", "2", "--world-model", str(folder), "--veto-at", "0.6", "0.5"]
    _, found = run_experiment(config, tmp_path, *flags)
    assert [one["rule"] for one in found] == [
        "likelihood", "veto", "world model", "world model, p >= 0.5", "world model, p >= 0.6",
    ]  # fmt: skip
    likelihood, veto, greedy, separate, high = found
    assert [one["vetoed"] for one in (veto, greedy, separate, high)] == [0, 0, 1, 0]
    # No veto, and a veto on everything, decide nothing.
    assert likelihood["success"] == veto["success"] == separate["success"]
    assert separate["precision"] == separate["base_rate"]


def run_experiment(config, tmp_path, *flags):
    cfg = config()
    out = tmp_path / "out"
    argv = ["alfworld", "--models", f"tiny={cfg.model}", *flags, "--out", str(out)]
    argv += ["--data", cfg.data, "--eval-tasks", "2", "--max-turns", "3", "--groups", "2"]
    argv += ["--max-response-tokens", "4", "--eval-temperature", "1"]
    experiment.main(argv)
    return out, json.loads((out / "lookahead-alfworld.json").read_text())


def test_the_experiment_with_a_model_that_vetoes_everything(config, tmp_path, monkeypatch, capsys):
    def all_of_them(cfg, policy, rows):
        return [True] * len(rows)

    monkeypatch.setattr(lookahead, "predicts_text", all_of_them)
    out, found = run_experiment(config, tmp_path, "--k", "2", "1", "--replays", "5")
    assert [(one["rule"], one["k"]) for one in found] == [
        ("plain", 1), ("likelihood", 2), ("veto", 2),
    ]  # fmt: skip
    plain, likelihood, veto = found
    assert veto["vetoed"] == 1.0 and veto["precision"] == veto["base_rate"] and veto["replays"] == 5
    # A veto on everything decides nothing: the same episodes.
    for name in ("success", "no_effect", "step_generated"):
        assert veto[name] == likelihood[name]
    assert veto["step_scored"] > 0 == likelihood["step_scored"]
    assert plain["vetoed"] is plain["precision"] is plain["base_rate"] is None
    shown = capsys.readouterr().out
    table = (out / "lookahead-alfworld.md").read_text()
    assert table in shown and table.count("\n| tiny | ") == 3
    assert (out / "lookahead-alfworld.png").stat().st_size > 5000


def test_a_killed_experiment_resumes(config, tmp_path, monkeypatch):
    whole = run_experiment(config, tmp_path / "whole", "--k", "1", "2", "--replays", "5")[1]
    play = experiment.play
    played = []

    def killed_at_the_third(plan, label, rule, k, *others):
        if len(played) == 2:
            raise KeyboardInterrupt
        played.append(rule.name)
        return play(plan, label, rule, k, *others)

    monkeypatch.setattr(experiment, "play", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config, tmp_path, "--k", "1", "2", "--replays", "5")
    assert played == ["plain", "likelihood"]
    played.clear()
    assert run_experiment(config, tmp_path, "--k", "1", "2", "--replays", "5")[1] == whole
    assert played == ["veto"]
    # Another K adds lines, in their order.
    played.clear()
    found = run_experiment(config, tmp_path, "--k", "3", "2", "--replays", "5")[1]
    assert played == ["likelihood", "veto"]
    assert [one for one in found if one["k"] < 3] == whole
    assert [(one["rule"], one["k"]) for one in found[3:]] == [("likelihood", 3), ("veto", 3)]
    # Other settings would mix: the lines stay.
    with pytest.raises(UserError, match="has lines of other settings: choose another --out"):
        run_experiment(config, tmp_path, "--k", "2", "--replays", "4")
    assert json.loads((tmp_path / "out" / "lookahead-alfworld.json").read_text()) == found


def test_rules_share_the_responses_that_they_draw_alike(config, tmp_path, monkeypatch):
    flags = ["--k", "1", "2", "3", "--replays", "5"]
    generated = []  # (prompt, seed) of each response that was generated
    generate = HFSampler._generate

    def counted(self, batch, *others):
        generated.extend((tuple(request.prompt_ids), request.seed) for request in batch)
        return generate(self, batch, *others)

    monkeypatch.setattr(HFSampler, "_generate", counted)
    shared = run_experiment(config, tmp_path / "shared", *flags)[1]
    assert len(set(generated)) == len(generated)
    once = len(generated)
    generated.clear()
    # Without sharing: the same lines, with more work.
    monkeypatch.setattr(experiment, "SharedDraws", lambda sampler: sampler)
    alone = run_experiment(config, tmp_path / "alone", *flags)[1]
    assert len(set(generated)) == once < len(generated)
    for line, other in zip(shared, alone, strict=True):
        assert line == pytest.approx(other)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--models", "open"], "--models open is not LABEL=MODEL, for example open=open."),
        (["--models", "a=tests"], "tests has no config.json: give"),
        (["--replays", "0"], "--replays 0 is out of range: it must be at least 1."),
        (["--world-model", "tests"], "tests is not a world model .no train.json"),
        (["--veto-at", "0.2"], "--veto-at needs --world-model."),
        (["--veto-at", "2"], "--veto-at 2 is out of range: it must be above 0 and at most 1."),
        (["--veto-at", "nan"], "--veto-at nan is out of range"),
        (["--k", "0"], "--lookahead 0 is out of range"),
        (["--eval-temperature", "0"], "--lookahead 2 draws equal candidates"),
        (["--models", "a=open", "a=open"], "--models has the labels a, a: use different ones"),
        (["--eval-temperature", "1e-300"], "--eval-temperature 1e-300 is out of range: it "),
        (["--eval-temperature", "inf"], "--eval-temperature inf is "),
    ],
)
def test_bad_flags_of_the_experiment(flags, message):
    argv = ["alfworld", "--models", "open=open", "--k", "2", *flags]
    with pytest.raises(UserError, match=f"^{message}"):
        experiment.main(argv)


def test_a_run_folder_stands_for_its_newest_checkpoint(finished, config):
    found = experiment.find_model(config(), f"mine={finished}")
    assert found == ("mine", str(finished / "checkpoint-000001"))


# ---- several seeds ----


def line(model: str, rule: str, k: int, success: float, tokens: float, **others):
    numbers = dict(
        games=60, success_se=0.06, no_effect=0.2, vetoed=None, precision=None, base_rate=None,
        replays=0, step_scored=0.0, step_passes=tokens, episode_tokens=0.0,
    )  # fmt: skip
    numbers |= others
    return experiment.Played(
        model=model, rule=rule, k=k, success=success, step_generated=tokens, **numbers
    )


def test_seeds_by_hand(tmp_path, capsys):
    """Differences at the same K and at the same tokens, on the seeds that have both."""
    start = line("start", "plain", 1, 0.1, 10.0)
    first = [
        start,
        line("PaW", "plain", 1, 0.2, 10.0),
        line("PaW", "likelihood", 4, 0.4, 40.0),
        # Halfway between 10 and 40 on a logarithmic axis: likelihood has 0.3 there.
        line("PaW", "veto", 2, 0.5, 20.0, vetoed=0.5, precision=0.9, base_rate=0.2),
        line("PaW", "veto", 4, 0.5, 50.0, vetoed=0.5, precision=0.9, base_rate=0.2),
    ]
    second = [
        start,
        line("PaW", "plain", 1, 0.4, 10.0),
        line("PaW", "likelihood", 4, 0.6, 40.0),
        line("PaW", "veto", 2, 0.4, 20.0, vetoed=0.1, precision=0.3, base_rate=0.2),
        line("PaW", "veto", 4, 0.6, 50.0, vetoed=0.0, base_rate=0.3),
    ]
    files = []
    for number, lines in enumerate((first, second)):
        files.append(tmp_path / f"seed{number}.json")
        files[-1].write_text(json.dumps([asdict(one) for one in lines]))
    lookahead_seeds.main(files, tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "lookahead-seeds.json").read_text())
    found = {(one["model"], one["rule"], one["k"]): one for one in numbers}
    assert found["start", "plain", 1]["success"] == [0.1]  # the same weights twice
    two = found["PaW", "veto", 2]
    assert two["same_k"] is None  # likelihood has no K = 2
    assert two["same_tokens"]["mean"] == pytest.approx(((0.5 - 0.3) + (0.4 - 0.5)) / 2)
    assert two["vetoed"] == pytest.approx(0.3)
    assert two["above_base"]["mean"] == pytest.approx((0.7 + 0.1) / 2)
    four = found["PaW", "veto", 4]
    assert four["same_k"]["mean"] == pytest.approx(0.05)
    # t(1) = 12.706; the differences 0.1 and 0 have the standard error 0.05.
    assert four["same_k"]["t"] == pytest.approx([0.05 - 12.706 * 0.05, 0.05 + 12.706 * 0.05], 1e-3)
    assert four["same_tokens"] is None  # more than likelihood's 40
    assert four["above_base"] == {"mean": pytest.approx(0.7), "t": None, "seeds": 1}
    shown = capsys.readouterr().out
    cells = ["PaW", "veto", "4", "2", "0.550 (0.500 to 0.600)", "50.0", "+0.050 [-0.585, +0.685]"]
    assert f"| {' | '.join(cells)} | - | 0.200 |" in shown
    assert "| PaW | veto | 4 | 2 | 0.250 | 0.900 | 0.250 | +0.700 (1) |" in shown
    assert (tmp_path / "out" / "lookahead-seeds.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "does not exist: write it with lookahead --out."),
        ("[]", "has no lines: finish the lookahead first."),
        ("[{}]", "0.model"),
    ],
)
def test_files_that_are_no_lookahead(tmp_path, content, message):
    path = tmp_path / "seed0.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=re.escape(message)):
        lookahead_seeds.main([path], tmp_path / "out")


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(base_rate=None), "'a', veto, K = 2 has no base_rate"),
        (dict(rule="guess"), "a line has the rule 'guess'"),
        (dict(step_generated=0.0), "0.step_generated"), (dict(success=2.0), "0.success"),
        (dict(step_scored=-1.0), "0.step_scored"), (dict(success=float("nan")), "0.success"),
    ],
)  # fmt: skip
def test_lines_that_no_evaluation_writes(tmp_path, changed, message):
    one = line("a", "veto", 2, 0.5, 20.0, vetoed=0.5, precision=0.9, base_rate=0.2)
    path = tmp_path / "lookahead-alfworld.json"
    path.write_text(json.dumps([asdict(one) | changed]))
    path.with_suffix(".settings").write_text("the same")
    with pytest.raises(UserError, match=re.escape(message)):
        lookahead_seeds.main([path], tmp_path)
    args = SimpleNamespace(out=tmp_path, cfg=SimpleNamespace(env="alfworld"))
    with pytest.raises(UserError, match=re.escape(message)):
        experiment.begin(args, "the same")


def test_lines_of_an_unknown_model(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "begin", lambda *_: [line("a", "plain", 1, 0.5, 20.0)])
    argv = ["alfworld", "--models", "open=open", "--k", "1", "--out", str(tmp_path)]
    with pytest.raises(UserError, match="lookahead-alfworld.json has lines of the model 'a': ch"):
        experiment.main(argv)


def recorded(name: str) -> tuple[str, list]:
    """The page in research/lookahead, which has the table of this file, and the file's lines."""
    folder = Path(__file__).parent.parent / "research" / "lookahead"
    page = (folder / "README.md").read_text()
    found = [experiment.Played(**one) for one in read(folder / name)]
    assert experiment.table(found) in page
    return page, found


def test_the_page_has_the_recorded_numbers():
    """research/lookahead: the table, and what the text says."""
    page, found = recorded("lookahead-alfworld.json")
    by_key = {(one.model, one.rule, one.k): one for one in found}
    vetoes = [one for one in found if one.rule == "veto"]
    pairs = [(one, by_key[one.model, "likelihood", one.k]) for one in vetoes]
    best = max(veto.success - likelihood.success for veto, likelihood in pairs)
    errors = [one.success_se for pair in pairs for one in pair]
    ce = [one for one in vetoes if one.model == "ce"]
    right = sorted(one.precision for one in ce)
    base = sorted(one.base_rate for one in ce)
    clipped = [one for one in vetoes if one.model == "cmae-0.2"]
    vetoed = sorted(100 * one.vetoed for one in clipped)
    success = [by_key["cmae-0.2", rule, 8].success for rule in ("veto", "likelihood")]
    start = [by_key["start", "plain", 1].success, by_key["start", "likelihood", 2].success]
    text = " ".join(page.split())
    for sentence in (
        f"at most {best:.3f} above the likelihood at the same K, with standard errors of "
        f"{min(errors):.2f} to {max(errors):.2f}",
        f"it is below: {success[0]:.3f} against {success[1]:.3f}.",
        f"right in {right[0]:.3f} to {right[-1]:.3f} of the cases; the base rate is {base[0]:.3f} "
        f"to {base[-1]:.3f}.",
        f"It vetoes {vetoed[0]:.0f} to {vetoed[-1]:.0f} % of the candidates.",
        f"success of `start` rises from {start[0]:.3f} to {start[1]:.3f}.",
    ):
        assert sentence in text
    seed = {(one.model, one.rule, one.k): one for one in found}
    equal = [lookahead_seeds.averaged([seed], key).same_tokens for key in seed if key[2] in (2, 4)]
    means = [one.mean for one in equal if one]
    assert f"the veto is {min(means):.3f} to {max(means):+.3f} from the likelihood" in text
    # "About as often as the base rate": within the error of 200 replays.
    assert all(abs(one.precision - one.base_rate) < 0.07 for one in clipped)
    assert all(one.vetoed == 0 for one in vetoes if one.model == "start")


def test_the_page_has_the_numbers_of_weights_trained_by_rl():
    """Both tables of lookahead_seeds, and what the text says."""
    folder = Path(__file__).parent.parent / "research" / "lookahead"
    page = (folder / "README.md").read_text()
    text = " ".join(page.split())
    files = sorted(folder.glob("lookahead-rl-seed*.json"))
    seeds = lookahead_seeds.read_all(files)
    assert len(files) == 8
    lines = [lookahead_seeds.averaged(seeds, key) for key in lookahead_seeds.ordered(seeds)]
    assert lookahead_seeds.markdown(lines) in page
    stored = json.dumps([asdict(one) for one in lines], indent=1, ensure_ascii=False) + "\n"
    assert (folder / "lookahead-seeds.json").read_text() == stored
    by_key = {(one.model, one.rule, one.k): one for one in lines}

    def around(differences) -> str:
        low, high = t_interval(differences)
        return f"{mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]"

    for model in ("GRPO w/ PaW", "placebo"):
        veto = by_key[model, "veto", 4]
        assert f"{lookahead_seeds.shown(veto, veto.above_base)} for {model}" in text
        assert f"{lookahead_seeds.shown(veto, veto.same_k)} for {model}" in text
        assert f"{lookahead_seeds.shown(veto, veto.same_tokens)} for {model}" in text
    for model in ("GRPO", "GRPO w/ PaW", "placebo"):
        pairs = [(run[model, "likelihood", 4], run[model, "plain", 1]) for run in seeds]
        gains = around([best.success - plain.success for best, plain in pairs])
        assert f"{gains} for {model}" in text
    separate = [one for run in seeds for one in run.values() if one.rule == "world model"]
    right = [one.precision for one in separate if one.replays]
    base = [one.base_rate for one in separate]
    vetoed = [100 * one.vetoed for one in separate]
    hits = [100 * one.vetoed * one.precision / one.base_rate for one in separate if one.replays]
    gaps = []
    for run in seeds:
        for (model, rule, k), one in run.items():
            if rule == "world model":
                gaps.append(one.success - run[model, "likelihood", k].success)
    for sentence in (
        f"right in {min(right):.3f} to {max(right):.3f} of the cases; the base rate is "
        f"{min(base):.3f} to {max(base):.3f}.",
        f"vetoes only {min(vetoed):.1f} to {max(vetoed):.1f} % of the candidates, {min(hits):.0f} "
        f"to {max(hits):.0f} % of those without an effect",
        f"by {min(gaps):+.3f} to {max(gaps):+.3f}.",
    ):
        assert sentence in text
    grpo = [100 * one.vetoed for run in seeds for key, one in run.items()
            if key[:2] == ("GRPO", "veto")]  # fmt: skip
    none = sum(run["GRPO", "veto", 4].vetoed == 0 for run in seeds)
    assert f"GRPO vetoes at most {max(grpo):.1f} % of the candidates, and {none} of eight" in text
    for run in seeds[1:3]:
        echo = run["ECHO", "veto", 4]
        assert 2 < echo.precision / echo.base_rate < 3
    fidelity = read(folder / "world-model-fidelity.json")
    text_of = f"is {fidelity['em']:.3f}, and {fidelity['em_observation']:.3f} without the list"
    assert text_of in text


def test_the_page_has_the_vetoes_at_a_probability():
    folder = Path(__file__).parent.parent / "research" / "lookahead"
    page = (folder / "README.md").read_text()
    found = [experiment.Played(**one) for one in read(folder / "lookahead-veto-at.json")]
    names = ["model", "rule", "success", "no_effect", "vetoed", "precision", "base_rate"]
    shown = [one for one in found if one.rule != "veto"]
    lines = [[getattr(one, name) for name in names] for one in shown]
    assert "\n".join(markdown_table(names, lines).splitlines()[2:]) in page
    likelihood = {one.model: one for one in found if one.rule == "likelihood"}
    at = [one for one in found if ">=" in one.rule]
    changes = [one.success - likelihood[one.model].success for one in at]
    vetoed = [100 * one.vetoed for one in at]
    right = [one.precision for one in at]
    base = [one.base_rate for one in at]
    text = " ".join(page.split())
    for sentence in (
        f"It vetoes {min(vetoed):.1f} to {max(vetoed):.1f} % of the candidates",
        f"right in {min(right):.3f} to {max(right):.3f} of the cases; the base rate is "
        f"{min(base):.3f} to {max(base):.3f}.",
        f"by {min(changes):+.3f} to {max(changes):+.3f}, with",
    ):
        assert sentence in text
    # "Fewer steps have no effect."
    assert all(one.no_effect < likelihood[one.model].no_effect for one in at)


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())
