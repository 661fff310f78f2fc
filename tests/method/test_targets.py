"""What the world model predicts: separator, placebo, several steps, equal transitions."""

from dataclasses import replace

import pytest
import torch

from examples.multi_step import first_occurrences, with_later_observations
from paw_min import targets
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model.batches import collate, micro_batches
from paw_min.model.chat import turn_text
from paw_min.rows import TokenRow, flatten
from paw_min.update import prepare
from tests.helpers import BASE, EPISODES, ROWS, make_policy, run

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")
THREE = [TokenRow([1], [10 * k, 10 * k + 1], [10 * k + 5]) for k in (1, 2, 3)]  # one trajectory
PLAIN = TokenRow([3, 4, 5], [6, 7, 1], [8, 9, 10, 11])
SEPARATED = replace(PLAIN, separator_ids=[12, 13])


# ---- separator ----


@pytest.mark.parametrize("template, reason", [
    ("{% if messages[1:] %}{{ raise_exception('one turn only') }}{% endif %}", "one turn only"),
    ("{{ messages[2].content }}{{ messages[1].content }}", "leaves out messages"),
])
def test_a_template_without_a_second_turn_is_refused(template, reason):
    tokenizer = make_policy().tokenizer
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"{reason}.*--wm-separator none"):
        turn_text(tokenizer)


def test_separator_is_context_and_no_target():
    batch = collate([SEPARATED, PLAIN], [True, True], pad_id=0)
    assert batch.ids.tolist() == [
        [3, 4, 5, 6, 7, 1, 12, 13, 8, 9, 10, 11],
        [3, 4, 5, 6, 7, 1, 8, 9, 10, 11, 0, 0],
    ]
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 0]] * 2
    assert batch.obs_mask.int().tolist() == [[0] * 5 + [1] * 4, [0] * 3 + [1] * 4 + [0] * 2]
    # The separator is appended only with the observation.
    assert collate([SEPARATED], [False], pad_id=0).ids.tolist() == [[3, 4, 5, 6, 7, 1]]
    between = collate([replace(SEPARATED, context_positions=[1, 2])], [True], pad_id=0)
    assert between.obs_mask[0].int().tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1]


# ---- placebo ----


def test_separators_count_in_the_budget():
    rows = [replace(PLAIN, separator_ids=[12] * 90), PLAIN]
    batches = micro_batches(make_policy(), rows, [0, 1], [True, True], budget=100)
    assert [len(batch.index) for batch in batches] == [1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_no_row_keeps_its_own_observation(seed):
    # Every third has none, the others have an action between.
    rows = [
        TokenRow([k], [k], [k] * (k % 3), context_positions=[0] * (k % 3 > 1))
        for k in range(3, 20)
    ]
    mixed = targets.shuffled(rows, 99, seed, 1)
    assert [(r.prompt_ids, r.response_ids) for r in mixed] == [
        (r.prompt_ids, r.response_ids) for r in rows
    ]
    for before, after in zip(rows, mixed):
        assert bool(before.obs_ids) == bool(after.obs_ids)
        assert not before.obs_ids or before.obs_ids != after.obs_ids
    for column in (mixed, rows):  # actions between stay with their observations
        column.sort(key=lambda row: row.obs_ids)
    ours, theirs = ([(r.obs_ids, r.context_positions) for r in of] for of in (mixed, rows))
    assert ours == theirs


def test_the_placebo_is_drawn_per_update_and_a_lone_row_has_none():
    drawn = [targets.shuffled(ROWS, 999, *key) for key in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert drawn[0] == drawn[1] and drawn.count(drawn[0]) == 2
    alone = targets.shuffled([TokenRow([1], [2], []), TokenRow([1], [2], [3])], 9, 0, 1)
    assert [row.obs_ids for row in alone] == [[], []]


def test_a_placebo_ends_at_the_models_positions():
    """A long prompt may have no room for another row's observation."""
    rows = [
        TokenRow([1] * 30, [2] * 8, [3]),
        TokenRow([1], [2], [4] * 12, context_positions=[0, 11]),
    ]
    long, short = targets.shuffled(rows, 40, 0, 1)
    assert (long.obs_ids, long.context_positions) == ([4, 4], [0])
    assert short.obs_ids == [3]


def test_the_placebo_changes_targets_and_nothing_else():
    cfg = Config(**BASE | dict(wm_target="shuffled"))
    plain = prepare(Config(**BASE), make_policy(), None, flatten(EPISODES))
    placebo = prepare(cfg, make_policy(), None, flatten(EPISODES), 3)
    assert placebo.tokens == targets.shuffled(ROWS, 9999, cfg.seed, 3) != plain.tokens == ROWS
    for name in ("selected", "row_weight", "advantage", "entropy"):
        assert torch.equal(getattr(placebo, name), getattr(plain, name)), name
    assert placebo.lambdas == plain.lambdas
    assert torch.equal(run(wm_target="shuffled", paw=False)[0], run(paw=False)[0])


# ---- several steps ----


def test_the_next_observations_follow_with_the_actions_between_as_context():
    two = with_later_observations(THREE, [0, 0, 0], 2)
    assert [r.obs_ids for r in two] == [[15, 20, 21, 25], [25, 30, 31, 35], [35]]
    assert [r.context_positions for r in two] == [[1, 2], [1, 2], []]
    many = with_later_observations(THREE, [0, 0, 0], 9)
    assert many[0].obs_ids == [15, 20, 21, 25, 30, 31, 35]
    assert many[0].context_positions == [1, 2, 4, 5]
    interleaved = with_later_observations(THREE, [0, 1, 0], 2)
    assert interleaved[0].obs_ids == [15, 30, 31, 35]
    separated = [replace(row, separator_ids=[7, 8]) for row in THREE]
    first = with_later_observations(separated, [0, 0, 0], 2)[0]
    assert first.obs_ids == [15, 20, 21, 7, 8, 25] and first.context_positions == [1, 2, 3, 4]
    empty = [THREE[0], TokenRow([1], [7], []), THREE[2]]  # as after an invalid search
    assert [r.obs_ids for r in with_later_observations(empty, [0, 0, 0], 3)] == [[15], [], [35]]


# ---- equal transitions ----


def test_equal_transitions_count_once():
    other = [replace(THREE[0], prompt_ids=[2]), replace(THREE[0], response_ids=[99])]
    rows = [THREE[0], THREE[1], THREE[0], *other, replace(THREE[0], obs_ids=[99]), THREE[0]]
    expected = [True, True, False, True, True, True, False]
    assert first_occurrences(rows) == expected
