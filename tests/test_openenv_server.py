"""The OpenEnv server of examples/, with OpenEnv's own client over real HTTP and WebSocket."""

import json
import random
import signal
import socket
import subprocess
import sys

import pytest

pytest.importorskip("openenv")

import requests
from openenv.cli._validation import validate_running_environment
from openenv.validation import Level, Verdict, run_validation
from websockets.sync.client import connect

from examples import openenv_paw, openenv_server
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Step
from tests import pools
from tests.helpers import ROOT
from tests.openenv_client import client, serving
from tests.pools import until

SEARCH = ["<search>Who wrote it?</search>", "nothing", "<answer>a</answer>"]
LOOK = {"command": "look"}


@pytest.fixture(scope="module")
def load(games_root, shop, world):
    """A function from the name of a benchmark to its tasks."""
    data = {"alfworld": str(games_root), "webshop": shop, "search": world}

    def load_tasks(env):
        return BENCHMARKS[env].load(Config(env=env, **openenv_server.SETTINGS[env]), data[env])

    return load_tasks


@pytest.fixture(scope="module")
def games(load):
    return openenv_server.Games(load("alfworld"))


@pytest.fixture(scope="module")
def url(games):
    with serving(openenv_server.make_app(games)) as url:
        yield url


def play(env, seed, reset, step, turns=8) -> list[Step]:
    """What a random player sees, whose searches and purchases find something."""
    rng = random.Random(seed)
    seen = [reset()]
    while not seen[-1].done and len(seen) <= turns:
        command = rng.choice(SEARCH if env == "search" else seen[-1].admissible)
        if "click[buy now]" in seen[-1].admissible and rng.random() < 0.5:
            command = "click[buy now]"
        seen.append(step(command.replace("<your query>", seen[-1].task)))
    return seen


@pytest.mark.parametrize("env, episodes", [("alfworld", 2), ("webshop", 8), ("search", 2)])
def test_an_episode_is_the_one_in_process(env, episodes, load):
    """With the client of examples/openenv_paw.py."""
    tasks = load(env)
    numbers = [*range(episodes), len(tasks.train)]  # the last is the first held-out one
    scores = []
    with serving(openenv_server.make_app(openenv_server.Games(tasks))) as url:
        remote = openenv_paw.Remote(url, "command", "text")
        pool = tasks.make_pool(1)
        for number in numbers:
            task = [*tasks.train, *tasks.held_out][number]
            expected = play(env, number, lambda task=task: pools.reset(pool, [task])[0],
                            lambda command: pools.step(pool, {0: command})[0])
            over = play(env, number, lambda n=number: remote.reset(str(n)), remote.step)
            assert over == expected and len(expected) > 1
            state = remote.session.state()
            assert state["task"] == task and state["step_count"] == len(expected) - 1
            scores.append(expected[-1].score)
    assert env != "webshop" or max(scores) > 0  # something was bought


def test_seeds_count_the_tasks(url, games):
    train = games.splits["train"]
    held_out = games.splits["held_out"]
    n = len(train)
    cases = [
        (dict(seed=0), train[0]), (dict(seed=n), held_out[0]),
        (dict(seed=n + len(held_out) + 1), train[1]), (dict(seed=n + 1, split="train"), train[1]),
        (dict(seed=2, split="held_out"), held_out[2]), (dict(seed=1, task=train[4]), train[4]),
    ]
    with client(url) as session:
        assert session.state() == {
            "episode_id": None, "step_count": 0, "train": n, "held_out": len(held_out),
        }
        for arguments, task in cases:
            session.reset(**arguments)
            assert session.state()["task"] == task
        drawn = {session.reset() and session.state()["task"] for _ in range(20)}
        assert len(drawn) > 1 and drawn <= set(train + held_out)
        session.reset(seed=0, episode_id="mine")
        assert session.state()["episode_id"] == "mine"


