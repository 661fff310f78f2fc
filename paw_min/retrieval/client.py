"""A retriever that queries a server over HTTP, with retries.

Two protocols are in use. Both POST to /retrieve; they differ in one key: Search-R1's server takes
{"queries": [..]}, verl-agent's takes {"query": ".."}, and ours (server.py) takes either. All answer
{"result": [[{"document": {"id", "contents"}, "score"}, ..] for each query]}. The client detects the
protocol at the start with a test query. A batch of searches is one request where the server takes
lists, and concurrent requests where it does not.

Failures: at the start, an unusable server is an error in one sentence. During training, temporary
failures (no connection, no complete answer in time, HTTP 408, 425, 429 and 5xx) are retried after
1, 2, 4 .. 30 seconds, or later if the server asks for it (Retry-After), for `patience` seconds;
then `RetrieverError` ends the run, and the same command resumes it from its last checkpoint. A
server that is busy or loads is waited for at the start, too. Other failures are not retried.
Redirects are refused, because a redirected POST becomes a GET.

The loop is not urllib3's `Retry`: it counts attempts, which may take a second or two minutes each,
and reads the body of an answer without a limit of its size and time.
"""

import base64
import json
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urlsplit

import urllib3
from urllib3 import HTTPHeaderDict
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError
from urllib3.exceptions import TimeoutError as NoAnswer

from paw_min.base.errors import UserError, masked
from paw_min.retrieval import MAX_HITS, Hit

THREADS = 32  # concurrent requests, for servers that take one query each
FIRST_WAIT = 1.0  # seconds between two attempts, doubled each time ..
LONGEST_WAIT = 30.0  # .. up to this
CHUNK = 1 << 20  # bytes of an answer that are read at once
MAX_BYTES = 1 << 28  # of one answer; 20,000 passages of 100 words are 12 MB
TEMPORARY = (NoAnswer, ProtocolError)  # NewConnectionError is a NoAnswer
BUSY = (408, 425, 429, 503)  # our own server answers 503 while it loads
# What reading an answer of another kind raises; RecursionError: JSON that is nested too deep.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
START_IT = "start it (`python -m paw_min.retrieval.server --help`) or correct the address"
log = logging.getLogger(__name__)


class RetrieverError(UserError):
    """An unusable server."""


@dataclass
class _Reply:
    status: int
    headers: HTTPHeaderDict
    body: bytes


