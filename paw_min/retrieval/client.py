"""A retriever that asks a server with Search-R1's protocol, over HTTP.

POST /retrieve takes {"queries": [..], "topk": k, "return_scores": true} and answers {"result":
[[{"document": {"id", "contents"}, "score"}, ..] for each query]}. Our server (server.py) does, and
so do all of Search-R1, whose online search has neither ids nor scores nor topk, and whose documents
are texts after reranking.

After a request that fails, for whatever reason, the client waits until the server answers a test
query, and then asks the queries in halves, a single one once more:

- A server that is busy or restarts delays the run. After `patience` seconds without an answer,
  `UserError` ends it. The same command resumes it from its last checkpoint. At the start, where the
  address may be wrong, that is START, unless the server accepts the request and is silent.
- A query that the server refuses, such as an empty one, which a server may answer with HTTP 400 or
  500, uses up its turn: its hits are None.
"""

import logging
import time
from urllib.parse import urlsplit

import requests

from paw_min.base.errors import UserError, masked
from paw_min.retrieval.interface import Hit

# A request has to be answered within `timeout`, even by a server on a CPU. The preset `paper` has
# up to 1,280 searches at once.
MAX_QUERIES = 64
START = 20.0  # seconds; our server opens its port before it loads
FIRST_WAIT = 1.0  # seconds between two tries, doubled each time ..
LONGEST_WAIT = 30.0  # .. up to this
BUSY = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that may pass
log = logging.getLogger(__name__)


class BadAnswer(Exception):
    """A request that brought no hits; the text says what came in their place."""

    def __init__(self, reason: str, may_pass: bool = False):
        super().__init__(reason)
        self.may_pass = may_pass


class SearchClient:
    """The retriever at a URL, with or without the path /retrieve.

    url: may contain a name and a password, http://NAME:PASSWORD@HOST; messages show ***@HOST.
    timeout: seconds that the server may take for an answer.
    patience: seconds that a silent or busy server gets to come back.
    """

    def __init__(self, url: str, timeout: float = 120.0, patience: float = 600.0):
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port above 65535, half of an IPv6 address
            is_address = False
        if not is_address:
            raise UserError(
                f"{masked(url)!r} is not the address of a server: give http://HOST:PORT or "
                "https://HOST:PORT."
            )
        self._address = f"{url.rstrip('/').removesuffix('/retrieve')}/retrieve"
        self.url = masked(self._address)  # what messages show
        self.timeout = timeout
        self.patience = patience
        self._http = requests.Session()
        # No proxy, not even one that the environment names: it would not find a local server.
        self._http.trust_env = False
        self._await_server(START)

    def search(self, queries: list[str], k: int) -> list[list[Hit] | None]:
        found = []
        for start in range(0, len(queries), MAX_QUERIES):
            found += self._search(queries[start : start + MAX_QUERIES], k)
        return found

    def _search(self, queries: list[str], k: int) -> list[list[Hit] | None]:
        try:
            return self._ask(queries, k, self.timeout)
        except BadAnswer as error:
            log.info("retrieval server %s: %s; asking again", self.url, error)
        self._await_server(self.patience)
        if len(queries) > 1:
            middle = len(queries) // 2
            return self._search(queries[:middle], k) + self._search(queries[middle:], k)
        try:
            return self._ask(queries, k, self.timeout)
        except BadAnswer as error:
            log.warning("retrieval server %s: %s to the query %.100r, which finds nothing",
                        self.url, error, queries[0])
            return [None]

    def _await_server(self, patience: float) -> None:
        """Ask a test query until the server answers; UserError after `patience` seconds."""
        start = time.monotonic()
        wait = FIRST_WAIT
        while True:
            try:
                # A server that loads may be silent for minutes.
                self._ask(["paw"], 1, timeout=self.patience)
                return
            except BadAnswer as error:
                reason = error
            if not reason.may_pass:
                raise UserError(
                    f"The answer of {self.url} is not a retrieval server's ({reason}): look at its "
                    "log, or give the address of a server with Search-R1's protocol."
                )
            if time.monotonic() + wait > start + patience:
                raise UserError(
                    f"The retrieval server {self.url} was not available for {patience:g} s "
                    f"({reason}): correct the address, or start it (`python -m "
                    "paw_min.retrieval.server --help`) and wait until it has loaded; then rerun "
                    "the same command, which resumes from its last checkpoint."
                )
            log.warning("retrieval server %s: %s; next try in %g s", self.url, reason, wait)
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _ask(self, queries: list[str], k: int, timeout: float) -> list[list[Hit]]:
        """The hits: the first k of each query, if a server ignores topk. Else BadAnswer."""
        body = {"queries": queries, "topk": k, "return_scores": True}
        try:
            # A redirected POST would become a GET.
            answer = self._http.post(
                self._address, json=body, timeout=timeout, allow_redirects=False
            )
        except requests.RequestException as error:
            # The innermost cause, such as "[Errno 111] Connection refused".
            cause = masked(" ".join(str(error).split()).rpartition(": ")[2])
            reason = f"{type(error).__name__}, {cause[:200]}".rstrip("\"')")
            raise BadAnswer(reason, may_pass=True) from None
        if answer.status_code != 200:
            raise BadAnswer(_excerpt(answer), may_pass=answer.status_code in BUSY)
        try:
            found = [[_hit(entry) for entry in hits[:k]] for hits in answer.json()["result"]]
            if len(found) != len(queries):
                raise ValueError(f"{len(found)} results for {len(queries)} queries")
        except Exception as error:  # whatever another program has sent
            raise BadAnswer(f"{type(error).__name__}, {_excerpt(answer)}") from error
        return found


def _hit(entry: dict) -> Hit:
    """An entry of an answer, reduced to the keys of `Hit`; any error if it is malformed."""
    document = entry["document"]
    if isinstance(document, str):  # Search-R1's reranking server
        document = {"contents": document}
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError("`contents` is not a text")
    contents.encode()  # raises UnicodeEncodeError for half of a surrogate pair
    # The score is not used: the order is the server's.
    return {
        "document": {"id": str(document.get("id", "")), "contents": contents},
        "score": entry.get("score", 0.0),
    }


def _excerpt(answer: requests.Response) -> str:
    """The status, and where the answer redirects to, or the beginning of its text."""
    text = masked(answer.headers.get("Location", ""))
    text = text or " ".join(answer.content[:1000].decode(errors="replace").split())
    return f"HTTP {answer.status_code}: {text[:100]!r}"
