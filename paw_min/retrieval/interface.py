"""What a retriever is: it takes queries and returns passages."""

from typing import Protocol, TypedDict


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
