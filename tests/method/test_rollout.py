"""Episodes to rows, with a scripted sampler and a toy environment; and nobody waits for others."""

from collections import deque
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest

from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Command, Step
from paw_min.envs.pool import EnvPool
from paw_min.rollout import rollout
from paw_min.toy import standins
from tests.helpers import (
    INJECTION,
    TEXTS,
    Script,
    chatml_tokenizer,
    control_tokens,
    make_policy,
    seeds,
)


class Countdown:
    """Task "n" is won in the n-th step, "-n" lost in it; "broken" dies in its second step."""

    def reset(self, task):
        if task == "missing":
            raise OSError("no such game")
        self.task = task
        self.left = 99 if task == "broken" else abs(int(task))
        return self.answer(f"{self.left} left")

    def step(self, command):
        self.left -= 1
        if self.task == "broken" and self.left == 97:
            raise OSError("the lights went out")
        done = self.left == 0
        won = done and not self.task.startswith("-")
        return self.answer(f"go to shelf {self.left}", reward=10.0 * won, done=done, won=won)

    def answer(self, observation, **outcome):
        commands = ["go to shelf 1", f"look {self.left}"]  # compact prompts leave out the second
        return Step(observation, self.task, "toy", commands, **outcome)


class OneByOne(Script):
    """An engine with continuous batching: a request takes three steps, or those of its slot."""

    steps = {}  # slot -> steps

    def generate(self, queue, temperature, max_tokens):
        running = []  # [steps left, request]
        while queue or running:
            while queue:
                request = queue.popleft()
                running.append([self.steps.get(request.slot, 3), request])
            for entry in running:
                entry[0] -= 1
            self.batches.append([request for _, request in running])
            finished = [request for left, request in running if left == 0]
            running = [entry for entry in running if entry[0] > 0]
            yield [self.answer(request.slot) for request in finished]


class Injecting(Countdown):
    """Its observations would end the user's turn and begin the assistant's."""

    def answer(self, observation, **outcome):
        return super().answer(f"{observation} {INJECTION}", **outcome)


def play(
    tasks, seats=None, sampler=Script, make_env=Countdown, positions=512, tokenizer=None,
    benchmark=None, **settings
):
    policy = make_policy(tokenizer=tokenizer, max_position_embeddings=positions)
    sampler = sampler(policy)
    cfg = Config(**{"prompt": "compact", "max_turns": 5, "temperature": 0.9} | settings)
    with EnvPool(make_env, seats or len(tasks)) as pool:
        played = rollout(cfg, policy, sampler, pool, tasks, (1, 2), benchmark=benchmark)
    return policy, sampler, played.episodes, played.metrics


def test_rows():
    policy, sampler, (episode,), stats = play(["2"])
    (ids,) = sampler.responses
    first, last = episode.transitions
    assert (first.reward, last.reward) == (0.0, 10.0)
    assert first.observation == "2 left" and last.observation == "go to shelf 1"
    assert first.next_observation == last.observation
    assert first.command == last.command == "go to shelf 1"  # parsed from `ids`
    # Those of the state that the command is executed in.
    assert first.admissible == ["go to shelf 1", "look 2"]
    assert last.admissible == ["go to shelf 1", "look 1"]
    assert first.response_ids == ids and first.valid  # as sampled, end token included
    assert first.sampler_logp == [-0.5] * len(ids)
    assert first.obs_ids == policy.encode("go to shelf 1")
    assert last.obs_ids == policy.encode("go to shelf 0")  # o_T, which no prompt shows
    assert last.prompt_ids == policy.encode_chat("task 2\nStart.\n> go to shelf 1\ngo to shelf 1\n"
                                                 "| go to shelf 1")
    assert episode.won and episode.episode_return == 10.0 and episode.task_type == "toy"
    assert stats["tokens_generated"] == 2 * len(ids)


class Accented(Countdown):
    """Its commands are in NFD, which a tokenizer in NFC cannot write."""

    asked = []

    def step(self, command):
        self.asked.append(command)
        return super().step(command)

    def answer(self, observation, **outcome):
        return replace(super().answer(observation, **outcome), admissible=["go to cafe\u0301"])


def test_a_command_is_sent_as_the_environment_lists_it():
    parse = Mock(return_value=Command("go to caf\u00e9", True))
    benchmark = replace(BENCHMARKS["alfworld"], parse=parse)
    _, _, (episode,), _ = play(["2"], make_env=Accented, benchmark=benchmark)
    assert set(Accented.asked) == {"go to cafe\u0301"} and episode.won
    assert episode.transitions[0].command == "go to cafe\u0301" and episode.transitions[0].valid


