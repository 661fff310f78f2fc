"""PaW on an OpenEnv environment whose action and observation have one text field each.

    python -m examples.guess_server                                 in another terminal
    python -m examples.openenv_paw --data http://127.0.0.1:8000 --model MODEL

A task is a seed; a seed must start the same episode each time. A server may offer more:
`admissible`, `instruction`, `task_type`, `won` and `score` in its observations, and the numbers of
seeds in its state, `train` and `held_out`. README.md says what a lost connection costs.

R_MAX is the return of an episode that is won, unless the server says `won` itself. If that of your
server is not 10, change it: with a return of 1, no episode would be won, and lambda_g of Eq. 10
would stay at 0.9 or more, and the world-model loss with it.
"""

import re
from dataclasses import dataclass
from functools import partial

import requests
from openenv.core import GenericEnvClient, SyncEnvClient

from paw_min.base.errors import UserError, masked
from paw_min.cli import main
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Step, Tasks
from paw_min.envs.pool import EnvPool
from paw_min.envs.prompting import with_history

TIMEOUT = 60.0  # seconds for an answer
R_MAX = 10.0
TEMPLATE = """{task}
You have taken {steps} step(s). The last {shown}: {history}
Step {now}. Observation: {observation}
"""

PRESETS = {"24gb": dict(
    model="Qwen/Qwen2.5-1.5B-Instruct", lora_rank=16, lr=1e-5, max_turns=20, workers=8,
    sampler="vllm", vllm_memory=0.6, grad_checkpointing=True)}


@dataclass
class Remote:
    """A session of the server. After a failure, which costs the episode, reset opens another."""

    url: str
    action: str  # the names of the text fields
    text: str
    session: SyncEnvClient | None = None
    total: float = 0.0  # the return of the episode so far

    def reset(self, task: str) -> Step:
        self.total = 0.0
        self.session = self.session or connect(self.url)
        return self._ask("reset", seed=int(task))

    def step(self, command: str) -> Step:
        return self._ask("step", {self.action: command})

    def _ask(self, method: str, *action: dict, **seed: int) -> Step:
        try:
            result = getattr(self.session, method)(*action, **seed)
        except Exception:
            # The answer may still come, and would be taken for that of the next request.
            self.session.close()
            self.session = None
            raise
        seen = result.observation
        reward = result.reward or 0.0  # OpenEnv allows None
        self.total += reward
        won = seen.get("won")
        if won is None:
            won = result.done and self.total >= R_MAX - 1e-6
        return Step(  # the pool checks its types
            observation=seen[self.text],
            task=seen.get("instruction") or "",
            task_type=seen.get("task_type") or "openenv",
            admissible=seen.get("admissible") or [],
            reward=reward,
            done=result.done,
            won=won,
            score=seen.get("score"),
        )


def connect(url: str) -> SyncEnvClient:
    try:
        client = GenericEnvClient(url, message_timeout_s=TIMEOUT, max_message_size_mb=1)
        return client.sync().connect()
    except Exception as error:  # its text has the URL
        raise ConnectionError(masked(str(error))) from None


def load(cfg: Config, url: str) -> Tasks:
    """The seeds of a run, after a look at the server; UserError if it has no such environment."""
    url = url.rstrip("/")
    try:
        schema = requests.get(f"{url}/schema", timeout=TIMEOUT).json()
        with connect(url) as session:
            state = session.state()
        sizes = [state.get("train", 1000), state.get("held_out", 100)]  # numbers of seeds
        if not all(type(size) is int and 0 < size < 1_000_000 for size in sizes):
            raise ValueError(f"it offers {sizes} seeds")
        fields = [text_field(schema, part) for part in ("action", "observation")]
    except UserError:
        raise
    except Exception as why:  # whatever the answer of another server ends in
        shown, reason = masked(url), masked(repr(why))
        if isinstance(why, requests.ConnectionError):  # its text is that of three exceptions
            reason = "nothing answers there"
        raise UserError(f"{shown!r} is no OpenEnv server ({reason:.300}): start one.") from why
    seeds = [str(seed) for seed in range(sum(sizes))]
    return Tasks(seeds[: sizes[0]], seeds[sizes[0] :],
                 lambda n: EnvPool(partial(Remote, url, *fields), n, cfg.workers))


def text_field(schema: dict, part: str) -> str:
    """The only text field of the action or the observation, or the one called `text`."""
    fields = schema[part]["properties"]
    names = [name for name in fields if fields[name].get("type") == "string"]
    if "text" not in names and len(names) != 1:
        raise UserError(f"the {part} has the text fields {names[:9]}: choose one in text_field.")
    return "text" if "text" in names else names[0]


def prompt(context: Context, history_length: int) -> str:
    return (
        f"{with_history(TEMPLATE, context, history_length)}"
        f"Admissible actions: [{', '.join(context.admissible)}] (any, if none is listed)\n"
        "Reason within <think> </think>, then give one action within <action> </action>."
    )


def parse(response: str) -> Command:
    action = re.search("<action>(.*?)</action>", response, re.DOTALL)
    text = action[1].strip() if action else response[-100:]
    return Command(text, valid=bool(action and text) and "</think>" in response)


BENCHMARKS["openenv"] = Benchmark(load, {"paper": prompt}, parse, r_max=R_MAX)

if __name__ == "__main__":
    main("openenv", PRESETS, __doc__)
