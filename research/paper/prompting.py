"""The prompting rows of Table 1: plain, ReAct and Reflexion agents, without training.

    python -m research.paper.prompting alfworld --agent react --data DIR \\
        --model gpt-4o --endpoint https://api.openai.com/v1          key: $OPENAI_API_KEY
    python -m research.paper.prompting webshop --agent reflexion --data DIR --model NAME

The model is behind any OpenAI-compatible server, here by default: `vllm serve NAME`. The other
flags are those of the benchmark's run script, whose panel, environments, parsers and metrics it
has; `python -m research.paper.table` reads its folder like that of a run. Every answer is kept in
responses.jsonl, so that a rerun of the same command does not pay twice.

The rollout works on token ids, but a server has no tokenizer: a token here is one character, so
limits of prompts count characters. The paper reports ReAct and Reflexion without describing them:

ReAct (Yao et al., 2023): one demonstration (demonstrations/, written for this project; the authors
have one or two, HotpotQA six), then all thoughts, actions and observations so far, then the
benchmark's plain prompt, without its history. Of a trajectory that is too long, the oldest steps
are left out. Deviations: each step has a thought; the admissible commands are listed; the prompt is
one message to a chat model.

Reflexion (Shinn et al., 2023): up to three trials per task with the ReAct agent (the authors: 12 in
ALFWorld). After a failed trial, the model reads its transcript and writes a reflection, which the
prompts of later trials show. A task is solved if one trial solves it. As in the original, the tasks
are those of the evaluation, and the feedback is the environment's success signal alone.
"""

import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from paw_min.base.console import say
from paw_min.base.errors import UserError, masked, user_errors
from paw_min.base.files import writing
from paw_min.base.flags import Parser
from paw_min.base.seeds import request_seed
from paw_min.cli import parse_config
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS, NAMES, presets_of
from paw_min.envs.interface import Answer, Benchmark, Context, Pool, Tasks
from paw_min.metrics import mean
from paw_min.model.sampler import Request, Response
from paw_min.rows import Episode
from paw_min.running.config_json import public
from paw_min.running.evaluate import evaluate, outcomes, panel_metrics, transcript
from paw_min.running.session import PANEL_SLOTS, find_tasks
from research.study import read_lines

DEMONSTRATIONS = Path(__file__).with_name("demonstrations")
TRIALS = 3  # most trials of a task
TRIAL_SEEDS = 10**6  # distance of the seeds of two trials
CHARACTERS = 4  # per token
TRAJECTORY = 16384 * CHARACTERS  # longest prompt of ReAct
CONCURRENCY = 8  # requests at a time
TIMEOUT = 300.0  # seconds for an answer
# Also a POST: asking for the same completion again is harmless. 0.5, 1, 2 .. 120 s between tries.
RETRY = Retry(8, backoff_factor=0.5, status_forcelist=[408, 409, 429, 500, 502, 503, 504],
              allowed_methods=None, raise_on_status=False)

REACT = """\
Solve a task step by step. In each step, first think about what you have seen and what is left to
do, then act. This example solves another task:

{example}

Now it is your turn. Your task: {task}
{steps}
{now}"""

LESSONS = "\n\nYou have failed at this task before. What you noted after each trial:\n"

REFLECT = """\
You are an agent that tried to solve a task. Your task: {task}

This is what you did. It did not solve the task:
{steps}

In two or three sentences, say which mistake you made, and what you will do instead when you try
the same task again. Name the objects, places or words that matter. Do not act now.
"""


# ---- the server ----


