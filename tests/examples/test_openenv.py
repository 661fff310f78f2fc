"""PaW on an OpenEnv server: OpenEnv's own client and server at a real port of this process."""

import json
import runpy
import socket
import sys
import threading
import time
from contextlib import contextmanager
from unittest.mock import Mock, create_autospec

import pytest
import uvicorn
from openenv.core import create_app

from examples import guess_server, openenv_paw
from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.pool import EnvPool
from paw_min.running import runs
from tests import pools
from tests.helpers import SMALL


@contextmanager
def serving(app):
    """The URL of an application, which runs in a thread until the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        pools.until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def url():
    with serving(guess_server.app) as url:
        yield url


@pytest.fixture
def settings(tmp_path, model) -> dict:
    own = dict(env="openenv", out=str(tmp_path), model=model, max_turns=4, eval_tasks=4, updates=1)
    return SMALL | own | dict(prompt="paper", max_prompt_tokens=1000)


def test_a_run_on_the_guessing_game(url, settings, tmp_path):
    train.train(Config(**settings, data=f"{url}/"))
    before, after = runs.read_metrics(tmp_path / "r")
    assert before["eval_failed"] == after["failed"] == 0
    assert after["rows"] == 16 and after["wm_loss"] > 0


@pytest.mark.parametrize("data", [
    "http://127.0.0.1:9", "nowhere", "http://me:secret@[::1", "http://me:secret@127.0.0.1",
])
def test_no_server(data, settings, tmp_path, capsys):
    with pytest.raises(UserError, match="is no OpenEnv server .*: start one") as error:
        train.train(Config(**settings, data=data))
    assert len(str(error.value)) < 200
    with pytest.raises(ConnectionError) as lost:  # as in an episode: its text is printed and stored
        openenv_paw.connect(data)
    stored = (tmp_path / "r" / "config.json").read_text()
    assert "secret" not in f"{error.value} {lost.value} {stored} {capsys.readouterr()}"


def test_the_port_of_the_guess_server(monkeypatch):
    started = Mock()
    monkeypatch.setattr(uvicorn, "run", started)
    monkeypatch.setattr(sys, "argv", ["guess_server", "--port", "8123"])
    runpy.run_path(guess_server.__file__, run_name="__main__")
    assert started.call_args.kwargs["port"] == 8123


def test_a_password_goes_to_the_server(monkeypatch):
    sent = Mock(side_effect=ValueError)
    monkeypatch.setattr("requests.Session.send", sent)
    with pytest.raises(UserError):
        openenv_paw.load(Config(), "http://me:secret@host:1")
    request = sent.call_args.args[0]
    assert request.path_url == "/schema"
    assert request.headers["Authorization"] == "Basic bWU6c2VjcmV0"


def test_a_game_is_played_as_its_server_says(url):
    remote = openenv_paw.Remote(url, "words", "answer")
    said = [remote.reset("7"), *(remote.step(n) for n in ("5", "5", "9", "7"))]
    assert [step.observation for step in said[1:]] == ["Higher.", "Lower.", "Lower.", ""]
    assert [step.reward for step in said] == [0.0, 0.0, 0.0, 0.0, 10.0]
    assert [step.won for step in said] == [False] * 4 + [True] == [step.done for step in said]
    assert remote.reset("17").observation == said[0].observation


class Small(guess_server.Guess):
    """Ends each episode with a small reward, or in many of them; `won` is the server's own word."""

    def step(self, action):
        reward, done, *won = action.words.split()
        heard = Said(answer="", won=json.loads(won[0])) if won else guess_server.Hear(answer="")
        heard.reward, heard.done = float(reward), done == "end"
        return heard


class Said(guess_server.Hear):
    won: bool | None


@pytest.mark.parametrize("said, won", [
    (["0.1 end"], False), (["10 end"], True), (["4 on", "6 end"], True), (["10 on"], False),
    (100 * ["0.1 on"] + ["0 end"], True),
    (["0.1 end true"], True), (["10 end false"], False), (["10 end null"], True),
])
def test_won_is_the_highest_return_or_the_word_of_the_server(said, won):
    app = create_app(Small, guess_server.Say, Said, max_concurrent_envs=8)
    with serving(app) as url:
        remote = openenv_paw.Remote(url, "words", "answer")
        for _ in range(2):  # a reset begins a new return
            remote.reset("1")
            assert [remote.step(words).won for words in said][-1] is won


def test_a_lost_connection_costs_its_episode(monkeypatch):
    class Slow(guess_server.Guess):
        def step(self, action):
            if action.words == "sleep":
                time.sleep(2)
            if action.words == "break":
                raise ValueError("broken")
            if action.words == "shout":
                return guess_server.Hear(answer=2_000_000 * "a")
            return super().step(action)

    own = openenv_paw.SyncEnvClient.close
    close = create_autospec(own, side_effect=own)
    monkeypatch.setattr(openenv_paw.SyncEnvClient, "close", close)
    monkeypatch.setattr(openenv_paw, "TIMEOUT", 0.5)
    app = create_app(Slow, guess_server.Say, guess_server.Hear, max_concurrent_envs=8)
    with serving(app) as url:
        pool = EnvPool(lambda: openenv_paw.Remote(url, "words", "answer"), 3)
        assert [step.failed for step in pools.reset(pool, "789")] == ["", "", ""]
        pools.step(pool, {0: "1", 1: "1", 2: "1"})
        answers = pools.step(pool, {0: "5", 1: "break", 2: "sleep"})
        assert answers[0].observation == "Lower." and not answers[0].failed
        assert "broken" in answers[1].failed and "TimeoutError" in answers[2].failed
        assert close.call_count == 2  # Else the server keeps their environments.
        # The next episode of these slots begins in a session of its own, with its own answers.
        assert [step.failed for step in pools.reset(pool, "789")] == ["", "", ""]
        assert pools.step(pool, {2: "9"})[2].won
        loud = pools.step(pool, {1: "shout"})[1]  # a tokenizer reads a megabyte in about a second
        assert "too big" in loud.failed and "\n" not in loud.failed
    answers = pools.step(pool, {0: "5", 1: "5"})  # the server has stopped
    assert answers[0].failed and answers[1].failed


def test_the_text_field():
    def field(*names):
        fields = dict.fromkeys(names, {"type": "string"}) | {"metadata": {"type": "object"}}
        return openenv_paw.text_field({"action": {"properties": fields}}, "action")

    assert field("words") == "words"
    assert field("text", "task_type") == "text"
    with pytest.raises(UserError, match="the action has the text fields"):
        field("a", "b")


@pytest.mark.parametrize("response, command, valid", [
    ("<think>a</think><action> Say <b> </action>", "Say <b>", True),
    ("<action>x</action>", "x", False),
    ("<think>a</think><action> </action>", "", False),
    ("nothing", "nothing", False),
])
def test_parsing(response, command, valid):
    assert openenv_paw.parse(response) == (command, valid)
