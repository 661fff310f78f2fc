"""The pool of environments and its fault tolerance.

The toy environment's observation is its task, the number of steps and all commands so far.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from paw_min.base.errors import UserError
from paw_min.envs import pool as pool_module
from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool
from tests.pools import reset, step, until

ROOT = Path(__file__).resolve().parents[2]


class Toy:
    """Some commands kill the process, hang or raise; "win" ends the episode.

    A step's `task_type` is the process id, its `admissible` the number of resets.
    """

    def __init__(self):
        self.resets = 0

    def reset(self, task):
        if task == "hang":
            time.sleep(600)
        if task == "corrupt":
            raise ValueError("this game is broken")
        self.task = task
        self.commands = []
        self.resets += 1
        return Step(f"start of {task}", task, str(os.getpid()), [str(self.resets)])

    def step(self, command):
        if command == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if command == "hang":
            time.sleep(600)
        if command == "slow":
            time.sleep(2)
        if command in RAISED:
            raise RAISED[command]
        self.commands.append(command)
        observation = f"{self.task}: {len(self.commands)} {' '.join(self.commands)}"
        won = command == "win"
        return Step(observation, self.task, str(os.getpid()), [], float(won), won, won)


def pid(answer):
    return int(answer.task_type)


def assert_playing(answer, observation, won=False):
    assert (answer.observation, answer.reward) == (observation, float(won))
    assert (answer.done, answer.won, answer.failed) == (won, won, "")


def assert_failed(answer, *parts):
    assert answer == Step("", "", "", [], done=True, failed=answer.failed)
    for part in parts:
        assert part in answer.failed, (part, answer.failed)


def ended(pid: int) -> bool:
    """Whether this process is gone, or only waits to be collected."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("workers", [0, 2])
def test_results_do_not_depend_on_workers(workers):
    with EnvPool(Toy, 5, workers) as pool:
        first = reset(pool, [f"task {slot}" for slot in range(5)])
        assert [s.observation for s in first] == [f"start of task {slot}" for slot in range(5)]
        pids = [pid(s) for s in first]
        blocks = [pids.index(p) for p in pids]  # first slot of the same process
        assert blocks == {0: [0] * 5, 2: [0, 0, 0, 3, 3]}[workers]
        assert (pids[0] == os.getpid()) == (workers == 0)
        steps = step(pool, {4: "a", 1: "b"})
        assert_playing(steps[4], "task 4: 1 a")
        assert_playing(step(pool, {1: "win"})[1], "task 1: 2 b win", won=True)
        assert reset(pool, ["other"])[0].admissible == ["2"]  # the same object as before


def test_requests_to_a_dead_worker(caplog):
    """The first one is blamed. Episodes are lost, and resets that waited are served."""
    with EnvPool(Toy, 4, 1) as pool:
        worker = pid(reset(pool, "abcd")[0])
        step(pool, {0: "x"})
        os.kill(worker, signal.SIGKILL)
        until(lambda: ended(worker))
        pool.step(0, "y")
        pool.step(1, "y")
        pool.reset(2, "new")
        answers = dict(pool.recv() for _ in range(3))
        assert_failed(answers[0], "Slot 0 failed at step 'y' after 1 steps of task 'a'", "died")
        assert answers[1] == answers[0]
        assert answers[2].observation == "start of new" and pid(answers[2]) != worker
        assert step(pool, {3: "z"})[3] == answers[0]
        assert_playing(step(pool, {2: "z"})[2], "new: 1 z")
        assert reset(pool, "efgh")[3].observation == "start of h"
        assert len(caplog.messages) == 1


def test_large_messages_do_not_block():
    """More than the buffers of a pipe, in both directions at once."""
    with EnvPool(Toy, 8, 1, timeout=60) as pool:
        reset(pool, [""] * 8)
        steps = step(pool, {slot: "x" * 200_000 for slot in range(8)})
        assert all(len(steps[slot].observation) > 200_000 for slot in range(8))


class PanicException(BaseException):
    """As those of Rust libraries (pyo3)."""


class Silent(Exception):
    def __str__(self):
        raise PanicException("no text")


RAISED = {
    "raise": KeyError("val1"), "exit": SystemExit("Undeclared predicate"),
    "cancel": asyncio.CancelledError(), "panic": PanicException("index out of bounds"),
    "leave": GeneratorExit(), "silent": Silent(), "half": ValueError("a \ud800\n b"),
    "pipe": BrokenPipeError(),
}


