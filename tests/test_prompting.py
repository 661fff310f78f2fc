"""Prompting baselines: agents, and an OpenAI-compatible endpoint over real HTTP."""

import json
import multiprocessing
import re
import socket
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import openai
import pytest

import run_alfworld
from paw_min.config import Config, parse_args
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Step, Tasks, Turn
from paw_min.envs.pool import EnvPool
from paw_min.model.sampler import Request
from paw_min.running.session import Session
from paw_min.train import train
from research.paper.prompting import __main__ as prompting
from research.paper.prompting import endpoint as client
from research.paper.prompting.agents import LESSONS, React
from research.paper.prompting.demonstrations import EXAMPLES
from research.paper.prompting.endpoint import Endpoint
from tests.helpers import one_sentence
from tests.http_server import Server

KEY = "sk-test/0123456789abcdef"
LOOK = "<think>hm</think><action>look</action>"


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


def play(argv) -> dict:
    """Run the command in this process -> what it wrote."""
    cfg, options, _ = prompting.parse(argv)
    prompting.run(cfg, options)
    texts = {path.name: path.read_text() for path in (Path(cfg.out) / cfg.name).iterdir()}
    return texts | {"metrics": json.loads(texts["metrics.json"])}


@pytest.fixture
def serve():
    servers = []

    def start(write=lambda body: LOOK) -> ChatServer:
        servers.append(ChatServer(write))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(client, "DEADLINE", 40.0)


@pytest.fixture
def connect(tmp_path):
    endpoints = []

    def make(server) -> Endpoint:
        endpoints.append(Endpoint(server.url, "m", tmp_path / "responses.jsonl"))
        return endpoints[-1]

    yield make
    for endpoint in endpoints:
        endpoint.close()


def ask(endpoint: Endpoint, *prompts: str) -> list[str]:
    queue = deque(Request(n, endpoint.encode_chat(p), (n + 1) << 40) for n, p in enumerate(prompts))
    found = {}
    for responses in endpoint.generate(queue, 0.4, 7):
        found |= {r.slot: endpoint.decode(r.ids) for r in responses}
        assert all(len(r.ids) == len(r.logps) for r in responses)
    return [found[n] for n in range(len(prompts))]


def flags(games_root, tmp_path, *more) -> list[str]:
    base = ["--data", str(games_root), "--out", str(tmp_path), "--eval-tasks", "2", "--max-turns",
            "3", "--eval-temperature", "0", "--preset", "tiny"]
    return ["alfworld", *base, *more]


# The agents with a local model.


def test_plain_is_the_evaluation_of_the_run_script(games_root, tmp_path, capsys):
    argv = flags(games_root, tmp_path, "--eval-temperature", "0.7")
    ours = play(argv)["metrics"]
    assert (ours["agent"], ours["model"]) == ("plain", "stand-in")
    capsys.readouterr()
    cfg, _ = parse_args("alfworld", run_alfworld.PRESETS, "", [*argv[1:], "--name", "e"])
    train(cfg, eval_only=True)
    weights, *lines = capsys.readouterr().out.splitlines()
    printed = dict(line.split() for line in lines)
    assert weights.startswith("weights: ") and len(printed) > 8
    assert printed == {key: f"{ours[key]:.3f}" for key in printed}


# ReAct and Reflexion prompts.

HISTORY = [Turn(f"o{n}", f"c{n}") for n in (1, 2, 3)]
RESPONSES = [f"<think>t{n}</think>\n<action>c{n}</action>" for n in (1, 2, 3)]
NOW = Context("put mug" + LESSONS + "Trial 1: hm", "o4", ["look"], HISTORY, RESPONSES)


def react(env: str, style="paper", limit=10**6) -> React:
    return React(BENCHMARKS[env].prompts[style], EXAMPLES[env], len, limit)


