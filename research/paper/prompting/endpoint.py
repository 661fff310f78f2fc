"""A chat model behind an OpenAI-compatible endpoint, in the roles of policy and sampler.

    POST URL/chat/completions    {"model", "messages", "temperature", "seed", "max_tokens"}

The rollout works on token ids, but an endpoint has no tokenizer. Here a token is one character and
its id the Unicode code point, so that prompt limits count characters; `max_tokens` is the server's.
Log-probs are zeros, which evaluations do not read.

Failures: the client of the openai package retries no connection and HTTP 408, 409, 429 and 5xx,
after 0.5, 1, 2 .. 8 s with jitter, or after as long as Retry-After says (two minutes at most). One
request has a deadline, retries included. After it, and at once for a redirect, another 4xx and an
answer that is not a chat completion, the run ends with one sentence. Requests under way are still
answered and kept: they are paid for.

Every answer is appended to a file, under a hash of its request, and the same command reads it from
there: a run that was interrupted or failed does not pay twice.

The key is read from $OPENAI_API_KEY. It is sent to URL alone (no redirect is followed), and it is
masked in everything that is printed or stored.
"""

import asyncio
import hashlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.base.files import reading, writing
from paw_min.model.sampler import Request, Response
from research.study import read_lines

CONCURRENCY = 8  # requests at a time
DEADLINE = 300.0  # seconds for one request, retries included
LONGEST_WAIT = 8  # seconds between two attempts of the openai package
AGAIN = "rerun the same command to resume, its answers so far are kept"


@dataclass
class Answer:
    """What the endpoint said to one request, and the tokens that it charges for."""

    text: str
    prompt_tokens: int  # 0 where the server does not report them, as some local ones
    completion_tokens: int
    cut: bool = False  # the limit of tokens ended it


class Endpoint:
    """url: up to and without /chat/completions. file: where the answers are kept."""

    positions = sys.maxsize  # the server has a limit of its own

    def __init__(self, url: str, model: str, file: Path):
        if not re.fullmatch(r"https?://[^\s@?#/:]+(:\d{1,5})?(/[^\s@?#]*)?", url):
            raise UserError("--endpoint must be http(s)://HOST[:PORT]/PATH, without a key or query")
        self.url = url.rstrip("/")
        self.model = model
        self.file = file
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", self._key):  # the HTTP library would quote it in its error
            raise UserError("OPENAI_API_KEY has a character that no key has: set it again")
        self._client = self._connect()
        self._runner = asyncio.Runner()
        self.kept = self._load()  # answers of earlier starts, by key
        self.used: dict[str, Answer] = {}  # answers of this run, by key

    def _connect(self):
        """The client, an openai.AsyncOpenAI."""
        try:
            import openai
        except ImportError as error:
            raise UserError("--endpoint needs a package: `pip install openai`") from error
        return openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self._key or "none",  # local servers need no key, but the package does
            timeout=DEADLINE,
            # The retries fit into the deadline, so that the last failure is reported, not only the
            # deadline.
            max_retries=int(DEADLINE // LONGEST_WAIT),
            # A redirect would send the key to another server.
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )

    # The policy's part: text to "token ids" and back.

    opened_thought = ""  # the server's template is unknown

    def encode_chat(self, message: str) -> list[int]:
        return self.encode(message)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def separator(self, response_ids: list[int]) -> list[int]:
        return []  # nothing is trained here

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
        """Yield answers until the queue is empty; the queue may grow in between.

        Requests make progress while this waits for an answer, not while the caller works on one.
        """
        loop = self._runner.get_loop()
        running = set()
        try:
            while queue or running:
                while queue and len(running) < CONCURRENCY:
                    request = queue.popleft()
                    body = self._body(request, temperature, max_tokens)
                    running.add(loop.create_task(self._answer(request.slot, body)))
                first = asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                done, _ = self._runner.run(first)
                yield [task.result() for task in done]
                running -= done
        finally:  # after an error or Ctrl-C: nothing new, but wait for what is under way
            self._runner.run(_settle(running))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def _body(self, request: Request, temperature: float, max_tokens: int) -> dict:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.decode(request.prompt_ids)}],
            "temperature": temperature,
            "seed": request.seed >> 32,  # 31 bits: some servers take no more
            "max_tokens": max_tokens,
        }

    async def _answer(self, slot: int, body: dict) -> Response:
        """The kept answer to a request, or the endpoint's, which is then kept."""
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        answer = self.kept.get(key)
        if answer is None:
            answer = await self._ask(body)
            self.kept[key] = answer
            with writing(str(self.file)), open(self.file, "a") as file:
                file.write(json.dumps({"key": key} | asdict(answer)) + "\n")
        self.used[key] = answer
        ids = self.encode(answer.text)
        return Response(slot, ids, [0.0] * len(ids), answer.cut)

    def _load(self) -> dict[str, Answer]:
        """The kept answers."""
        with reading(self.file):
            return {line.pop("key"): Answer(**line) for line in read_lines(self.file)}

    async def _ask(self, body: dict) -> Answer:
        """The endpoint's answer, after retries; UserError if there is none by the deadline."""
        import openai

        # "from None": the errors of HTTP libraries may quote headers, the key among them.
        try:
            async with asyncio.timeout(DEADLINE):
                return read(await self._client.chat.completions.create(**body))
        except TimeoutError:
            raise UserError(f"{self.url}: no answer within {DEADLINE:g} s: {AGAIN}") from None
        except openai.APIConnectionError as error:
            reason = type(error.__cause__).__name__
            raise UserError(f"{self.url}: no connection ({reason}): {AGAIN}") from None
        except openai.APIStatusError as error:
            status = f"HTTP {error.status_code}{self._message(error.body)}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise UserError(f"{self.url}: {status}, after retries: {AGAIN}") from None
            remedy = "check --endpoint, --model, $OPENAI_API_KEY and the flags"
            raise UserError(f"{self.url} answers {status}: {remedy}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{self.url}: no chat completion: check it; {AGAIN}") from None

    def _message(self, body: object) -> str:
        """The server's own message, in parentheses: on one line, bounded and without the key."""
        if isinstance(body, dict):
            body = body.get("message", body)
        text = str(body or "")
        if self._key:
            text = text.replace(self._key, "***")
        text = " ".join(re.sub("[^ -~]", " ", text).split())
        return f" ({text[:200]})" if text else ""


async def _settle(tasks: set[asyncio.Task]) -> None:
    """Wait until all have ended, in whichever way."""
    await asyncio.gather(*tasks, return_exceptions=True)


def read(completion) -> Answer:
    """Read an openai ChatCompletion, whose fields are not checked; any error if it is none."""
    text = completion.choices[0].message.content
    if text is None:  # a refusal, or all tokens spent on hidden reasoning
        text = ""
    usage = completion.usage
    return Answer(
        text=text.encode(errors="replace").decode(),
        # A local server may leave these out.
        prompt_tokens=getattr(usage, "prompt_tokens", 0) or 0,
        completion_tokens=getattr(usage, "completion_tokens", 0) or 0,
        cut=getattr(completion.choices[0], "finish_reason", None) == "length",
    )
