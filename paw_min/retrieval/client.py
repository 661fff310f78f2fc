"""A retriever that queries a server over HTTP, with retries.

Two protocols are in use. Both POST to /retrieve; they differ in one key: Search-R1's server takes
{"queries": [..]}, verl-agent's takes {"query": ".."}, and ours (server.py) takes either. All answer
{"result": [[{"document": {"id", "contents"}, "score"}, ..] for each query]}. The client detects the
protocol at the start with a test query. A batch of searches is one request where the server takes
lists, and concurrent requests where it does not.

Failures: at the start, an unusable server is an error in one sentence. During training, temporary
failures (no connection, no answer in time, HTTP 5xx) are retried after 1, 2, 4 .. 30 seconds, for
`patience` seconds; then `RetrieverError` ends the run, and the same command resumes it from its
last checkpoint. Other failures are not retried.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import requests

from paw_min.config import UserError
from paw_min.retrieval import Hit

THREADS = 32  # concurrent requests, for servers that take one query each
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds between two attempts: doubled from first to longest
TEMPORARY = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
START_IT = "start it (`python -m paw_min.retrieval.server --help`) or correct the address"
log = logging.getLogger(__name__)


class RetrieverError(UserError):
    """An unusable server."""


class SearchClient:
    """The retriever at a URL, with or without the path /retrieve.

    timeout: seconds for one request, which may be a batch of queries.
    patience: seconds that a silent server gets to come back, or to finish loading.
    """

    def __init__(self, url: str, timeout: float = 120.0, patience: float = 600.0):
        self.base = url.rstrip("/").removesuffix("/retrieve")
        self.url = f"{self.base}/retrieve"
        self.timeout, self.patience = timeout, patience
        self._session = requests.Session()
        self._session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=THREADS))
        self._session.trust_env = False  # an internet proxy would not find a local server
        self._wait_until_loaded()
        self.protocol = self._find_protocol()  # "queries" or "query"

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        if self.protocol == "queries":
            return self._ask({"queries": queries, "topk": k, "return_scores": True}, len(queries))
        payloads = [{"query": query, "topk": k, "return_scores": True} for query in queries]
        with ThreadPoolExecutor(min(THREADS, len(queries))) as threads:
            return [hits for (hits,) in threads.map(lambda p: self._ask(p, 1), payloads)]

    def _wait_until_loaded(self) -> None:
        """Wait while our own server reports that it is loading; the published ones are silent."""
        deadline, told = time.monotonic() + self.patience, False
        while True:
            try:
                answer = self._session.get(f"{self.base}/health", timeout=self.timeout)
            except TEMPORARY as error:
                raise RetrieverError(f"The retrieval server {self.url} cannot be reached "
                                     f"({self._reason(error)}): {START_IT}; the published servers "
                                     "are silent for minutes while they load.") from error
            if answer.status_code != 503:
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
                answer = self._post({protocol: test, "topk": 1, "return_scores": True})
            except TEMPORARY as error:
                raise RetrieverError(f"The retrieval server {self.url} does not answer a test "
                                     f"query ({self._reason(error)}): look at its log, or "
                                     f"{START_IT}.") from error
            if answer.status_code != 422:  # FastAPI's status for a missing key
                self._read(answer, 1)
                return protocol
        raise RetrieverError(f"The server {self.url} takes neither `queries` nor `query` (HTTP "
                             f"422: {_excerpt(answer)}): give the address of a retrieval server.")

    def _ask(self, payload: dict, n: int) -> list[list[Hit]]:
        """The hits of n queries; retries for `patience` seconds after the first failure."""
        deadline, wait = None, FIRST_WAIT
        while True:
            try:
                answer = self._post(payload)
            except TEMPORARY as error:
                reason = self._reason(error)
            else:
                if answer.status_code < 500:
                    return self._read(answer, n)
                reason = f"HTTP {answer.status_code}"
            deadline = deadline or time.monotonic() + self.patience
            if time.monotonic() + wait > deadline:
                raise RetrieverError(f"The retrieval server {self.url} did not come back within "
                                     f"{self.patience:g} s ({reason}): start it again, then rerun "
                                     "the same command to resume from the last checkpoint.")
            log.warning("retrieval server %s: %s; next attempt in %g s", self.url, reason, wait)
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _post(self, payload: dict) -> requests.Response:
        return self._session.post(self.url, json=payload, timeout=self.timeout)

    def _read(self, answer: requests.Response, n: int) -> list[list[Hit]]:
        """The hits of n queries, reduced to the keys of `Hit`."""
        if answer.status_code != 200:
            raise RetrieverError(f"The server {self.url} answers HTTP {answer.status_code} "
                                 f"({_excerpt(answer)}): look at its log, or give the address of "
                                 "a retrieval server.")
        try:
            result = [
                [{"document": {"id": str(hit["document"].get("id", "")),
                               "contents": hit["document"]["contents"] + ""},
                  "score": float(hit["score"])} for hit in hits]
                for hits in answer.json()["result"]
            ]  # fmt: skip
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RetrieverError(f"The answer of {self.url} is not a retrieval server's "
                                 f"({type(error).__name__}: {_excerpt(answer)}): give the address "
                                 "of a server with Search-R1's or verl-agent's protocol."
                                 ) from error
        if len(result) != n:
            raise RetrieverError(f"The server {self.url} answered {len(result)} queries of {n}: "
                                 "look at its log.")
        return result

    def _reason(self, error: requests.RequestException) -> str:
        if isinstance(error, requests.Timeout):
            return f"no answer within {self.timeout:g} s"
        return "connection refused" if "refused" in str(error) else "connection lost"


def _excerpt(answer: requests.Response) -> str:
    text = " ".join(answer.text.split())
    return repr(text if len(text) <= 100 else text[:100] + " ...")
