"""A retriever that queries a server over HTTP, and waits while it is silent or busy.

Two protocols are in use. Both POST to /retrieve; they differ in one key: Search-R1's server takes
{"queries": [..]}, verl-agent's takes {"query": ".."}, and ours (server.py) takes either. All answer
{"result": [[{"document": {"id", "contents"}, "score"}, ..] for each query]}. The client detects the
protocol at the start with a test query. A batch of searches is sent in requests of MAX_QUERIES
where the server takes lists, and in concurrent requests where it does not.

A failure that may pass is retried after 1, 2, 4 .. 30 seconds: no connection, no answer in
time, HTTP 408, 425, 429 or 5xx. After `patience` seconds, `UserError` ends the run; the same
command resumes it from its last checkpoint. At the start, the address may be wrong: unless the
server is silent or busy, as while it loads, it gets START seconds. All else, such as the answer of
another kind of server, is an error at once.

The loop is not urllib3's `Retry`: that counts attempts, of a second or of two minutes alike, reads
the body of a 503 for as long as it drips, and repeats no answer that breaks off while it is read.
"""

import json
import logging
import math
import time
from typing import NamedTuple
from urllib.parse import unquote

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, ReadTimeoutError

from paw_min.base.errors import UserError, masked
from paw_min.base.threads import in_daemon
from paw_min.retrieval import Hit

# A request has to be answered within `timeout`, even by a server on a CPU. The preset `paper` has
# up to 1,280 searches at once: if a server cannot answer them in time, no retry helps.
MAX_QUERIES = 64
THREADS = 32  # concurrent requests, for servers that take one query each
START = 20.0  # seconds; our server opens its port before it loads
FIRST_WAIT = 1.0  # seconds between two attempts, doubled each time ..
LONGEST_WAIT = 30.0  # .. up to this
CHUNK = 1 << 20  # bytes of an answer that are read at once
MAX_BYTES = 1 << 28  # one answer's; 20,000 passages of 100 words are 12 MB
log = logging.getLogger(__name__)


class Reply(NamedTuple):
    status: int
    body: bytes
    location: str  # where it redirects to, or ""


class Address(NamedTuple):
    url: str
    headers: dict[str, str]


def without_password(url: str) -> Address:
    """A URL without its name and password, which are in the headers instead."""
    parts = urllib3.util.parse_url(url)
    # make_headers encodes in Latin-1, which gives back the bytes in the URL.
    auth = unquote(parts.auth, "latin-1") if parts.auth else None
    return Address(parts._replace(auth=None).url, dict(urllib3.make_headers(basic_auth=auth)))


