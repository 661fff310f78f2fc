"""A fault-tolerant pool of environments, served by worker processes or by this process.

Each slot has one environment (interface.py: Environment). A failure costs ONE episode, that of the
slot being served. Each failure is logged and answered by a Step with `failed` (the reason) and
done=True, which the slot repeats until its next reset.

    what happens                       what is discarded     what goes on
    ---------------------------------  --------------------  ------------------------------------
    an exception in reset or step      its episode           everything else
    a worker dies or exceeds timeout   the served episode    a new worker, which replays the other
                                                             episodes when they are next used
    a worker dies while starting       nothing               it is started again; after
                                                             START_ATTEMPTS, UserError
    make_env fails                     the run               RuntimeError: nothing can be played

A replay repeats the task and the commands of an episode, so environments must be deterministic.

The life of a request, with workers:

    sent        `reset` or `step` stores the call in _open and sends it to the slot's worker
    served      the worker makes the call in its environment and returns a _Result
    answered    `recv` moves the call from _open to _calls and returns an Answer with the Step
    failed      the call is dropped with all earlier ones of its episode; the Answer says why
    replayed    after the worker of a slot has died, the next request of the slot is sent with all
                calls in _calls before it; only the last Step is returned

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
from typing import NamedTuple

from paw_min.base.errors import UserError
from paw_min.envs.interface import Answer, Environment, Step

START_TIMEOUT = 120.0  # seconds for a worker to start, which includes importing make_env's module
START_ATTEMPTS = 3
MAX_REWARD = 1e9  # far above, sums and squares of returns are no longer finite numbers
MAX_WORKERS = 1024  # processes of at least 20 MB; far more than a machine has cores for
log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """A call of a method of an environment."""

    method: str  # reset or step
    argument: str  # task or command


class _Request(NamedTuple):
    """What a worker is sent."""

    slot: int
    calls: list[_Call]  # the open call of the slot, after those to replay


class _Result(NamedTuple):
    """What `_serve` returns: exactly one of the three is set."""

    step: Step | None = None  # the answer to the last call
    failure: str = ""  # the exception of a call: this episode has failed
    make_env_error: OSError | str = ""  # of make_env: an OSError, or the traceback of another error


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
        self.n_envs = n_envs
        self._make_env = make_env
        self._timeout = timeout
        self._open: dict[int, _Call] = {}  # slot -> its unanswered call
        self._calls: dict[int, list[_Call]] = {}  # slot -> answered calls of its episode
        self._lost: set[int] = set()  # slots whose environment has died: replay first
        self._failed: dict[int, str] = {}  # slot -> why its episode failed
        self._ready: deque[Answer] = deque()  # for recv
        self._workers: list[_Worker] = []
        # Without workers only:
        self._envs: dict[int, Environment] = {}  # slot -> environment
        self._local: deque[int] = deque()  # slots with an open call, in the order of the requests
        try:
            # Start all, then wait for each: imports take seconds, and run in parallel.
            for _ in range(min(workers, n_envs)):
                self._workers.append(_Worker(make_env))
            for index in range(len(self._workers)):
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
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + timeout
        if self._local and not self._ready:
            slot = self._local.popleft()
            # Nothing to replay: an environment in this process cannot die alone.
            result = _serve(self._envs, self._make_env, _Request(slot, [self._open[slot]]))
            self._on_result(slot, result)
        while self._open and not self._ready:
            # Wait first, compare afterwards: with timeout=0, answers that are already there count.
            self._wait(deadline)
            if time.monotonic() >= deadline:
                break
        if not self._ready:
            return None
        return self._ready.popleft()

    def close(self) -> None:
        """Stop the workers; the pool cannot be used again."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker exits
            worker.end(grace=5.0)
        self._workers = []
        self._envs = {}
        self.n_envs = 0  # a later request raises ValueError

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(self, *_):
        self.close()

    def _send(self, slot: int, method: str, argument: str) -> None:
        if not 0 <= slot < self.n_envs:
            raise ValueError(f"{method} of slot {slot!r}: the pool has {self.n_envs} slots, "
                             "numbered from 0.")
        if slot in self._open:
            raise RuntimeError(f"Slot {slot} has an unanswered request: call recv first.")
        if method == "reset":
            # A new episode: nothing of the old one is to be replayed or reported.
            self._calls[slot] = []
            self._failed.pop(slot, None)
        self._open[slot] = _Call(method, argument)
        if slot in self._failed:
            self._answer_failed(slot)
        elif not self._workers:
            self._local.append(slot)
        else:
            self._request(slot)

    def _on_result(self, slot: int, result: _Result) -> None:
        """The open call of a slot has been served: queue its Answer."""
        error = result.make_env_error
        if isinstance(error, OSError):
            raise UserError(f"No environment can be created ({error}): free space in the "
                              "folder for temporary files, or set TMPDIR.") from error
        if error:
            raise RuntimeError(f"make_env failed, so no episode can be played:\n{error}")
        if result.failure:
            self._fail(slot, result.failure)
            return
        call = self._open.pop(slot)
        self._calls.setdefault(slot, []).append(call)
        # The worker has made all calls of this episode, so its environment is up to date again.
        self._lost.discard(slot)
        self._ready.append(Answer(slot, result.step))

    def _fail(self, slot: int, reason: str) -> None:
        """End the episode of a slot: log the reason, and answer its open call with it."""
        method, argument = self._open[slot]
        # Dropped, not kept for a replay: the same calls would fail again.
        calls = self._calls.pop(slot, [])
        progress = ""
        if calls:
            reset, *steps = calls
            progress = f" after {len(steps)} steps of task {reset.argument!r:.300}"
        self._failed[slot] = f"Slot {slot} failed at {method} {argument!r:.300}{progress}: {reason}"
        log.warning(self._failed[slot])
        self._answer_failed(slot)

    def _answer_failed(self, slot: int) -> None:
        """Answer the open call of a failed episode, without an environment."""
        del self._open[slot]
        step = Step(
            observation="",
            task="",
            task_type="",
            admissible=[],
            done=True,
            failed=self._failed[slot],
        )
        self._ready.append(Answer(slot, step))

    def _worker(self, slot: int) -> "_Worker":
        # Blocks of adjacent slots, of equal size up to one.
        return self._workers[slot * len(self._workers) // self.n_envs]

    def _request(self, slot: int) -> None:
        """Send the open call of a slot to its worker, after the calls to replay, if any."""
        worker = self._worker(slot)
        replay = []
        if slot in self._lost:
            replay = self._calls.get(slot, [])
        request = _Request(slot, [*replay, self._open[slot]])
        if not worker.serving:
            worker.since = time.monotonic()  # an idle worker starts now; a busy one has started
        worker.serving.append(request)
        try:
            worker.connection.send(request)
        except OSError:
            # The worker has died. If it was idle, no episode is to blame: restart it, which sends
            # this request again. If it was busy, `_wait` reads the end of its pipe, and fails the
            # episode that it was serving.
            if len(worker.serving) == 1:
                self._restart(worker)

    def _wait(self, deadline: float) -> None:
        """Receive one answer from each busy worker that has one; restart dead and hanging ones."""
        busy = [worker for worker in self._workers if worker.serving]
        # The time limit is per call, and a request with a replay has several. Only the first
        # request of a worker is timed: the others are waiting for it.
        limits = [worker.since + self._timeout * len(worker.serving[0].calls) for worker in busy]
        seconds = max(0.0, min(deadline, *limits) - time.monotonic())
        readable = wait([worker.connection for worker in busy], seconds)
        for worker, limit in zip(busy, limits):
            if worker.connection in readable:
                # The pipe of a dead worker is readable, too: it has ended.
                try:
                    result = worker.connection.recv()
                except (EOFError, OSError):
                    code = worker.end(grace=5.0)  # negative: the signal that killed it
                    self._restart(worker, f"its worker died (exit code {code})")
                else:
                    request = worker.serving.popleft()
                    # The worker has been serving its next request since it sent this answer, maybe
                    # long ago. Its limit starts here: rather too late than too early.
                    worker.since = time.monotonic()
                    self._on_result(request.slot, result)
            elif time.monotonic() > limit:
                self._restart(worker, f"no answer within {self._timeout:g} s")

    def _restart(self, worker: "_Worker", reason: str = "") -> None:
        """Replace a worker; with a reason, the episode that it was serving has failed."""
        worker.end(grace=0.0)
        # All environments of the worker are gone. Mark them before any request is sent again,
        # since `_request` decides by _lost whether to replay.
        self._lost.update(slot for slot in self._calls if self._worker(slot) is worker)
        slots = [request.slot for request in worker.serving]
        if reason:
            # Requests are served in order, so the first one is to blame; the others were waiting.
            self._fail(slots.pop(0), reason)
        index = self._workers.index(worker)
        self._workers[index] = _Worker(self._make_env)
        self._await_start(index)
        for slot in slots:
            self._request(slot)

    def _await_start(self, index: int) -> None:
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

    def __init__(self, make_env: Callable[[], Environment]):
        self.serving: deque[_Request] = deque()  # its open requests; it is serving the first ...
        self.since = 0.0  # ... since this time.monotonic() or earlier
        context = multiprocessing.get_context("spawn")
        try:
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_work, args=(make_env, theirs), daemon=True)
            self.process.start()
        except OSError as error:  # no more files, processes or memory
            raise UserError(f"Cannot start a worker ({error}): use fewer workers.") from error
        # The pipe ends when the last copy of this end is closed: keep only the worker's copy, so
        # that its death can be seen here.
        theirs.close()

    def is_ready(self) -> bool:
        """Wait until it is ready, so that no request's timeout includes the worker's imports."""
        try:
            return self.connection.poll(START_TIMEOUT) and self.connection.recv() == "started"
        except (EOFError, OSError):  # it has died
            return False

    def end(self, grace: float) -> int:
        """Kill it unless it exits within `grace` seconds; returns the exit code."""
        self.process.join(grace)
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


