"""Pools whose steps a world model predicts (Word2World, arXiv 2512.18832): an agent plays in them.

    DreamPool     all answers are predicted (section 4)
    VerifiedPool  a real pool in which a purchase is simulated first (section 7.1)

Both are pools as in envs/interface.py. They take the world model as a function `predict`, so that
tests can use broken ones.
"""

from collections import deque
from collections.abc import Callable

from paw_min.envs.interface import Answer, Pool, Step
from paw_min.envs.webshop.pages import clicked
from world_models.word2world.trajectories import (
    Message,
    Recorder,
    initial_context,
    is_solved,
    said,
    to_step,
    to_text,
)

# Chats that end with the agent's command -> the environment's answers. None: too long to read.
Predict = Callable[[list[list[Message]]], list[str | None]]


class DreamPool:
    """A pool whose steps are predicted; only resets are real.

    real: a pool with one slot or more, whose slot 0 is used.
    """

    def __init__(self, env: str, predict: Predict, real: Pool, n_envs: int):
        self.n_envs = n_envs
        self._env = env
        self._predict = predict
        self._real = real
        self._first: dict[int, Step] = {}  # slot -> the answer to its reset
        self._chat: dict[int, list[Message]] = {}  # slot -> the episode so far
        self._open: list[int] = []  # slots with a command to answer
        self._ready: deque[Answer] = deque()

    def reset(self, slot: int, task: str) -> None:
        self._real.reset(0, task)
        step = self._real.recv().step
        self._first[slot] = step
        if not step.failed:
            self._chat[slot] = [said("system", initial_context(self._env, task, step))]
        self._ready.append(Answer(slot, step))

    def step(self, slot: int, command: str) -> None:
        self._chat[slot].append(said("user", command))
        self._open.append(slot)

    def recv(self, timeout: float | None = None) -> Answer | None:
        """The next answer. All open commands are answered in one batch, when nothing else waits."""
        if not self._ready and self._open and timeout is None:
            self._answer_all()
        if not self._ready:
            return None
        return self._ready.popleft()

    def close(self) -> None:
        self._real.close()

    def _answer_all(self) -> None:
        answers = self._predict([self._chat[slot] for slot in self._open])
        for slot, text in zip(self._open, answers, strict=True):
            first = self._first[slot]
            if text is None:
                reason = "the chat is longer than the world model's context"
                step = Step("", first.task, first.task_type, [], done=True, failed=reason)
            else:
                step = to_step(text, first)
            self._chat[slot].append(said("assistant", to_text(step)))
            self._ready.append(Answer(slot, step))
        self._open = []


class VerifiedPool(Recorder):
    """A real pool that buys only what the world model expects to succeed (section 7.1).

    budget: most checks per episode. Unstated in the paper, and chosen here: the world model sees
    the real chat so far. A vetoed purchase costs a step, and the agent sees the same page again,
    without a reason. A purchase after the budget is spent goes through.
    """

    def __init__(self, env: str, pool: Pool, predict: Predict, budget: int):
        super().__init__(env, pool)
        self.checks = 0
        self.vetoes = 0
        self._predict = predict
        self._budget = budget
        self._left: dict[int, int] = {}  # slot -> checks
        self._page: dict[int, Step] = {}  # slot -> what the agent sees
        self._vetoed: deque[Answer] = deque()

    def reset(self, slot: int, task: str) -> None:
        self._left[slot] = self._budget
        super().reset(slot, task)

    def step(self, slot: int, command: str) -> None:
        if self._buys(slot, command) and self._left[slot] > 0:
            self._left[slot] -= 1
            self.checks += 1
            chat = [*self.current[slot].messages, said("user", command)]
            answer = self._predict([chat])[0]
            if answer is None or not is_solved(answer):
                self.vetoes += 1
                self._vetoed.append(Answer(slot, self._page[slot]))
                return
        super().step(slot, command)

    def recv(self, timeout: float | None = None) -> Answer | None:
        if self._vetoed:
            return self._vetoed.popleft()
        answer = super().recv(timeout)
        if answer is not None:
            self._page[answer.slot] = answer.step
        return answer

    def _buys(self, slot: int, command: str) -> bool:
        """Would the shop buy? It reads `click[buy now] to finish`, too, and needs the button."""
        admissible = self._page[slot].admissible
        links = [text.removeprefix("click[").removesuffix("]") for text in admissible]
        return clicked(command, links) == "buy now"
