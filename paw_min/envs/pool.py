"""A fixed pool of environments that plays many episodes at once and survives what kills one.

What: `n_envs` slots, each with one environment, served in this process or by worker processes. An
environment is any object with
    reset(task) -> (obs: str, info: dict)
    step(action: str) -> (obs: str, reward: float, done: bool, info: dict)
that answers in the same way when it is given the same task and actions again. TextWorld's
AsyncBatchEnv runs one process for each (so nothing is shared) and fails for good when one dies.

What a failure costs: ONE episode, that of the slot being served. A worker that dies, or that takes
longer than `timeout`, is restarted; its other slots are restored when next used, by making their
calls again, so their episodes go on. An exception in reset or step costs its episode, too. Each
failure is logged and named in the answer: obs "", reward 0.0, done True, the reason in
info["failed"]; the slot repeats it until its next reset. Only make_env must not fail: then no
episode could be played, and RuntimeError is raised.

Workers are spawned, not forked: the training process has threads (torch, CUDA), and a fork copies
their locks without the threads that would release them. A spawned process imports the main script
again, which therefore needs `if __name__ == "__main__":`.
"""

import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import wait
from queue import SimpleQueue

START_TIMEOUT = 120.0  # seconds for a worker to start, which includes importing make_env's module
log = logging.getLogger(__name__)


class LockStep(AbstractContextManager):
    """What a pool with send(slot, method, argument), recv() and close() offers besides."""

    def reset(self, tasks):
        """Reset slot i to tasks[i], for len(tasks) <= n_envs; returns a list of (obs, info)."""
        answers = self._call("reset", dict(enumerate(tasks)))
        return [answers[slot] for slot in range(len(tasks))]

    def step(self, actions):
        """actions: {slot: action}; returns {slot: (obs, reward, done, info)}."""
        return self._call("step", actions)

    def _call(self, method, arguments):
        if self._open or self._ready:
            raise RuntimeError(f"{method} of a pool with unanswered requests: recv them first.")
        for slot, argument in arguments.items():
            self.send(slot, method, argument)
        answers = dict(self.recv() for _ in arguments)
        return {slot: answers[slot] for slot in arguments}

    def __exit__(self, *_):
        self.close()


