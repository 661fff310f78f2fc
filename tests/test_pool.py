"""The pool of environments and its fault tolerance: pytest tests/test_pool.py

The toy environment's observation is its task, the number of steps and all commands so far.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.envs import pool as pool_module
from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool
from tests.pools import reset, step, until

ROOT = Path(__file__).resolve().parents[1]


class Toy:
    """Some commands kill the process, hang or raise; "win" ends the episode.

    A step's `task_type` is the process id, its `admissible` the number of resets.
    """

    def __init__(self):
        self.resets = 0

    def reset(self, task):
        if task == "corrupt":
            raise ValueError("this game is broken")
        if task == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        self.task, self.commands = task, []
        self.resets += 1
        return Step(f"start of {task}", task, str(os.getpid()), [str(self.resets)])

    def step(self, command):
        if command == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if command == "hang":
            time.sleep(600)
        if command == "slow":
            time.sleep(0.5)
        if command == "raise":
            raise KeyError("val1")
        if command == "exit":
            raise SystemExit("Undeclared predicate")
        if command.startswith("reward"):
            return Step("", self.task, "", [], float(command.split()[1]))
        if command.startswith("score"):
            return Step("", self.task, "", [], score=float(command.split()[1]))
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


@pytest.mark.parametrize("workers", [0, 2])
def test_requests_and_answers(workers):
    with EnvPool(Toy, 4, workers) as pool:
        with pytest.raises(RuntimeError, match="recv would block forever"):
            pool.recv()
        reset(pool, "wxyz")
        for slot in (2, 0, 3):
            pool.step(slot, f"go {slot}")
        for request in (pool.step, pool.reset):
            with pytest.raises(RuntimeError, match="Slot 2 has an unanswered request"):
                request(2, "again")
        answers = [pool.recv() for _ in range(3)]
        assert {answer.slot: answer.step.observation for answer in answers} == {
            2: "y: 1 go 2", 0: "w: 1 go 0", 3: "z: 1 go 3"
        }
        if workers == 0:
            assert [answer.slot for answer in answers] == [2, 0, 3]
        for slot in (4, -1):
            with pytest.raises(ValueError, match=f"step of slot {slot}: the pool has 4 slots"):
                pool.step(slot, "x")


@pytest.mark.parametrize("workers", [0, 2])
def test_recv_with_a_timeout(workers):
    with EnvPool(Toy, 4, workers) as pool:
        assert pool.recv(0) is None and pool.recv(0.01) is None  # no open request
        reset(pool, "wxyz")
        pool.step(1, "slow")
        pool.step(3, "go")
        if workers:
            answer = pool.recv(60)
            assert answer.slot == 3 and answer.step.observation == "z: 1 go"
            assert pool.recv(0) is None and pool.recv(0.01) is None
            assert pool.recv().slot == 1
        else:  # one request per call, in order
            assert [pool.recv(0).slot, pool.recv(0).slot] == [1, 3]
        assert pool.recv(0) is None


def test_requests_to_a_dead_worker(caplog):
    """The first one is blamed. Episodes are lost, and resets that waited are served."""
    with EnvPool(Toy, 4, 1) as pool:
        worker = pid(reset(pool, "abcd")[0])
        step(pool, {0: "x"})
        os.kill(worker, signal.SIGKILL)
        until(lambda: not alive(worker))
        pool.step(0, "y")
        pool.step(1, "y")
        pool.reset(2, "new")
        answers = dict(pool.recv() for _ in range(3))
        assert_failed(answers[0], "Slot 0 failed at step 'y' after 1 steps of task 'a'", "died")
        assert answers[1] == answers[0]
        assert answers[2].observation == "start of new" and pid(answers[2]) != worker
        assert step(pool, {3: "z"})[3] == answers[0]
        assert reset(pool, "efgh")[3].observation == "start of h"
        assert len(caplog.messages) == 1


def test_large_messages_do_not_block():
    """More than the buffers of a pipe, in both directions at once."""
    with EnvPool(Toy, 8, 1, timeout=60) as pool:
        reset(pool, [""] * 8)
        steps = step(pool, {slot: "x" * 200_000 for slot in range(8)})
        assert all(len(steps[slot].observation) > 200_000 for slot in range(8))


@pytest.mark.parametrize(("workers", "command", "reason"), [
    (0, "raise", "KeyError: 'val1'"), (2, "exit", "SystemExit: Undeclared predicate"),
    (2, "reward nan", "the reward nan is beyond"),
    (0, "score 5", "the score 5.0 is not between 0 and"),
])
def test_an_exception_costs_one_episode(workers, command, reason, caplog):
    with EnvPool(Toy, 4, workers) as pool:
        first = reset(pool, "abcd")
        steps = step(pool, {0: "x", 1: command, 2: "x", 3: "x"})
        assert_failed(steps[1], f"Slot 1 failed at step '{command}' after 0 steps of task 'b'",
                      reason)
        assert caplog.messages == [steps[1].failed]
        assert caplog.records[0].levelno == logging.WARNING
        assert [steps[slot].observation for slot in (0, 2, 3)] == ["a: 1 x", "c: 1 x", "d: 1 x"]
        again = step(pool, {0: "y", 1: "y"})
        assert again[1] == steps[1]  # until its next reset
        assert again[0].observation == "a: 2 x y"
        second = reset(pool, ["e", "corrupt"])
        assert second[0] == Step("start of e", "e", first[0].task_type, ["2"])
        assert_failed(second[1], "reset 'corrupt': ValueError: this game is broken")
        assert reset(pool, "ef")[1].observation == "start of f"


@pytest.mark.parametrize(("command", "reason"), [("crash", "its worker died (exit code -9)"),
                                                 ("hang", "no answer within 3 s")])
@pytest.mark.slow
def test_a_crash_or_hang_costs_the_episodes_of_its_worker(command, reason, caplog):
    with EnvPool(Toy, 6, 2, timeout=3.0) as pool:  # slots 0-2 and 3-5
        before = reset(pool, "abcdef")
        step(pool, {slot: "x" for slot in range(6)})
        # Slot 0 is answered before its worker dies; slot 2 is in the queue behind slot 1.
        steps = step(pool, {0: "y", 1: command, 2: "y", 3: "y", 4: "y"})
        assert_playing(steps[0], "a: 2 x y")
        assert_failed(steps[1], f"Slot 1 failed at step '{command}' after 1 steps of task 'b'",
                      reason)
        assert caplog.messages == [steps[1].failed]
        assert steps[2] == steps[1]
        for slot, task in ((3, "d"), (4, "e")):
            assert_playing(steps[slot], f"{task}: 2 x y")
        again = step(pool, {slot: "z" for slot in range(6)})
        assert [again[slot] for slot in range(3)] == [steps[1]] * 3
        assert [again[slot].observation for slot in (3, 4, 5)] == [
            "d: 3 x y z", "e: 3 x y z", "f: 2 x z"
        ]
        assert pid(again[5]) == pid(before[5])  # the other worker is not affected
        after = reset(pool, ["g"] * 6)
        assert [s.admissible for s in after] == [[n] for n in "111222"]  # new environments
        assert len(caplog.messages) == 1


@pytest.mark.slow
def test_the_timeout_is_per_call(caplog):
    """It does not apply to a queue of requests as a whole."""
    with EnvPool(Toy, 4, 1, timeout=1.5) as pool:
        reset(pool, "abcd")
        step(pool, {slot: "slow" for slot in range(4)})
        assert not caplog.messages


class Slow(Toy):
    def __init__(self):
        super().__init__()
        time.sleep(1.5)


def test_making_an_environment_has_a_limit_of_its_own(caplog, monkeypatch):
    with EnvPool(Slow, 1, 1, timeout=1.0) as pool:
        assert reset(pool, "a")[0].observation == "start of a"
        assert step(pool, {0: "x"})[0].observation == "a: 1 x"
    assert not caplog.messages
    monkeypatch.setattr(pool_module, "MAKE_TIMEOUT", 0.5)
    with EnvPool(Slow, 1, 1) as pool:
        assert_failed(reset(pool, "a")[0], "Slot 0 failed at reset 'a': no answer within 0.5 s")


def test_a_deadly_task_does_not_cost_the_resets_behind_it():
    with EnvPool(Toy, 3, 1) as pool:
        reset(pool, "abc")
        steps = reset(pool, ["x", "deadly", "z"])
        assert [s.observation for s in steps] == ["start of x", "", "start of z"]
        assert_failed(steps[1], "Slot 1 failed at reset 'deadly': its worker died")
        steps = step(pool, {0: "1", 1: "1", 2: "1"})
        assert [steps[slot].observation for slot in range(3)] == ["", "", "z: 1 1"]


# A module whose import counts the workers that import it, and kills all but the first.
FRAGILE = """
import os
from tests.test_pool import Toy
class Env(Toy):
    pass
