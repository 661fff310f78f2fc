"""Retrievers: from queries to passages, in this process or on a server.

What: objects with one method,
    search(queries: list[str], k: int) -> for each query a list of at most k hits, best first
where a hit is {"document": {"id": str, "contents": str}, "score": float}: what the servers of
Search-R1 and verl-agent send. `open_retriever` decides which one it is:

- a URL: envs/search_client.py asks a server;
- a corpus alone: BM25 in this process, which needs no model (envs/bm25.py, ranks as Lucene);
- a corpus and an encoder: vectors in this process (envs/dense.py).

A corpus is a jsonl file with a line {"id": "0", "contents": "\\"Title\\"\\ntext"} per passage, as
wiki-18 is published. Hits of equal score come in the order of their ids (as strings), so that the
same query finds the same passages in the same order wherever it is asked.
"""

import hashlib
import json
import mmap
from pathlib import Path

import numpy as np
from tqdm import tqdm

from paw_min.envs.bm25 import BM25

CHUNK = 1 << 24  # bytes read at once
FORMAT = 'a line {"id": "0", "contents": "\\"Title\\"\\ntext"} per passage'


def open_retriever(source: str | Path, encoder: str = "", **dense_settings):
    """The retriever behind `source`: a URL, or a corpus file or the folder of a corpus.jsonl.

    encoder: folder or hub name of a sentence encoder; "": BM25. dense_settings: see dense.Dense.
    """
    if str(source).startswith(("http://", "https://")):
        from paw_min.envs.search_client import SearchClient

        return SearchClient(str(source))
    corpus = Corpus(source)
    if encoder:
        from paw_min.envs.dense import Dense  # imports torch and transformers

        return Dense(corpus, encoder, **dense_settings)
    return LexicalRetriever(corpus)


class Corpus:
    """Passages of a jsonl file, read when they are asked for.

    In memory are two numbers for each line; the text stays on disk, mapped. wiki-18 (21 million
    passages, 14 GB) takes 0.34 GB so, where a list of its passages would take tens.
    """

    def __init__(self, path: str | Path):
        path = Path(path).expanduser()
        self.path = path / "corpus.jsonl" if path.is_dir() else path
        if not self.path.is_file():
            raise FileNotFoundError(f"The corpus {self.path} does not exist: give a jsonl file "
                                    f"with {FORMAT}, or the folder of a corpus.jsonl.")
        newlines, size = [], self.path.stat().st_size
        for start, chunk in self._chunks("reading lines of"):
            newlines.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + start)
        ends = np.concatenate([*newlines, [size]])
        starts = np.concatenate([[0], ends[:-1] + 1])
        filled = ends - starts > 1  # neither an empty line nor "\r"
        self._starts, self._ends = starts[filled], ends[filled]
        if not len(self):
            raise ValueError(f"The corpus {self.path} is empty: it needs {FORMAT}.")
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self[0]  # a file of another kind shows at once

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> dict:
        """{"id", "contents"} of a row; rows count from 0, empty lines left out."""
        line = self._map[self._starts[row]:self._ends[row]]
        try:
            passage = json.loads(line)
            return {"id": str(passage["id"]), "contents": passage["contents"] + ""}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}, passage {row + 1} cannot be read "
                             f"({type(error).__name__}: {error}): it needs {FORMAT}.") from error

    def fingerprint(self) -> str:
        """Of all bytes: a corpus that has changed has other vectors."""
        digest = hashlib.blake2b(digest_size=8)
        for _, chunk in self._chunks("checking"):
            digest.update(chunk)
        return digest.hexdigest()

    def _chunks(self, label: str):
        """(position, bytes) of one chunk after another; large files show a progress bar."""
        size, position = self.path.stat().st_size, 0
        with self.path.open("rb") as file, tqdm(
            total=size, desc=f"{label} {self.path.name}", unit="B", unit_scale=True,
            disable=None if size > 16 * CHUNK else True,
        ) as bar:  # fmt: skip
            while chunk := file.read(CHUNK):
                yield position, chunk
                position += len(chunk)
                bar.update(len(chunk))


def hits_in_order(corpus: Corpus, rows, scores, k: int) -> list[dict]:
    """The k best of some rows as hits: by falling score, then by id."""
    hits = [{"document": corpus[int(row)], "score": float(score)}
            for row, score in zip(rows, scores)]
    return sorted(hits, key=lambda hit: (-hit["score"], hit["document"]["id"]))[:k]


class LexicalRetriever:
    """BM25 over the contents; passages that share no word with the query are not found."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        quiet = None if len(corpus) > 50_000 else True
        ids = [corpus[row]["id"] for row in tqdm(range(len(corpus)), "reading ids", disable=quiet)]
        self._rows = {id: row for row, id in enumerate(ids)}
        if len(self._rows) < len(ids):
            twice = next(id for row, id in enumerate(ids) if self._rows[id] != row)
            raise ValueError(f"{corpus.path} has the id {twice!r} twice: give each passage its "
                             "own.")
        rows = tqdm(range(len(corpus)), "indexing passages", disable=quiet)
        self._index = BM25(ids, (corpus[row]["contents"] for row in rows))

    def search(self, queries: list[str], k: int) -> list[list[dict]]:
        return [
            [{"document": self.corpus[self._rows[id]], "score": float(score)}
             for id, score in self._index.search(query, k)]
            for query in queries
        ]  # fmt: skip
