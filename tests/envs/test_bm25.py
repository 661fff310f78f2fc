"""BM25: the rules of the analyzer, scores against a loop, ties.

test_webshop.py compares rankings with recordings of Lucene's own.
"""

import math
import random
from collections import Counter

import numpy as np
import pytest

from paw_min.retrieval import bm25
from paw_min.retrieval.bm25 import BM25, analyze, lossy_length


@pytest.mark.parametrize("text, terms", [
    ("The Running Shoes, for a dog", "run shoe dog"),  # case, stop words, stems
    ("women's men’s boss'", "women men boss"),  # no possessive 's; "'" alone is no letter
    ("don't can''t", "don't can t"),  # at most one apostrophe in a row
    ("u.s.a. 3.5mm 1,000.50 12:30 a:b a,b 7;5 7'5", "u.s.a 3.5mm 1,000.50 12 30 a:b b 7;5 7'5"),
    ("a.1 1.a x.-y", "1 1 x y"),  # "." joins letters or digits, not one of each
    ("12-pack t-shirt and/or (pack+2)", "12 pack t shirt pack 2"),
    ("foo_bar _x_ __ 4_", "foo_bar _x_ 4_"),
    ("us as gas bly flies", "us ga bly fli"),  # words of two letters are not stemmed
    ("possibly psychology", "possibl psycholog"),  # the author's later rules: -bli, -logi
    ("café naïve", "café naïv"),
    ("İstanbul ΟΔΟΣ", "istanbul οδοσ"),  # in lower case one by one
    ("levi’s® x™ 5 ½ 10²", "levi ® x ™ 5 10"),  # emoji are words
    ("日本 カタカナ ひら ไทย", "日 本 カタカナ ひ ら ไทย"),
    ("👍🏽👨‍👩‍👧 🇩🇪", "👍🏽 👨‍👩‍👧 🇩🇪"),
    ("e\u0301te\u0301 １２", "e\u0301te\u0301 １２"),  # marks belong to the character before
    ("", ""),
])
def test_analyzer(text, terms):
    assert analyze(text) == terms.split()


def test_ascii_shortcut_equals_the_full_rules():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("aZz01_.:,;'- ", k=rng.randint(1, 12)))
        assert bm25._ASCII_WORD.findall(text) == bm25._WORD.findall(text), text


def test_lossy_length_is_a_round_trip_through_lucenes_byte():
    def byte(i):  # SmallFloat.intToByte4
        if i < 24:
            return i
        bits = (i - 24).bit_length()
        return 24 + (i - 24 if bits < 4 else (i - 24 >> bits - 4 & 7) | bits - 3 << 3)

    def length(b):  # SmallFloat.byte4ToInt
        if b < 24:
            return b
        low = (b - 24) & 7
        shift = (b - 24 >> 3) - 1
        return 24 + (low if shift < 0 else (low | 8) << shift)

    lengths = np.array([*range(5000), 10**6, 2**31 - 1])
    assert lossy_length(lengths).tolist() == [length(byte(i)) for i in lengths.tolist()]


def loop_scores(ids, texts, query):
    """The formula in the docstring of bm25.py, document by document, in float64."""
    documents = [Counter(analyze(text)) for text in texts]
    used = [d for d in documents if d]
    avgdl = sum(sum(d.values()) for d in used) / len(used)
    scores = {}
    for name, document in zip(ids, documents):
        norm = 0.9 * (0.6 + 0.4 * int(lossy_length(np.array(document.total()))) / avgdl)
        for term, count in Counter(analyze(query)).items():
            df = sum(term in d for d in used)
            if document[term]:
                idf = math.log(1 + (len(used) - df + 0.5) / (df + 0.5))
                part = count * idf * (1 - 1 / (1 + document[term] / norm))
                scores[name] = scores.get(name, 0) + part
    return scores


def test_scores_equal_a_loop_over_documents():
    rng = random.Random(1)
    words = [f"w{i}" for i in range(40)]
    ids = [f"d{i}" for i in range(80)]
    rng.shuffle(ids)
    texts = [" ".join(rng.choices(words, range(1, 41), k=rng.choice([0, 3, 30, 90]))) for _ in ids]
    index = BM25(ids, iter(texts))  # an iterator is enough
    for _ in range(10):
        query = " ".join(rng.choices(words, k=4))
        expected = loop_scores(ids, texts, query)
        found = index.search(query, len(ids))
        assert dict(found) == pytest.approx(expected, rel=1e-5)
        assert found == sorted(found, key=lambda hit: (-hit[1], hit[0]))
        assert all(score == float(np.float32(score)) for _, score in found)  # as Lucene rounds
        for k in (1, 7):  # the first results do not depend on k, ties included
            assert index.search(query, k) == found[:k]


def test_nothing_to_find():
    index = BM25(["a", "b"], ["red", ""])
    assert index.search("", 3) == index.search("the of", 3) == index.search("green", 3) == []
    assert BM25([], []).search("red", 3) == []
    with pytest.raises(ValueError, match="k is 0: ask for 1"):
        index.search("red", 0)
