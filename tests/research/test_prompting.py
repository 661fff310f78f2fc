"""Prompting baselines: agents, and an OpenAI-compatible server over real HTTP."""

import json
import socket
from dataclasses import replace

import pytest

from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Step, Tasks, Turn
from paw_min.envs.pool import EnvPool
from research.paper import prompting, table
from research.paper.prompting import DEMONSTRATIONS, LESSONS, React, Server
from tests import http_server
from tests.helpers import one_sentence

KEY = "sk-test/0123456789abcdef"
LOOK = "<think>hm</think><action>look</action>"


class ChatServer(http_server.Server):
    """A server of chat completions. `write`: prompt -> text."""

    def __init__(self):
        super().__init__()
        self.write = lambda prompt: LOOK
        self.url += "/v1"

    def answer(self, handler, body):
        message = {"role": "assistant", "content": self.write(body["messages"][0]["content"])}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        handler.reply(200, {"choices": [{"message": message}], "usage": usage})

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]


@pytest.fixture
def server(monkeypatch):
    """It always answers LOOK, unless a test lets it write something else."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(prompting.RETRY, "backoff_factor", 0.001)
    server = ChatServer()
    yield server
    server.close()


# ---- ReAct and Reflexion ----

HISTORY = [Turn(f"o{n}", f"c{n}") for n in (1, 2, 3)]
RESPONSES = [f"<think>t{n}</think>\n<action>c{n}</action>" for n in (1, 2, 3)]
NOW = Context("put mug" + LESSONS + "Trial 1: hm", "o4", ["look"], HISTORY, RESPONSES)


def react(env: str, style="paper") -> React:
    example = (DEMONSTRATIONS / f"{env}.txt").read_text().strip()
    return React(BENCHMARKS[env].prompts[style], example)


@pytest.mark.parametrize("env, style", [("alfworld", "compact"), ("search", "paper")])
def test_react_shows_the_example_all_thoughts_and_the_plain_prompt(env, style):
    context = replace(NOW, admissible=[]) if env == "search" else NOW
    context = replace(context, observation='<information>{"result": "o4"}</information>')
    agent = react(env, style)
    prompt = agent.prompt(context, 1)
    steps = "\n".join(f"Observation: o{n}\n{said}" for n, said in enumerate(RESPONSES, start=1))
    assert agent.example in prompt and steps in prompt and NOW.task in prompt
    plain = agent.plain(replace(context, task="put mug", history=[]), 0)
    assert prompt.endswith(plain) and LESSONS not in plain
    assert prompt.count(context.observation) == 1
    first = agent.prompt(replace(context, history=[], responses=[]), 1)
    assert "t1" not in first
    assert first.count("Observation:") == agent.example.count("Observation:")


def test_the_oldest_steps_of_a_long_trajectory_are_left_out(monkeypatch):
    full = react("alfworld").prompt(NOW, 2)
    monkeypatch.setattr(prompting, "TRAJECTORY", len(full) - 1)
    shorter = react("alfworld").prompt(NOW, 2)
    assert NOW.task in shorter and "(the first 1 steps are left out)" in shorter
    assert [f"t{k}" in full for k in (1, 2, 3)] == [True, True, True]
    assert [f"t{k}" in shorter for k in (1, 2, 3)] == [False, True, True]


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


def doorman(prompt: str) -> str:
    if "It did not solve the task" in prompt:
        return "<think>so</think> Next time\n I knock." if "push" in prompt else "?"
    command = "knock" if "Trial 1: <think>so</think> Next time I knock." in prompt else "push"
    return f"<think>try</think><action>{command}</action>"


def test_reflexion_learns_from_its_reflections_and_replays_only_lost_tasks(server, tmp_path):
    server.write, Door.played = doorman, []
    model = Server(server.url, "m", tmp_path / "responses.jsonl")
    tasks = Tasks([], ["easy", "hard", "broken", "wall"], None)
    cfg = Config(max_turns=2, eval_temperature=0.0)
    with EnvPool(Door, 2) as pool:
        episodes, metrics = prompting.play(cfg, "reflexion", model, pool, tasks)
    assert Door.played == ["easy", "hard", "broken", "wall", "hard", "wall", "wall"]
    assert [e.won for e in episodes] == [True, True, False, False]
    trials = [metrics[f"eval_success_trial_{n}"] for n in (1, 2, 3)]
    assert trials == pytest.approx([1 / 3, 2 / 3, 2 / 3])  # "broken" is not counted
    assert metrics["eval_success"] == pytest.approx(2 / 3) and metrics["eval_failed"] == 1
    reflections = [p for p in server.prompts if "It did not solve the task" in p]
    assert len(reflections) == 3  # hard and wall after trial 1, wall after trial 2, none after 3
    third = [p for p in server.prompts if "Trial 2: " in p and "It did not" not in p]
    assert len(third) == 2  # the second reflection is on a transcript without "push"
    assert all("Next time I knock.\nTrial 2: ?\n" in p for p in third)
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies)


# ---- the command and its server ----


def status(code, content="{}"):
    return lambda handler, body: handler.reply(code, content)


def drop(handler, body):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_a_rerun_asks_nothing_twice_and_is_a_row_of_a_table(games_root, tmp_path, server, capsys):
    argv = ["alfworld", "--data", str(games_root), "--out", str(tmp_path), "--eval-tasks", "2",
            "--max-turns", "3", "--preset", "tiny", "--model", "m", "--agent", "react",
            "--endpoint", server.url]
    server.faults.extend([status(500), drop, status(429)])  # are asked again
    prompting.main(argv)
    folder = tmp_path / "alfworld-react-m-seed0"
    metrics = json.loads((folder / "metrics.jsonl").read_text())
    assert metrics["calls"] == 6 == len(server.bodies) - 3 and metrics["prompt_tokens"] == 600
    expected = {"model": "m", "temperature": 0.4, "max_tokens": server.bodies[0]["max_tokens"]}
    assert expected.items() <= server.bodies[0].items()
    assert set(server.keys) == {f"Bearer {KEY}"} and set(server.paths) == {"/v1/chat/completions"}
    file = folder / "responses.jsonl"
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:-1]) + kept[-1][:9])  # as after a kill
    prompting.main(argv)
    assert len(server.bodies) == 10
    assert json.loads((folder / "metrics.jsonl").read_text()) == metrics
    prompting.main([*argv, "--name=own"])
    assert (tmp_path / "own" / "metrics.jsonl").exists()
    table.main([folder], None)
    assert "| alfworld-react-m | " in capsys.readouterr().out
    seeds = [body["seed"] for body in server.bodies]
    prompting.main([*argv, "--seed", "1"])
    assert not {body["seed"] for body in server.bodies[len(seeds):]} & set(seeds)


@pytest.mark.parametrize("fault, part", [
    (status(200, '{"choices": [{"mess'), "no chat completion"),
    (status(200, '{"choices": [{"message": 5}]}'), "no chat completion"),
    (status(200, "<html>busy</html>"), "no chat completion .*<html>busy"),
    (status(200, {"error": {"message": "no such model"}}), "no chat completion .*no such model"),
    (status(200, {"choices": []}), "no chat completion"),
    (status(200, {"choices": [{"message": {"content": 5}}]}), "no chat completion"),
    (status(200, {"choices": [{"message": {"content": [{"type": "text"}]}}]}), "no chat comp"),
    (status(200, {"choices": [{"message": {"content": "\ud800"}}]}), "no chat completion"),
    (status(200, "[" * 100_000), "no chat completion"),
    (status(200, {"choices": [{"message": {"content": "a"}}], "usage": 5}), "no chat completion"),
    (status(400, {"error": "temperature does not support 0.4"}), "temperature .*--eval-temp"),
    (status(401, f"Bad key {KEY}.\n" + 999 * "x"), r"HTTP 401 \(Bad key \*\*\*\. x+\): check --e"),
])
def test_a_wrong_answer_is_one_sentence_without_the_key(fault, part, server, tmp_path):
    server.faults.append(fault)
    model = Server(server.url, "m", tmp_path / "responses.jsonl")
    with one_sentence(part) as error:
        model.ask("a", 0, 0.4, 7)
    assert KEY not in str(error.value)
    assert model.ask("a", 0, 0.4, 7)["text"] == LOOK  # nothing of it was kept


@pytest.mark.parametrize("content, text", [
    ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"},
      {"type": "text", "text": "b"}], "ab"),
    ([], ""), (None, ""),
])
def test_a_message_of_blocks_or_without_text(content, text, server, tmp_path):
    message = {"role": "assistant", "content": content, "refusal": None}
    server.faults.append(status(200, {"choices": [{"message": message}], "usage": {"a": "b"}}))
    model = Server(server.url, "m", tmp_path / "responses.jsonl")
    assert model.ask("a", 0, 0.4, 7)["text"] == text and model.costs()["calls"] == 1


def test_a_model_that_wants_max_completion_tokens_is_asked_again(server, tmp_path):
    answer = server.answer

    def newer(handler, body):
        if "max_tokens" in body:
            said = "'max_tokens' is not supported with this model. Use 'max_completion_tokens'"
            return handler.reply(400, {"error": {"message": said}})
        return answer(handler, body)

    server.answer = newer
    file = tmp_path / "responses.jsonl"
    model = Server(server.url, "m", file)
    assert model.ask("a", 0, 0.4, 7)["text"] == LOOK == model.ask("b", 0, 0.4, 7)["text"]
    limits = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in server.bodies]
    assert limits == [(7, None), (None, 7), (None, 7)]
    again = Server(server.url, "m", file)
    again.ask("a", 0, 0.4, 7)
    assert len(server.bodies) == 3  # kept under the same key