def _work(make_env, connection) -> None:
    """The main function of a worker: answer requests in order.

    A thread reads them, so that sending to a busy worker never blocks.
    """
    # Ctrl-C reaches all processes of a terminal; the parent handles it and stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel  # readable once the parent has exited
    envs = {}  # slot -> environment
    requests = SimpleQueue()

    def read():
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        # The parent has closed its end: the main thread returns when it gets to this None.
        requests.put(None)
        # A hanging environment never gets there. The parent then kills this process; if the
        # parent itself was killed, exit here, so that no orphan remains.
        wait([parent])
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    with suppress(OSError):  # the parent has closed its end
        connection.send("started")
        while True:
            request = requests.get()
            if request is None:
                return
            connection.send(_serve(envs, make_env, request))


def _serve(envs: dict, make_env: Callable[[], Environment], request: _Request) -> _Result:
    """Make the calls of a request in the environment of its slot, created on first use."""
    if request.slot not in envs:
        try:
            envs[request.slot] = make_env()
        except OSError as error:  # usually: $TMPDIR is full
            return _Result(make_env_error=error)
        except Exception:  # noqa: BLE001 - any error; the pool raises it
            return _Result(make_env_error=traceback.format_exc())
    env = envs[request.slot]
    try:
        for call in request.calls:
            step = getattr(env, call.method)(call.argument)
            if not abs(step.reward) <= MAX_REWARD:
                raise ValueError(f"the reward {step.reward} is beyond {MAX_REWARD:g}")
            if step.score is not None and not 0 <= step.score <= 1:
                raise ValueError(f"the score {step.score} is not between 0 and 1")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - costs one episode, reported by name
        reason = " ".join(str(error).split())[:300]  # one line, whatever a server has sent
        return _Result(failure=f"{type(error).__name__}: {reason}")
    return _Result(step=step)
