"""A chat model behind an OpenAI-compatible endpoint, in the roles of policy and sampler.

    POST URL/chat/completions    {"model", "messages", "temperature", "seed", "max_tokens"}

The rollout works on token ids, but an endpoint has no tokenizer. Here a token is one character and
its id the Unicode code point, so that prompt limits count characters; `max_tokens` is the server's.
Log-probs are zeros, which evaluations do not read.

Failures: no connection, no complete answer in time, HTTP 408, 429 or 5xx, and an answer that is no
chat completion are retried after 1, 2, 4 .. 30 s with jitter, or after as long as Retry-After says,
within the deadline of the request. After it, and at once for a redirect or another 4xx, the run
ends with one sentence. Requests under way are still answered and kept: they are paid for.

Every answer is appended to a file, under a hash of its request, and the same command reads it from
there: a run that was interrupted or failed does not pay twice.

The key is read from $OPENAI_API_KEY. It is sent to URL alone (no redirect is followed), and it is
masked in everything that is printed or stored.
"""

import hashlib
import json
import logging
import os
import random
import re
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event, Lock

import requests
import urllib3

from paw_min.model.sampler import Request, Response
from paw_min.retrieval.client import FIRST_WAIT, LONGEST_WAIT, TEMPORARY, timed_adapter
from paw_min.running.errors import UserError
from paw_min.running.runs import reading, writing

MAX_BYTES = 1 << 24  # of one answer
AGAIN = "rerun the same command to resume, its answers so far are kept"
log = logging.getLogger(__name__)


@dataclass
class Answer:
    """What the endpoint said to one request, and the tokens that it charges for."""

    text: str
    prompt_tokens: int | None  # None: the server does not report them
    completion_tokens: int | None