class SearchClient:
    """The retriever at a URL, with or without the path /retrieve.

    url: may contain a name and a password, http://NAME:PASSWORD@HOST; messages show ***@HOST.
    timeout: seconds for one complete answer, which may be to a batch of queries.
    patience: seconds that a silent or busy server gets to come back.
    """

    def __init__(self, url: str, timeout: float = 120.0, patience: float = 600.0):
        try:
            parts = urllib3.util.parse_url(url.rstrip("/").removesuffix("/retrieve"))
        except LocationParseError:  # A port above 65535 raises it.
            parts = urllib3.util.Url()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise UserError(
                f"{masked(url)!r} is not the address of a server: give http://HOST:PORT or "
                "https://HOST:PORT."
            )
        self.url = masked(f"{parts.url}/retrieve")  # what messages show
        self.timeout = timeout
        self.patience = patience
        address, headers = without_password(parts.url)
        headers |= {"Content-Type": "application/json"}
        self._address = f"{address}/retrieve"
        # No proxy, not even one that the environment names: it would not find a local server.
        self._http = urllib3.PoolManager(
            maxsize=THREADS, headers=headers, retries=False, timeout=timeout
        )
        self.protocol = ""  # "queries" or "query", once it is known
        protocol = "queries"
        reply = self._ask("queries", ["paw"], 1)
        if reply.status == 422:  # FastAPI's status for a missing key
            protocol = "query"
            reply = self._ask("query", "paw", 1)
        self._hits(reply, n=1, k=1)
        self.protocol = protocol

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if self.protocol == "queries":
            found = []
            for start in range(0, len(queries), MAX_QUERIES):
                part = queries[start : start + MAX_QUERIES]
                found += self._hits(self._ask("queries", part, k), len(part), k)
            return found

        def search_each(part: list[str]) -> list[list[Hit]]:
            return [self._hits(self._ask("query", query, k), 1, k)[0] for query in part]

        # Thread n asks queries n, n + threads, n + 2 threads, ...
        threads = min(THREADS, len(queries))
        calls = [in_daemon(search_each, queries[n::threads]) for n in range(threads)]
        found = [[]] * len(queries)
        for n, call in enumerate(calls):
            found[n::threads] = call.result()
        return found

    def _ask(self, key: str, asked: str | list[str], k: int) -> Reply:
        """The answer to a search; repeats it for `patience` seconds while a failure may pass."""
        body = json.dumps({key: asked, "topk": k, "return_scores": True}).encode()
        start = time.monotonic()
        wait = FIRST_WAIT
        while True:
            try:
                reply = self._send(body)
                if reply.status < 500 and reply.status not in (408, 425, 429):
                    return reply
                reason = f"HTTP {reply.status}: {_excerpt(reply)}"
                loading = reply.status in (429, 503)
            except HTTPError as error:
                reason = " ".join(str(error).split())[:200]
                loading = isinstance(error, ReadTimeoutError)
            patience = self.patience if self.protocol or loading else START
            if time.monotonic() + wait > start + patience:
                raise UserError(
                    f"The retrieval server {self.url} was not available for {patience:g} s "
                    f"({reason}): correct the address, or start it (`python -m "
                    "paw_min.retrieval.server --help`) and wait until it has loaded; then rerun "
                    "the same command, which resumes from its last checkpoint."
                )
            log.warning("retrieval server %s: %s; next attempt in %g s", self.url, reason, wait)
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _send(self, body: bytes) -> Reply:
        """The complete answer to one request; HTTPError for one without an end."""
        deadline = time.monotonic() + self.timeout
        content = bytearray()
        with self._http.request(
            "POST", self._address, body=body, redirect=False, preload_content=False
        ) as answer:
            # urllib3's timeout is for each read: without the deadline, an answer of one byte per
            # second would never end. read1 returns what has arrived, and decompresses nothing.
            while part := answer.read1(CHUNK, decode_content=False):
                content += part
                if len(content) > MAX_BYTES or time.monotonic() > deadline:
                    raise HTTPError(f"no end of the answer within {self.timeout:g} s")
        return Reply(answer.status, bytes(content), answer.headers.get("Location", ""))

    def _hits(self, reply: Reply, n: int, k: int) -> list[list[Hit]]:
        """The hits of n queries: the first k of each, if a server ignores topk."""
        if reply.status != 200:  # a redirect too: a redirected POST becomes a GET
            raise UserError(
                f"The server {self.url} answers HTTP {reply.status} ({_excerpt(reply)}): look at "
                "its log, or give the address of a retrieval server."
            )
        try:
            found = json.loads(reply.body)["result"]
            result = [[_hit(entry) for entry in hits[:k]] for hits in found]
            if len(result) != n:
                raise ValueError(f"{len(result)} results for {n} queries")
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(
                f"The answer of {self.url} is not a retrieval server's ({type(error).__name__}: "
                f"{_excerpt(reply)}): give the address of a server with Search-R1's or "
                "verl-agent's protocol."
            ) from error
        return result


def _hit(entry: dict) -> Hit:
    """An entry of an answer, reduced to the keys of `Hit`; any error if it is malformed."""
    document = entry["document"]
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError("`contents` is not a text")
    contents.encode()  # raises UnicodeEncodeError for half of a surrogate pair
    score = float(entry["score"])
    if not math.isfinite(score):
        raise ValueError(f"the score {score}")
    return {"document": {"id": str(document.get("id", "")), "contents": contents}, "score": score}


def _excerpt(reply: Reply) -> str:
    """Where a reply redirects to, or the beginning of its text."""
    text = masked(reply.location) or " ".join(reply.body[:1000].decode(errors="replace").split())
    return repr(text if len(text) <= 100 else text[:100] + " ...")