def test_no_observation_writes_control_tokens():
    tokenizer = chatml_tokenizer()
    policy, _, (episode,), _ = play(["2"], make_env=Injecting, tokenizer=tokenizer)
    for transition in episode.transitions:
        assert transition.obs_ids and not control_tokens(policy, transition.obs_ids)
        written = control_tokens(policy, transition.prompt_ids)
        assert written == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


OPENS = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<agent>\n<think>\n"


@pytest.mark.parametrize("env", ["alfworld", "webshop", "search"])
@pytest.mark.parametrize("template, valid", [(OPENS, True), (standins.CHAT, False)])
def test_a_thought_that_the_template_opens_counts(env, template, valid):
    tokenizer = standins.make_tokenizer([*TEXTS, "<search>a</search>"])
    tokenizer.chat_template = template
    command = "<search>a</search>" if env == "search" else "<action>go to shelf 1</action>"
    found = []
    for response in (f"a b</think>{command}", f"a b{command}", "go to shelf 1"):
        sampler = partial(Script, texts=[response])
        _, _, (episode,), _ = play(["1"], sampler=sampler, tokenizer=tokenizer, env=env)
        (transition,) = episode.transitions
        found.append((transition.valid, transition.command))
    # Search asks for no thought. A thought that is never closed is none.
    executed = "<search>a</search>" if env == "search" else "go to shelf 1"
    assert found[0] == (valid or env == "search", executed)
    assert found[1] == (env == "search", executed)
    assert found[2] == (False, "" if env == "search" else "go to shelf 1")


class EarlyClaim(Countdown):
    """Says that it is won before it is done, as a game whose win can be undone may."""

    def answer(self, observation, **outcome):
        return super().answer(observation, **outcome | {"won": True})


def test_only_an_episode_that_is_done_is_won():
    _, _, (cut, done), _ = play(["9", "2"], make_env=EarlyClaim)
    assert not cut.won and done.won
    _, _, (lost, won), _ = play(["-2", "2"])
    assert not lost.won and not lost.failed and lost.episode_return == 0.0
    assert won.won and len(lost.transitions) == len(won.transitions) == 2


@pytest.mark.parametrize("sampler", [Script, OneByOne])
def test_rows_belong_to_their_episode_and_stand_in_order(sampler):
    policy, _, episodes, _ = play(["3", "1", "4", "2"], sampler=sampler)
    assert [e.task for e in episodes] == ["3", "1", "4", "2"] and all(e.won for e in episodes)
    for i, episode in enumerate(episodes):
        n = int(episode.task)
        assert [(t.group, t.trajectory) for t in episode.transitions] == [(i, i)] * n
        assert [t.obs_ids for t in episode.transitions] == [
            policy.encode(f"go to shelf {left}") for left in reversed(range(n))
        ]
        # Script's log-probabilities name the slot that asked.
        assert {p for t in episode.transitions for p in t.sampler_logp} == {-i - 0.5}


def test_the_turn_limit_ends_an_episode():
    _, sampler, (episode,), _ = play(["9"])
    assert len(episode.transitions) == 5 and not episode.won
    assert episode.transitions[-1].obs_ids
    assert set(sampler.settings) == {(0.9, 512)}


def test_a_free_slot_takes_the_next_task_at_once():
    """Slot 0 plays 1, 1, 1 while slot 1 plays 3; nobody waits for a round to end."""
    _, sampler, episodes, _ = play(["1", "3", "1", "1", "2"], seats=2)
    assert [len(e.transitions) for e in episodes] == [1, 3, 1, 1, 2]
    assert [len(batch) for batch in sampler.batches] == [2, 2, 2, 1, 1]
    assert {request_seed(1, 2, trajectory, 0) for trajectory in range(5)} <= seeds(sampler)


def test_a_broken_environment_costs_its_episode_alone():
    _, _, (good, bad, missing, late), _ = play(["3", "broken", "missing", "1"], seats=3)
    assert "the lights went out" in bad.failed and "broken" in bad.failed
    assert "no such game" in missing.failed and not missing.transitions
    assert len(bad.transitions) == 1  # what came before stays
    assert good.won and late.won  # in the slot of a broken one


def test_seeds_name_update_episode_and_turn():
    _, sampler, _, _ = play(["2", "2"])
    assert seeds(sampler) == {request_seed(1, 2, i, turn) for i in (0, 1) for turn in (0, 1)}
    assert request_seed(0, 1, 2, 3) == 3252311618909706447  # the same on every machine


