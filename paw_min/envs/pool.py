"""A fault-tolerant pool of environments, served by worker processes or by this process.

Each slot has one environment (interface.py: Environment). A failure ends episodes, not the run. It
is logged, and answered by a Step with `failed` (the reason) and done=True, which the slot repeats
until its next reset.

    what happens                       what is discarded     what continues
    ---------------------------------  --------------------  ------------------------------------
    an exception in reset or step, or  its episode           everything else
    what they return is no Step
    a worker dies or exceeds timeout   the episodes of its   a new worker; resets that waited for
                                       slots                 the old one are sent to it
    it does so before it has made an   the run               UserError
    environment
    make_env fails                     the run               RuntimeError: nothing can be played

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import NamedTuple

from paw_min.base.errors import UserError
from paw_min.envs.interface import Answer, Environment, Step

# Seconds for a worker's start and first environment: all of WebShop loads for minutes.
LOAD_TIMEOUT = 1800.0
LOADED = "loaded"  # what a worker sends when it has made the environment of a slot
MAX_REWARD = 1e9  # far above, sums and squares of returns are no longer finite numbers
log = logging.getLogger(__name__)


class _Request(NamedTuple):
    """A call of a method of a slot's environment."""

    slot: int
    method: str  # reset or step
    argument: str  # task or command