@pytest.mark.parametrize("env, style", [("alfworld", "compact"), ("search", "paper")])
def test_react_shows_the_example_all_thoughts_and_the_plain_prompt(env, style):
    context = replace(NOW, admissible=[]) if env == "search" else NOW
    context = replace(context, observation='<information>{"result": "o4"}</information>')
    agent = react(env, style)
    prompt = agent.prompt(context, 1)
    steps = "\n".join(f"Observation: o{n}\n{said}" for n, said in enumerate(RESPONSES, start=1))
    assert EXAMPLES[env] in prompt and steps in prompt and NOW.task in prompt
    plain = agent.plain(replace(context, task="put mug", history=[]), 0)
    assert prompt.endswith(plain) and LESSONS not in plain
    assert prompt.count(context.observation) == 1
    first = agent.prompt(replace(context, history=[], responses=[]), 1)
    assert "t1" not in first and first.count("Observation:") == EXAMPLES[env].count("Observation:")


def test_the_oldest_steps_of_a_long_trajectory_are_left_out():
    full = react("alfworld").prompt(NOW, 2)
    assert react("alfworld", limit=len(full)).prompt(NOW, 2) == full
    for limit in (len(full) - 1, len(full) - 80):
        prompt = react("alfworld", limit=limit).prompt(NOW, 2)
        assert len(prompt) <= limit and NOW.task in prompt and EXAMPLES["alfworld"] in prompt
        n = int(re.search(r"first (\d) steps are left out", prompt)[1])
        left = [f"t{k}" in prompt for k in (1, 2, 3)]
        assert n >= 1 and left == [k > n for k in (1, 2, 3)]
        assert n == 1 or len(full) - 38 * (n - 1) + 40 > limit  # and no more of them
    none = react("alfworld", limit=1).prompt(NOW, 2)  # the rollout reports that it is too long
    assert "t3" not in none and NOW.task in none


class Door:
    """Three doors with the same instruction; "broken" breaks in its first step."""

    played: list[str] = []

    def reset(self, task):
        self.opens = {"easy": "push", "hard": "knock"}.get(task, "-")
        self.task, self.left = task, 2
        Door.played.append(task)
        return Step("A door.", "get in", "door", ["push", "knock"])

    def step(self, command):
        if self.task == "broken":
            raise OSError("no door")
        won, self.left = command == self.opens, self.left - 1
        return Step("In." if won else "Out.", "", "door", ["push"], 10.0 * won, won, won)


def doorman(body: dict) -> str:
    prompt = body["messages"][0]["content"]
    if "It did not solve the task" in prompt:
        return "<think>so</think> Next time\n I knock." if "push" in prompt else "?"
    command = "knock" if "Trial 1: <think>so</think> Next time I knock." in prompt else "push"
    return f"<think>try</think><action>{command}</action>"


def test_reflexion_learns_from_its_reflections_and_replays_only_lost_tasks(serve, connect, capsys):
    server, Door.played = serve(doorman), []
    remote = connect(server)
    tasks = Tasks([], ["easy", "hard", "broken", "wall"], None)
    cfg = Config(max_turns=2, eval_temperature=0.0)
    _, options, _ = prompting.parse(["alfworld", "--agent", "reflexion", "--endpoint", server.url])
    with EnvPool(Door, 2) as pool:
        s = Session(None, remote, None, None, remote, pool, tasks, done=0)
        episodes, metrics, _ = prompting.play(cfg, s, options)
    assert Door.played == ["easy", "hard", "broken", "wall", "hard", "wall", "wall"]
    assert [e.won for e in episodes] == [True, True, False, False]
    trials = [metrics[f"eval_success_trial_{n}"] for n in (1, 2, 3)]
    assert trials == pytest.approx([1 / 3, 2 / 3, 2 / 3])  # "broken" is not counted
    assert metrics["eval_success"] == pytest.approx(2 / 3) == metrics["eval_success/door"]
    assert metrics["eval_failed"] == 1 and "trial 2: success 0.667" in capsys.readouterr().out
    reflections = [p for p in server.prompts if "It did not solve the task" in p]
    assert len(reflections) == 3  # hard and wall after trial 1, wall after trial 2, none after 3
    third = [p for p in server.prompts if "Trial 2: " in p and "It did not" not in p]
    assert len(third) == 2  # the second reflection is on a transcript without "push"
    assert all("Next time I knock.\nTrial 2: ?\n" in p for p in third)
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies)


# Failures of an endpoint.


def drop(handler, body):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def status(code, content=b"{}", **headers):
    return lambda handler, body: handler.reply(code, content, **headers)