class Server:
    """A chat model behind a URL, in the roles of policy and sampler; its log-probs are zeros."""

    positions = sys.maxsize  # the server has a limit of its own
    opened_thought = ""  # its template is unknown

    def __init__(self, url: str, model: str, file: Path):
        self.url = url.rstrip("/")
        self.model = model
        self.file = file  # of the answers
        self.kept = {line.pop("key"): line for line in read_lines(file)}
        self.lock = Lock()  # of the file
        self.limit = "max_tokens"  # what the server calls it; newer models: max_completion_tokens
        self.key = os.environ.get("OPENAI_API_KEY", "").strip()
        self.http = requests.Session()
        if self.key:
            self.http.headers["Authorization"] = f"Bearer {self.key}"
        for scheme in ("http://", "https://"):
            self.http.mount(scheme, HTTPAdapter(pool_maxsize=CONCURRENCY, max_retries=RETRY))

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    encode_chat = encode

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def separator(self, response_ids: list[int]) -> list[int]:
        return []  # nothing is trained here

    @contextmanager
    def sync(self, policy: "Server"):
        """Nothing to copy."""
        yield

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Yield responses until the queue is empty; it may grow in between."""
        while queue:
            requests = [queue.popleft() for _ in range(len(queue))]
            asked = [(self.decode(request.prompt_ids), request.seed) for request in requests]
            responses = []
            for request, answer in zip(requests, self.ask_all(asked, temperature, max_tokens)):
                ids = self.encode(answer["text"])
                responses.append(Response(request.slot, ids, [0.0] * len(ids), answer["cut"]))
            yield responses

    def ask_all(
        self, asked: list[tuple[str, int]], temperature: float, max_tokens: int
    ) -> list[dict]:
        """The answers to prompts, each with its seed; CONCURRENCY of them at a time."""
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            # What is under way is still answered and kept after an error or Ctrl-C.
            return list(threads.map(lambda one: self.ask(*one, temperature, max_tokens), asked))

    def ask(self, prompt: str, seed: int, temperature: float, max_tokens: int) -> dict:
        """The kept answer to this request, or the server's: text, usage, cut."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": prompt}],
            "temperature": temperature, "max_tokens": max_tokens,
            "seed": seed >> 32,  # 31 bits: some servers take no more
        }
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if key not in self.kept:
            answer = self.post(body)
            with self.lock, writing(str(self.file)), open(self.file, "a", encoding="utf-8") as file:
                self.kept[key] = answer
                file.write(json.dumps({"key": key} | answer) + "\n")
        return self.kept[key]

    def post(self, body: dict) -> dict:
        said = ""
        sent = {self.limit if name == "max_tokens" else name: body[name] for name in body}
        try:
            # A redirect would send the key to another server.
            answer = self.http.post(f"{self.url}/chat/completions", json=sent, timeout=TIMEOUT,
                                    allow_redirects=False)
            said = " ".join(answer.text.split()).replace(self.key or "\0", "***")[:200]
            other = "max_completion_tokens"
            if answer.status_code == 400 and other in answer.text and other not in sent:
                self.limit = other
                return self.post(body)
            if answer.status_code != 200:
                remedy = "check --endpoint, --model and $OPENAI_API_KEY"
                if answer.status_code == 400:
                    remedy = "change --eval-temperature, --max-response-tokens or --model"
                raise UserError(f"{masked(self.url)} answers HTTP {answer.status_code} ({said}): "
                                f"{remedy}, then rerun.")
            found = answer.json()
            choice = found["choices"][0]
            usage = found.get("usage") or {}  # a local server may leave it out
            return {
                "text": text_of(choice["message"].get("content")),
                "usage": {name: count for name, count in usage.items() if isinstance(count, int)},
                "cut": choice.get("finish_reason") == "length",
            }
        except UserError:
            raise
        except Exception as error:  # whatever a server has sent, or that it has sent nothing
            reason = f"{type(error).__name__}, {said!r}" if said else type(error).__name__
            raise UserError(f"{masked(self.url)}: no chat completion ({reason}): check it; a rerun "
                            "of the same command keeps the answers so far.") from None

    def costs(self) -> dict[str, int]:
        """Calls and tokens of all answers in the file."""
        tokens = {
            kind: sum(answer["usage"].get(kind) or 0 for answer in self.kept.values())
            for kind in ("prompt_tokens", "completion_tokens")
        }
        return {"calls": len(self.kept)} | tokens


def text_of(content: str | list[dict] | None) -> str:
    """The text of a message: a text, or the texts of a list of blocks, without its thoughts.

    Empty for None: a refusal, or all tokens were spent on hidden reasoning.
    """
    if isinstance(content, list):
        content = "".join(block["text"] for block in content if block["type"] == "text")
    if not isinstance(content, str | None):
        raise TypeError("content is not a text")
    (content or "").encode()  # UnicodeEncodeError for half of a surrogate pair
    return content or ""


