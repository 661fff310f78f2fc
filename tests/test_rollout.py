"""Episodes to rows, with a scripted sampler and a toy environment.

    python -m pytest tests/test_rollout.py
"""

import pytest

from paw_min.config import Config, UserError
from paw_min.envs.pool import EnvPool
from paw_min.rollout import request_seed, rollout
from tests.test_policy import make_policy

WORDS = "<think></think><action>go to shelf 1</action>"


class Countdown:
    """Task "n" is won in the n-th step; task "broken" dies in its second step."""

    def reset(self, task):
        self.task, self.left = task, 99 if task == "broken" else int(task)
        return f"{self.left} left", self.info(False)

    def step(self, action):
        self.left -= 1
        if self.task == "broken" and self.left == 97:
            raise OSError("the lights went out")
        won = self.left == 0
        return f"go to shelf {self.left}", 10.0 * won, won, self.info(won)

    def info(self, won):
        return {"task": self.task, "task_type": "toy", "admissible": ["go to shelf 1"], "won": won}


class Script:
    """Answers every prompt with the same words, and remembers what it was asked."""

    def __init__(self, policy, words=WORDS):
        self.ids = policy.encode(words) + policy.eos_ids
        self.calls = []

    def generate(self, prompts, seeds, temperature, max_tokens):
        self.calls.append((prompts, seeds, temperature, max_tokens))
        return [list(self.ids) for _ in prompts]


def play(tasks, seats=None, words=WORDS, **settings):
    policy = make_policy()
    sampler = Script(policy, words)
    cfg = Config(**{"prompt": "compact", "max_turns": 5} | settings)
    with EnvPool(Countdown, seats or len(tasks)) as pool:
        episodes, stats = rollout(
            cfg, policy, sampler, pool, tasks, range(len(tasks)), temperature=0.9, seed=(1, 2)
        )
    return policy, sampler, episodes, stats


def test_rows():
    policy, sampler, (episode,), stats = play(["2"])
    first, last = episode.transitions
    assert (first.reward, first.done, first.turn) == (0.0, False, 0)
    assert (last.reward, last.done, last.turn) == (10.0, True, 1)
    assert first.anchor == "2 left" and last.anchor == "go to shelf 1"
    assert first.response_ids == sampler.ids and first.valid  # as sampled, end token included
    assert first.obs_ids == policy.encode("go to shelf 1")
    assert last.obs_ids == policy.encode("go to shelf 0")  # o_T, which no prompt shows
    assert last.prompt_ids == policy.encode_chat("task 2\n2 left\n> go to shelf 1\ngo to shelf 1\n"
                                                 "| go to shelf 1")  # fmt: skip
    assert episode.won and episode.episode_return == 10.0 and episode.task_type == "toy"
    assert stats["tokens_generated"] == 2 * len(sampler.ids)


def test_finished_episodes_are_not_prompted_again():
    _, sampler, episodes, _ = play(["1", "3", "2"])
    assert [len(call[0]) for call in sampler.calls] == [3, 2, 1]
    assert [len(e.transitions) for e in episodes] == [1, 3, 2]


def test_the_turn_limit_ends_an_episode():
    _, sampler, (episode,), _ = play(["9"])
    assert len(episode.transitions) == 5 and not episode.won
    assert not episode.transitions[-1].done and episode.transitions[-1].obs_ids
    assert sampler.calls[0][2:] == (0.9, 512)


def test_more_episodes_than_seats():
    _, _, episodes, _ = play(["1", "2", "3", "1", "2"], seats=2)
    assert [len(e.transitions) for e in episodes] == [1, 2, 3, 1, 2]
    assert [e.trajectory for e in episodes] == [0, 1, 2, 3, 4]


def test_a_broken_environment_costs_its_episode_alone():
    _, _, (good, bad), _ = play(["3", "broken"])
    assert "the lights went out" in bad.failed and "broken" in bad.failed
    assert good.won and not good.failed


def test_seeds_name_update_episode_and_turn():
    _, sampler, _, _ = play(["2", "2"])
    seeds = [seed for call in sampler.calls for seed in call[1]]
    assert len(set(seeds)) == 4
    assert seeds[3] == request_seed(1, 2, 1, 1)
    assert request_seed(0, 1, 2, 3) == 3252311618909706447  # the same on every machine


def test_bad_format_is_recorded():
    _, _, (episode,), _ = play(["1"], words="go to shelf 1")
    assert not episode.transitions[0].valid


def test_limits():
    _, _, (episode,), stats = play(["1"], max_obs_tokens=3)
    assert len(episode.transitions[0].obs_ids) == 3 and stats["obs_tokens_cut"] == 1
    with pytest.raises(UserError, match="max_prompt_tokens=8"):
        play(["1"], max_prompt_tokens=8)
    policy, _, (episode,), stats = play(["1"], max_prompt_tokens=8, prompt_overflow="cut")
    full = policy.encode_chat("task 1\n1 left\n| go to shelf 1")
    assert episode.transitions[0].prompt_ids == full[-8:] and stats["prompts_cut"] == 1
