"""Dense retrieval: passages and queries as vectors, ranked by inner product.

Source: E5 as Search-R1 uses it (the paper's setting is intfloat/e5-base-v2 over wiki-18): the mean
of the last hidden states over the tokens, scaled to length 1, at most 256 tokens, and a prefix that
tells queries from passages ("query: ", "passage: "; use "" for encoders without prefixes).

sentence-transformers computes the vectors, with the pooling that a model's folder publishes: E5 the
mean, bge the first token, Qwen3-Embedding the last one, which alone has read the whole text. A
folder of transformers, which publishes none, gets the mean, and that of a chat model the last one.

Search is exact, by numpy, on vectors that are computed at the start. For a large corpus, a ready
FAISS index, as published for wiki-18, takes their place, after a check that passages of the corpus
find themselves: of another order or encoder, it would answer with wrong passages in silence.

Memory: 4 bytes per dimension and passage. 100,000 passages of E5 (768 dimensions) take 0.3 GB, the
21 million of wiki-18 64.6 GB (computed from the sizes of the published files, not measured).
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from paw_min.base.errors import masked
from paw_min.base.files import damaged, reason_of
from paw_min.base.hub import look_on_hub
from paw_min.retrieval import Hit
from paw_min.retrieval.corpus import Corpus

DIGITS = 5  # digits of a score; equal texts may differ by 1e-7, depending on their batch
SAMPLE = 16  # passages that must find themselves in a ready index
BATCH = 64  # texts per forward pass
BLOCK = 64  # queries per matrix product: 26 MB of scores for 100,000 passages


class Encoder:
    """A sentence encoder, with the pooling that its folder publishes.

    name: folder or hub name.
    """

    def __init__(
        self,
        name: str,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        max_tokens: int = 256,
        device: str = "cpu",
    ):
        self.query_prefix = query_prefix
        self.passage_prefix = passage_prefix
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError(
                'A sentence encoder needs a package: `pip install "sentence-transformers>=6,<7"`.'
            ) from error
        try:
            look_on_hub(name)
            on_gpu = torch.device(device).type == "cuda"
            self.model = SentenceTransformer(
                name,
                device=device,
                local_files_only=Path(name).exists(),
                # The published server has fp16 on a GPU, too.
                model_kwargs={"dtype": torch.float16 if on_gpu else torch.float32},
            )
            self._check_weights()
            self.model.max_seq_length = max_tokens
            self._encode("", ["a"])  # a model of another kind loads, but cannot do this
        except Exception as error:  # noqa: BLE001 - the libraries raise many types
            raise ValueError(masked(
                f"The encoder {name!r} cannot be loaded ({reason_of(error)}): give the "
                "folder or hub name of a sentence encoder, and a device of this machine."
            )) from error
        self.width = self.model.get_embedding_dimension()  # D

    def _check_weights(self) -> None:
        """transformers fills missing weights with random numbers. The pooler is not used."""
        for weight, values in self.model.transformers_model.named_parameters():
            # transformers marks what it has loaded.
            if not hasattr(values, "_is_hf_initialized") and not weight.startswith("pooler"):
                raise ValueError(f"its files have no weights for {weight}")

    def queries(self, texts: list[str]) -> np.ndarray:
        """(N, D) float32, rows of length 1."""
        return self._encode(self.query_prefix, texts)

    def passages(self, texts: Iterable[str], n: int) -> np.ndarray:
        """(n, D) float32, rows of length 1. The n texts are read in parts, to save memory."""
        vectors = np.empty((n, self.width), np.float32)
        texts = iter(texts)
        row = 0
        with tqdm(total=n, desc="encoding passages", unit="passage", disable=None) as bar:
            while part := list(islice(texts, 16 * BATCH)):
                vectors[row : row + len(part)] = self._encode(self.passage_prefix, part)
                row += len(part)
                bar.update(len(part))
        return vectors

    def _encode(self, prefix: str, texts: list[str]) -> np.ndarray:
        """(N, D) float32, rows of length 1."""
        vectors = self.model.encode(
            texts, prompt=prefix, batch_size=BATCH, show_progress_bar=False
        ).astype(np.float32)  # (N, D)
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


class Dense:
    """A retriever that returns the passages with the largest inner product.

    encoder: folder or hub name. index: a FAISS file of the corpus's passages, in its order; "":
    compute the vectors. settings: see `Encoder`.
    """

    def __init__(self, corpus: Corpus, encoder: str, index: str = "", **settings):
        self.corpus = corpus
        self.encoder = Encoder(encoder, **settings)
        self._index = None
        if index:
            self._index = _read_index(Path(index), len(corpus), self.encoder)
            self._check_index(index)
        else:
            texts = (corpus[row]["contents"] for row in range(len(corpus)))
            self._vectors = self.encoder.passages(texts, len(corpus))  # (N, D)

    def _check_index(self, path: str) -> None:
        """ValueError unless passages of the corpus find themselves; prints what limits a search."""
        n = min(SAMPLE, len(self.corpus))
        texts = [self.corpus[i * len(self.corpus) // n]["contents"] for i in range(n)]
        vectors = self.encoder.passages(texts, n)  # (n, D)
        hits = 0
        for text, (rows, _) in zip(texts, self._nearest(vectors, 2)):
            # Compare texts: a passage may be there twice, and an index may have ids of its own.
            near = [self.corpus[int(row)]["contents"] for row in rows if row < len(self.corpus)]
            hits += text in near
        # An approximate index may miss some of them. Another encoder or order finds about none.
        if 2 * hits < n:
            raise ValueError(
                f"The index {path} is not of this corpus and encoder: of {n} passages, {hits} find "
                "themselves. Give one that this encoder made from this corpus, in its order."
            )
        print(f"index: {hits} of {n} passages find themselves", flush=True)
        import faiss

        # A passage finds itself even where a search reads one list of many.
        ivf = faiss.try_extract_index_ivf(self._index)
        if ivf and ivf.nprobe < ivf.nlist:
            print(f"index: a search reads nprobe = {ivf.nprobe} of {ivf.nlist} lists, and misses "
                  "passages in the others: raise nprobe if it is far too low", flush=True)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        vectors = self.encoder.queries(queries)  # (Q, D)
        k = min(k, len(self.corpus))
        found = []
        for start in range(0, len(queries), BLOCK):
            for rows, scores in self._nearest(vectors[start : start + BLOCK], k):
                hits = []
                for row, score in zip(rows, np.round(scores, DIGITS), strict=True):
                    hits.append({"document": self.corpus[int(row)], "score": float(score)})
                # Best score first, equal scores by id.
                hits.sort(key=lambda hit: (-hit["score"], hit["document"]["id"]))
                found.append(hits[:k])
        return found

    def _nearest(self, vectors: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, scores) for each query: its k best passages and possibly more, unsorted."""
        if self._index is not None:
            scores, rows = self._index.search(vectors, min(2 * k, len(self.corpus)))  # (Q, 2k)
            for row, score in zip(rows, scores):
                yield row[row >= 0], score[row >= 0]  # -1: an approximate index found fewer
            return
        for scores in vectors @ self._vectors.T:  # (N,)
            lowest = np.partition(scores, -k)[-k]
            # Include all that may equal the k-th after rounding: the ids decide among them.
            rows = np.flatnonzero(scores >= lowest - 2 * 10.0**-DIGITS)
            yield rows, scores[rows]


def _read_index(path: Path, n: int, encoder: Encoder):
    """Read a FAISS index file into memory, and check that it fits."""
    try:
        import faiss
    except ImportError as error:
        raise ValueError("A ready index needs FAISS: `pip install faiss-cpu`.") from error
    print(f"reading {path}: {path.stat().st_size / 1e9:.1f} GB, kept in memory", flush=True)
    with damaged(f"The index {path}", "check that it is complete, its parts joined with `cat`"):
        index = faiss.read_index(str(path))
    if (index.ntotal, index.d) != (n, encoder.width):
        raise ValueError(
            f"The index {path} holds {index.ntotal:,} vectors of {index.d} numbers, but the corpus "
            f"has {n:,} passages and the encoder's vectors have {encoder.width}: give an index "
            "that was built from both."
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"The index {path} does not rank by inner product: give one that does.")
    return index
