"""Dense retrieval: passages and queries as vectors, ranked by inner product.

Source: E5 as Search-R1 uses it (the paper's setting is intfloat/e5-base-v2 over wiki-18): the mean
of the last hidden states over the tokens, scaled to length 1, at most 256 tokens, and a prefix that
tells queries from passages ("query: ", "passage: "; use "" for encoders without prefixes).

sentence-transformers computes the vectors, with the pooling that a model's folder publishes: E5 the
mean, bge the first token, Qwen3-Embedding the last one, which alone has read the whole text. A
folder of transformers, which publishes none, gets the mean, and that of a chat model the last one.

FAISS searches: an exact index of vectors that are computed at the start, or a ready index, as
published for wiki-18, after a check that passages of the corpus find themselves: an index of
another order or encoder would give wrong passages without an error.

Memory: 4 bytes per dimension and passage. 100,000 passages of E5 (768 dimensions) take 0.3 GB, the
21 million of wiki-18 64.6 GB (computed from the sizes of the published files, not measured).
"""

from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from paw_min.base.errors import masked
from paw_min.base.files import damaged, reason_of
from paw_min.base.hub import look_on_hub
from paw_min.retrieval.corpus import Corpus
from paw_min.retrieval.interface import Hit

DIGITS = 5  # digits of a score; equal texts may differ by 1e-7, depending on their batch
SAMPLE = 16  # passages that must find themselves in a ready index
BATCH = 64  # texts per forward pass
PART = 1024  # passages that are encoded at once, to save memory
PACKAGES = 'pip install "sentence-transformers>=6,<7" faiss-cpu'


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
            raise ValueError(f"A sentence encoder needs a package: `{PACKAGES}`.") from error
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
        except Exception as error:  # each library has errors of its own
            raise ValueError(masked(
                f"The encoder {name!r} cannot be loaded ({reason_of(error)}): give the "
                "folder or hub name of a sentence encoder, and a device of this machine."
            )) from error

    def _check_weights(self) -> None:
        """transformers fills missing weights with random numbers. The pooler is not used."""
        for weight, values in self.model.transformers_model.named_parameters():
            # transformers marks what it has loaded.
            if not hasattr(values, "_is_hf_initialized") and not weight.startswith("pooler"):
                raise ValueError(f"its files have no weights for {weight}")

    def queries(self, texts: list[str]) -> np.ndarray:
        """(N, D) float32, rows of length 1."""
        return self._encode(self.query_prefix, texts)

    def passages(self, texts: list[str]) -> np.ndarray:
        """(N, D) float32, rows of length 1."""
        return self._encode(self.passage_prefix, texts)

    def reads(self, texts: list[str]) -> list[bool]:
        """Whether it reads each text to its end: of a longer one, it sees the beginning."""
        whole = []
        for text in texts:
            ids = self.model.tokenizer(self.passage_prefix + text, verbose=False)["input_ids"]
            whole.append(len(ids) <= self.model.max_seq_length)
        return whole

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
        try:
            import faiss
        except ImportError as error:
            raise ValueError(f"Dense retrieval needs a package: `{PACKAGES}`.") from error
        if index:
            self._index = self._read(index)
            return
        self._index = faiss.IndexFlatIP(self.encoder.model.get_embedding_dimension())
        starts = range(0, len(corpus), PART)
        for start in tqdm(starts, "encoding passages", unit_scale=PART, disable=None):
            self._index.add(self._vectors(range(start, min(start + PART, len(corpus)))))

    def _vectors(self, rows: range) -> np.ndarray:
        """(len(rows), D): of passages of the corpus."""
        return self.encoder.passages([self.corpus[row]["contents"] for row in rows])

    def _read(self, path: str):
        """A FAISS file in memory; ValueError unless passages of the corpus find themselves."""
        import faiss

        with damaged(f"The index {path}", "check that it is complete, its parts joined with `cat`"):
            print(f"reading {path}: {Path(path).stat().st_size / 1e9:.1f} GB, kept in memory",
                  flush=True)
            index = faiss.read_index(path)
        rows = range(0, len(self.corpus), -(-len(self.corpus) // SAMPLE))
        vectors = self._vectors(rows)  # (n, D)
        hits = 0
        fits = (index.ntotal, index.d) == (len(self.corpus), vectors.shape[1])
        if fits and index.metric_type == faiss.METRIC_INNER_PRODUCT:
            for row, (_, near) in zip(rows, zip(*index.search(vectors, min(2, index.ntotal)))):
                # Compare texts: a passage may be there twice, and an index may have own ids.
                texts = [self.corpus[int(n)]["contents"] for n in near if n < len(self.corpus)]
                hits += self.corpus[row]["contents"] in texts
        # An approximate index may miss some of them. Another encoder or order finds about none.
        if 2 * hits < len(rows):
            raise ValueError(
                f"The index {path} is not of this corpus and encoder: it has {index.ntotal:,} "
                f"vectors of {index.d} numbers, the corpus {len(self.corpus):,} passages, and "
                f"{hits} of {len(rows)} find themselves. Give one for the inner product that this "
                "encoder made from this corpus, in its order."
            )
        return index

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        # Further ones may equal the k-th after rounding: the ids decide among them.
        depth = min(2 * k, len(self.corpus))
        found = []
        for scores, rows in zip(*self._index.search(self.encoder.queries(queries), depth)):
            hits = []
            for row, score in zip(rows, np.round(scores.astype(float), DIGITS)):
                if row >= 0:  # -1: an approximate index found fewer
                    hits.append({"document": self.corpus[int(row)], "score": float(score)})
            hits.sort(key=lambda hit: (-hit["score"], hit["document"]["id"]))
            found.append(hits[:k])
        return found