# ---- the agents ----


@dataclass
class React:
    """The prompts of the ReAct agent in one benchmark."""

    plain: Callable[[Context, int], str]  # the benchmark's own prompt
    example: str

    def prompt(self, context: Context, history_length: int) -> str:
        """h_t, with the whole trajectory; as a style of Benchmark.prompts."""
        steps = [
            shown(turn.observation, response)
            for turn, response in zip(context.history, context.responses, strict=True)
        ]
        # The plain prompt comes last. The history and the reflections stand above it already.
        instruction = context.task.partition(LESSONS)[0]
        now = self.plain(replace(context, task=instruction, history=[]), history_length)
        # Search shows the current observation as a part of the history, which is left out here.
        if steps and context.observation not in now:
            steps.append(shown(context.observation))
        return fitted(REACT, steps, example=self.example, task=context.task, now=now)

    def reflection(self, episode: Episode) -> str:
        """The request for a reflection on a failed trial."""
        steps = [shown(row.observation, row.response) for row in episode.transitions]
        steps.append(shown(episode.transitions[-1].next_observation))
        return fitted(REFLECT, steps, task=episode.instruction)


def fitted(form: str, steps: list[str], **fields: str) -> str:
    """The form with all steps, or without as many of the oldest as its length requires."""
    for n in range(len(steps) + 1):
        note = [f"(the first {n} steps are left out)"] if n else []
        text = form.format(steps="\n".join(note + steps[n:]), **fields)
        if len(text) <= TRAJECTORY:
            break
    return text  # if none fits, the rollout says that it is too long


def shown(observation: str, response: str = "") -> str:
    return f"Observation: {observation.strip()}\n{response.strip()}".strip()


@dataclass
class Remembering:
    """A pool that appends the reflections on a task to its instruction.

    A prompt knows only the instruction, which several games can share; the pool knows the task.
    """

    pool: Pool
    lessons: dict[str, list[str]]  # task -> its lessons, oldest first
    tasks: dict[int, str] = field(default_factory=dict)  # slot -> its task

    def __getattr__(self, name: str):
        return getattr(self.pool, name)

    def reset(self, slot: int, task: str) -> None:
        self.tasks[slot] = task
        self.pool.reset(slot, task)

    def recv(self, timeout: float | None = None) -> Answer | None:
        answer = self.pool.recv(timeout)
        lessons = self.lessons.get(self.tasks[answer.slot]) if answer else None
        if not lessons:
            return answer
        notes = "\n".join(f"Trial {n}: {note}" for n, note in enumerate(lessons, start=1))
        step = replace(answer.step, task=answer.step.task + LESSONS + notes)
        return Answer(answer.slot, step)


def reflexion(
    cfg: Config, server: Server, react: React, benchmark: Benchmark, pool: Pool, tasks: list[str]
) -> tuple[list[Episode], dict[str, float]]:
    """Up to TRIALS trials per task -> the last episode of each task, success after each trial."""
    lessons: dict[str, list[str]] = {}
    last: dict[str, Episode] = {}  # task -> its latest episode
    success = {}
    for trial in range(TRIALS):
        if tasks:  # else all are solved
            seed = TRIAL_SEEDS * trial + cfg.seed
            memory = Remembering(pool, lessons)
            played = evaluate(cfg, server, server, memory, tasks, seed, benchmark).episodes
            for episode in played:
                # A game that breaks in a later trial does not replace its earlier episode.
                if not episode.failed or episode.task not in last:
                    last[episode.task] = episode
            # A broken game is not played again: it stays broken.
            lost = [episode for episode in played if not episode.won and not episode.failed]
            tasks = [episode.task for episode in lost]
            if trial < TRIALS - 1:
                # -2 keeps these draws apart from the responses (paw_min/base/seeds.py).
                asked = [
                    (react.reflection(episode), request_seed(-2, seed, episode.trajectory))
                    for episode in lost
                ]
                notes = server.ask_all(asked, cfg.eval_temperature, cfg.max_response_tokens)
                for episode, note in zip(lost, notes):
                    text = " ".join(note["text"].split())
                    lessons.setdefault(episode.task, []).append(text)
        solved = mean([episode.won for episode in last.values() if not episode.failed])
        success[f"eval_success_trial_{trial + 1}"] = solved
        say(f"trial {trial + 1}: success {solved:.3f}, {len(tasks)} tasks left")
    return list(last.values()), success