@pytest.mark.parametrize("workers, command, reason", [
    (0, "raise", "KeyError: 'val1' (test_pool.py:"),
    (2, "exit", "SystemExit: Undeclared predicate (test_pool.py:"),
    (0, "cancel", "CancelledError: "), (0, "panic", "PanicException: index out of bounds ("),
    (2, "panic", "PanicException: index out of bounds ("), (0, "leave", "GeneratorExit: "),
    (0, "silent", "Silent: an error whose text cannot be printed ("), (2, "silent", "Silent: an "),
    (0, "half", "ValueError: a \\ud800 b ("), (0, "pipe", "BrokenPipeError: "),
])
def test_an_exception_costs_one_episode(workers, command, reason, caplog):
    with EnvPool(Toy, 3, workers) as pool:
        reset(pool, "abc")
        steps = step(pool, {0: "x", 1: command, 2: "x"})
        where = f"Slot 1 failed at step '{command}' after 0 steps of task 'b'"
        assert_failed(steps[1], where, reason)
        assert caplog.messages == [steps[1].failed]
        assert_playing(steps[0], "a: 1 x")
        assert_playing(steps[2], "c: 1 x")
        again = step(pool, {0: "y", 1: "y"})
        assert again[1] == steps[1]  # until its next reset
        assert_playing(again[0], "a: 2 x y")
        new, corrupt = reset(pool, ["e", "corrupt"])
        assert_playing(new, "start of e")
        assert_failed(corrupt, "reset 'corrupt': ValueError: this game is broken")


def test_ctrl_c_in_an_environment_ends_the_run(monkeypatch):
    monkeypatch.setitem(RAISED, "interrupt", KeyboardInterrupt())
    with EnvPool(Toy, 1) as pool:
        reset(pool, "a")
        with pytest.raises(KeyboardInterrupt):
            step(pool, {0: "interrupt"})


class Odd:
    """Returns Steps with other values: a task is one of RETURNED."""

    def reset(self, task):
        fields = dict(observation="seen", task=task, task_type="odd", admissible=["go"])
        value, _ = RETURNED[task]
        return value if task == "no Step" else Step(**fields | value)


RETURNED = {  # what comes back, and what the pool makes of it: values, or a reason
    "defaults": (
        {}, dict(observation="seen", admissible=["go"], reward=0.0, done=False, won=False,
                 score=None, failed=""),
    ),
    "numpy": (
        dict(observation=np.str_("o"), admissible=np.array(["a", "b"]), reward=np.float32(0.5),
             done=np.bool_(True), won=np.int64(0), score=np.float64(1)),
        dict(observation="o", admissible=["a", "b"], reward=0.5, done=True, won=False, score=1.0),
    ),
    "no Step": (("seen", 1.0, True, {}), "TypeError: ('seen', 1.0, True, {}) is not a Step"),
    "text": (dict(observation=None), "observation is None, not a text"),
    "half": (dict(task_type="\ud800"), "UnicodeEncodeError"),
    "command": (dict(admissible=["a", 5]), "a command of admissible is 5, not a text"),
    "commands": (dict(admissible="go"), "admissible is 'go', not a list"),
    "reward": (dict(reward="1"), "reward is '1', not a number"),
    "nan": (dict(reward=np.float32("nan")), "the reward nan is beyond"),
    "done": (dict(done="False"), "done is 'False', neither true nor false"),
    "won": (dict(won=None), "won is None, neither true nor false"),
    "score": (dict(score=5), "the score 5.0 is not between 0 and"),
    "failed": (dict(failed="the game is gone"), "the game is gone"),
    "below": (dict(score=-0.1), "the score -0.1 is not between 0 and"),
}


@pytest.mark.parametrize("task", RETURNED)
def test_what_an_environment_returns_is_checked(task):
    _, expected = RETURNED[task]
    (step,) = reset(EnvPool(Odd, 1), [task])
    if isinstance(expected, str):
        assert_failed(step, f"Slot 0 failed at reset {task!r}: ", expected)
        return
    assert step == Step(task=task, task_type="odd", **expected)
    json.dumps(asdict(step))
    assert type(step.observation) is str and type(step.reward) is float