class EnvPool(LockStep):
    """n_envs environments, each built when its slot (0 .. n_envs - 1) is first used.

    make_env: callable without arguments that returns an environment; with workers it must be
        picklable: a class or function of a module, or a functools.partial of one.
    workers: number of processes, each with a block of adjacent slots, so that members of a group
        share its caches. 0: this process serves while `recv` waits; a crash then ends it.
    timeout: seconds that one reset or step may take (no limit if workers is 0).
    """

    def __init__(self, make_env, n_envs, workers=0, timeout=60.0):
        if n_envs < 1 or workers < 0 or timeout <= 0:
            raise ValueError(f"n_envs={n_envs}, workers={workers}, timeout={timeout}: need 1 or "
                             "more environments, 0 or more workers and a positive timeout.")
        self._make_env, self.n_envs, self._timeout = make_env, n_envs, timeout
        self._open = {}  # slot -> its unanswered call, ("reset", task) or ("step", action)
        self._calls = {}  # slot -> the answered calls of its episode: enough to play it again
        self._lost = set()  # slots whose environment died since: play again before the next step
        self._failed = {}  # slot -> how its episode failed
        self._ready = deque()  # (slot, result) for recv
        self._envs, self._local = {}, deque()  # for workers=0: slot -> env, slots to be served
        self._workers = [_Worker(make_env) for _ in range(min(workers, n_envs))]
        for worker in self._workers:  # which are all starting by now
            worker.await_start()

    def send(self, slot, method, argument):
        """Ask for "reset" (argument: a task) or "step" (argument: an action); does not wait.

        One at a time per slot. A worker serves its requests in the order in which they were sent.
        """
        if not 0 <= slot < self.n_envs or method not in ("reset", "step"):
            raise ValueError(f"{method!r} of slot {slot!r}: need reset or step of 0 to n_envs-1.")
        if slot in self._open:
            raise RuntimeError(f"Slot {slot} still owes an answer: call recv before send.")
        if method == "reset":
            self._calls[slot] = []
            self._failed.pop(slot, None)
        self._open[slot] = method, argument
        if slot in self._failed:
            self._answer_failed(slot)
        elif not self._workers:
            self._local.append(slot)
        else:
            self._request(slot)

    def recv(self, timeout=None):
        """Wait for any answer; returns (slot, result), with the result of its reset or step.

        timeout: seconds after which None is returned if nothing has come; 0: no waiting, though
            without workers one request is served.
        """
        if not self._open and not self._ready and timeout is None:
            raise RuntimeError("recv would wait for ever: every request has been answered.")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self._local and not self._ready:
            slot = self._local.popleft()
            self._answer(slot, *_serve(self._envs, self._make_env, slot, [self._open[slot]]))
        while self._open and not self._ready:
            self._wait(deadline)
            if time.monotonic() >= deadline:
                break
        return self._ready.popleft() if self._ready else None

    def close(self):
        """End the workers; the pool cannot be used again."""
        for worker in self._workers:
            worker.connection.close()  # if it is idle, it leaves
            worker.end(grace=5.0)
        self._workers, self._envs, self.n_envs = [], {}, 0

    def _answer(self, slot, good, content):
        """Turn an answer of _serve into a result."""
        if good is None:
            raise RuntimeError(f"make_env failed, so that nothing can be played:\n{content}")
        if not good:
            self._fail(slot, content)
        else:
            self._calls.setdefault(slot, []).append(self._open.pop(slot))
            self._lost.discard(slot)
            self._ready.append((slot, content))

    def _fail(self, slot, reason):
        (method, argument), calls = self._open[slot], self._calls.pop(slot, [])
        task = f" after {len(calls) - 1} steps of task {calls[0][1]!r:.300}" if calls else ""
        self._failed[slot] = f"Slot {slot} failed at {method} {argument!r:.300}{task}: {reason}"
        log.warning(self._failed[slot])
        self._answer_failed(slot)

    def _answer_failed(self, slot):
        method, info = self._open.pop(slot)[0], {"failed": self._failed[slot]}
        self._ready.append((slot, ("", info) if method == "reset" else ("", 0.0, True, info)))

    def _worker(self, slot):
        return self._workers[slot * len(self._workers) // self.n_envs]

    def _request(self, slot):
        """Send the open call of a slot to its worker, behind those that restore what it lost."""
        worker = self._worker(slot)
        again = self._calls.get(slot, []) if slot in self._lost else []
        if not worker.serving:
            worker.since = time.monotonic()
        worker.serving.append((slot, [*again, self._open[slot]]))
        try:
            worker.connection.send(worker.serving[-1])
        except OSError:  # it has died; if it was busy then, `_wait` finds out which episode pays
            if len(worker.serving) == 1:
                self._restart(worker)

    def _wait(self, deadline):
        """Take the next answer of each busy worker, or notice that it died or hangs."""
        busy = [worker for worker in self._workers if worker.serving]
        limits = [worker.since + self._timeout * len(worker.serving[0][1]) for worker in busy]
        seconds = max(0.0, min(deadline, *limits) - time.monotonic())
        readable = wait([worker.connection for worker in busy], seconds)
        for worker, limit in zip(busy, limits):
            if worker.connection in readable:
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    code = worker.end(grace=5.0)  # below 0: the signal that killed it
                    self._restart(worker, f"its worker died (exit code {code})")
                else:
                    slot, _ = worker.serving.popleft()
                    worker.since = time.monotonic()  # by now the next one has begun
                    self._answer(slot, *answer)
            elif time.monotonic() > limit:
                self._restart(worker, f"no answer within {self._timeout:g} s")

    def _restart(self, worker, reason=None):
        """Replace a worker; with a reason, the episode which it was serving has failed."""
        worker.end(grace=0.0)
        self._lost.update(slot for slot in self._calls if self._worker(slot) is worker)
        slots = [slot for slot, _ in worker.serving]
        if reason:
            self._fail(slots.pop(0), reason)
        self._workers[self._workers.index(worker)] = new = _Worker(self._make_env)
        new.await_start()
        for slot in slots:
            self._request(slot)


class _Worker:
    """A worker process as the pool sees it."""

    def __init__(self, make_env):
        self.serving = deque()  # (slot, calls) of its requests; the first is being served ...
        self.since = 0.0  # ... since this time.monotonic(), or before
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(make_env, theirs), daemon=True)
        self.process.start()
        theirs.close()  # else we would not see it end

    def await_start(self):
        """Wait until it can serve; no request is to pay for its imports."""
        with suppress(EOFError, OSError):
            if self.connection.poll(START_TIMEOUT) and self.connection.recv():
                return
        raise RuntimeError(f"A worker did not start (exit code {self.end(grace=1.0)}): see its "
                           'error above. Scripts need `if __name__ == "__main__":`.')

    def end(self, grace):
        """Kill it unless it leaves within so many seconds; returns the exit code."""
        self.process.join(grace)
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


def _work(make_env, connection):
    """The main function of a worker: requests come in, each gets an answer in order.

    A thread takes them in at once, so that a busy worker can always be sent more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    parent, envs, requests = multiprocessing.parent_process().sentinel, {}, SimpleQueue()

    def read():
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        requests.put(None)  # the parent has closed its end
        wait([parent])  # no orphans, even when it is killed while an environment hangs
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    with suppress(OSError):  # the parent has closed its end
        connection.send("started")
        while request := requests.get():
            slot, calls = request
            connection.send(_serve(envs, make_env, slot, calls))


def _serve(envs, make_env, slot, calls):
    """Make the calls; (True, result of the last), (False, reason) or (None, why make_env failed)"""
    if slot not in envs:
        try:
            envs[slot] = make_env()
        except Exception:  # noqa: BLE001 - whatever it is, the pool raises it
            return None, traceback.format_exc()
    try:
        for method, argument in calls:
            result = getattr(envs[slot], method)(argument)
        return True, result
    except (Exception, SystemExit) as error:  # noqa: BLE001 - costs one episode, named by the pool
        return False, f"{type(error).__name__}: {error}"