def test_what_is_refused_costs_no_episode(url):
    resets = {
        "there is no task '/etc/passwd': give a seed and a split": dict(task="/etc/passwd"),
        "the seed True is not a number: use 0, 1, 2": dict(seed=True),
        "there is no split 'test': use train or held_out": dict(seed=0, split="test"),
    }
    no_episode = "no episode is running in this session: call reset first"
    with client(url) as session:
        with pytest.raises(RuntimeError, match=no_episode):
            session.step(LOOK)
        for sentence, arguments in resets.items():
            with pytest.raises(RuntimeError, match=f"{sentence}.*EXECUTION_ERROR"):
                session.reset(**arguments)
        session.reset(seed=0)
        for action in ({}, LOOK | {"x": 1}, {"command": "a" * 100_001}):
            with pytest.raises(RuntimeError, match="Invalid message .code: VALIDATION_ERROR"):
                session.step(action)
        assert "Nothing happens" in session.step({"command": "xyzzy"}).observation["text"]
        assert session.state()["step_count"] == 1


def vanish(session):
    """Without a closing handshake, as after a crash."""
    session.socket.shutdown(socket.SHUT_RDWR)


def test_a_session_that_ends_frees_its_slot(load, monkeypatch):
    monkeypatch.setattr(openenv_server, "SESSIONS", 1)
    games = openenv_server.Games(load("alfworld"))
    with serving(openenv_server.make_app(games)) as url:
        socket_url = url.replace("http", "ws") + "/ws"
        with connect(socket_url) as session:
            session.send('{"type": "reset", "data": {"seed": 0}}')
            assert json.loads(session.recv())["type"] == "observation"
            assert games.free.qsize() == 1
            with connect(socket_url) as second:
                assert json.loads(second.recv())["data"]["code"] == "CAPACITY_REACHED"
            vanish(session)
        until(lambda: games.free.qsize() == 2)
        with client(url) as third:
            third.reset(seed=0)
            assert third.step(LOOK).observation["text"]


def test_a_closed_session_takes_no_slot(games):
    """In OpenEnv, another client can close a session by its name."""
    free = games.free.qsize()
    session = openenv_server.GameSession(games)
    session.reset(seed=0)
    session.close()
    with pytest.raises(UserError, match="this session was closed: connect again"):
        session.reset(seed=0)
    assert games.free.qsize() == free


@pytest.mark.parametrize("path, body, status", [
    ("mcp", '{"id": NaN}', 422), ("reset", '{"seed": 1e999}', 422),
    ("reset", '{"seed": 0, "episode_id": "\\ud800"}', 422),
    ("step", '{"action": {"command": "look", "\\ud800": 1}}', 422),
    ("reset", '{"x": "' + "a" * (33 << 20) + '"}', 413),
], ids=range(5))
def test_what_json_does_not_have_is_not_repeated(url, path, body, status):
    headers = {"Content-Type": "application/json"}
    answer = requests.post(f"{url}/{path}", body, headers=headers, timeout=20)
    assert answer.status_code == status and len(answer.content) < 1000


def test_http(url):
    task = {"seed": 2, "split": "held_out"}
    answer = requests.post(f"{url}/reset", json=task, timeout=20).json()
    with client(url) as session:
        text = session.reset(**task).observation["text"]
    assert (answer["observation"]["text"], answer["reward"], answer["done"]) == (text, 0, False)


def test_openenv_validate(url):
    """With a URL, and on the static level; the others need Docker."""
    report = validate_running_environment(url, timeout_s=20)
    assert report["passed"], report
    report = run_validation(ROOT / "examples", max_level=Level.STATIC)
    assert report.verdict is Verdict.PASS, report


@pytest.mark.slow
def test_the_command(games_root, request):
    command = [sys.executable, "-m", "examples.openenv_server", "alfworld"]
    process = subprocess.Popen(
        [*command, "--data", games_root, "--port", "0"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    request.addfinalizer(process.kill)
    line = process.stdout.readline()
    assert line.endswith(": 12 training tasks, 6 held out\n"), line + process.stderr.read()
    url = line.split()[2].rstrip(":")
    with client(url) as session:
        assert session.reset(seed=0).observation["text"]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert process.stderr.read() == ""  # no traceback