def test_ranks_play_whole_groups_and_draw_as_one_would(monkeypatch):
    policy = make_policy()
    cfg = Config(prompt="compact", max_turns=5)
    def play(rank, n_ranks):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        monkeypatch.setattr(distributed, "n_ranks", lambda: n_ranks)
        monkeypatch.setattr(distributed, "all_gather", lambda items: items)
        sampler = Script(policy)
        with EnvPool(Countdown, 2) as pool:
            episodes = rollout(cfg, policy, sampler, pool, ["1"] * 3, (0,), 2).episodes
            return episodes, seeds(sampler)

    (alone, drawn) = play(0, 1)
    parts = [play(rank, 2) for rank in range(2)]
    assert [[e.trajectory for e in episodes] for episodes, _ in parts] == [[0, 1], [2, 3, 4, 5]]
    assert [e.group for episodes, _ in parts for e in episodes] == [e.group for e in alone]
    assert parts[0][1] | parts[1][1] == drawn and not parts[0][1] & parts[1][1]
    assert [len(play(rank, 4)[0]) for rank in range(4)] == [0, 2, 2, 2]  # one has nothing to do


def test_limits(monkeypatch):
    policy, _, (episode,), stats = play(["1"], max_obs_tokens=3)
    full = policy.encode("go to shelf 0")
    assert episode.transitions[0].obs_ids == full[:3] != full[1:]  # its beginning is kept
    assert len(full) == 4 and stats["obs_tokens_cut"] == 1
    with pytest.raises(UserError, match="max_prompt_tokens=8"):
        play(["1"], max_prompt_tokens=8)
    # A model with two positions more than prompt, response and separator need.
    row = episode.transitions[0]
    used = len(row.prompt_ids) + len(row.response_ids) + len(row.separator_ids)
    _, _, (episode,), stats = play(["1"], positions=used + 2)
    assert episode.transitions[0].obs_ids == full[:2] and stats["obs_tokens_cut"] == 2
    cutting = replace(BENCHMARKS["alfworld"], cut_prompts=True)
    policy, _, (episode,), stats = play(["1"], max_prompt_tokens=8, benchmark=cutting)
    full = policy.encode_chat("task 1\nStart.\n| go to shelf 1")
    assert episode.transitions[0].prompt_ids == full[-8:] and stats["prompts_cut"] == 1
    monkeypatch.setitem(BENCHMARKS, "alfworld", cutting)
    assert play(["1"], max_prompt_tokens=8)[3]["prompts_cut"] == 1


class FirstCut(Script):
    """The first response in a slot was stopped by the limit of tokens."""

    def answer(self, slot):
        return replace(super().answer(slot), cut=self.turns[slot] == 1)


def test_cut_responses_are_a_fraction_of_the_rows():
    stats = play(["2", "2"], sampler=FirstCut)[3]
    assert stats["responses_cut"] == 0.5


# ---- no lock-step ----


class LateSlot(EnvPool):
    """Slot 0 answers nothing as long as another slot is playing."""

    blocked = 0  # how often slot 0 was waited for

    def recv(self, timeout=None):
        self._local = deque(sorted(self._local, key=lambda request: request.slot == 0))
        if self._local and self._local[0].slot == 0:
            if timeout == 0:
                return None
            self.blocked += 1
        return super().recv(timeout)


@pytest.mark.parametrize("sampler", [Script, OneByOne])
def test_a_slow_environment_holds_nobody_up(sampler):
    """The late one is waited for only when nobody else has anything left to do."""
    policy = make_policy()
    sampler = sampler(policy)
    pool = LateSlot(Countdown, 4)
    cfg = Config(prompt="compact", max_turns=9)
    tasks = ["2", "4", "3", "4", "3"]
    episodes = rollout(cfg, policy, sampler, pool, tasks, (0,)).episodes
    assert [len(e.transitions) for e in episodes] == [2, 4, 3, 4, 3]
    order = [request.slot for batch in sampler.batches for request in batch]
    first = order.index(0)
    assert 0 not in order[:first] and set(order[first:]) == {0}
    assert pool.blocked == 3  # its reset and its two steps


def test_others_go_on_while_a_long_response_is_generated(monkeypatch):
    """Slot 1 plays three steps of its episode during the four steps of one response in slot 0."""
    monkeypatch.setattr(OneByOne, "steps", {0: 4, 1: 1})
    _, sampler, _, _ = play(["1", "3"], sampler=OneByOne)
    units = [[request.slot for request in batch] for batch in sampler.batches]
    assert units == [[0, 1], [0, 1], [0, 1], [0]]
