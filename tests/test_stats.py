"""Arms compared over seeds, by hand."""

import numpy as np
import pytest

from research import stats
from research.stats import Compared


def test_differences_are_of_the_same_seed_and_task():
    base = [{"": {"x": 0.0, "y": 100.0, "w": 50.0}}, {"": {"w": 9.0, "y": 0.0, "x": 50.0}}]
    ours = [{"": {"x": 100.0, "y": 100.0, "z": 0.0}}, {"": {"x": 50.0, "y": 100.0}}]
    (part,) = stats.paired(ours, base)
    assert part.tolist() == [[100.0, 0.0], [0.0, 100.0]]  # w and z are not in all runs
    found = stats.compared({7: ours[0], 0: ours[0], 1: ours[1]}, {1: base[1], 0: base[0]})
    assert found.mean == pytest.approx((200 / 3 + 75 + 200 / 3) / 3)  # of its own three runs ...
    assert found.std == pytest.approx(np.std([200 / 3, 75, 200 / 3], ddof=1))
    assert found.difference == 50.0  # ... but paired in two
    # One seed: tasks can be drawn, a single number cannot.
    assert stats.compared({0: ours[0]}, {0: base[0]}).bootstrap == (0.0, 100.0)
    one = stats.compared({0: {"": {"": 70.0}}}, {0: {"": {"": 60.0}}})
    assert one == Compared([70.0], 10.0) and one.std is None


def test_arms_become_one_comparison_each():
    def run(bonus: float) -> dict:
        return {"sets": {"nq": {"a": bonus, "b": 50.0 + bonus}, "popqa": {"c": 100.0 + bonus}}}

    runs = {("base", 0): run(0.0), ("own", 0): run(10.0) | {"only here": {"": {"": 1.0}}}}
    found = stats.compare(runs, "base")
    assert found["base"] == {"sets": Compared([62.5])}  # the parts have equal weights
    assert found["own"] == {"sets": Compared([72.5], 10.0, (10.0, 10.0))}


def test_paired_t_interval():
    # Mean 2, standard deviation 2, three values: t(2) = 4.302653 at 97.5 %.
    low, high = stats.t_interval([0.0, 2.0, 4.0])
    half = 4.302653 * 2 / 3**0.5
    assert (low, high) == pytest.approx((2 - half, 2 + half))


@pytest.mark.parametrize("df, share, quantile", [  # of printed tables
    (1, 0.975, 12.7062), (7, 0.975, 2.3646), (120, 0.975, 1.9799), (7, 0.8, 0.8960),
])
def test_quantiles_of_student(df, share, quantile):
    assert stats.t_quantile(df, share) == pytest.approx(quantile, abs=1e-4)


def test_the_interval_resamples_seeds_and_then_tasks():
    interval = stats.bootstrap_interval
    assert interval([np.full((3, 5), 4.0)]) == (4.0, 4.0)
    assert interval([np.array([[0.0, 100.0]])]) == (0.0, 100.0)  # 0, 50, 100: 1/4, 1/2, 1/4
    tasks = np.arange(400) % 2 * 100.0
    sigma = 50 / 400**0.5
    # One draw of tasks for all seeds: more seeds with the same outcomes add no information.
    for part in (tasks[None], np.tile(tasks, (9, 1))):
        assert interval([part]) == pytest.approx((50 - 1.96 * sigma, 50 + 1.96 * sigma), abs=0.5)
    seeds = np.tile(np.arange(400)[:, None] % 2 * 100.0, (1, 3))  # all variance between seeds
    assert interval([seeds]) == pytest.approx((50 - 1.96 * sigma, 50 + 1.96 * sigma), abs=0.5)
    # Two independent parts with equal weights: their mean has 1/sqrt(2) of the deviation.
    low, high = interval([tasks[None], tasks[None]])
    assert high - low == pytest.approx(2 * 1.96 * sigma / 2**0.5, abs=0.7)
