"""BM25 with exactly Lucene's ranking, ties included: the search engine of WebShop and search QA.

The score of a document is the sum, over the query's terms that it contains, of

    count in the query * idf * (1 - 1 / (1 + tf / norm)),      norm = k1 * (1 - b + b * dl / avgdl)
    idf = ln(1 + (N - df + 0.5) / (df + 0.5))

where tf is the term's count in the document, dl the document's length in tokens, avgdl the mean
length, N the number of documents with at least one token and df the number of documents that
contain the term.

Source: Lucene 8 with Pyserini's settings (k1 0.9, b 0.4, English analyzer, bag of words), which the
official WebShop runs. Textbook BM25 finds nearly the same products in a different order. Four
details of Lucene determine the order, and thereby the pages that the agent sees:

1. dl is stored in 8 bits: exact up to 40 tokens, then four significant bits (63 counts as 60).
2. Documents with equal scores are ordered by id, as strings.
3. Each term's contribution is a float32; they are summed in float64 and the sum is rounded to
   float32.
4. The analyzer: words by Unicode's UAX 29, no possessive 's, lower case, no stop words, and
   Porter's stemmer in the version that its author maintains.

Memory: 44 bytes per indexed word while the index is made (measured on 6 million words), about 8
afterwards. That is near 60 GB for wiki-18 (computed).
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import regex
from tqdm import tqdm

from paw_min.retrieval.corpus import Corpus
from paw_min.retrieval.interface import Hit

# Pyserini's defaults; Lucene's own are 1.2 and 0.75.
K1 = np.float32(0.9)
B = np.float32(0.4)

STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with".split()
)
POSSESSIVES = ("'s", "'S", "’s", "’S", "＇s", "＇S")

# Words by UAX 29, as Lucene's tokenizer implements it: runs of letters, digits and "_" with at
# least one letter or digit. Inside a word, "." and "'" may join two letters or two digits, ":" two
# letters, "," and ";" two digits. Runs of Kana, runs of South East Asian scripts, emoji (® and ™
# are emoji) and single Chinese characters are words, too. _X: marks that combine with the character
# before them.
_MARK = r"[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]"
_X = _MARK + "*+"
_LETTER = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]" + _X
_DIGIT = r"[\p{WB=Numeric}０-９]" + _X
_INSIDE_WORD = r"[\p{WB=MidLetter}\p{WB=MidNumLet}\p{WB=Single_Quote}]" + _X
_INSIDE_NUMBER = r"[\p{WB=MidNum}\p{WB=MidNumLet}\p{WB=Single_Quote}]" + _X
_LOW_LINE = r"(?:\p{WB=ExtendNumLet}" + _X + ")*+"
# A run of "_" alone is not a word. It is matched all the same, as a whole, and `_Terms` drops it:
# else the search for a word would start at each of its characters, minutes for 20,000 of them.
# (Vowel signs of South East Asian scripts are marks, and words, too.)
_NO_WORD = r"(?:\p{WB=ExtendNumLet}(?:(?!\p{Line_Break=SA})" + _MARK + ")*+)++"
_WORD = regex.compile(
    rf"(?:{_LOW_LINE}(?:(?:{_LETTER})++(?:{_INSIDE_WORD}(?:{_LETTER})++)*+"
    rf"|(?:{_DIGIT})++(?:{_INSIDE_NUMBER}(?:{_DIGIT})++)*+))++{_LOW_LINE}"
    rf"|(?:{_LOW_LINE}\p{{WB=Katakana}}{_X})++{_LOW_LINE}"
    rf"|(?:\p{{Line_Break=SA}}{_X})++|[\p{{Script=Han}}\p{{Script=Hiragana}}]{_X}"
    rf"|\p{{Extended_Pictographic}}{_X}(?:(?<=\u200d)\p{{Extended_Pictographic}}{_X})*+"
    rf"|(?:\p{{WB=Regional_Indicator}}{_X}){{2}}|[#*]\ufe0f?\u20e3"
    rf"|{_NO_WORD}"
)
_LOW_LINES = regex.compile(_NO_WORD)
# The same rules for plain ASCII text, which is most of it: six times as fast.
_ASCII_WORD = re.compile(
    r"_*[A-Za-z0-9]"
    r"(?:[A-Za-z0-9_]+|(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[,;.'](?=[0-9]))*"
    r"|_+"
)


class _Terms(dict):
    """Cache from a word to its index term: each word is stemmed once.

    The term is "" for a stop word, and for a run of "_".
    """

    def __init__(self):
        from nltk.stem.porter import PorterStemmer  # importing nltk takes over a second

        self._stem = PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS).stem

    def __missing__(self, word: str) -> str:
        term = word
        if word.endswith(POSSESSIVES):
            term = word[:-2]
        # Each character alone, as in Lucene: the lower() of a word makes two characters of "İ", and
        # another sigma at the end of a Greek word.
        term = "".join(character.lower()[0] for character in term)
        if term in STOP_WORDS or _LOW_LINES.fullmatch(term):
            term = ""
        else:
            term = self._stem(term, to_lowercase=False)
        self[word] = term
        return term


def analyze(text: str, terms: dict | None = None) -> list[str]:
    """The index terms of a text, in order, with repeats.

    terms: a `_Terms` cache; pass the same one for many texts to save time.
    """
    if terms is None:
        terms = _Terms()
    pattern = _ASCII_WORD if text.isascii() else _WORD
    found = [terms[word] for word in pattern.findall(text)]
    return [term for term in found if term]


def lossy_length(length: np.ndarray) -> np.ndarray:
    """Lengths as Lucene stores them: exact below 24, then 24 plus four significant bits."""
    excess = np.maximum(length.astype(np.int64) - 24, 0)
    shift = np.maximum(np.frexp(excess)[1] - 4, 0)  # frexp's exponent is the number of bits
    return np.where(length < 24, length, 24 + (excess >> shift << shift))


class BM25:
    """An inverted index over a fixed set of documents.

    ids: distinct strings. texts: one per id; may be a generator.
    """

    def __init__(self, ids: Sequence[str], texts: Iterable[str]):
        # Number the documents in the order of their ids, so that ties go to the lower number.
        order = sorted(range(len(ids)), key=ids.__getitem__)
        self.ids = [ids[i] for i in order]
        rank = np.empty(len(ids), np.int64)
        rank[order] = np.arange(len(ids))

        self._terms = _Terms()
        self._numbers = {}  # term -> 0, 1, 2, ...
        # Arrays of C integers: a list of the tokens of a large corpus would take eight times as
        # much memory.
        tokens = array("i")
        lengths = array("i")
        for _, text in zip(ids, texts, strict=True):
            found = analyze(text, self._terms)
            tokens.extend([self._numbers.setdefault(term, len(self._numbers)) for term in found])
            lengths.append(len(found))
        dl = np.asarray(lengths, np.int32)  # (documents,)
        term = np.asarray(tokens, np.int32)  # (tokens,)

        # Postings sorted by term, then document: one key for each (term, document), with its tf.
        n = max(1, len(ids))
        key, tf = np.unique(term * np.int64(n) + np.repeat(rank, dl), return_counts=True)
        self._documents = (key % n).astype(np.int32)  # (postings,)
        self._starts = np.searchsorted(key, np.arange(len(self._numbers) + 1) * n)  # (terms + 1,)
        df = np.diff(self._starts)  # (terms,)

        n_used = np.count_nonzero(dl)  # N; documents without tokens do not count for avgdl either
        avgdl = np.float32(dl.sum(dtype=np.int64) / max(1, n_used))
        self._idf = np.log(1 + (n_used - df + 0.5) / (df + 0.5)).astype(np.float32)
        inverse_norm = np.empty(len(ids), np.float32)  # 1 / norm: one division, as in Lucene
        if n_used:
            norm = K1 * ((1 - B) + B * lossy_length(dl).astype(np.float32) / avgdl)
            inverse_norm[rank] = 1 / norm
        self._denominator = 1 + tf.astype(np.float32) * inverse_norm[self._documents]

    def search(self, query: str, k: int) -> list[tuple[str, float]]:
        """[(id, score)] of the k best documents that share a term with the query, best first."""
        if k < 1:
            raise ValueError(f"k is {k}: ask for 1 document or more.")
        scores = np.zeros(len(self.ids))  # (documents,) float64
        for term, count in Counter(analyze(query, self._terms)).items():
            number = self._numbers.get(term)
            if number is None:
                continue
            postings = slice(self._starts[number], self._starts[number + 1])
            weight = np.float32(count) * self._idf[number]
            part = weight - weight / self._denominator[postings]  # float32
            scores[self._documents[postings]] += part
        found = np.flatnonzero(scores)
        scores = scores[found].astype(np.float32)
        if len(found) > k:
            # Sort only the candidates for the first k. Ties with the k-th are candidates, too:
            # the ids decide among them.
            keep = scores >= np.partition(scores, -k)[-k]
            found = found[keep]
            scores = scores[keep]
        best = np.argsort(-scores, kind="stable")[:k]
        return [(self.ids[found[i]], float(scores[i])) for i in best]


class LexicalRetriever:
    """BM25 over a corpus; passages that share no term with the query are not found."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        quiet = None if len(corpus) > 50_000 else True
        ids = [corpus[row]["id"] for row in tqdm(range(len(corpus)), "reading ids", disable=quiet)]
        self._rows = {id: row for row, id in enumerate(ids)}
        if len(self._rows) < len(ids):
            twice = next(id for row, id in enumerate(ids) if self._rows[id] != row)
            raise ValueError(f"{corpus.path} has the id {twice!r} twice: make the ids unique.")
        rows = tqdm(range(len(corpus)), "indexing passages", disable=quiet)
        self._index = BM25(ids, (corpus[row]["contents"] for row in rows))

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        found = []
        for query in queries:
            hits = []
            for id, score in self._index.search(query, k):
                hits.append({"document": self.corpus[self._rows[id]], "score": score})
            found.append(hits)
        return found
