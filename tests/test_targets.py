"""What the world model predicts: placebo, several steps, equal transitions; and its scale."""

from dataclasses import replace

import pytest
import torch

from examples.multi_step import first_occurrences, with_later_observations
from paw_min import targets
from paw_min.config import Config
from paw_min.rows import TokenRow, flatten
from paw_min.update import prepare
from tests.helpers import BASE, EPISODES, ROWS, make_policy, run, step_of

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")
THREE = [TokenRow([1], [10 * k, 10 * k + 1], [10 * k + 5]) for k in (1, 2, 3)]  # one trajectory


# ---- placebo ----


@pytest.mark.parametrize("seed", range(5))
def test_no_row_keeps_its_own_observation(seed):
    # Every third has none, the others have an action between.
    rows = [TokenRow([k], [k], [k] * (k % 3), given=[0] * (k % 3 > 1)) for k in range(3, 20)]
    mixed = targets.shuffled(rows, seed, 1)
    assert [(r.prompt_ids, r.response_ids) for r in mixed] == [
        (r.prompt_ids, r.response_ids) for r in rows
    ]
    for before, after in zip(rows, mixed):
        assert bool(before.obs_ids) == bool(after.obs_ids)
        assert not before.obs_ids or before.obs_ids != after.obs_ids
    for column in (mixed, rows):  # actions between stay with their observations
        column.sort(key=lambda row: row.obs_ids)
    assert [(r.obs_ids, r.given) for r in mixed] == [(r.obs_ids, r.given) for r in rows]


def test_the_placebo_is_drawn_per_update_and_a_lone_row_has_none():
    drawn = [targets.shuffled(ROWS, *key) for key in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert drawn[0] == drawn[1] and drawn.count(drawn[0]) == 2
    alone = targets.shuffled([TokenRow([1], [2], []), TokenRow([1], [2], [3])], 0, 1)
    assert [row.obs_ids for row in alone] == [[], []]


def test_the_placebo_changes_targets_and_nothing_else():
    cfg = Config(**BASE | dict(wm_target="shuffled"))
    plain = prepare(Config(**BASE), make_policy(), None, flatten(EPISODES))
    placebo = prepare(cfg, make_policy(), None, flatten(EPISODES), 3)
    assert placebo.tokens == targets.shuffled(ROWS, cfg.seed, 3) != plain.tokens == ROWS
    for name in ("selected", "row_weight", "advantage", "entropy"):
        assert torch.equal(getattr(placebo, name), getattr(plain, name)), name
    assert placebo.lambdas == plain.lambdas
    assert not torch.equal(run(wm_target="shuffled")[0], run()[0])
    assert torch.equal(run(wm_target="shuffled", paw=False)[0], run(paw=False)[0])


# ---- several steps ----


def test_the_next_observations_follow_with_the_actions_between_as_context():
    two = with_later_observations(THREE, [0, 0, 0], 2)
    assert [r.obs_ids for r in two] == [[15, 20, 21, 25], [25, 30, 31, 35], [35]]
    assert [r.given for r in two] == [[1, 2], [1, 2], []]
    many = with_later_observations(THREE, [0, 0, 0], 9)
    assert many[0].obs_ids == [15, 20, 21, 25, 30, 31, 35] and many[0].given == [1, 2, 4, 5]
    interleaved = with_later_observations(THREE, [0, 1, 0], 2)
    assert interleaved[0].obs_ids == [15, 30, 31, 35]
    assert with_later_observations(THREE, [0, 0, 0], 1) == THREE
    separated = [replace(row, separator_ids=[7, 8]) for row in THREE]
    first = with_later_observations(separated, [0, 0, 0], 2)[0]
    assert first.obs_ids == [15, 20, 21, 7, 8, 25] and first.given == [1, 2, 3, 4]
    assert first.separator_ids == [7, 8]
    empty = [THREE[0], TokenRow([1], [7], []), THREE[2]]  # as after an invalid search
    assert [r.obs_ids for r in with_later_observations(empty, [0, 0, 0], 3)] == [[15], [], [35]]


# ---- equal transitions ----


def test_equal_transitions_count_once():
    other = [replace(THREE[0], prompt_ids=[2]), replace(THREE[0], response_ids=[99])]
    rows = [THREE[0], THREE[1], THREE[0], *other, replace(THREE[0], obs_ids=[99]), THREE[0]]
    expected = [True, True, False, True, True, True, False]
    assert first_occurrences(rows) == expected


# ---- scale ----


def test_the_scale_multiplies_the_world_model_term():
    once = step_of(wm_scale=50.0)
    twice = step_of(wm_scale=100.0)
    base = step_of(paw=False)
    torch.testing.assert_close(twice - base, 2 * (once - base), atol=1e-3, rtol=1e-3)
    assert (once - base).abs().max() > 0.1