class Temporary(Exception):
    """A failure that another attempt may not have; `wait`: seconds that the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


class Endpoint:
    """url: up to and without /chat/completions. file: where the answers are kept.

    threads: concurrent requests, at most. deadline: seconds for one request, retries included.
    """

    def __init__(self, url: str, model: str, file: Path, threads: int, deadline: float):
        if not re.fullmatch(r"https?://[^\s@?#/:]+(:\d{1,5})?(/[^\s@?#]*)?", url):
            raise UserError("--endpoint must be http(s)://HOST[:PORT]/PATH, without a key or query")
        self.url, self.model, self.file = url.rstrip("/"), model, file
        self.threads, self.deadline = threads, deadline
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", self._key):  # requests would quote it in its own error
            raise UserError("OPENAI_API_KEY has a character that no key has: set it again")
        self._session = requests.Session()
        self._session.auth = self._authorize  # a header would lose against ~/.netrc
        self._session.mount("http://", adapter := timed_adapter())
        self._session.mount("https://", adapter)
        self._stopping, self._lock = Event(), Lock()
        self.kept = self._load()  # answers of earlier starts, by key
        self.used: dict[str, Answer] = {}  # answers of this run, by key
        self.n_sent = 0  # of them, those that this start has paid for

    # The policy's part: text to "token ids" and back.

    def encode_chat(self, message: str) -> list[int]:
        return self.encode(message)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    # The sampler's part.

    @contextmanager
    def sync(self, policy: "Endpoint"):
        """Nothing to copy."""
        yield

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Yield answers until the queue is empty; the queue may grow in between."""
        executor, running = ThreadPoolExecutor(self.threads), set()
        try:
            while queue or running:
                while queue:
                    request = queue.popleft()
                    body = self._body(request, temperature, max_tokens)
                    running.add(executor.submit(self._answer, request.slot, body))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield [future.result() for future in done]
        finally:  # after an error or Ctrl-C: no new attempts, but wait for what is under way
            self._stopping.set()
            executor.shutdown(cancel_futures=True)
            self._stopping.clear()

    def close(self) -> None:
        self._session.close()

    def _body(self, request: Request, temperature: float, max_tokens: int) -> dict:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.decode(request.prompt_ids)}],
            "temperature": temperature,
            "seed": request.seed >> 32,  # 31 bits: some servers take no more
            "max_tokens": max_tokens,
        }

    def _answer(self, slot: int, body: dict) -> Response:
        """In a thread: the kept answer to a request, or the endpoint's, which is then kept."""
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        answer = self.kept.get(key) or self._ask(body)
        with self._lock:
            self.used[key] = answer
            if key not in self.kept:
                self.n_sent += 1
                self.kept[key] = answer
                with writing(str(self.file)), open(self.file, "a") as file:
                    file.write(json.dumps({"key": key} | asdict(answer)) + "\n")
        ids = self.encode(answer.text)
        return Response(slot, ids, [0.0] * len(ids))

    def _load(self) -> dict[str, Answer]:
        """The kept answers. A last line that a kill has cut is removed."""
        if not self.file.exists():
            return {}
        with reading(self.file):
            content = self.file.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            if complete != content:
                os.truncate(self.file, len(complete))
            lines = [json.loads(line) for line in complete.splitlines()]
            return {line.pop("key"): Answer(**line) for line in lines}

    def _ask(self, body: dict) -> Answer:
        """The endpoint's answer, after retries; UserError if there is none by the deadline."""
        deadline, pause = time.monotonic() + self.deadline, FIRST_WAIT
        while True:
            try:
                return self._exchange(body, deadline - time.monotonic())
            except Temporary as error:
                seconds = max(error.wait, pause * random.uniform(0.5, 1.0))
                if time.monotonic() + seconds >= deadline:
                    asks = f" and asks to wait {error.wait:.0f} s" if error.wait else ""
                    raise UserError(f"{self.url}: {error}{asks}; no answer within --deadline "
                                    f"{self.deadline:g} s: {AGAIN}") from None  # fmt: skip
                log.warning("%s: %s; next attempt in %.1f s", self.url, error, seconds)
                if self._stopping.wait(seconds):
                    raise UserError(f"{self.url}: {error}; stopped: {AGAIN}") from None
                pause = min(2 * pause, LONGEST_WAIT)

    def _exchange(self, body: dict, seconds: float) -> Answer:
        """One attempt of `seconds` at most."""
        content, url = bytearray(), f"{self.url}/chat/completions"
        options = dict(timeout=max(seconds, 0.1), stream=True, allow_redirects=False)
        try:
            with self._session.post(url, json=body, **options) as reply:
                for part in reply.iter_content(1 << 16):
                    content += part
                    if len(content) > MAX_BYTES:
                        raise UserError(f"{url}: an answer has over {MAX_BYTES} bytes: check it")
        except TEMPORARY as error:
            raise Temporary(f"no complete answer ({type(error).__name__})") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            # Errors of requests may quote headers, so only their type is shown.
            raise UserError(f"{url} cannot be used ({type(error).__name__}): check it") from None
        status = reply.status_code
        if status in (408, 429) or status >= 500:
            wait = retry_after(reply.headers.get("Retry-After", ""))
            raise Temporary(f"HTTP {status}{self._excerpt(content)}", wait)
        if status != 200:
            remedy = "check --endpoint, --model, $OPENAI_API_KEY and the flags"
            raise UserError(f"{url} answers HTTP {status}{self._excerpt(content)}: {remedy}")
        try:
            return parse(bytes(content))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Temporary(f"no chat completion{self._excerpt(content)}") from None

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _excerpt(self, content: bytearray) -> str:
        """The server's own message, in parentheses: on one line, bounded and without the key."""
        text = content.decode(errors="replace").replace("\\/", "/")
        if self._key:
            text = text.replace(self._key, "***")
        if found := re.search(r'"(?:message|error|detail)"\s*:\s*"((?:[^"\\]|\\.)+)"', text):
            text = found[1]
        text = " ".join(re.sub(r"[^ -~]|\\[nrt]", " ", text).split())
        return f" ({text[:200]})" if text else ""


def parse(content: bytes) -> Answer:
    """Read a chat completion; ValueError or other errors of access if it is none."""
    data = json.loads(content)
    text = data["choices"][0]["message"]["content"]
    text = "" if text is None else text  # a refusal, or all tokens spent on hidden reasoning
    usage = data.get("usage") or {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counts = [n if type(n) is int and n >= 0 else None for n in counts]
    return Answer(text.encode(errors="replace").decode(), *counts)


def retry_after(header: str) -> float:
    """Seconds to wait, from a number or a date; 0 if the header is missing or has neither."""
    try:
        if re.fullmatch(r"\d{1,9}(\.\d+)?", header.strip()):
            return float(header)
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
