"""The tables of research/predictable, by hand."""

import numpy as np
import pytest

from research.predictable import study
from research.stats import t_quantile


def test_a_seed_counts_where_all_arms_have_it():
    runs = {
        world: {(arm, seed): {"success": [0, 1]} for arm in ("paw", "grpo") for seed in study.SEEDS}
        for world in ("plain", "fog")
    }
    del runs["fog"]["paw", 9100]
    found, seeds = study.complete(runs, ("plain", "fog"), ("paw", "grpo"))
    assert seeds == [*range(9101, 9116)]
    assert len(found["plain"]) == len(found["fog"]) == 30 and ("paw", 9100) not in found["plain"]


def test_regret_is_the_largest_shortfall_from_the_best_loss():
    """Two worlds, two seeds; a placebo that is best of all is no loss to fall short of."""
    names = study.ARMS
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
    names = study.ARMS
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
