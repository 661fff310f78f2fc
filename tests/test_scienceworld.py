"""examples/scienceworld.py with the real engine: python -m pytest tests/test_scienceworld.py

Needs Java (apt-get install default-jre-headless); without it, most of the file is skipped.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from py4j.protocol import Py4JNetworkError

from examples import scienceworld
from examples.scienceworld import FRICTION, LIFESPAN, R_MAX, ScienceWorld
from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.interface import Context, Turn
from paw_min.envs.pool import EnvPool
from paw_min.model.policy import load_policy
from paw_min.running import runs
from paw_min.toy.standins import Demonstration, make_tokenizer
from research.scienceworld import study
from tests.helpers import make_policy, one_sentence, python
from tests.pools import ended, reset, step, until
from world_models import word2world

PAINT = "chemistry-mix-paint-secondary-color"
PLANE = "inclined plane with a {} surface"
WON = {  # task -> its shortest solution
    f"{FRICTION} 0": ["teleport to workshop", f"focus on {PLANE.format('cloth')}"],
    f"{PAINT} 0": [
        "teleport to art studio", "pour wood cup containing blue paint in jug",
        "pour wood cup containing yellow paint in jug", "mix jug", "focus on green paint",
    ],
    f"{LIFESPAN} 0": ["teleport to outside", "focus on baby brown bear"],
}


@pytest.fixture
def java():
    """The engine of this process."""
    try:
        return scienceworld.engine()
    except UserError as error:
        pytest.skip(str(error))  # in CI, conftest.py makes this a failure


def play(environment, task: str, commands: list[str]) -> list:
    return [environment.reset(task), *map(environment.step, commands)]


@pytest.mark.parametrize("task", WON)
def test_a_solved_task_returns_r_max(java, task):
    steps = play(ScienceWorld(), task, WON[task])
    assert sum(s.reward for s in steps) == pytest.approx(R_MAX)
    assert [s.done for s in steps] == [False] * len(WON[task]) + [True]
    assert steps[-1].won and steps[-1].score == 1 and not steps[-2].won
    assert f"{steps[0].task_type} " in task and steps[0].task.startswith("Your task is to ")


def test_a_wrong_focus_ends_the_episode_and_takes_nothing_back(java):
    commands = ["teleport to workshop", f"focus on {PLANE.format('paper')}"]
    _, moved, failed = play(ScienceWorld(), f"{FRICTION} 0", commands)
    assert moved.reward > 0 and not moved.done
    assert failed.done and not failed.won
    assert (failed.score, failed.reward) == (0, 0)


def test_the_next_observation_says_the_fact(java):
    """Of a surface the same in every task; of a mixture its color. The prompts say neither."""
    environment = ScienceWorld()
    for variation in (0, 1):  # both have a plane of paper
        commands = ["teleport to workshop", f"move block to {PLANE.format('paper')}",
                    f"look at {PLANE.format('paper')}"]
        steps = play(environment, f"{FRICTION} {variation}", commands)
        assert "approximately 6% down the plane" in steps[-1].observation
    steps = play(environment, f"{PAINT} 0", WON[f"{PAINT} 0"])
    assert steps[4].observation == "Blue and yellow paint mix to produce green paint."


def test_the_same_commands_give_the_same_steps(java):
    """In two environments at the same time, with animals that move, and in another engine."""
    commands = ["teleport to outside", *["look around", "wait1"] * 4]
    one, two = ScienceWorld(), ScienceWorld()
    first = play(one, "find-plant 2", commands)
    both = [(one.reset("find-plant 2"), two.reset("find-plant 2"))]
    both += [(one.step(command), two.step(command)) for command in commands]
    assert both == [(s, s) for s in first]
    java.java_process.kill()
    java.java_process.wait()
    assert play(one, "find-plant 2", commands) == first


def test_the_lists_are_those_of_scienceworld(java):
    tasks = scienceworld.load(Config(eval_split="dev"), f"{FRICTION},boil")
    assert tasks.held_out[-7:] == [f"boil {i}" for i in range(14, 21)]
    test = scienceworld.load(Config(eval_split="test"), "boil")
    assert test.held_out == [f"boil {i}" for i in range(21, 30)]
    assert test.train == [f"boil {i}" for i in range(14)] == tasks.train[-14:]
    friction = [task for task in tasks.train if task.startswith(FRICTION)]
    assert len(friction) <= scienceworld.TRAIN and len(tasks.held_out) <= 32 + 7
    assert not set(tasks.train) & set(tasks.held_out)


def test_prompts_have_no_list_of_the_commands_that_work():
    turns = [Turn("Here you see a door.", "teleport to workshop")]
    context = Context("Your task is to rest.", "You teleport.", ["never shown"], turns)
    for style, prompt in scienceworld.BENCHMARKS["scienceworld"].prompts.items():
        text = prompt(context, 1)
        for part in (context.task, "> teleport to workshop", "You teleport."):
            assert part in text
        assert "never shown" not in text
        assert ("a door" in text) == (style == "paper")  # the other one leaves it out


@pytest.mark.parametrize("response, command, valid", [
    ("look around", "look around", True),
    ("I am cold. <action>Open Door</action> So.", "open door", True),
    ("<action>wait1", "wait1", True),
    ("First,\nopen", "first,\nopen", False),
    ("<action></action>", "", False),
])
def test_responses(response, command, valid):
    assert scienceworld.parse(response) == (command, valid)


# ---- failures ----


@pytest.mark.parametrize("data, split, named", [
    ("boil,melting", "dev", "melting"), ("boil", "valid_seen", "--eval-split valid_seen"),
])
def test_wrong_names_get_one_sentence(java, data, split, named):
    with pytest.raises(UserError, match=named):
        scienceworld.load(Config(eval_split=split), data)


@pytest.mark.parametrize("kind, remedy", [
    ("no program", "apt-get install default-jre-headless"),
    ("too old", "java -Xmx3g -version"),
])
def test_without_an_engine_there_is_one_sentence(tmp_path, monkeypatch, kind, remedy):
    monkeypatch.setattr(scienceworld, "_java", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if kind == "too old":
        (tmp_path / "java").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "java").chmod(0o755)
    with one_sentence(remedy):
        scienceworld.engine()


def engine_of(worker: int) -> psutil.Process:
    (found,) = psutil.Process(worker).children()
    assert found.name() == "java"
    return found


def test_a_worker_and_its_engine_end_together(java):
    """Two workers, two engines at once. One worker is killed, the other's engine goes on."""
    with EnvPool(ScienceWorld, 2, workers=2) as pool:
        tasks = [f"{FRICTION} 0", f"{LIFESPAN} 0"]
        reset(pool, tasks)
        workers = [worker.process.pid for worker in pool._workers]
        engines = [engine_of(worker) for worker in workers]
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: ended(engines[0].pid))
        answers = step(pool, {0: "teleport to workshop", 1: "teleport to outside"})
        assert "its worker died" in answers[0].failed and not answers[1].failed
        assert "(paper, cloth)" in reset(pool, tasks)[0].task
    until(lambda: ended(engines[1].pid))


