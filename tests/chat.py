"""What tests of prompting share: a server of chat completions, the command in this process."""

import json
import threading
from collections import deque
from pathlib import Path

from paw_min.model.sampler import HFSampler, Request
from research.paper.prompting import __main__ as prompting
from tests.http_server import Server


class ChatServer(Server):
    """A server of chat completions. `write`: body -> text, or the whole answer."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.url += "/v1"

    def answer(self, handler, body):
        written = self.write(body)
        handler.reply(200, written if isinstance(written, dict) else completion(written))

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]


def completion(text: str | None, **usage) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def answers_of(policy):
    """A server's answers from a model of this process."""
    lock = threading.Lock()

    def answer(body: dict) -> dict:
        ids = policy.encode_chat(body["messages"][0]["content"])
        sampler, queue = HFSampler(), deque([Request(0, ids, body["seed"])])
        with lock, sampler.sync(policy):
            ((response,),) = sampler.generate(queue, body["temperature"], body["max_tokens"])
        usage = dict(prompt_tokens=len(ids), completion_tokens=len(response.ids))
        return completion(policy.decode(response.ids), **usage)

    return answer


def play(argv) -> dict:
    """Run the command in this process -> what it wrote."""
    cfg, options, _ = prompting.parse(argv)
    prompting.run(cfg, options)
    return results(Path(cfg.out) / cfg.name)


def results(folder: Path) -> dict:
    texts = {p.name: p.read_text() for p in folder.iterdir()}
    return texts | {"metrics": json.loads(texts["metrics.json"])}
