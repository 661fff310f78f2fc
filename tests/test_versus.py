"""research/bench/versus.py at tiny sizes: its ratios, and TRL's gradient beside ours."""

from functools import partial

import pytest

from research.bench.versus import LockStepPool, Sleeper, compare, passes, rollouts

pytestmark = pytest.mark.slow


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    found = compare([2.0, 9.0, 8.0], [1.0, 3.0, 8.0])
    assert found == {"paw_min": 8.0, "instead": 3.0, "ratio": 2.0, "lowest": 1.0, "highest": 3.0}


def test_passes_have_the_gradient_of_trl_and_need_less_memory():
    found = passes(
        generated=16, per_pass=2, rounds=2, vocab_size=2000, intermediate_size=64,
        num_hidden_layers=2, max_window_layers=2,
    )
    assert 0 < found["gradient_difference"] < 1e-5
    speed, memory = found["ratios"].values()
    assert 0 < speed["lowest"] <= speed["ratio"] <= speed["highest"]
    assert memory["ratio"] == memory["paw_min"] / memory["instead"] < 0.8


def test_lock_step_answers_nothing_before_it_has_all_answers():
    with LockStepPool(partial(Sleeper, 0.01, (1, 1)), 2, workers=2) as pool:
        pool.reset(0, "a")
        pool.reset(1, "b")
        assert pool.recv(timeout=0.5) is None
        assert {pool.recv().slot, pool.recv(timeout=0).slot} == {0, 1}


def test_asynchronous_rollouts_wait_less_for_environments_that_sleep():
    found = rollouts(episodes=4, turns=(2, 4), delays=(0.2,), rounds=1)
    speed, idle = found["ratios"].values()
    assert speed["ratio"] == speed["paw_min"] / speed["instead"]
    assert 0 < idle["paw_min"] < idle["instead"] < 1
