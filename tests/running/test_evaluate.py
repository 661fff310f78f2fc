"""Evaluations: repeats, their standard error, seeds, lost episodes, the mean over task types."""

import pytest

from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool
from paw_min.metrics import describe_episodes
from paw_min.rows import Episode, Transition
from paw_min.running.evaluate import evaluate, transcript
from tests.helpers import Script, make_policy, one_sentence, seeds


class Series:
    """Task "a1 101": of type a; its k-th episode is won if the k-th digit is 1, x breaks."""

    played: dict[str, int] = {}

    def reset(self, task):
        self.kind = task[0]
        outcomes = task.split()[1]
        k = self.played[task] = self.played.get(task, -1) + 1
        if outcomes[k] == "x":
            raise OSError("no such game")
        self.won = outcomes[k] == "1"
        return Step("start", task, self.kind, ["go to shelf 1"])

    def step(self, command):
        return Step("end", "", self.kind, [], 10.0 * self.won, done=True, won=self.won, score=0.75)


def run(tasks, trial=0, **settings):
    Series.played = {}
    policy = make_policy()
    sampler = Script(policy)
    with EnvPool(Series, 3) as pool:
        cfg = Config(**{"prompt": "compact", "eval_temperature": 0.7} | settings)
        return evaluate(cfg, policy, sampler, pool, tasks, trial), sampler


def test_each_task_is_played_eval_repeats_times():
    tasks = ["a1 110", "b 000", "a2 111"]
    (three, sampler) = run(tasks, eval_repeats=3)
    assert [e.task for e in three.episodes] == [task for task in tasks for _ in range(3)]
    assert [e.group for e in three.episodes] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert three.metrics["eval_success"] == pytest.approx(5 / 9)
    assert set(sampler.settings) == {(0.7, 512)}


def test_the_standard_error_is_that_of_the_means_of_tasks():
    """Means 1, 0, 1/2 and 1/2: std sqrt(1/6), over sqrt(4). Repeats are not independent."""
    metrics = run(["a1 11", "a2 00", "a3 10", "a4 01"], eval_repeats=2)[0].metrics
    assert metrics["eval_success"] == 0.5
    assert metrics["eval_success_se"] == pytest.approx((1 / 6) ** 0.5 / 2)
    # Equal repeats say nothing new: the error stays that of four episodes.
    once = run(["a1 1", "a2 0", "a3 1", "a4 0"])[0].metrics["eval_success_se"]
    assert once == pytest.approx((1 / 3) ** 0.5 / 2)  # std of 1, 0, 1, 0, unbiased
    nines = [f"a{k} {9 * x}" for k, x in enumerate("1010")]
    nine = run(nines, eval_repeats=9)[0].metrics["eval_success_se"]
    assert nine == pytest.approx(once)


def test_pass_at_k_counts_tasks_with_a_win():
    metrics = run(["a1 100", "a2 000", "a3 x01", "a4 xxx"], eval_repeats=3)[0].metrics
    assert metrics["eval_success_at_k"] == pytest.approx(2 / 3)  # a4 was never played
    assert metrics["eval_success"] == pytest.approx(2 / 8)


def test_types_count_alike_and_lost_episodes_count_nowhere():
    metrics = run(["a1 1", "a2 1", "a3 0", "b 0", "b x", "c x"])[0].metrics
    assert metrics["eval_success"] == 0.5 and metrics["eval_failed"] == 2
    assert metrics["eval_success/a"] == pytest.approx(2 / 3) and metrics["eval_success/b"] == 0.0
    assert metrics["eval_success_types"] == pytest.approx(1 / 3)
    assert "eval_success/c" not in metrics
    assert metrics["eval_score"] == 75.0
    with one_sentence("no episode of the evaluation.*no such game"):
        run(["a x", "b x"])


def test_another_trial_draws_anew_and_repeats_draw_their_own():
    assert seeds(run(["a 1", "a 0"])[1]) == {request_seed(-1, i, 0) for i in range(2)}
    tasks = ["a 111", "b 000"]
    drawn = [seeds(run(tasks, trial=k, eval_repeats=3)[1]) for k in (0, 1, 2)]
    assert all(len(one) == 6 for one in drawn) and len(set.union(*drawn)) == 18
    # The seed of training does not matter.
    assert seeds(run(tasks, seed=5)[1]) == seeds(run(tasks)[1])


def test_an_episode_is_headed_by_what_it_was_asked_to_do():
    """WebShop's task is a number. An environment that says nothing has its task in this place."""
    step = Transition([1], [2], [3], [0.0], 0.0, True, "Results", 0, 0, response="click[b]")
    shop = Episode("567", 0, 0, [step], instruction="find me\n a lamp", task_type="home")
    other = Episode("data/game.z8", 1, 1, [step], task_type="home", won=True)
    headings = [line for line in transcript([shop, other]).splitlines() if line.startswith("#")]
    assert headings == ["## find me a lamp", "## data/game.z8"]
    assert "home: not won in 1 steps, `567`" in transcript([shop])


def test_episodes_are_described():
    def episode(group, rewards, valid, failed=""):
        steps = [Transition([1], [2], [k], [0.0], r, v, "", group, 0)
                 for k, (r, v) in enumerate(zip(rewards, valid))]
        return Episode("task", group, 0, steps, won=rewards[-1] == 10.0, failed=failed)

    episodes = [
        episode(0, [0.0, 10.0], [True, True]), episode(0, [0.0], [True]),
        episode(1, [5.0, 0.0, 5.0], [True, False, False]), episode(1, [10.0], [False]),
        episode(2, [10.0], [True]), episode(2, [0.0], [True]),
        episode(1, [0.0] * 9, [False] * 9, failed="it broke"),
    ]
    assert describe_episodes(episodes) == {
        "success": 0.5, "return": 40 / 6, "length": 9 / 6, "valid": 6 / 9, "no_variance": 1 / 3,
        "failed": 1, "rows": 9,
    }
