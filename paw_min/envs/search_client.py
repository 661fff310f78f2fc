"""A retriever that asks a server over HTTP, and what happens when the server does not answer.

Two protocols are in use, both POST /retrieve, told apart by one key: Search-R1's server takes
{"queries": [..]}, verl-agent's {"query": ".."}; our own (envs/search_server.py) takes either. The
answer of all is {"result": [[{"document": {"id", "contents"}, "score"}, ..] for each query]}. At
the start one test question finds out which it is; a batch of searches is one request where the
server takes lists, and requests side by side where it does not.

A server that cannot be used is an error in one sentence at the start, where others fail later with
a traceback of their JSON parser. During training a server gets `patience` seconds to come back,
asked again after 1, 2, 4 .. 30 seconds; then `RetrieverError` ends the run, which the same command
goes on from its last checkpoint. Only what may pass is tried again: no connection, no answer in
time, HTTP 5xx.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import requests

from paw_min.config import UserError

THREADS = 32  # requests side by side, for servers that take one query each
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds between two attempts: doubled each time, up to this
PASSING = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
START_IT = "start it (`python -m paw_min.envs.search_server --help`) or correct the address"
log = logging.getLogger(__name__)


class RetrieverError(UserError):
    """A server that cannot be used: shown as one sentence; the run can be resumed."""


class SearchClient:
    """The retriever at a URL, with or without the path /retrieve.

    timeout: seconds that one request, which may be a batch of queries, may take.
    patience: seconds that a silent server gets to come back, or to finish loading.
    """

    def __init__(self, url: str, timeout: float = 120.0, patience: float = 600.0):
        self.base = url.rstrip("/").removesuffix("/retrieve")
        self.url = f"{self.base}/retrieve"
        self.timeout, self.patience = timeout, patience
        self._session = requests.Session()
        self._session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=THREADS))
        self._session.trust_env = False  # a proxy for the internet would not find a local server
        self._await_loading()
        self.protocol = self._find_protocol()  # "queries" or "query"

    def search(self, queries: list[str], k: int) -> list[list[dict]]:
        """See envs/retrievers.py."""
        if not queries:
            return []
        if self.protocol == "queries":
            return self._ask({"queries": queries, "topk": k, "return_scores": True}, len(queries))
        payloads = [{"query": query, "topk": k, "return_scores": True} for query in queries]
        with ThreadPoolExecutor(min(THREADS, len(queries))) as threads:
            return [hits for (hits,) in threads.map(lambda p: self._ask(p, 1), payloads)]

    def _await_loading(self):
        """Our own server says when it is still loading; the published ones are silent then."""
        deadline, told = time.monotonic() + self.patience, False
        while True:
            try:
                answer = self._session.get(f"{self.base}/health", timeout=self.timeout)
            except PASSING as error:
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
            except PASSING as error:
                raise RetrieverError(f"The retrieval server {self.url} does not answer a test "
                                     f"question ({self._reason(error)}): look at its log, or "
                                     f"{START_IT}.") from error
            if answer.status_code != 422:  # FastAPI's word for: a key is missing
                self._read(answer, 1)
                return protocol
        raise RetrieverError(f"The server {self.url} takes neither `queries` nor `query` (HTTP "
                             f"422: {_excerpt(answer)}): give the address of a retrieval server.")

    def _ask(self, payload: dict, n: int) -> list[list[dict]]:
        """Ask until there is an answer, for `patience` seconds after the first failure."""
        deadline, wait = None, FIRST_WAIT
        while True:
            try:
                answer = self._post(payload)
            except PASSING as error:
                reason = self._reason(error)
            else:
                if answer.status_code < 500:
                    return self._read(answer, n)
                reason = f"HTTP {answer.status_code}"
            deadline = deadline or time.monotonic() + self.patience
            if time.monotonic() + wait > deadline:
                raise RetrieverError(f"The retrieval server {self.url} did not come back within "
                                     f"{self.patience:g} s ({reason}): start it again, then "
                                     "repeat the command, which goes on from the last checkpoint.")
            log.warning("retrieval server %s: %s; next attempt in %g s", self.url, reason, wait)
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _post(self, payload: dict) -> requests.Response:
        return self._session.post(self.url, json=payload, timeout=self.timeout)

    def _read(self, answer: requests.Response, n: int) -> list[list[dict]]:
        """The hits of n queries, nothing but what retrievers promise; else one clear sentence."""
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
                                 "of one that speaks Search-R1's or verl-agent's protocol."
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
