"""Clusters of similar texts against the plain rule: difflib's ratio, first fit."""

import math
import random
from difflib import SequenceMatcher

import pytest

from paw_min.envs.similar import is_similar, similar_anchors


def test_similarity_is_greedy_first_fit_within_a_group():
    near = "You are at desk 1. On it you see a mug 1, a pen 2 and a book 1."
    texts = [near, "Nothing happens.", near.replace("pen 2", "pen 3"), near]
    assert similar_anchors([0] * 4, texts, 0.9) == [0, 1, 0, 0]
    assert similar_anchors([0] * 4, texts, 1.0) == [0, 1, 2, 0]
    assert similar_anchors([0, 0, 1, 1], texts, 0.9) == [0, 1, 0, 0]
    # First fit, not best fit: row 2 would be nearer to cluster 1 than to cluster 0.
    assert similar_anchors([0] * 3, ["aaaa", "abbb", "aabb"], 0.5) == [0, 1, 0]
    with pytest.raises(ValueError, match="similarity=1.5"):
        similar_anchors([0] * 4, texts, 1.5)


def first_fit(group, texts, threshold):
    """The rule of similar_anchors, without any thought of time."""
    clusters = {}
    result = []
    for g, text in zip(group, texts):
        known = clusters.setdefault(g, [])
        fits = [n for n, first in enumerate(known) if ratio(text, first) >= threshold]
        if not fits:
            known.append(text)
        result.append(fits[0] if fits else len(known) - 1)
    return result


def ratio(a, b):
    return SequenceMatcher(None, a, b).ratio()


def random_texts(rng, n):
    """Texts of 7 to 250 characters (autojunk begins at 200), and edits of earlier ones."""
    texts = ["", "é\U0001f600 ∑"]
    while len(texts) < n:
        letters = rng.choice(["ab ", "the quick brown fox. "])
        texts.append("".join(rng.choices(letters, k=rng.choice([7, 60, 250]))))
        old, change = rng.choice(texts), rng.choice([0.0, 0.02, 0.1])
        texts.append("".join(rng.choice("ab x") if rng.random() < change else c for c in old))
    return texts


@pytest.mark.parametrize("threshold", [0.6, 0.9, 1.0])
def test_similar_anchors_equals_the_plain_rule(threshold):
    joined = 0
    for seed in range(10):
        rng = random.Random(f"{threshold} {seed}")
        texts = random_texts(rng, 40)
        group = [rng.randrange(2) for _ in texts]
        expected = first_fit(group, texts, threshold)
        assert similar_anchors(group, texts, threshold) == expected
        joined += len({*zip(group, texts)}) - len({*zip(group, expected)})
    assert joined >= 10 or threshold == 1.0  # texts that differ and are alike did occur


def test_the_bound_excludes_no_similar_text():
    rng = random.Random(5)
    for _ in range(40):
        # difflib finds the LCS of one change without repeated letters: bound and ratio meet.
        a = "".join(map(chr, range(1000, 1000 + rng.randrange(5, 150))))
        place = rng.randrange(len(a))
        b = a[:place] + "-" * rng.randrange(1, 30) + a[place + rng.randrange(3) :]
        exact = ratio(a, b)
        for x, y in ((a, b), (b, a)):
            assert is_similar(x, y, exact)
            assert not is_similar(x, y, math.nextafter(exact, 2.0))
