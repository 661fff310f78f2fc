"""Micro-batching: which rows share a forward pass, and where their tokens are in it.

Splits are checked on random row lengths with a long tail, like those of episodes.
"""

import random
from types import SimpleNamespace

import pytest

from paw_min.base import distributed
from paw_min.model.batches import micro_batches, split
from paw_min.rows import TokenRow

ROWS = [
    TokenRow([1, 2, 3], [4, 5], [6]),
    TokenRow([1], [7], [8, 9, 10]),
    TokenRow([2, 2], [3, 4, 5], []),
]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_micro_batches_give_each_rank_its_part(monkeypatch, n_ranks):
    """Every chosen row on exactly one rank; equally many batches on all, empty ones masked out."""
    rows = ROWS * 3
    chosen = [8, 1, 3, 5, 0]
    with_obs = [k % 2 == 0 for k in range(9)]
    policy = SimpleNamespace(pad_id=0, device="cpu")
    monkeypatch.setattr(distributed, "n_ranks", lambda: n_ranks)
    counts = set()
    seen = []
    shares = []
    for rank in range(n_ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        batches = list(micro_batches(policy, rows, chosen, with_obs, budget=6))
        counts.add(len(batches))
        for batch in batches:
            if not batch.response_mask.any():  # nothing left for this rank
                assert batch.share == 0
                assert batch.index == chosen[:1] and not batch.obs_mask.any()
                continue
            seen += batch.index
            shares.append(batch.share)
            for i, mask, obs in zip(batch.index, batch.response_mask, batch.obs_mask):
                assert mask.sum() == len(rows[i].response_ids)
                assert obs.sum() == with_obs[i] * len(rows[i].obs_ids)
    assert sorted(seen) == sorted(chosen) and len(counts) == 1
    assert sum(shares) == pytest.approx(1.0)


def cost(part, lengths):
    return len(part) * max((lengths[i] for i in part), default=0)


def random_lengths(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [int(rng.lognormvariate(4, 0.7)) + 1 for _ in range(rng.randrange(1, 60))]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("multiple", [1, 3])
def test_split_keeps_its_promises(seed, multiple):
    lengths = random_lengths(seed)
    budget = 100 + 40 * seed
    parts = split(lengths, budget, multiple)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(cost(part, lengths) <= budget or len(part) <= 1 for part in parts)
    assert len(parts) % multiple == 0
    firsts = [lengths[part[0]] for part in parts if part]
    assert firsts == sorted(firsts, reverse=True)
    assert parts == split(lengths, budget, multiple)


def test_split_is_even():
    """Without it, 9 equal rows, 8 of which fit, would make one part of 8 and one of 1."""
    assert sorted(map(len, split([10] * 9, 80))) == [4, 5]
    assert sorted(map(len, split([10] * 9, 80, multiple=3))) == [3, 3, 3]
    assert max(map(len, split([10] * 9, 1000, multiple=4))) == 3


def test_split_of_rows_that_are_too_few_or_too_long():
    assert split([5, 5], 100, multiple=4) == [[0], [1], [], []]
    assert split([5, 500, 5], 100) == [[1], [0, 2]]
    assert split([], 100) == []