class SearchClient:
    """The retriever at a URL, with or without the path /retrieve.

    url: may contain a name and a password, http://NAME:PASSWORD@HOST; messages show ***@HOST.
    timeout: seconds for one complete answer, which may be to a batch of queries.
    patience: seconds that a silent server gets to come back, or to finish loading.
    """

    def __init__(self, url: str, timeout: float = 120.0, patience: float = 600.0):
        self.url = masked(url.rstrip("/").removesuffix("/retrieve")) + "/retrieve"  # for messages
        self.timeout = timeout
        self.patience = patience
        # No proxy, not even one that the environment names: it would not find a local server.
        self._http = urllib3.PoolManager(maxsize=THREADS, retries=False, timeout=timeout)
        self._http.headers["Content-Type"] = "application/json"
        self._base = self._log_in(url)
        self.protocol = ""  # until it is known
        self._ask("GET", "/health")  # waits while our own server loads; the published have no such
        self.protocol = self._find_protocol()  # "queries" or "query"

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        if self.protocol == "queries":
            found = []
            size = max(1, MAX_HITS // k)  # our own server refuses larger requests
            for start in range(0, len(queries), size):
                part = queries[start : start + size]
                found += self._read(self._post("queries", part, k), len(part), k)
            return found

        def search_one(query: str) -> list[Hit]:
            return self._read(self._post("query", query, k), 1, k)[0]

        with ThreadPoolExecutor(min(THREADS, len(queries))) as threads:
            return list(threads.map(search_one, queries))

    def _log_in(self, url: str) -> str:
        """Move the name and password of a URL, if any, to a header; returns the URL without."""
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # for example a port above 65535
            valid = False
        if not valid:
            raise RetrieverError(
                f"{masked(url)!r} is not the address of a server: give http://HOST:PORT or "
                "https://HOST:PORT."
            )
        if parts.username is not None:
            login = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
            self._http.headers["Authorization"] = "Basic " + base64.b64encode(login).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        return parts.geturl().rstrip("/").removesuffix("/retrieve")

    def _find_protocol(self) -> str:
        for protocol, test in (("queries", ["paw"]), ("query", "paw")):
            reply = self._post(protocol, test, 1)
            if reply.status != 422:  # FastAPI's status for a missing key
                self._read(reply, n=1, k=1)
                return protocol
        raise RetrieverError(
            f"The server {self.url} takes neither `queries` nor `query` (HTTP 422: "
            f"{_excerpt(reply)}): give the address of a retrieval server."
        )

    def _post(self, key: str, asked: str | list[str], k: int) -> _Reply:
        payload = {key: asked, "topk": k, "return_scores": True}
        return self._ask("POST", "/retrieve", json.dumps(payload).encode())

    def _ask(self, method: str, path: str, body: bytes = b"") -> _Reply:
        """The answer to a request; retries for `patience` seconds after the first failure."""
        deadline = None
        wait = FIRST_WAIT
        while True:
            least = 0.0  # seconds that the server asks for
            try:
                reply = self._send(method, path, body)
            except TEMPORARY as error:
                reason = self._reason(error)
                if not self.protocol:
                    raise RetrieverError(
                        f"The retrieval server {self.url} cannot be reached ({reason}): "
                        f"{START_IT}; the published servers are silent for minutes while they load."
                    ) from error
            else:
                if reply.status not in BUSY and (reply.status < 500 or not self.protocol):
                    return reply
                reason = f"HTTP {reply.status}: {_excerpt(reply)}"
                least = _retry_after(reply)
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.patience
            if now >= deadline:
                raise RetrieverError(
                    f"The retrieval server {self.url} did not come back within "
                    f"{self.patience:g} s ({reason}): start it again, then rerun the same command "
                    "to resume from the last checkpoint."
                )
            pause = min(max(wait, least), deadline - now)
            log.warning("retrieval server %s: %s; next attempt in %g s", self.url, reason, pause)
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)

    def _send(self, method: str, path: str, body: bytes) -> _Reply:
        """Exchange one request and its answer; temporary failures are raised as they are."""
        deadline = time.monotonic() + self.timeout
        url = self._base + path
        content = bytearray()
        try:
            with self._http.request(
                method, url, body=body, redirect=False, preload_content=False
            ) as answer:
                # The timeout of urllib3 is for each read: without the deadline, a body of one byte
                # per second would never end. read1 returns what has arrived. No compression was
                # asked for, so nothing is decompressed.
                part = answer.read1(CHUNK, decode_content=False)
                while part:
                    content += part
                    if len(content) > MAX_BYTES:
                        raise RetrieverError(
                            f"The answer of {self.url} has more than {MAX_BYTES} bytes: give the "
                            "address of a retrieval server."
                        )
                    if time.monotonic() > deadline:
                        raise NoAnswer
                    part = answer.read1(CHUNK, decode_content=False)
        except (*TEMPORARY, RetrieverError):
            raise
        except (HTTPError, ValueError) as error:
            # For example a host name with an empty part, or a certificate that does not fit.
            raise RetrieverError(
                f"The retrieval server {self.url} cannot be used ({type(error).__name__}): look at "
                f"its log, or {START_IT}."
            ) from error
        return _Reply(answer.status, answer.headers, bytes(content))

    def _read(self, reply: _Reply, n: int, k: int) -> list[list[Hit]]:
        """The hits of n queries: the first k of each, if a server ignores topk."""
        if 300 <= reply.status < 400:
            location = masked(reply.headers.get("Location", ""))
            raise RetrieverError(
                f"The server {self.url} redirects to {location!r} (HTTP {reply.status}): give the "
                "final address."
            )
        if reply.status != 200:
            raise RetrieverError(
                f"The server {self.url} answers HTTP {reply.status} ({_excerpt(reply)}): look at "
                "its log, or give the address of a retrieval server."
            )
        try:
            found = json.loads(reply.body)["result"]
            result = [[_hit(entry) for entry in hits[:k]] for hits in found]
        except MALFORMED as error:
            raise RetrieverError(
                f"The answer of {self.url} is not a retrieval server's ({type(error).__name__}: "
                f"{_excerpt(reply)}): give the address of a server with Search-R1's or "
                "verl-agent's protocol."
            ) from error
        if len(result) != n:
            raise RetrieverError(
                f"The server {self.url} answered {len(result)} queries of {n}: look at its log."
            )
        return result

    def _reason(self, error: HTTPError) -> str:
        if "refused" in str(error):
            return "connection refused"
        if isinstance(error, NewConnectionError | ProtocolError):
            return "connection lost"
        return f"no answer within {self.timeout:g} s"


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


def _retry_after(reply: _Reply) -> float:
    """The seconds in the header Retry-After, a number or a date; 0 without a readable one."""
    try:
        return urllib3.Retry().parse_retry_after(reply.headers.get("Retry-After", "0"))
    except (HTTPError, ValueError, OverflowError):
        return 0.0


def _excerpt(reply: _Reply) -> str:
    text = " ".join(reply.body[:1000].decode(errors="replace").split())
    return repr(text if len(text) <= 100 else text[:100] + " ...")
