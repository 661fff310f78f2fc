"""Passage retrieval: the interface, and the choice of a retriever.

Three retrievers; `open_retriever` returns one of the first two:

- for a URL: a client that sends the queries to a server (client.py);
- for a corpus: BM25 in this process, which needs no model (bm25.py, ranks like Lucene);
- behind our server (server.py), also dense vectors of a sentence encoder (dense.py).

Ours order hits with equal scores by id, as strings, so that the same query returns the same
passages in the same order on every machine.
"""

from pathlib import Path
from typing import Protocol, TypedDict

from paw_min.base.files import is_url


class Document(TypedDict):
    id: str
    contents: str  # '"Title"\ntext' in the published corpora


class Hit(TypedDict):
    """One search result, as Search-R1's servers send it."""

    document: Document
    score: float


class Retriever(Protocol):
    def search(self, queries: list[str], k: int) -> list[list[Hit] | None]:
        """At most k hits for each query, best first; None: a server has refused this query."""


def open_retriever(source: str | Path) -> Retriever:
    """The retriever for `source`: a URL, a corpus file, or a folder that contains corpus.jsonl."""
    # Imported on demand: each needs packages of its own.
    if is_url(source):
        from paw_min.retrieval.client import SearchClient

        return SearchClient(str(source))
    from paw_min.retrieval.bm25 import LexicalRetriever
    from paw_min.retrieval.corpus import Corpus

    return LexicalRetriever(Corpus(source))