if os.getpid() != {parent}:
    file = os.open({log!r}, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.write(file, b"%15d\\n" % os.getpid())
    if os.lseek(file, 0, os.SEEK_CUR) > 16:
        os._exit(7)
"""


@pytest.mark.slow
def test_a_worker_that_does_not_start_ends_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    log = tmp_path / "pids"
    module = tmp_path / "fragile.py"
    module.write_text(FRAGILE.format(log=str(log), parent=os.getpid()))
    make_env = __import__(module.stem).Env
    with pytest.raises(UserError, match=r"did not start \(exit code 7\): see its error above"):
        with EnvPool(make_env, 2, 1) as pool:
            reset(pool, "ab")
            pool.step(0, "crash")
            pool.recv()
    pids = [int(line) for line in log.read_text().split()]
    assert len(pids) == 2 and not any(map(alive, pids))


def test_a_trillion_slots_take_no_memory_before_they_are_used():
    with EnvPool(Toy, 10**12, workers=1) as pool:
        pool.reset(10**12 - 1, "last")
        assert pool.recv().step.observation == "start of last"
    with EnvPool(Toy, 1, 10**6) as pool:  # no more workers than slots
        assert len(pool._workers) == 1
    sentence = "1000000 workers are too many processes; use 1024 or fewer"
    with pytest.raises(UserError, match=sentence):
        EnvPool(Toy, 10**6, 10**6)


def broken():
    raise ImportError("no such game engine")


def no_space():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "workers, make_env, error, sentence",
    [
        (0, broken, RuntimeError, "no such game"),
        (1, no_space, UserError, "No environment can be created .*28. No space .* free .* TMPDIR"),
    ],
)
def test_make_env_must_not_fail(workers, make_env, error, sentence):
    with EnvPool(make_env, 2, workers) as pool:
        for _ in range(2):  # the slot can be reset again
            pool.reset(0, "a")
            with pytest.raises(error, match=sentence):
                pool.recv()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before open, or between open and read
        return False


@pytest.mark.parametrize("way", ["kill -9", "exit without close", "close"])
def test_no_orphans(way, tmp_path):
    """When the parent exits, one worker is idle and the other hangs."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from paw_min.envs.pool import EnvPool
from tests.pools import reset, step
from test_pool import Toy, pid
if __name__ == "__main__":
    pool = EnvPool(Toy, 2, 2)
    print(*map(pid, reset(pool, "ab")), flush=True)
    if {way != "close"}:
        pool.step(1, "hang")
    time.sleep({600 if way == "kill -9" else 0})
    if {way == "close"}:
        pool.close()
        pool.close()
        try:
            pool.step(0, "x")
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
        until(lambda: not any(alive(pid) for pid in pids))
        assert way != "close" or parent.poll() is None
    finally:
        parent.kill()
        parent.wait()
