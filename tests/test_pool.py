"""The pool of environments; what crashes, hangs and exceptions cost: pytest tests/test_pool.py

The toy environment counts: its observation names task, number of steps and all actions so far.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from paw_min.envs.pool import EnvPool

ROOT = Path(__file__).resolve().parents[1]


class Toy:
    """Plays as told: some actions end the process, hang or raise; "win" ends the episode."""

    def __init__(self, crash_file=None):
        self.crash_file = crash_file
        self.resets = 0

    def reset(self, task):
        if task == "corrupt":
            raise ValueError("this game is broken")
        if task == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        self.task, self.actions = task, []
        self.resets += 1
        return f"start of {task}", {"pid": os.getpid(), "resets": self.resets}

    def step(self, action):
        if action == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "leave":
            os._exit(3)
        if action == "hang":
            time.sleep(600)
        if action == "slow":
            time.sleep(0.5)
        if action == "raise":
            raise KeyError("val1")
        if action == "exit":
            raise SystemExit("Undeclared predicate")
        if action == "crash when replayed":
            if os.path.exists(self.crash_file):
                os.kill(os.getpid(), signal.SIGKILL)
            Path(self.crash_file).touch()
        self.actions.append(action)
        obs = f"{self.task}: {len(self.actions)} {' '.join(self.actions)}"
        won = action == "win"
        return obs, float(won), won, {"pid": os.getpid()}


def broken():
    raise ImportError("no such game engine")


def without_pid(result):
    return (*result[:-1], {key: value for key, value in result[-1].items() if key != "pid"})


def assert_failed(result, *parts):
    assert result[:3] == ("", 0.0, True)
    for part in parts:
        assert part in result[3]["failed"], (part, result[3]["failed"])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_do_not_depend_on_workers(workers):
    with EnvPool(Toy, 5, workers) as pool:
        results = pool.reset([f"task {slot}" for slot in range(5)])
        assert [obs for obs, _ in results] == [f"start of task {slot}" for slot in range(5)]
        pids = [info["pid"] for _, info in results]
        blocks = [pids.index(pid) for pid in pids]  # first slot of the same process
        assert blocks == {0: [0] * 5, 1: [0] * 5, 2: [0, 0, 0, 3, 3]}[workers]
        assert (pids[0] == os.getpid()) == (workers == 0)
        results = pool.step({4: "a", 1: "b"})
        assert list(results) == [4, 1]
        assert without_pid(results[4]) == ("task 4: 1 a", 0.0, False, {})
        assert without_pid(pool.step({1: "win"})[1]) == ("task 1: 2 b win", 1.0, True, {})
        assert pool.reset(["other"])[0][1]["resets"] == 2  # the same object plays on


@pytest.mark.parametrize("workers", [0, 2])
def test_send_and_recv(workers):
    with EnvPool(Toy, 4, workers) as pool:
        with pytest.raises(RuntimeError, match="recv would wait for ever"):
            pool.recv()
        pool.reset(list("wxyz"))
        for slot in (2, 0, 3):
            pool.send(slot, "step", f"go {slot}")
        with pytest.raises(RuntimeError, match="Slot 2 still owes an answer"):
            pool.send(2, "step", "again")
        with pytest.raises(RuntimeError, match="unanswered requests"):
            pool.step({1: "go"})
        answers = [pool.recv() for _ in range(3)]
        assert {slot: result[0] for slot, result in answers} == {
            2: "y: 1 go 2", 0: "w: 1 go 0", 3: "z: 1 go 3"
        }
        if workers == 0:
            assert [slot for slot, _ in answers] == [2, 0, 3]
        for bad in ((4, "step"), (-1, "step"), (0, "close")):
            with pytest.raises(ValueError, match="of slot"):
                pool.send(*bad, "x")


@pytest.mark.parametrize("workers", [0, 2])
def test_recv_with_a_timeout(workers):
    with EnvPool(Toy, 4, workers) as pool:
        assert pool.recv(0) is None and pool.recv(0.01) is None  # nothing has been asked
        pool.reset(list("wxyz"))
        pool.send(1, "step", "slow")
        pool.send(3, "step", "go")
        if workers:
            slot, result = pool.recv(60)
            assert slot == 3 and result[0] == "z: 1 go"
            assert pool.recv(0) is None and pool.recv(0.01) is None
            assert pool.recv()[0] == 1
        else:  # one request at a call, in order
            assert [pool.recv(0)[0], pool.recv(0)[0]] == [1, 3]
        assert pool.recv(0) is None


def wait_until(condition):
    limit = time.monotonic() + 60
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    assert condition()


def test_a_worker_works_on_while_nobody_calls_recv(tmp_path):
    touched = tmp_path / "touched"
    with EnvPool(partial(Toy, str(touched)), 2, 1) as pool:
        pool.reset(list("ab"))
        pool.send(0, "step", "slow")
        pool.send(1, "step", "crash when replayed")  # its worker is busy; it will touch a file
        wait_until(touched.exists)
        assert [pool.recv(0)[0], pool.recv(0)[0]] == [0, 1]


def test_requests_to_a_worker_that_died_meanwhile(caplog):
    with EnvPool(Toy, 3, 1) as pool:
        pid = pool.reset(list("abc"))[0][1]["pid"]
        pool.send(0, "step", "crash")
        wait_until(lambda: not alive(pid))
        pool.send(1, "step", "x")
        pool.send(2, "step", "x")
        answers = dict(pool.recv() for _ in range(3))
        assert_failed(answers[0], "Slot 0 failed at step 'crash'", "its worker died")
        assert [answers[slot][0] for slot in (1, 2)] == ["b: 1 x", "c: 1 x"]
        assert len(caplog.messages) == 1


def test_large_messages_do_not_block():
    """More than the buffers of a pipe hold, in both directions at once."""
    actions = {slot: "x" * 200_000 for slot in range(8)}
    with EnvPool(Toy, 8, 1, timeout=60) as pool:
        pool.reset([""] * 8)
        results = pool.step(actions)
        assert all(len(results[slot][0]) > 200_000 for slot in range(8))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("action", "reason"), [("raise", "KeyError: 'val1'"),
                                                ("exit", "SystemExit: Undeclared predicate")])
def test_an_exception_costs_one_episode(workers, action, reason, caplog):
    with EnvPool(Toy, 4, workers) as pool:
        first = pool.reset(list("abcd"))
        results = pool.step({0: "x", 1: action, 2: "x", 3: "x"})
        assert_failed(results[1], f"Slot 1 failed at step '{action}' after 0 steps of task 'b'",
                      reason)
        assert caplog.messages == [results[1][3]["failed"]]
        assert caplog.records[0].levelno == logging.WARNING
        assert [results[slot][0] for slot in (0, 2, 3)] == ["a: 1 x", "c: 1 x", "d: 1 x"]
        again = pool.step({0: "y", 1: "y"})
        assert again[1] == results[1]  # until its next reset
        assert again[0][0] == "a: 2 x y"
        results = pool.reset(["e", "corrupt"])
        assert results[0] == ("start of e", {"pid": first[0][1]["pid"], "resets": 2})
        assert results[1][0] == ""
        assert "reset 'corrupt': ValueError: this game is broken" in results[1][1]["failed"]
        assert pool.reset(["e", "f"])[1][0] == "start of f"
        results = pool.step({0: action, 1: "z"})
        assert_failed(results[0], f"Slot 0 failed at step '{action}' after 0 steps of task 'e'")
        assert results[1][0] == "f: 1 z"


@pytest.mark.parametrize(("action", "reason"), [("crash", "its worker died (exit code -9)"),
                                                ("leave", "its worker died (exit code 3)"),
                                                ("hang", "no answer within 3 s")])
def test_a_crash_or_hang_costs_one_episode(action, reason, caplog):
    with EnvPool(Toy, 6, 2, timeout=3.0) as pool:  # slots 0-2 and 3-5
        before = pool.reset(list("abcdef"))
        pool.step({slot: "x" for slot in range(6)})
        # Slot 0 is answered before the end of its worker, slot 2 waits behind it.
        results = pool.step({0: "y", 1: action, 2: "y", 3: "y", 4: "y"})
        assert_failed(results[1], f"Slot 1 failed at step '{action}' after 1 steps of task 'b'",
                      reason)
        assert caplog.messages == [results[1][3]["failed"]]
        for slot, task in ((0, "a"), (2, "c"), (3, "d"), (4, "e")):
            assert without_pid(results[slot]) == (f"{task}: 2 x y", 0.0, False, {})
        results = pool.step({slot: "z" for slot in range(6)})
        assert_failed(results[1], reason)
        assert [results[slot][0] for slot in (0, 2, 3, 4, 5)] == [
            "a: 3 x y z", "c: 3 x y z", "d: 3 x y z", "e: 3 x y z", "f: 2 x z"
        ]
        assert results[5][3]["pid"] == before[5][1]["pid"]  # the other worker was left alone
        assert results[0][3]["pid"] != before[0][1]["pid"]
        results = pool.reset(["g"] * 6)
        assert results[1][0] == "start of g"
        assert [info["resets"] for _, info in results] == [2, 1, 2, 2, 2, 2]  # restored once
        assert len(caplog.messages) == 1


def test_the_timeout_is_that_of_one_call(caplog):
    """Neither requests in a row nor the replay of an episode may exceed it only by their sum."""
    with EnvPool(Toy, 4, 1, timeout=1.5) as pool:
        pool.reset(list("abcd"))
        for _ in range(2):
            pool.step({slot: "slow" for slot in range(4)})
        assert not caplog.messages
        pool.step({0: "crash"})
        assert pool.step({1: "slow"})[1][0] == "b: 3 slow slow slow"
        assert len(caplog.messages) == 1


def test_a_deadly_task_ends_nothing_else():
    with EnvPool(Toy, 3, 1) as pool:
        pool.reset(list("abc"))
        results = pool.reset(["x", "deadly", "z"])
        assert [obs for obs, _ in results] == ["start of x", "", "start of z"]
        assert "reset 'deadly'" in results[1][1]["failed"]
        results = pool.step({0: "1", 1: "1", 2: "1"})
        assert [results[slot][0] for slot in range(3)] == ["x: 1 1", "", "z: 1 1"]


def test_a_crash_while_restoring_fails_that_slot_too(tmp_path):
    with EnvPool(partial(Toy, str(tmp_path / "crash")), 3, 1) as pool:
        pool.reset(list("abc"))
        pool.step({0: "crash when replayed", 1: "x", 2: "x"})
        results = pool.step({0: "y", 1: "y", 2: "crash"})
        assert results[0][0].startswith("a: 2") and results[1][0] == "b: 2 x y"
        assert_failed(results[2], "Slot 2", "crash")
        results = pool.step({0: "z", 1: "z", 2: "z"})
        assert_failed(results[0], "Slot 0 failed at step 'z'", "2 steps of task 'a'", "died")
        assert results[1][0] == "b: 3 x y z"
        assert_failed(results[2], "Slot 2", "crash")


def test_a_worker_that_dies_while_idle_costs_nothing(caplog):
    with EnvPool(Toy, 2, 1) as pool:
        pid = pool.reset(list("ab"))[0][1]["pid"]
        pool.step({0: "x"})
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        results = pool.step({0: "y", 1: "y"})
        assert [results[0][0], results[1][0]] == ["a: 2 x y", "b: 1 y"]
        assert not caplog.messages


@pytest.mark.parametrize("workers", [0, 1])
def test_make_env_must_not_fail(workers):
    with EnvPool(broken, 2, workers) as pool, pytest.raises(RuntimeError, match="no such game"):
        pool.reset(["a", "b"])


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("way", ["kill -9", "exit without close", "close"])
def test_no_orphans(way, tmp_path):
    """One worker is idle, the other hangs, when their parent goes."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from paw_min.envs.pool import EnvPool
from test_pool import Toy
if __name__ == "__main__":
    pool = EnvPool(Toy, 2, 2)
    print(*(info["pid"] for _, info in pool.reset(["a", "b"])), flush=True)
    if {way != "close"}:
        pool.send(1, "step", "hang")
    time.sleep({600 if way == "kill -9" else 0})
    if {way == "close"}:
        pool.close()
        pool.close()
        try:
            pool.send(0, "step", "x")
        except ValueError:
            time.sleep(600)
""")
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if way == "kill -9":
            assert all(alive(pid) for pid in pids)
            parent.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))
        assert way != "close" or parent.poll() is None
    finally:
        parent.kill()
        parent.wait()
