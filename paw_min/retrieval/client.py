"""A retriever that queries a server over HTTP, with retries.

Two protocols are in use. Both POST to /retrieve; they differ in one key: Search-R1's server takes
{"queries": [..]}, verl-agent's takes {"query": ".."}, and ours (server.py) takes either. All answer
{"result": [[{"document": {"id", "contents"}, "score"}, ..] for each query]}. The client detects the
protocol at the start with a test query. A batch of searches is one request where the server takes
lists, and concurrent requests where it does not.

Failures: at the start, an unusable server is an error in one sentence. During training, temporary
failures (no connection, no complete answer in time, HTTP 5xx) are retried after 1, 2, 4 .. 30
seconds, for `patience` seconds; then `RetrieverError` ends the run, and the same command resumes it
from its last checkpoint. Other failures are not retried. Redirects are refused, because a
redirected POST becomes a GET.
"""

import json
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

import requests
import urllib3

from paw_min.retrieval import MAX_HITS, Hit
from paw_min.running.errors import UserError, masked

THREADS = 32  # concurrent requests, for servers that take one query each
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds between two attempts: doubled from first to longest
MAX_BYTES = 1 << 28  # of one answer; 20,000 passages of 100 words are 12 MB
TEMPORARY = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
START_IT = "start it (`python -m paw_min.retrieval.server --help`) or correct the address"
log = logging.getLogger(__name__)


class RetrieverError(UserError):
    """An unusable server."""


class _Reply(NamedTuple):
    status: int
    body: bytes
    location: str  # where a redirect points, else ""