@pytest.mark.slow
def test_the_limit_is_that_of_one_request():
    """Together, those of a worker may take longer."""
    with EnvPool(Toy, 3, 1, timeout=4.0) as pool:
        reset(pool, "abc")
        for answer in step(pool, dict.fromkeys(range(3), "slow")).values():
            assert answer.failed == ""


@pytest.mark.slow
@pytest.mark.parametrize("command, reason", [
    ("crash", "its worker died (exit code -9)"), ("hang", "no answer within 3 s"),
])
def test_a_crash_or_hang_costs_the_episodes_of_its_worker(command, reason, caplog):
    with EnvPool(Toy, 6, 2, timeout=3.0) as pool:  # slots 0-2 and 3-5
        before = reset(pool, "abcdef")
        step(pool, {slot: "x" for slot in range(6)})
        # Slot 0 is answered before its worker dies; slot 2 is in the queue behind slot 1.
        steps = step(pool, {0: "y", 1: command, 2: "y", 3: "y"})
        assert_playing(steps[0], "a: 2 x y")
        where = f"Slot 1 failed at step '{command}' after 1 steps of task 'b'"
        assert_failed(steps[1], where, reason)
        assert steps[2] == steps[1]
        assert_playing(steps[3], "d: 2 x y")
        again = step(pool, {slot: "z" for slot in range(6)})
        assert [again[slot] for slot in range(3)] == [steps[1]] * 3
        assert_playing(again[3], "d: 3 x y z")
        assert pid(again[5]) == pid(before[5])  # the other worker is not affected
        after = reset(pool, ["g"] * 6)
        assert [s.admissible for s in after] == [[n] for n in "111222"]  # new environments
        assert caplog.messages == [steps[1].failed]


class Slow(Toy):
    def __init__(self):
        super().__init__()
        time.sleep(1.5)


def test_loading_has_a_limit_of_its_own(monkeypatch):
    """A game that hangs at its start costs that of a step: a group would wait for it in turn."""
    with EnvPool(Slow, 1, 1, timeout=1.0) as pool:
        assert_failed(reset(pool, ["hang"])[0], "failed at reset 'hang': no answer within 1 s")
        assert reset(pool, "a")[0].observation == "start of a"
    monkeypatch.setattr(pool_module, "LOAD_TIMEOUT", 0.5)
    with EnvPool(Slow, 1, 1) as pool, pytest.raises(UserError, match="no answer within 0.5 s"):
        reset(pool, "a")


def test_a_worker_that_does_not_start_ends_in_one_sentence(tmp_path, monkeypatch):
    """The module of its environment ends every process that is not this one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(7)\nclass Env: pass\n"
    (tmp_path / "fragile.py").write_text(module)
    sentence = r"can be made: its worker died \(exit code 7\); see its error above"
    pool = EnvPool(__import__("fragile").Env, 2, 1)
    with pytest.raises(UserError, match=sentence):
        reset(pool, "ab")


def broken():
    raise ImportError("no such game engine")


def no_space():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("workers, make_env, error, sentence", [
    (0, broken, RuntimeError, "no such game"),
    (1, no_space, UserError, "No space .* free .* TMPDIR"),
])
def test_make_env_must_not_fail(workers, make_env, error, sentence):
    with EnvPool(make_env, 2, workers) as pool:
        for _ in range(2):  # the slot can be reset again
            pool.reset(0, "a")
            with pytest.raises(error, match=sentence):
                pool.recv()


SCRIPT = """
import sys, time
from tests.pools import reset
from tests.envs.test_pool import EnvPool, Toy, pid
if __name__ == "__main__":
    way = sys.argv[1]
    pool = EnvPool(Toy, 2, 2)
    print(*map(pid, reset(pool, "ab")), flush=True)
    if way == "close":
        pool.close()
        pool.close()
    else:
        pool.step(1, "hang")
    if way != "exit":
        time.sleep(600)
"""


@pytest.mark.parametrize("way", ["kill -9", "exit", "close"])
def test_no_orphans(way, tmp_path):
    """When the parent exits, one worker is idle and the other hangs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, script, way], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if way == "kill -9":
            parent.kill()
        until(lambda: all(map(ended, pids)))
        assert way != "close" or parent.poll() is None
    finally:
        parent.kill()
        parent.wait()