def test_a_killed_or_hanging_engine_costs_episodes_only(java):
    with EnvPool(ScienceWorld, 1, workers=1, timeout=20) as pool:
        reset(pool, [f"{FRICTION} 0"])
        engine_of(pool._workers[0].process.pid).kill()
        assert step(pool, {0: "teleport to workshop"})[0].failed
        # The connection ends a moment before the process, of which the last thread counts.
        until(lambda: "(paper, cloth)" in reset(pool, [f"{FRICTION} 0"])[0].task)
        pool._timeout = 1.0
        engine = engine_of(pool._workers[0].process.pid)
        engine.suspend()
        assert "no answer within 1 s" in step(pool, {0: "teleport to workshop"})[0].failed
        with suppress(psutil.NoSuchProcess):  # with its worker gone, the system may have ended it
            engine.resume()
        until(lambda: ended(engine.pid))
        pool._timeout = 60.0
        assert "(paper, cloth)" in reset(pool, [f"{FRICTION} 0"])[0].task


def test_ctrl_c_ends_the_run_and_no_episode(java):
    """It reaches all processes of a terminal; the engine's end would look like a failed episode."""
    code = (
        "import signal\n"
        # A job in the background of a script ignores it, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from examples.scienceworld import FRICTION, ScienceWorld\n"
        "from paw_min.envs.pool import EnvPool\n"
        "pool = EnvPool(ScienceWorld, 1)\n"
        "pool.reset(0, f'{FRICTION} 0')\n"
        "while True:\n"
        "    print(pool.recv().step.failed or 'played', flush=True)\n"
        "    pool.step(0, 'look around')\n"
    )
    command = [sys.executable, "-c", code]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stdout.readline() == "played\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert set(out.split()) <= {"played"} and err.rstrip().endswith("KeyboardInterrupt")


def test_a_slot_whose_first_reset_failed_plays_later(java, monkeypatch):
    env, real = ScienceWorld(), scienceworld.engine
    monkeypatch.setattr(scienceworld, "engine", SimpleNamespace)  # has no jvm
    with pytest.raises(AttributeError):
        env.reset(f"{FRICTION} 0")
    monkeypatch.setattr(scienceworld, "engine", real)
    assert "(paper, cloth)" in env.reset(f"{FRICTION} 0").task


def test_an_engine_that_ends_while_tasks_are_listed(java, monkeypatch):
    monkeypatch.setattr(scienceworld, "list_tasks", Mock(side_effect=Py4JNetworkError("gone")))
    with pytest.raises(UserError, match="ended while it listed the tasks: rerun"):
        scienceworld.load(Config(eval_split="dev"), FRICTION)


