"""How rule-based teachers play: one loop in any pool, and the noise of their demonstrations.

    Teacher       the rules of a benchmark, and the mistakes that suit it (<benchmark>.py)
    Demonstrator  a teacher that makes these mistakes
    play          one episode per task, as typed steps

Two mistakes, drawn at random. Haste: the response has a command that comes too early, against its
thought. A slip: the response stays good to imitate, but another command is executed, so that the
data include states that the teacher never reaches.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paw_min.base.console import progress_bar
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Pool, Turn


class Action(NamedTuple):
    """What a player does in one step."""

    command: str
    thought: str  # the current subgoal, in two to four words
    slip: str | None = None  # what is executed instead of the command

    @property
    def response(self) -> str:
        return f"<think>{self.thought}</think><action>{self.command}</action>"


class Player(Protocol):
    """Plays one episode."""

    def act(self, context: Context) -> Action: ...


class Teacher(Player, Protocol):
    """The rules: `act` makes no mistake, the others are those that suit the benchmark."""

    def hasty(self, context: Context, command: str, haste: float, rng: random.Random) -> str:
        """The command; where another one would be premature, that one with probability `haste`."""

    def slip(self, context: Context, command: str, rng: random.Random) -> str | None:
        """The command to execute instead of this one, if the teacher slips here."""


class Demonstrator:
    """A teacher that is hasty and slips."""

    def __init__(self, teacher: Teacher, rng: random.Random, haste: float):
        self.teacher = teacher
        self.rng = rng
        self.haste = haste

    def act(self, context: Context) -> Action:
        command, thought, _ = self.teacher.act(context)
        command = self.teacher.hasty(context, command, self.haste, self.rng)
        return Action(command, thought, self.teacher.slip(context, command, self.rng))


@dataclass
class PlayedStep:
    """One step of an episode."""

    task: str  # what the environment was reset with
    context: Context  # what the player knew
    response: str
    executed: str  # the command that the parser reads from the response, or a slip
    observation: str = ""  # what followed; "" after a slip: it does not follow from the response


@dataclass
class _Seat:
    """The episode in a slot of the pool."""

    number: int
    task: str
    player: Player | None = None  # None: the reset is not answered yet
    action: Action | None = None  # the last one


def play(
    env: str,
    pool: Pool,
    tasks: list[str],
    start: Callable[[int, str, Context], Player],
    max_turns: int,
    label: str = "demonstrations",
) -> list[list[PlayedStep]]:
    """The steps of one episode per task. An episode whose environment fails ends there.

    Not the loop of rollout.py, which collects prompts for a sampler and makes rows of token ids: a
    player answers at once, in text.

    start: (number of the episode, its task, its first context) -> who plays it. In a pool with one
    slot, the episodes come one after another, so that they can share a generator.
    """
    parse = BENCHMARKS[env].parse
    episodes = [[] for _ in tasks]
    waiting = deque(enumerate(tasks))
    seats: dict[int, _Seat] = {}  # slot -> its episode

    def begin(slot: int) -> None:
        if waiting:
            seats[slot] = _Seat(*waiting.popleft())
            pool.reset(slot, seats[slot].task)

    for slot in range(pool.n_envs):
        begin(slot)
    with progress_bar(len(tasks), label, "episode") as bar:
        while seats:
            slot, step = pool.recv()
            seat = seats[slot]
            steps = episodes[seat.number]
            if steps and not seat.action.slip:
                steps[-1].observation = step.observation
            if step.failed or step.done or len(steps) == max_turns:
                del seats[slot]
                bar.update()
                begin(slot)
                continue
            context = Context(step.task, step.observation, step.admissible)
            if steps:
                # New lists: the contexts of earlier steps stay as they were.
                last = steps[-1]
                turn = Turn(last.context.observation, last.executed)
                context.history = [*last.context.history, turn]
                context.responses = [*last.context.responses, last.response]
            else:
                seat.player = start(seat.number, seat.task, context)
            seat.action = seat.player.act(context)
            executed = seat.action.slip or parse(seat.action.response).text
            steps.append(PlayedStep(seat.task, context, seat.action.response, executed))
            pool.step(slot, executed)
    return episodes
