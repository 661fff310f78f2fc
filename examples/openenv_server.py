"""A benchmark as an OpenEnv server (HTTP and WebSocket), for other trainers.

    python -m examples.openenv_server alfworld|webshop|search [--data DIR] [--host H] [--port N]

Needs `pip install openenv`. A connection to /ws is a session with an environment of its own,
until it closes. OpenEnv's POST /reset and POST /step begin a new session each, so a whole episode
needs /ws. Sessions share the benchmark's pool, in which one request at a time is served.

reset takes `task`, a name in the benchmark's lists, or `seed`, with `split` (train, held_out) or
without: seeds count the tasks of the split, or the training tasks and then the held-out ones, and
begin again after the last. Without `task` and `seed`, the task is random. The same task and
commands give the same observations. The server ends no episode after a number of steps; the client
does, except in search, which has turns. `state` has the task, and the numbers of tasks.

A page in a browser of this machine may connect, too: no Origin is checked. It can play, and take
sessions, but reads no file.
"""

import json
import random
from functools import partial
from queue import LifoQueue
from threading import Lock

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from openenv.core import Action, Environment, Observation, State, create_app
from pydantic import BaseModel, Field

from paw_min import toy
from paw_min.base.errors import Parser, UserError, masked, user_errors
from paw_min.base.files import is_url
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Step, Tasks
from paw_min.retrieval.server import guard, listen, serve

SESSIONS = 256  # each has a thread, and an environment once it has been reset
MAX_COMMAND = 100_000  # characters
# Episodes are those of the preset paper, but WebShop has all products.
SETTINGS = {"alfworld": {}, "webshop": {"eval_split": "test"},
            "search": {"eval_split": "test", "max_turns": 4}}


class CommandAction(Action):
    command: str = Field(max_length=MAX_COMMAND)


class StepObservation(Observation):  # has reward and done, too
    text: str  # the environment's own text: o_{t+1}
    instruction: str  # the same in all steps of an episode
    task_type: str
    admissible: list[str]  # commands; empty if any text is accepted
    won: bool
    score: float | None  # the benchmark's own score in [0, 1], where it has one (WebShop)


class Call(BaseModel):
    """A request in JSON-RPC."""

    id: int | str | None = None  # no NaN: the answer repeats it


class Games:
    """The tasks of a benchmark, and the slots of its pool."""

    def __init__(self, tasks: Tasks):
        self.splits = {"train": tasks.train, "held_out": tasks.held_out}
        self.names = tasks.train + tasks.held_out
        # One more than sessions, for POST /reset: so a session never waits long for a slot.
        self.pool = tasks.make_pool(SESSIONS + 1)
        # The last one first: its environment exists already.
        self.free = LifoQueue()
        for slot in reversed(range(SESSIONS + 1)):
            self.free.put(slot)
        self.lock = Lock()

    # Sessions run in threads, and a pool is not thread-safe. With one open request at a time, the
    # next answer is its own.

    def reset(self, slot: int, task: str) -> Step:
        with self.lock:
            self.pool.reset(slot, task)
            return unless_failed(self.pool.recv().step)

    def step(self, slot: int, command: str) -> Step:
        with self.lock:
            self.pool.step(slot, command)
            return unless_failed(self.pool.recv().step)

    def choose(self, task: object, seed: object, split: object) -> str:
        """The task of a reset; UserError for one that does not exist."""
        if task is not None:
            # A task of ALFWorld is a path: no other file may be read.
            if task not in self.names:
                raise UserError(f"there is no task {task!r:.300}: give a seed and a split instead.")
            return task
        if split is not None and split not in ("train", "held_out"):
            raise UserError(f"there is no split {split!r:.300}: use train or held_out.")
        names = self.splits[split] if split else self.names
        if seed is None:
            return random.choice(names)
        if type(seed) is not int or seed < 0:
            raise UserError(f"the seed {seed!r:.300} is not a number: use 0, 1, 2 ...")
        return names[seed % len(names)]


def unless_failed(step: Step) -> Step:
    if step.failed:
        raise UserError(f"the episode is lost, call reset: {step.failed}")
    return step


class GameSession(Environment):
    """One client's environment: a slot of the pool, from its first reset to its end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, games: Games):
        super().__init__()
        self.games = games
        self.slot = None
        self.running = False
        self.closed = False
        self._state = State()

    def reset(self, seed=None, episode_id=None, task=None, split=None) -> StepObservation:
        # In OpenEnv, another client can close a session by its name. A slot would be lost for good.
        if self.closed:
            raise UserError("this session was closed: connect again.")
        name = self.games.choose(task, seed, split)
        self._state = State(episode_id=episode_id, task=name)
        if self.slot is None:
            self.slot = self.games.free.get()
        self.running = False  # if an error follows
        return self._seen(self.games.reset(self.slot, name))

    def step(self, action: CommandAction) -> StepObservation:
        if not self.running:
            raise UserError("no episode is running in this session: call reset first.")
        self.running = False  # if an error follows
        step = self.games.step(self.slot, action.command)
        self._state.step_count += 1
        return self._seen(step)

    def _seen(self, step: Step) -> StepObservation:
        self.running = not step.done
        return StepObservation(
            text=step.observation,
            instruction=step.task,
            task_type=step.task_type,
            admissible=step.admissible,
            won=step.won,
            score=step.score,
            reward=step.reward,
            done=step.done,
        )

    @property
    def state(self) -> State:
        counts = {name: len(tasks) for name, tasks in self.games.splits.items()}
        return State(**self._state.model_dump() | counts)

    def close(self) -> None:
        """Free the slot. OpenEnv calls this when a connection ends, however it does."""
        self.closed = True
        self.running = False
        if self.slot is not None:
            self.games.free.put(self.slot)
            self.slot = None


def make_app(games: Games) -> FastAPI:
    app = create_app(
        partial(GameSession, games), CommandAction, StepObservation, max_concurrent_envs=SESSIONS
    )
    # Our environments are not MCP servers, and OpenEnv's POST /mcp begins a session without an end.
    app.router.routes[:] = [route for route in app.router.routes if route.path != "/mcp"]

    @app.post("/mcp")
    def no_tools(call: Call):  # `openenv validate --url` wants an answer in JSON-RPC
        error = {"code": -32601, "message": "this environment has no MCP: use /ws"}
        answer = {"jsonrpc": "2.0", "id": call.id, "error": error}
        # The text is ASCII, since an id may be half of a surrogate pair.
        return Response(json.dumps(answer), media_type="application/json")

    guard(app)

    # Over /ws, OpenEnv sends the sentence itself, as EXECUTION_ERROR.
    @app.exception_handler(UserError)
    async def explain(_, error):
        return JSONResponse({"detail": str(error)}, 422)

    return app


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("env", choices=list(SETTINGS))
    parser.add_argument("--data", default="", help="data folder; default: generated")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    args = parser.parse_args(argv)
    if is_url(args.data):
        raise UserError(f"--data {masked(args.data)} is a URL: give a folder.")
    listener = listen(args.host, args.port)
    data = args.data or toy.default_data(args.env)
    try:
        tasks = BENCHMARKS[args.env].load(Config(env=args.env, **SETTINGS[args.env]), data)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    app = make_app(Games(tasks))
    counts = f"{len(tasks.train)} training tasks, {len(tasks.held_out)} held out"
    print(f"{args.env} at http://{args.host}:{listener.getsockname()[1]}: {counts}", flush=True)
    # The largest message is an action. A client that answers no ping for 20 s is gone.
    serve(app, listener, ws_max_size=8 * MAX_COMMAND)


if __name__ == "__main__":
    with user_errors():
        main()