@dataclass
class _Slot:
    """The latest request of a slot, and its episode."""

    request: _Request
    task: str
    steps: int = 0  # answered ones
    failed: str = ""  # why it is discarded


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
        self.n_envs = n_envs
        self._make_env = make_env
        self._timeout = timeout
        self._slots: dict[int, _Slot] = {}  # those that have been used
        self._ready: deque[Answer] = deque()  # recv returns these first
        self._workers = [_Worker(make_env) for _ in range(min(workers, n_envs))]
        # The next two are for pools without workers.
        self._envs: dict[int, Environment] = {}  # slot -> environment
        self._local: deque[_Request] = deque()  # the open ones, in their order

    def reset(self, slot: int, task: str) -> None:
        """Request the start of an episode; returns at once."""
        request = _Request(slot, "reset", task)
        self._slots[slot] = _Slot(request, task)
        self._send(request)

    def step(self, slot: int, command: str) -> None:
        """Request a step; returns at once. A worker serves its requests in order."""
        state = self._slots[slot]
        state.request = _Request(slot, "step", command)
        if state.failed:
            self._answer(slot, _failed_step(state.failed))
        else:
            self._send(state.request)

    def recv(self, timeout: float | None = None) -> Answer | None:
        """The next answer, of any slot; None if there is none within `timeout` seconds.

        Without workers, one open request is served here, whatever the timeout.
        """
        deadline = math.inf
        if timeout is not None:
            deadline = time.monotonic() + timeout
        if self._local and not self._ready:
            request = self._local.popleft()
            with _kept_torch():
                *_, result = _serve(self._envs, self._make_env, request)
            self._on_result(request.slot, result)
        while not self._ready and self._busy():
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

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(self, *_):
        self.close()

    def _send(self, request: _Request) -> None:
        """Let the request be served, by the worker of its slot or by the next recv."""
        if not self._workers:
            self._local.append(request)
            return
        worker = self._worker(request.slot)
        if not worker.serving:
            worker.since = time.monotonic()  # an idle worker starts now; a busy one has started
        worker.serving.append(request.slot)
        # An OSError: the worker has died. `_wait` finds the end of its pipe.
        with suppress(OSError):
            worker.connection.send(request)

    def _on_result(self, slot: int, result: Step | Exception) -> None:
        """The request of a slot has been served."""
        if isinstance(result, Exception):
            raise result
        if result.failed:
            self._fail(slot, result.failed)
        else:
            self._answer(slot, result)

    def _fail(self, slot: int, reason: str) -> None:
        """The request of a slot has failed: log the reason, and answer with it."""
        state = self._slots[slot]
        _, method, argument = state.request
        progress = ""
        if method == "step":
            progress = f" after {state.steps} steps of task {state.task!r:.300}"
        state.failed = f"Slot {slot} failed at {method} {argument!r:.300}{progress}: {reason}"
        log.warning(state.failed)
        self._answer(slot, _failed_step(state.failed))

    def _answer(self, slot: int, step: Step) -> None:
        state = self._slots[slot]
        if state.request.method == "step":
            state.steps += 1
        self._ready.append(Answer(slot, step))

    def _busy(self) -> list["_Worker"]:
        return [worker for worker in self._workers if worker.serving]

    def _worker(self, slot: int) -> "_Worker":
        # Blocks of adjacent slots, of equal size up to one.
        return self._workers[slot * len(self._workers) // self.n_envs]

    def _wait(self, deadline: float) -> None:
        """Receive one answer from each busy worker that has one; restart dead and hanging ones."""
        busy = self._busy()
        # Only the first request of a worker is timed: the others are waiting for it.
        limits = []
        for worker in busy:
            limits.append(worker.since + (self._timeout if worker.loaded else LOAD_TIMEOUT))
        seconds = max(0.0, min(deadline, *limits) - time.monotonic())
        readable = wait([worker.connection for worker in busy], seconds)
        now = time.monotonic()  # others may answer during a restart
        for worker, limit in zip(busy, limits):
            if worker.connection in readable:
                # The pipe of a dead worker is readable, too: it has ended.
                try:
                    result = worker.connection.recv()
                except (EOFError, OSError):
                    code = worker.end(grace=5.0)  # negative: the signal that killed it
                    self._restart(worker, f"its worker died (exit code {code})")
                else:
                    # The worker may have sent this long ago, and be at its next request since then.
                    # When that began is not known, so its limit starts now, which may be too late.
                    worker.since = time.monotonic()
                    worker.loaded = True
                    if result != LOADED:
                        self._on_result(worker.serving.popleft(), result)
            elif now > limit:
                self._restart(worker, f"no answer within {limit - worker.since:g} s")

    def _restart(self, worker: "_Worker", reason: str) -> None:
        """Replace a dead or hanging worker, whose environments are gone."""
        worker.end(grace=0.0)
        if not worker.loaded:
            raise UserError(f"No environment can be made: {reason}; see its error above. Scripts "
                            'need `if __name__ == "__main__":`.')
        # Requests are served in order: the first one failed, the others were waiting.
        served, *waiting = worker.serving
        self._fail(served, reason)
        for slot, state in self._slots.items():
            if self._worker(slot) is worker:
                state.failed = self._slots[served].failed
        self._workers[self._workers.index(worker)] = _Worker(self._make_env)
        for slot in waiting:
            state = self._slots[slot]
            if state.request.method == "reset":  # its episode has not begun
                state.failed = ""
                self._send(state.request)
            else:
                self._answer(slot, _failed_step(state.failed))


class _Worker:
    """The pool's view of a worker process."""

    def __init__(self, make_env: Callable[[], Environment]):
        self.serving: deque[int] = deque()  # the slots of its requests; the first is served ...
        self.since = 0.0  # ... since this time.monotonic() or earlier
        self.loaded = False  # Has it made an environment?
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
        for request in iter(requests.get, None):
            for result in _serve(envs, make_env, request):
                connection.send(result)


def _serve(envs: dict[int, Environment], make_env: Callable[[], Environment],
           request: _Request) -> Iterator[str | Step | Exception]:
    """LOADED where an environment had to be made, then its answer: a failed Step after an error.

    An exception, which recv must raise, is all there is if no environment can be made.
    """
    if request.slot not in envs:
        try:
            envs[request.slot] = make_env()
        except KeyboardInterrupt:
            raise
        except OSError as error:  # usually: $TMPDIR is full
            yield UserError(f"No environment can be created ({error}): free space in the folder "
                            "for temporary files, or set TMPDIR.")
            return
        except BaseException:  # whatever make_env raises
            yield RuntimeError("make_env failed, so no episode can be played:\n"
                               f"{traceback.format_exc()}")
            return
        yield LOADED
    try:
        answer = plain_step(getattr(envs[request.slot], request.method)(request.argument))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # It ends one episode, also if it is a panic of a Rust library.
        reason = _reason(error)
        # The line is for the author of an environment: KeyError: 'x' alone does not name it.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        answer = _failed_step(f"{type(error).__name__}: {reason} ({place})")
    yield answer


def _reason(error: BaseException) -> str:
    """What an error says, on one line, whatever a server has sent."""
    try:
        text = " ".join(str(error).split())[:300]
    except BaseException:  # Its __str__ is foreign code, too.
        return "an error whose text cannot be printed"
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair


@contextmanager
def _kept_torch():
    """An environment in this process may use torch for itself: what it sets is undone."""
    import torch  # The trainer has it. Workers, which start faster without, never get here.

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    strict = torch.are_deterministic_algorithms_enabled()
    # Their exits restore what the environment has set, too.
    with (torch.inference_mode(torch.is_inference_mode_enabled()),
          torch.set_grad_enabled(torch.is_grad_enabled())):
        yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(strict)
    if torch.get_default_device() != device:
        torch.set_default_device(None)


def _failed_step(reason: str) -> Step:
    return Step(observation="", task="", task_type="", admissible=[], done=True, failed=reason)


# ---- what comes from an environment ----


def plain_step(step: Step) -> Step:
    """The step in plain Python values; TypeError or ValueError for any others.

    Numbers and texts of numpy are converted, since json cannot write them.
    """
    if not isinstance(step, Step):
        raise TypeError(f"{step!r:.100} is not a Step")
    if isinstance(step.admissible, str):
        raise TypeError(f"admissible is {step.admissible!r:.100}, not a list of texts")
    reward = _number("reward", step.reward)
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(f"the reward {reward} is beyond {MAX_REWARD:g}")
    score = None if step.score is None else _number("score", step.score)
    if score is not None and not 0 <= score <= 1:
        raise ValueError(f"the score {score} is not between 0 and 1")
    return Step(
        observation=_text("observation", step.observation),
        task=_text("task", step.task),
        task_type=_text("task_type", step.task_type),
        admissible=[_text("a command of admissible", command) for command in step.admissible],
        reward=reward,
        done=_truth("done", step.done),
        won=_truth("won", step.won),
        score=score,
        failed=_text("failed", step.failed),
    )


def _text(name: str, value) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.100}, not a text")
    value.encode()  # raises UnicodeEncodeError for half of a surrogate pair
    return str(value)


def _number(name: str, value) -> float:
    if isinstance(value, str) or value is None:
        raise TypeError(f"{name} is {value!r:.100}, not a number")
    return float(value)


def _truth(name: str, value) -> bool:
    if value not in (False, True):
        raise TypeError(f"{name} is {value!r:.100}, neither true nor false")
    return bool(value)
