"""A fault-tolerant pool of environments, served by worker processes or by this process.

Each slot has one environment (interface.py: Environment), which must be deterministic: the pool
restores a lost episode by replaying its task and commands. In contrast, TextWorld's AsyncBatchEnv
runs one process per environment, so nothing is shared, and fails for good when one of them dies.

Fault tolerance: a failure costs ONE episode, that of the slot being served. A worker that dies or
exceeds `timeout` is restarted, and its other slots are replayed when they are next used. An
exception in reset or step costs its episode, too. Each failure is logged and answered by a Step
with `failed` (the reason) and done=True, which the slot repeats until its next reset. Only make_env
must not fail: no episode could be played then, so RuntimeError is raised. A worker that dies while
starting is started again; if START_ATTEMPTS fail, UserError is raised.

Workers are spawned, not forked: the training process has threads (torch, CUDA), and a fork copies
their locks but not the threads that would release them. A spawned process imports the main script
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
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from queue import SimpleQueue

from paw_min.envs.interface import Answer, Environment, Step
from paw_min.running.errors import UserError

START_TIMEOUT = 120.0  # seconds for a worker to start, which includes importing make_env's module
START_ATTEMPTS = 3
MAX_WORKERS = 1024  # processes of at least 20 MB; far more than a machine has cores for
log = logging.getLogger(__name__)


class EnvPool:
    """n_envs environments, each created when its slot (0 .. n_envs - 1) is first used.

    make_env: returns a new environment; with workers it must be picklable: a class or function of a
        module, or a functools.partial of one.
    workers: number of processes; each serves a block of adjacent slots, so that the members of a
        group share its caches. 0: `recv` runs the environments in this process, without protection
        against crashes and hangs.
    timeout: seconds that one reset or step may take (no limit if workers is 0).
    """

    def __init__(self, make_env: Callable[[], Environment], n_envs: int, workers: int = 0,
                 timeout: float = 60.0):
        if n_envs < 1 or workers < 0 or timeout <= 0:
            raise ValueError(f"n_envs={n_envs}, workers={workers}, timeout={timeout}: need 1 or "
                             "more environments, 0 or more workers and a positive timeout.")
        if min(workers, n_envs) > MAX_WORKERS:
            raise UserError(f"{workers} workers are too many processes; use {MAX_WORKERS} or "
                              "fewer, such as one per CPU core.")
        self._make_env, self.n_envs, self._timeout = make_env, n_envs, timeout
        self._open = {}  # slot -> its unanswered call: ("reset", task) or ("step", command)
        self._calls = {}  # slot -> the answered calls of its episode, for a replay
        self._lost = set()  # slots whose environment has died: replay before the next step
        self._failed = {}  # slot -> why its episode failed
        self._ready = deque()  # Answers for recv
        self._envs, self._local = {}, deque()  # for workers=0: slot -> env, slots with open calls
        self._workers = []
        try:
            for _ in range(min(workers, n_envs)):
                self._workers.append(_Worker(make_env))
            for index in range(len(self._workers)):  # all are starting in parallel
                self._await_start(index)
        except BaseException:  # Ctrl-C, too, must not leave the other workers running
            for worker in self._workers:
                worker.end(grace=0.0)
            raise

    def reset(self, slot: int, task: str) -> None:
        """Request the start of an episode; returns at once."""
        self._send(slot, "reset", task)

    def step(self, slot: int, command: str) -> None:
        """Request a step; returns at once. A worker serves its requests in order."""
        self._send(slot, "step", command)

    def recv(self, timeout: float | None = None) -> Answer | None:
        """The next answer, of any slot; None if there is none within `timeout` seconds.

        Without workers, one open request is served here, whatever the timeout.
        """
        if not self._open and not self._ready and timeout is None:
            raise RuntimeError("recv would block forever: every request has been answered.")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self._local and not self._ready:
            slot = self._local.popleft()
            self._answer(slot, *_serve(self._envs, self._make_env, slot, [self._open[slot]]))
        while self._open and not self._ready:
            self._wait(deadline)
            if time.monotonic() >= deadline:
                break
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Stop the workers; the pool cannot be used again."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker exits
            worker.end(grace=5.0)
        self._workers, self._envs, self.n_envs = [], {}, 0

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(self, *_):
        self.close()

    def _send(self, slot, method, argument):
        if not 0 <= slot < self.n_envs:
            raise ValueError(f"{method} of slot {slot!r}: the pool has {self.n_envs} slots, "
                             "numbered from 0.")
        if slot in self._open:
            raise RuntimeError(f"Slot {slot} has an unanswered request: call recv first.")
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

    def _answer(self, slot, good, content):
        """Queue the Answer for what `_serve` returned."""
        if isinstance(content, OSError):
            raise UserError(f"No environment can be created ({content}): free space in the "
                              "folder for temporary files, or set TMPDIR.") from content
        if good is None:
            raise RuntimeError(f"make_env failed, so no episode can be played:\n{content}")
        if not good:
            self._fail(slot, content)
        else:
            self._calls.setdefault(slot, []).append(self._open.pop(slot))
            self._lost.discard(slot)
            self._ready.append(Answer(slot, content))

    def _fail(self, slot, reason):
        (method, argument), calls = self._open[slot], self._calls.pop(slot, [])
        task = f" after {len(calls) - 1} steps of task {calls[0][1]!r:.300}" if calls else ""
        self._failed[slot] = f"Slot {slot} failed at {method} {argument!r:.300}{task}: {reason}"
        log.warning(self._failed[slot])
        self._answer_failed(slot)

    def _answer_failed(self, slot):
        del self._open[slot]
        self._ready.append(Answer(slot, Step("", "", "", [], done=True, failed=self._failed[slot])))

    def _worker(self, slot):
        return self._workers[slot * len(self._workers) // self.n_envs]

    def _request(self, slot):
        """Send the open call of a slot to its worker, after the calls to replay, if any."""
        worker = self._worker(slot)
        replay = self._calls.get(slot, []) if slot in self._lost else []
        if not worker.serving:
            worker.since = time.monotonic()
        worker.serving.append((slot, [*replay, self._open[slot]]))
        try:
            worker.connection.send(worker.serving[-1])
        except OSError:  # it has died; if it was busy, `_wait` decides which episode has failed
            if len(worker.serving) == 1:
                self._restart(worker)

    def _wait(self, deadline):
        """Receive one answer from each busy worker that has one; restart dead and hanging ones."""
        busy = [worker for worker in self._workers if worker.serving]
        limits = [worker.since + self._timeout * len(worker.serving[0][1]) for worker in busy]
        seconds = max(0.0, min(deadline, *limits) - time.monotonic())
        readable = wait([worker.connection for worker in busy], seconds)
        for worker, limit in zip(busy, limits):
            if worker.connection in readable:
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    code = worker.end(grace=5.0)  # negative: the signal that killed it
                    self._restart(worker, f"its worker died (exit code {code})")
                else:
                    slot, _ = worker.serving.popleft()
                    worker.since = time.monotonic()  # when the next request started, at the latest
                    self._answer(slot, *answer)
            elif time.monotonic() > limit:
                self._restart(worker, f"no answer within {self._timeout:g} s")

    def _restart(self, worker, reason=None):
        """Replace a worker; with a reason, the episode that it was serving has failed."""
        worker.end(grace=0.0)
        self._lost.update(slot for slot in self._calls if self._worker(slot) is worker)
        slots = [slot for slot, _ in worker.serving]
        if reason:
            self._fail(slots.pop(0), reason)
        index = self._workers.index(worker)
        self._workers[index] = _Worker(self._make_env)
        self._await_start(index)
        for slot in slots:
            self._request(slot)

    def _await_start(self, index):
        """Wait until a worker is ready; start another one if it dies first."""
        for attempt in range(1, START_ATTEMPTS + 1):
            if self._workers[index].is_ready():
                return
            code = self._workers[index].end(grace=1.0)
            if attempt < START_ATTEMPTS:
                log.warning(f"A worker did not start (exit code {code}); starting another one.")
                self._workers[index] = _Worker(self._make_env)
        raise UserError(f"A worker did not start (exit code {code}, {START_ATTEMPTS} attempts): "
                          'see its error above. Scripts need `if __name__ == "__main__":`.')


class _Worker:
    """The pool's view of a worker process."""

    def __init__(self, make_env):
        self.serving = deque()  # (slot, calls) of its open requests; it is serving the first ...
        self.since = 0.0  # ... since this time.monotonic() or earlier
        context = multiprocessing.get_context("spawn")
        try:
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_work, args=(make_env, theirs), daemon=True)
            self.process.start()
        except OSError as error:  # no more files, processes or memory
            raise UserError(f"Cannot start a worker ({error}): use fewer workers.") from error
        theirs.close()  # otherwise its end would go unnoticed here

    def is_ready(self):
        """Wait until it is ready, so that no request's timeout includes the worker's imports."""
        with suppress(EOFError, OSError):
            return self.connection.poll(START_TIMEOUT) and self.connection.recv() == "started"
        return False

    def end(self, grace):
        """Kill it unless it exits within `grace` seconds; returns the exit code."""
        self.process.join(grace)
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


def _work(make_env, connection):
    """The main function of a worker: answer requests in order.

    A thread reads them, so that sending to a busy worker never blocks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops workers
    parent, envs, requests = multiprocessing.parent_process().sentinel, {}, SimpleQueue()

    def read():
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        requests.put(None)  # the parent has closed its end
        wait([parent])  # no orphans, even if the parent is killed while an environment hangs
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    with suppress(OSError):  # the parent has closed its end
        connection.send("started")
        while request := requests.get():
            slot, calls = request
            connection.send(_serve(envs, make_env, slot, calls))


def _serve(envs, make_env, slot, calls):
    """Make the calls; (True, last Step), (False, reason) or (None, make_env's error)."""
    if slot not in envs:
        try:
            envs[slot] = make_env()
        except OSError as error:  # no place for temporary files, above all
            return None, error
        except Exception:  # noqa: BLE001 - any error; the pool raises it
            return None, traceback.format_exc()
    try:
        for method, argument in calls:
            result = getattr(envs[slot], method)(argument)
        return True, result
    except (Exception, SystemExit) as error:  # noqa: BLE001 - costs one episode, reported by name
        return False, f"{type(error).__name__}: {error}"