def test_temporary_failures_are_retried_with_the_same_request(serve, connect):
    server = serve()
    server.faults.extend([status(500), drop, status(429)])
    assert ask(connect(server), "a") == [LOOK]
    assert server.bodies == [server.bodies[0]] * 4
    expected = {"model": "m", "messages": [{"role": "user", "content": "a"}], "seed": 256}
    assert server.bodies[0] == expected | {"temperature": 0.4, "max_tokens": 7}
    assert set(server.keys) == {f"Bearer {KEY}"} and set(server.paths) == {"/v1/chat/completions"}


@pytest.mark.parametrize("content", [b'{"choices": [{"mess', {"choices": [{"message": 5}]}])
def test_an_answer_that_is_no_chat_completion(content, serve, connect):
    server = serve()
    server.faults.append(status(200, content, Content_Type="application/json"))
    remote = connect(server)
    with one_sentence("no chat completion: check it; rerun the same"):
        ask(remote, "a")
    assert ask(remote, "a") == [LOOK]  # nothing of it was kept


def test_a_refused_key_ends_in_one_sentence_without_the_key(
    games_root, tmp_path, serve, capsys, caplog, monkeypatch
):
    caplog.set_level("DEBUG")
    monkeypatch.setattr(client, "DEADLINE", 8.0)
    server = serve()
    escaped = json.dumps({"error": {"message": f"Bad key {KEY}.\n" + 999 * "x"}}).replace(
        "/", "\\/"
    )
    argv = flags(games_root, tmp_path, "--endpoint", server.url, "--model", "m", "--name", "k")
    for fault in (status(401, escaped.encode()), status(500, f"oh {KEY}".encode())):
        server.faults.extend([fault] * 100)
        with pytest.raises(SystemExit) as error:
            prompting.main(argv)
        server.faults.clear()
        message = str(error.value)
        assert re.search(
            r"error: http://\S+ (answers )?HTTP (401 \(Bad key|500 \(oh) \*\*\*", message
        )
        assert "\n" not in message and len(message) < 500
        out = message + str(capsys.readouterr()) + caplog.text
        out += "".join(p.read_text() for p in (tmp_path / "k").iterdir())
        assert KEY not in out and KEY[8:] not in out
    assert "HTTP" in caplog.text


# Resuming.


@pytest.mark.slow
def test_a_killed_run_resumes_without_asking_twice(games_root, tmp_path, serve, monkeypatch):
    monkeypatch.setattr(client, "CONCURRENCY", 1)

    def answer(body):
        time.sleep(0.02)
        return completion(LOOK, prompt_tokens=100, completion_tokens=10)

    server = serve(answer)
    argv = flags(games_root, tmp_path, "--endpoint", server.url, "--model", "m", "--name", "k",
                 "--agent", "reflexion", "--max-turns", "10")
    # A fork, because a new process would take seconds to import torch, which is not used here.
    process = multiprocessing.get_context("fork").Process(target=prompting.main, args=(argv,))
    process.start()
    file = tmp_path / "k" / "responses.jsonl"
    while not (file.exists() and file.read_bytes().count(b"\n") >= 5):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    time.sleep(0.2)  # the request under way
    with open(file, "a") as damaged:
        damaged.write('{"key": "cut by the ki')
    asked, kept = len(server.bodies), file.read_bytes().count(b"\n")
    assert kept <= asked <= kept + 1
    metrics = play(argv)["metrics"]
    assert metrics["calls"] == 2 * 3 * 10 + 2 * 2 == kept + len(server.bodies) - asked
    assert metrics["prompt_tokens"] == 100 * metrics["calls"]  # of both starts
    again = play(argv)["metrics"]
    assert len(server.bodies) == asked + metrics["calls"] - kept
    assert all(again[key] == metrics[key] for key in metrics if key != "seconds")


# Flags.


@pytest.mark.parametrize("more, message", [
    (["--endpoint", "http://h/v1", "--preset", "tiny"], "--endpoint needs --model"),
    (["--endpoint", "http://u:p@h/v1", "--model", "m"], "--endpoint must be"),
    (["--agent", "reflexion", "--eval-repeats", "2"], "--eval-repeats 2: .*omit it"),
])
def test_user_errors(more, message, games_root, tmp_path, capsys):
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        prompting.main(["alfworld", "--data", str(games_root), "--out", str(tmp_path), *more])
