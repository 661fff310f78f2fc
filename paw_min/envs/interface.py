"""The types between environments and training: what an environment gives, and what it gets.

    task  ->  Environment.reset, step  ->  Step  ->  Context  ->  prompt h_t  ->  response a_t
                          ^                                                           |
                          +------------------------ Command <-------------------------+

An environment is any object with the two methods of `Environment`. It plays text: it knows neither
tokens nor models. A `Benchmark` adds what training needs beyond playing: how to load tasks, how to
write a prompt from a `Context`, how to read a `Command` from a response, and R_max, the highest
return of an episode (10; 1 in search).

Training plays many environments at once, through a `Pool` (envs/pool.py): a request names a slot
and returns at once, and answers come in any order. The same task and commands give the same steps;
there is no seed. So the episodes of a group differ only by what the policy samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paw_min.config import Config


@dataclass
class Step:
    """What an environment answers to `reset` (reward 0, not done) and to `step`."""

    observation: str  # o_{t+1}; an empty one is not a world-model target
    task: str  # the instruction, the same in all steps of an episode
    task_type: str  # evaluation is reported for each type, eval_success/<type>
    admissible: list[str]  # commands; empty if any text is accepted
    reward: float = 0.0  # r_t, without format penalties
    done: bool = False
    won: bool = False
    score: float | None = None  # the benchmark's own score in [0, 1], where it has one (WebShop)
    failed: str = ""  # set by the pool: why the environment broke; the episode is discarded


class Environment(Protocol):
    """Deterministic: the same task and commands give the same steps.

    One object plays many episodes, one after another. What it raises costs the episode (pool.py).
    """

    def reset(self, task: str) -> Step:
        """Begin an episode, even if the last one has not ended. task: one of Tasks."""

    def step(self, command: str) -> Step:
        """Execute the text of a Command. It is called until `done`, or --max-turns times."""


class Answer(NamedTuple):
    """What a pool returns: the answer to the open request of one slot."""

    slot: int
    step: Step


class Pool(Protocol):
    """Many environments at once, slots 0 .. n_envs - 1, each with one open request at most.

    EnvPool (pool.py) puts each answer through `plain_step`; other pools have to do so themselves.
    """

    n_envs: int

    def reset(self, slot: int, task: str) -> None:
        """Request the start of an episode; returns at once."""

    def step(self, slot: int, command: str) -> None:
        """Request a step; returns at once."""

    def recv(self, timeout: float | None = None) -> Answer | None:
        """The next answer; None if there is none within `timeout` seconds (None: no limit)."""

    def close(self) -> None: ...


class Turn(NamedTuple):
    """An earlier step as the prompt shows it."""

    observation: str  # o_t
    command: str  # what was executed


@dataclass
class Context:
    """What the agent knows when it acts: h_t before it is rendered as text."""

    task: str
    observation: str  # o_t
    admissible: list[str]
    history: list[Turn] = field(default_factory=list)  # all earlier steps, oldest first
    responses: list[str] = field(default_factory=list)  # the responses of these steps, in full


class Command(NamedTuple):
    """What the parser reads from a response."""

    text: str  # executed even if the format is wrong, as far as it can be read
    valid: bool  # is the response well formed?


@dataclass(frozen=True)
class Tasks:
    """The data of a run: what to play, and a pool to play it in."""

    # A task is a text that `reset` understands, such as a path, a question or a number.
    train: list[str]
    held_out: list[str]
    make_pool: Callable[[int], Pool]  # number of slots -> pool


def recent(turns: list, n: int) -> list:
    """The last n turns. Not turns[-n:], which is all of them for n = 0."""
    return turns[max(0, len(turns) - n) :]


@dataclass(frozen=True)
class Benchmark:
    """Everything that training needs from a benchmark."""

    # (settings, data folder) -> tasks; may raise ValueError or OSError
    load: Callable[[Config, str], Tasks]
    # name, which --prompt chooses -> (context, history length) -> text of h_t
    prompts: dict[str, Callable[[Context, int], str]]
    parse: Callable[[str], Command]  # response -> command
    r_max: float = 10.0  # R_max of Eq. 10: the highest possible episode return, A.1
    # GiGPO: observations that are at least this similar are one state; None: only equal ones.
    similarity: float | None = None
    splits: tuple[str, ...] = ()  # what --eval-split takes; (): the data decide
    cut_prompts: bool = False  # cut the beginning of prompts over the limit; else they stop the run