# ---- the command ----


def play(cfg: Config, agent: str, server: Server, pool: Pool, tasks: Tasks):
    """Play the panel -> its episodes and their metrics."""
    benchmark = BENCHMARKS[cfg.env]
    example = (DEMONSTRATIONS / f"{cfg.env}.txt").read_text("utf-8").strip()
    react = React(benchmark.prompts[cfg.prompt], example)
    cfg = replace(cfg, max_prompt_tokens=CHARACTERS * cfg.max_prompt_tokens)
    if agent != "plain":
        cfg = replace(cfg, max_prompt_tokens=TRAJECTORY)
        benchmark = replace(benchmark, prompts={cfg.prompt: react.prompt})
    if agent == "reflexion":
        episodes, success = reflexion(cfg, server, react, benchmark, pool, tasks.held_out)
        return episodes, panel_metrics(episodes) | success
    # Evaluations of trained runs draw alike; here, seeds are the only difference of two runs.
    played = evaluate(cfg, server, server, pool, tasks.held_out, cfg.seed, benchmark)
    return played.episodes, played.metrics


def main(argv: list[str]) -> None:
    usage = "%(prog)s BENCHMARK [flags of run_BENCHMARK.py] [flags below]"
    parser = Parser(usage=usage, description=__doc__)
    add = parser.add_argument
    add("env", choices=NAMES, metavar="BENCHMARK", help=", ".join(NAMES))
    add("--agent", choices=("plain", "react", "reflexion"), default="plain", help="default: plain")
    add("--endpoint", default="http://127.0.0.1:8000/v1", help="URL before /chat/completions")
    options, flags = parser.parse_known_args(argv)
    known = presets_of(options.env)
    presets = {size: known[size] for size in ("paper", "tiny")}
    cfg = parse_config(options.env, presets, "", [*flags, "--no-paw"])
    if not options.endpoint.startswith(("http://", "https://")):
        raise UserError(f"--endpoint {masked(options.endpoint)} must be http://HOST:PORT/PATH or https://..")
    if options.agent == "reflexion" and cfg.eval_repeats > 1:
        raise UserError(f"--eval-repeats {cfg.eval_repeats}: Reflexion's trials are repeats of a "
                        "task already; omit it.")
    if not any(word.partition("=")[0] == "--name" for word in flags):
        name = f"{cfg.env}-{options.agent}-{cfg.model.rpartition('/')[2]}-seed{cfg.seed}"
        cfg = replace(cfg, name=name)
    cfg = replace(cfg, groups=1, updates=0)  # nothing is trained: there may be few training tasks
    folder = Path(cfg.out) / cfg.name
    with writing(f"the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    server = Server(options.endpoint, cfg.model, folder / "responses.jsonl")
    tasks = find_tasks(cfg)
    with closing(tasks.make_pool(min(len(tasks.held_out), PANEL_SLOTS))) as pool:
        episodes, metrics = play(cfg, options.agent, server, pool, tasks)
    metrics = {"update": 0} | metrics | server.costs()
    with writing(f"the folder {folder}"):
        for name, text in {
            "config.json": json.dumps(public(cfg), indent=2) + "\n",
            "metrics.jsonl": json.dumps(metrics) + "\n",
            "evaluation.json": outcomes(0, episodes),
            "episodes.md": transcript(episodes),
        }.items():
            (folder / name).write_text(text, encoding="utf-8")
    for key, value in metrics.items():
        say(f"{key:48s} {value:12,.{3 if isinstance(value, float) else 0}f}")
    say(f"{folder}: python -m research.paper.table {folder} ...")


if __name__ == "__main__":
    with user_errors():
        main(sys.argv[1:])
