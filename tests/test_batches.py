"""Micro-batching: which rows share a forward pass.

Splits are checked on random row lengths with a long tail, like those of episodes.
"""

import random

import pytest

from paw_min.model.batches import split


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