def test_a_missing_package_is_a_sentence_where_tasks_are_listed(monkeypatch):
    monkeypatch.setattr(scienceworld, "_java", None)
    for name in ("py4j.java_gateway", "py4j.protocol"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it was not installed
    with one_sentence("pip install scienceworld==1.2.3"):
        scienceworld.load(Config(eval_split="dev"), FRICTION)


def test_help_needs_no_java(tmp_path):
    python("-m", "examples.scienceworld", "--help", env={"PATH": str(tmp_path)})


# ---- the start model and a run ----


def test_the_procedures_tell_no_fact(java):
    """Half of the planes in focus are the rougher ones, as by chance; each command works.

    Nor do the looks: of a surface, they have different numbers.
    """
    rng = scienceworld.random.Random(0)
    environment = ScienceWorld()
    won, looks = [], set()
    for _ in range(24):
        rows = scienceworld.demonstrate(environment, f"{FRICTION} 0", rng)
        *_, last = [row for row in rows if row.observation]  # of those that were played
        won.append("cloth surface" in last.response)
        looks |= {row.observation for row in rows if "wood block" in row.observation}
        assert {"cloth", "paper"} == {row.response.split()[-2] for row in rows[-2:]}
        assert not any("No known action" in row.observation for row in rows)
    assert 5 <= sum(won) <= 19
    for surface in ("cloth", "paper"):
        assert sum(f"{surface} surface, with" in look for look in looks) >= 4


def test_what_a_model_knows_of_the_numbers():
    """Against a pass for each row, up to the number in o'."""
    seen = "a block has slid approximately {}% down the plane"
    texts = [seen.format(n) for n in study.NUMBERS]
    policy = make_policy(tokenizer=make_tokenizer(["look at the plane", *texts]))
    before, *_ = (policy.encode(part) for part in seen.split("{}"))
    numbers = [policy.encode(str(n))[0] for n in study.NUMBERS]
    prompt, response = policy.encode_chat("the plane"), policy.encode_response("look at")
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + response + before])).logits
    p = logits[0, -1].softmax(-1)[numbers]  # (7,)
    assert p.max() > 1.5 * p.min()
    for number, probability in zip(study.NUMBERS, p.tolist(), strict=True):
        found = study.known(policy, [Demonstration("the plane", "look at", seen.format(number))])
        first = float(probability == p.max().item())
        assert found == {"p": pytest.approx(probability, abs=6e-5), "first": first}
    rows = [Demonstration("the plane", "look at", text) for text in texts]
    found = study.known(policy, rows)
    assert found == {"p": pytest.approx(p.mean().item(), abs=6e-5), "first": round(1 / 7, 4)}


@pytest.mark.slow
def test_a_run(java, tmp_path, monkeypatch):
    """The start model is made, and an update moves its weights."""
    monkeypatch.setattr(scienceworld, "START", tmp_path / "data" / "scienceworld")
    monkeypatch.setattr(scienceworld, "WARM_EPISODES", 9)
    monkeypatch.setattr(scienceworld, "WARM_STEPS", 60)
    scienceworld.prepare()
    start = str(scienceworld.START)
    settings = scienceworld.PRESETS["tiny"] | dict(
        env="scienceworld", name="r", out=str(tmp_path), model=start, groups=2, group_size=2,
        updates=1, eval_tasks=3, lr=1e-2,
    )
    train.train(Config(**settings))
    before, line = runs.read_metrics(tmp_path / "r")
    assert {f"eval_success/{name}" for name in (FRICTION, LIFESPAN)} <= set(before)
    assert line["failed"] == 0 and line["wm_loss"] > 0
    end = load_policy(str(tmp_path / "r" / "checkpoint-000001"))
    moved = [not torch.equal(p, q) for p, q in
             zip(load_policy(start).parameters(), end.parameters(), strict=True)]
    assert any(moved)


@pytest.mark.slow
def test_word2world_in_an_environment_from_outside(java, tmp_path):
    """By the name of its module: a world model from two episodes answers in its place."""

    def run(command: str, *flags: str) -> dict:
        words = [command, "examples.scienceworld", "--agents", "random", "--max-turns", "2"]
        return word2world.main([*words, *flags, "--out", str(tmp_path / command)])

    assert run("collect", "--episodes", "2")["turns"] == 4
    episodes = ["--trajectories", str(tmp_path / "collect" / "trajectories.json")]
    run("train", *episodes, "--width", "32", "--epochs", "1", "--batch", "2")
    trained = ["--world-model", str(tmp_path / "train"), "--answer-tokens", "8"]
    assert run("fidelity", *episodes, *trained)["n"] == 4
    assert run("consistency", *trained, "--eval-tasks", "1")["random"]["n"] == 1


def test_word2world_names_what_it_plays_in(tmp_path):
    for env, named in [("scienceworld", "such as examples.scienceworld"), ("no.such", "no.such")]:
        with pytest.raises(UserError, match=named):
            word2world.main(["collect", env, "--out", str(tmp_path)])
