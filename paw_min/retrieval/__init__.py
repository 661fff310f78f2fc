"""Passage retrieval: the choice of a retriever.

Three retrievers; `open_retriever` returns one of the first two:

- for a URL: a client that sends the queries to a server (client.py);
- for a corpus: BM25 in this process, which needs no model (bm25.py, ranks like Lucene);
- behind our server (server.py), also dense vectors of a sentence encoder (dense.py).

Ours order hits with equal scores by id, as strings, so that the same query returns the same
passages in the same order on every machine.
"""

from pathlib import Path

from paw_min.base.files import is_url
from paw_min.retrieval.interface import Retriever


def open_retriever(source: str | Path) -> Retriever:
    """The retriever for `source`: a URL, a corpus file, or a folder that contains corpus.jsonl."""
    # Imported on demand: each needs packages of its own.
    if is_url(source):
        from paw_min.retrieval.client import SearchClient

        return SearchClient(str(source))
    from paw_min.retrieval.bm25 import LexicalRetriever
    from paw_min.retrieval.corpus import Corpus

    return LexicalRetriever(Corpus(source))
