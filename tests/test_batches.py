"""Which rows share a forward pass, and where their tokens lie in it.

    python -m pytest tests/test_batches.py

Plans are checked on random row lengths with a long tail, as those of episodes are.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from paw_min.batches import collate, find_families, plan


def row(prompt, response, observation):
    return SimpleNamespace(prompt_ids=prompt, response_ids=response, obs_ids=observation)


ROWS = [row([1, 2, 3], [4, 5], [6]), row([1], [7], [8, 9, 10]), row([2, 2], [3, 4, 5], [])]


@pytest.mark.parametrize("packed", [False, True])
def test_scored_tokens_are_found_where_they_lie(packed):
    batch = collate(ROWS, [True, True, True], pad_id=0, packed=packed)
    found = [[None] * 4 for _ in ROWS]
    for row, slot, at in zip(batch.row.tolist(), batch.slot.tolist(), batch.at.tolist()):
        found[row][slot] = batch.ids.flatten()[at].item()
    assert found == [[4, 5, 6, None], [7, 8, 9, 10], [3, 4, 5, None]]
    assert batch.action_mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert batch.obs_mask.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    is_action = batch.action_mask[batch.row, batch.slot]
    assert is_action.tolist() == [True] * batch.n_action + [False] * 4


def test_padded_and_packed_layouts():
    padded = collate(ROWS, [True, False, True], pad_id=0)
    assert padded.ids.tolist() == [[1, 2, 3, 4, 5, 6], [1, 7, 0, 0, 0, 0], [2, 2, 3, 4, 5, 0]]
    assert padded.positions is None
    packed = collate(ROWS, [True, False, True], pad_id=0, packed=True)
    assert packed.ids.tolist() == [[1, 2, 3, 4, 5, 6, 1, 7, 2, 2, 3, 4, 5]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3, 4]]


FAMILY = [row([1, 2, 3], [4, 5], [6]), row([8], [7], []), row([1, 2, 3], [9], [5, 5])]


def test_a_family_is_one_sequence_of_a_prompt_and_tails():
    batch = collate(FAMILY, [True, False, True], pad_id=0, families=[[0, 2], [1]])
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 9, 5, 5], [8, 7, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    found = [[None] * 3 for _ in FAMILY]
    places = torch.stack([batch.row, batch.slot, batch.at, batch.before], dim=1)
    for r, slot, at, before in places.tolist():
        found[r][slot] = batch.ids.flatten()[[before, at]].tolist()
    assert found == [[[3, 4], [4, 5], [5, 6]], [[8, 7], None, None], [[3, 9], [9, 5], [5, 5]]]
    seen = [batch.mask[0, 0, i].nonzero()[:, 0].tolist() for i in (1, 4, 6, 8)]
    assert seen == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 6], [0, 1, 2, 6, 7, 8]]
    assert batch.mask.any(-1).all()  # nobody is left with nothing to see, padding included


def test_no_family_no_mask():
    assert collate(FAMILY, [True] * 3, pad_id=0, families=[[0], [1], [2]]).mask is None


@pytest.mark.parametrize("budget", [1, 6, 9, 12, 1000])
def test_families_have_equal_prompts_and_room(budget):
    rng = random.Random(budget)
    prompts = [[rng.randrange(3)] * rng.randint(1, 2) for _ in range(60)]
    tails = [rng.randint(1, 5) for _ in prompts]
    families = find_families(prompts, tails, budget)
    assert sorted(i for f in families for i in f) == list(range(60))
    for f in families:
        assert len({tuple(prompts[i]) for i in f}) == 1 and f == sorted(f)
        length = len(prompts[f[0]]) + sum(tails[i] for i in f)
        assert length <= budget or len(f) == 1
    assert [f[0] for f in families] == sorted(f[0] for f in families)
    if budget == 1000:
        assert len(families) == len({tuple(p) for p in prompts})


def test_an_observation_costs_its_own_tokens_and_nothing_else():
    without = collate(ROWS, [False] * 3, pad_id=0, packed=True)
    for i, r in enumerate(ROWS):
        one = collate(ROWS, [i == k for k in range(3)], pad_id=0, packed=True)
        assert one.ids.numel() - without.ids.numel() == len(r.obs_ids)
        assert len(one.at) - len(without.at) == len(r.obs_ids)
        assert one.n_action == without.n_action


def cost(part, lengths):
    return len(part) * max(lengths[i] for i in part)


def random_lengths(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [int(rng.lognormvariate(4, 0.7)) + 1 for _ in range(rng.randrange(1, 60))]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("multiple", [1, 3])
def test_plan_keeps_its_promises(seed, multiple):
    lengths, budget = random_lengths(seed), 100 + 40 * seed
    parts = plan(lengths, budget, multiple)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(cost(part, lengths) <= budget or len(part) == 1 for part in parts)
    assert len(parts) % multiple == 0 or len(parts) == len(lengths)
    firsts = [lengths[part[0]] for part in parts]
    assert firsts == sorted(firsts, reverse=True)
    assert parts == plan(lengths, budget, multiple)


def test_plan_needs_as_few_micro_batches_as_can_be():
    """Against all ways of cutting the sorted rows."""

    def fewest(lengths, budget):
        best = [0]
        for end in range(1, len(lengths) + 1):
            fits = (s for s in range(end) if s == end - 1 or (end - s) * lengths[s] <= budget)
            best.append(1 + min(best[s] for s in fits))
        return best[-1]

    for seed in range(20):
        lengths, budget = random_lengths(seed), 200 + 30 * seed
        assert len(plan(lengths, budget)) == fewest(sorted(lengths, reverse=True), budget)


def test_plan_is_even():
    """Without it, 9 equal rows, 8 of which fit, would make one part of 8 and one of 1."""
    assert sorted(map(len, plan([10] * 9, 80))) == [4, 5]
    assert sorted(map(len, plan([10] * 9, 80, multiple=3))) == [3, 3, 3]
    assert max(map(len, plan([10] * 9, 1000, multiple=4))) == 3


def test_plan_of_rows_that_are_too_few_or_too_long():
    assert plan([5, 5], 100, multiple=4) == [[0], [1]]
    assert plan([5, 500, 5], 100) == [[1], [0, 2]]
    assert plan([], 100) == []


def test_length_sorted_micro_batches_waste_little():
    lengths = random_lengths(7) * 20
    padded = sum(cost(part, lengths) for part in plan(lengths, 2000))
    assert padded < 1.1 * sum(lengths) < 0.6 * len(lengths) * max(lengths)


def test_on_device_of_choice():
    batch = collate(ROWS, [True] * 3, pad_id=0, device="meta", packed=True)
    moved = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)]
    assert len(moved) == 8 and all(t.is_meta for t in moved)