class SearchClient:
    """The retriever at a URL, with or without the path /retrieve.

    url: may contain a name and a password, http://NAME:PASSWORD@HOST; messages show ***@HOST.
    timeout: seconds for one complete answer, which may be to a batch of queries.
    patience: seconds that a silent server gets to come back, or to finish loading.
    """

    def __init__(self, url: str, timeout: float = 120.0, patience: float = 600.0):
        self.url = masked(url.rstrip("/").removesuffix("/retrieve")) + "/retrieve"  # for messages
        self.timeout, self.patience = timeout, patience
        self._session = requests.Session()
        self._session.mount("http://", adapter := timed_adapter())
        self._session.mount("https://", adapter)
        self._session.trust_env = False  # an internet proxy would not find a local server
        self._base = self._log_in(url)
        self._wait_until_loaded()
        self.protocol = self._find_protocol()  # "queries" or "query"

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        if self.protocol == "queries":
            size, found = max(1, MAX_HITS // k), []  # our own server refuses larger requests
            for part in (queries[i : i + size] for i in range(0, len(queries), size)):
                payload = {"queries": part, "topk": k, "return_scores": True}
                found += self._ask(payload, len(part))
            return found
        payloads = [{"query": query, "topk": k, "return_scores": True} for query in queries]
        with ThreadPoolExecutor(min(THREADS, len(queries))) as threads:
            return [hits for (hits,) in threads.map(lambda p: self._ask(p, 1), payloads)]

    def _log_in(self, url: str) -> str:
        """Move the name and password of a URL, if any, to the session; returns the URL without."""
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # for example a port above 65535
            valid = False
        if not valid:
            raise RetrieverError(f"{masked(url)!r} is not the address of a server: give "
                                 "http://HOST:PORT or https://HOST:PORT.")
        if parts.username is not None:
            login = parts.username, parts.password or ""
            self._session.auth = tuple(unquote_to_bytes(part) for part in login)
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        return parts.geturl().rstrip("/").removesuffix("/retrieve")

    def _wait_until_loaded(self) -> None:
        """Wait while our own server reports that it is loading; the published ones are silent."""
        deadline, told = time.monotonic() + self.patience, False
        while True:
            try:
                reply = self._send("GET", "/health")
            except TEMPORARY as error:
                raise RetrieverError(f"The retrieval server {self.url} cannot be reached "
                                     f"({self._reason(error)}): {START_IT}; the published servers "
                                     "are silent for minutes while they load.") from error
            if reply.status != 503:
                return
            if not told:
                print(f"the retrieval server {self.url} is loading: waiting", flush=True)
            told = True
            if time.monotonic() > deadline:
                raise RetrieverError(f"The retrieval server {self.url} has been loading for more "
                                     f"than {self.patience:g} s: try again when it is ready.")
            time.sleep(FIRST_WAIT)

    def _find_protocol(self) -> str:
        for protocol, test in (("queries", ["paw"]), ("query", "paw")):
            try:
                reply = self._post({protocol: test, "topk": 1, "return_scores": True})
            except TEMPORARY as error:
                raise RetrieverError(f"The retrieval server {self.url} does not answer a test "
                                     f"query ({self._reason(error)}): look at its log, or "
                                     f"{START_IT}.") from error
            if reply.status != 422:  # FastAPI's status for a missing key
                self._read(reply, 1)
                return protocol
        raise RetrieverError(f"The server {self.url} takes neither `queries` nor `query` (HTTP "
                             f"422: {_excerpt(reply)}): give the address of a retrieval server.")

    def _ask(self, payload: dict, n: int) -> list[list[Hit]]:
        """The hits of n queries; retries for `patience` seconds after the first failure."""
        deadline, wait = None, FIRST_WAIT
        while True:
            try:
                reply = self._post(payload)
            except TEMPORARY as error:
                reason = self._reason(error)
            else:
                if reply.status < 500:
                    return self._read(reply, n)
                reason = f"HTTP {reply.status}"
            deadline = deadline or time.monotonic() + self.patience
            if time.monotonic() + wait > deadline:
                raise RetrieverError(f"The retrieval server {self.url} did not come back within "
                                     f"{self.patience:g} s ({reason}): start it again, then rerun "
                                     "the same command to resume from the last checkpoint.")
            log.warning("retrieval server %s: %s; next attempt in %g s", self.url, reason, wait)
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _post(self, payload: dict) -> _Reply:
        reply = self._send("POST", "/retrieve", payload)
        if 300 <= reply.status < 400:
            raise RetrieverError(f"The server {self.url} redirects to {masked(reply.location)!r} "
                                 f"(HTTP {reply.status}): give the final address.")
        return reply

    def _send(self, method: str, path: str, payload: dict | None = None) -> _Reply:
        """Exchange one request and its answer; temporary failures are raised as they are."""
        body = bytearray()
        try:
            with self._session.request(method, self._base + path, json=payload, stream=True,
                                       timeout=self.timeout, allow_redirects=False) as answer:
                for part in answer.iter_content(1 << 20):
                    body += part
                    if len(body) > MAX_BYTES:
                        raise RetrieverError(f"The answer of {self.url} has more than {MAX_BYTES} "
                                             "bytes: give the address of a retrieval server.")
        except (*TEMPORARY, RetrieverError):
            raise
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            # For example a host name with an empty part, or an answer with damaged gzip data.
            raise RetrieverError(f"The retrieval server {self.url} cannot be used "
                                 f"({type(error).__name__}): look at its log, or {START_IT}."
                                 ) from error
        return _Reply(answer.status_code, bytes(body), answer.headers.get("Location", ""))

    def _read(self, reply: _Reply, n: int) -> list[list[Hit]]:
        """The hits of n queries, reduced to the keys of `Hit`."""
        if reply.status != 200:
            raise RetrieverError(f"The server {self.url} answers HTTP {reply.status} "
                                 f"({_excerpt(reply)}): look at its log, or give the address of "
                                 "a retrieval server.")
        try:
            result = [
                [{"document": {"id": str(hit["document"].get("id", "")),
                               "contents": hit["document"]["contents"] + ""},
                  "score": float(hit["score"])} for hit in hits]
                for hits in json.loads(reply.body)["result"]
            ]  # fmt: skip
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError,
                RecursionError) as error:  # fmt: skip
            raise RetrieverError(f"The answer of {self.url} is not a retrieval server's "
                                 f"({type(error).__name__}: {_excerpt(reply)}): give the address "
                                 "of a server with Search-R1's or verl-agent's protocol."
                                 ) from error
        if len(result) != n:
            raise RetrieverError(f"The server {self.url} answered {len(result)} queries of {n}: "
                                 "look at its log.")
        for score in (hit["score"] for hits in result for hit in hits):
            if not math.isfinite(score):
                raise RetrieverError(f"The server {self.url} answered with the score {score}: "
                                     "look at its log.")
        return result

    def _reason(self, error: requests.RequestException) -> str:
        if isinstance(error, requests.Timeout) or "Read timed out" in str(error):
            return f"no answer within {self.timeout:g} s"
        return "connection refused" if "refused" in str(error) else "connection lost"


def _excerpt(reply: _Reply) -> str:
    text = " ".join(reply.body[:1000].decode(errors="replace").split())
    return repr(text if len(text) <= 100 else text[:100] + " ...")


class _TimedResponse(HTTPResponse):
    """An answer that has to be complete within the timeout.

    The timeout of requests is for each read: a server that sends one byte per second never ends.
    """

    def __init__(self, sock, *args, **keywords):
        super().__init__(sock, *args, **keywords)
        read, deadline = self.fp.raw.readinto, time.monotonic() + sock.gettimeout()

        def readinto(buffer) -> int:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
            return read(buffer)

        self.fp.raw.readinto = readinto


def timed_adapter() -> requests.adapters.HTTPAdapter:
    """An adapter of requests with `_TimedResponse`."""
    adapter = requests.adapters.HTTPAdapter(pool_maxsize=THREADS)
    adapter.poolmanager.pool_classes_by_scheme = classes = {}
    for scheme, pool in (("http", urllib3.HTTPConnectionPool),
                         ("https", urllib3.HTTPSConnectionPool)):
        connection = type("Connection", (pool.ConnectionCls,), {"response_class": _TimedResponse})
        classes[scheme] = type("Pool", (pool,), {"ConnectionCls": connection})
    return adapter
