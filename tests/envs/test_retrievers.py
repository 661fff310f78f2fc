"""Retrievers in this process: the corpus file, vectors, FAISS.

The encoder is a random one; test_rwml.py uses all-MiniLM-L6-v2.
"""

import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from paw_min.retrieval import corpus as corpus_module
from paw_min.retrieval import dense
from paw_min.retrieval.corpus import Corpus
from paw_min.retrieval.dense import Dense, Encoder
from tests.retrieval import WORDS, make_encoder, write_corpus


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> str:
    return make_encoder(tmp_path_factory.mktemp("encoders") / "random")


@pytest.fixture
def letters(tmp_path):
    """60 passages of random letters, all different."""
    rng = np.random.default_rng(0)
    texts = {" ".join(rng.choice(list("abcdefgh"), rng.integers(3, 9))) for _ in range(70)}
    return Corpus(write_corpus(tmp_path / "letters.jsonl", sorted(texts)[:60]))


@pytest.fixture
def vectors(letters, encoder) -> np.ndarray:
    """Of the passages, in their order."""
    return Encoder(encoder).passages([letters[row]["contents"] for row in range(60)])


def ids(hits) -> list[str]:
    return [hit["document"]["id"] for hit in hits]


# ---- the corpus file ----

@pytest.mark.parametrize("content, chunk", [
    ('{"id": "0", "contents": "a"}\n{"id": 1, "contents": "b\\nc"}', 1 << 24),  # no final newline
    ('{"id": "0", "contents": "a"}\r\n\r\n\n{"id": 1, "contents": "b\\nc"}\r\n\n', 1),
])
def test_corpus_lines(tmp_path, monkeypatch, content, chunk):
    monkeypatch.setattr(corpus_module, "CHUNK", chunk)
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content.encode())
    corpus = Corpus(tmp_path)  # finds the file in the folder
    assert [corpus[row] for row in range(len(corpus))] == [
        {"id": "0", "contents": "a"}, {"id": "1", "contents": "b\nc"}]


# ---- vectors ----

def by_hand(folder, text) -> np.ndarray:
    """The vector of one text, token by token and without a batch."""
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    tokens = ["[CLS]", *text.replace(":", " :").split(), "[SEP]"]
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(torch.tensor([[vocabulary[token] for token in tokens]])).last_hidden_state
    total = sum(states[0, t].numpy().astype(np.float64) for t in range(len(tokens)))
    return total / np.linalg.norm(total)


def test_encoder_pools_over_the_tokens_alone(encoder):
    texts = ["a b c", "d", "e f g h a b"]  # different lengths, hence padding
    vectors = Encoder(encoder).queries(texts)
    assert vectors.shape == (3, 16) and vectors.dtype == np.float32
    for text, vector in zip(texts, vectors):
        np.testing.assert_allclose(vector, by_hand(encoder, f"query: {text}"), atol=1e-6)
    (passage,) = Encoder(encoder).passages(["a b"])
    np.testing.assert_allclose(passage, by_hand(encoder, "passage: a b"), atol=1e-6)
    short = Encoder(encoder, "", "", max_tokens=5)  # three letters between [CLS] and [SEP]
    np.testing.assert_array_equal(*short.queries(["a b c d e", "a b c h"]))


def test_an_encoder_without_a_weight_is_refused(tmp_path):
    """transformers fills it with random numbers; the pooler's are not used."""
    folder = make_encoder(tmp_path / "encoder")
    weights = load_file(f"{folder}/model.safetensors")
    weights.pop("pooler.dense.weight")
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    Encoder(folder)
    weights.pop("encoder.layer.0.output.dense.bias")
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="its files have no weights for encoder.layer.0.output"):
        Encoder(folder)


def test_a_missing_package_is_named(monkeypatch, encoder):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match="needs a package: `pip install .sentence-transformers"):
        Encoder(encoder)


def test_dense_search_is_exact_and_ties_go_by_id(letters, encoder, vectors, monkeypatch, tmp_path):
    queries = ["a b c", "h", "d d e", "g f", "a"]
    monkeypatch.setattr(dense, "PART", 7)
    retriever = Dense(letters, encoder)
    found = retriever.search(queries, 7)
    for query, hits in zip(Encoder(encoder).queries(queries), found):
        scored = [(-round(float(vector @ query), 5), letters[row]["id"])
                  for row, vector in enumerate(vectors)]
        assert ids(hits) == [id for _, id in sorted(scored)[:7]]
    assert found[0][0]["document"] == letters[int(found[0][0]["document"]["id"])]
    assert -1 <= found[0][6]["score"] <= found[0][0]["score"] <= 1
    assert len(retriever.search(["a"], 100)[0]) == 60  # more than there are
    assert retriever.search([], 7) == []
    path = write_corpus(tmp_path / "c.jsonl", ["a b"] * 5 + ["h"], ["5", "3", "10", "2", "1", "9"])
    found = Dense(Corpus(path), encoder).search(["passage: a b", "h"], 3)
    assert ids(found[0]) == ["1", "10", "2"]


# ---- ready FAISS files ----


def write_index(path, index, vectors) -> str:
    index.add(vectors)
    faiss.write_index(index, str(path))
    return str(path)


def test_a_ready_index(letters, encoder, vectors, tmp_path):
    expected = Dense(letters, encoder).search(["a b", "h g"], 5)
    for index in (faiss.IndexFlatIP(16), faiss.IndexHNSWFlat(16, 32, faiss.METRIC_INNER_PRODUCT)):
        path = write_index(tmp_path / "x.index", index, vectors)
        assert Dense(letters, encoder, path).search(["a b", "h g"], 5) == expected


def test_an_approximate_index_may_miss_half_of_the_passages(
    letters, encoder, vectors, tmp_path, monkeypatch
):
    monkeypatch.setattr(dense, "SAMPLE", 60)
    for found in (30, 29):
        changed = np.concatenate([vectors[:found], -vectors[found:]])  # these find others
        path = write_index(tmp_path / f"{found}.index", faiss.IndexFlatIP(16), changed)
        if found == 30:
            assert len(Dense(letters, encoder, path).search(["a b"], 5)[0]) == 5
        else:
            with pytest.raises(ValueError, match="29 of 60 find themselves"):
                Dense(letters, encoder, path)


class OwnIds(faiss.IndexIDMap):
    def add(self, vectors):
        self.add_with_ids(vectors, np.arange(1000, 1060))


FLAT = faiss.IndexFlatIP
BAD_INDICES = {
    "of 59 vectors": (FLAT, lambda vectors: vectors[:59]),
    "of 15 numbers": (lambda width: FLAT(15), lambda vectors: vectors[:, :15].copy()),
    "other distance": (faiss.IndexFlatL2, np.copy),
    "other order": (FLAT, lambda vectors: np.roll(vectors, 7, axis=0)),
    "other encoder": (FLAT, lambda vectors: vectors[:, ::-1].copy()),
    "other ids": (lambda width: OwnIds(FLAT(width)), np.copy),
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_an_index_of_something_else_is_refused(letters, encoder, vectors, tmp_path, name):
    make, change = BAD_INDICES[name]
    path = write_index(tmp_path / "x.index", make(16), change(vectors))
    with pytest.raises(ValueError, match="x.index is not of this corpus and encoder: it has [56]"):
        Dense(letters, encoder, path)
    Path(path).write_bytes(b"Ix")
    with pytest.raises(ValueError, match="x.index cannot be read .*joined with `cat`"):
        Dense(letters, encoder, path)
