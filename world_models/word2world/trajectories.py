"""Trajectories as chats, and how they are collected (Word2World, arXiv 2512.18832, sec. 3.1, 4).

The world model reads (S_0, a_1, o_1, ..., a_n) and answers o_n with the reward (Eq. 2). As in the
released records, the roles are swapped: the user's messages are the agent's commands, the
assistant's are the environment's answers. The agent's thoughts are not among them.

    system       S_0: for ALFWorld the hidden state of the game, then what the agent sees
    user         take mug 1 from desk 2
    assistant    You pick up the mug 1 from the desk 2.
                 Available actions: examine mug 1 | go to bed 1 | ...
    user         move mug 1 to bed 1
    assistant    You move the mug 1 to the bed 1. [SUCCESS]

Deviation: the answers of all environments end with the available actions, since the prompts of PaW
list them in every step. In Word2World, only WebShop's pages do.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import textworld

from paw_min.base.errors import UserError
from paw_min.base.files import parse_json, reading, replace_text
from paw_min.envs.alfworld import engine
from paw_min.envs.interface import Answer, Context, Pool, Step, Turn

MARKER = " [SUCCESS]"  # R' = 1: solved. Without it: unfinished or failed
ACTIONS = "\nAvailable actions: "
HIDDEN = "# Hidden state, which the agent does not see"
SEEN = "# What the agent sees"
COMMAND = r"(?:click|search)\["  # WebShop's commands begin so


Message = dict[str, str]  # role: system, user or assistant; content


@dataclass
class Trajectory:
    """One episode, in the real environment or in a world model."""

    task: str = ""  # what the environment was reset with
    instruction: str = ""  # the text of the task
    messages: list[Message] = field(default_factory=list)  # system, user, assistant, user, ...
    responses: list[str] = field(default_factory=list)  # the agent's: its thoughts and commands
    won: bool = False
    failed: str = ""  # why the episode was lost, if it was; it counts as not won

    @property
    def commands(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "user"]

    @property
    def answers(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "assistant"]


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# ---- steps as text ----


def to_text(step: Step) -> str:
    """An environment's answer as the world model has to write it."""
    text = step.observation.strip()
    if step.admissible and not step.done:
        text += ACTIONS + " | ".join(step.admissible)
    if step.done and step.won:
        text += MARKER
    return text.strip()


def observation_of(text: str) -> str:
    """An answer without the available actions; the marker stays."""
    before, _, after = text.partition(ACTIONS.strip())
    marker = MARKER if is_solved(after) else ""
    return before.strip() + marker


def is_solved(text: str) -> bool:
    return MARKER.strip() in text


def to_step(text: str, first: Step) -> Step:
    """What the agent gets of a predicted answer. The marker and all after it are cut, as released.

    Only the marker ends an episode: the world model has no sign for a failure. first: the answer to
    the reset.
    """
    solved = is_solved(text)
    shown = text.partition(MARKER.strip())[0].strip()
    observation, _, actions = shown.partition(ACTIONS.strip())
    return Step(
        observation=observation.strip(),
        task=first.task,
        task_type=first.task_type,
        admissible=split_actions(actions),
        reward=10.0 if solved else 0.0,  # a win, in all benchmarks
        done=solved,
        won=solved,
    )


def split_actions(text: str) -> list[str]:
    """The actions between bars; a bar before a closing bracket is within one.

    WebShop's options may have brackets of their own, such as click[a | b [2 | 4]]: there, an action
    ends where another begins.
    """
    bar = r"\|(?![^\[\]]*\])"
    if re.match(rf"\s*{COMMAND}", text):
        bar = rf"\|(?=\s*{COMMAND})"
    return [action.strip() for action in re.split(bar, text) if action.strip()]


def initial_context(env: str, task: str, first: Step) -> str:
    """S_0, section 2.1: the first observation, and for ALFWorld the hidden state before it."""
    seen = to_text(first)
    if first.task not in seen:
        seen = f"Task: {first.task}\n{seen}"
    if env != "alfworld":
        return seen
    return f"{HIDDEN}\n{hidden_state(task)}\n\n{SEEN}\n{seen}"


def decisions(trajectory: Trajectory) -> Iterator[tuple[Context, str]]:
    """What the agent knew, and its response, in each step: the inverse of recording."""
    seen = trajectory.messages[0]["content"].rpartition(SEEN)[2].strip()
    seen = seen.removeprefix(f"Task: {trajectory.instruction}\n")
    blank = Step("", trajectory.instruction, "", [])
    step = to_step(seen, blank)
    context = Context(trajectory.instruction, step.observation, step.admissible)
    turns = zip(trajectory.responses, trajectory.commands, trajectory.answers)
    for response, command, answer in turns:
        yield context, response
        step = to_step(answer, blank)
        context.history.append(Turn(context.observation, command))
        context.observation = step.observation
        context.admissible = step.admissible


@cache
def hidden_state(game: str) -> str:
    """One line per receptacle that can be opened or holds something, and the lamps (Fig. 8).

    From the facts that hold at the start of the game, as in its initial_state.pddl.
    """
    world = _facts_engine()
    world.load(game)
    facts = defaultdict(list)  # predicate -> the names in each of its facts
    for fact in world.reset()["facts"]:
        facts[fact.name].append([variable.name.strip() for variable in fact.arguments])
    opened, openable = facts["opened"], facts["openable"]
    lines = []
    for place in sorted(name for name, _ in facts["receptacletype"]):
        things = sorted(f"a {thing}" for thing, where in facts["inreceptacle"] if where == place)
        state = ""
        if [place] in openable:
            state = " (open)" if [place] in opened else " (closed)"
        if state or things:
            lines.append(f"The {place}{state}: {', '.join(things) or 'nothing'}.")
    for (lamp,) in sorted(facts["toggleable"]):
        lines.append(f"The {lamp} is {'on' if [lamp] in facts['istoggled'] else 'off'}.")
    return "\n".join(lines)


@cache
def _facts_engine():
    """One engine for all games: fast-downward never frees an engine's memory."""
    return engine.make_env(textworld.EnvInfos(facts=True))


# ---- collecting ----


class Recorder:
    """A pool that passes everything on, and keeps each episode, in the order of the resets."""

    def __init__(self, env: str, pool: Pool):
        self.n_envs = pool.n_envs
        self.trajectories: list[Trajectory] = []
        self.current: dict[int, Trajectory] = {}  # slot -> its episode
        self._env = env
        self._pool = pool

    def reset(self, slot: int, task: str) -> None:
        self.current[slot] = Trajectory(task)
        self.trajectories.append(self.current[slot])
        self._pool.reset(slot, task)

    def step(self, slot: int, command: str) -> None:
        self.current[slot].messages.append(said("user", command))
        self._pool.step(slot, command)

    def recv(self, timeout: float | None = None) -> Answer | None:
        answer = self._pool.recv(timeout)
        if answer is None:
            return None
        step = answer.step
        trajectory = self.current[answer.slot]
        if step.failed:
            trajectory.failed = step.failed
        elif not trajectory.messages:
            trajectory.instruction = step.task
            context = initial_context(self._env, trajectory.task, step)
            trajectory.messages.append(said("system", context))
        else:
            trajectory.messages.append(said("assistant", to_text(step)))
            trajectory.won = step.done and step.won
        return answer

    def close(self) -> None:
        self._pool.close()


def read_trajectories(paths: Iterable[Path]) -> list[Trajectory]:
    """All trajectories of these files; UserError for one that is missing, damaged or empty."""
    found = []
    for path in paths:
        with reading(path):
            episodes = [Trajectory(**episode) for episode in parse_json(path.read_bytes())]
        if not episodes:
            raise UserError(f"{path} has no episode: collect some.")
        found += episodes
    return found


def write_trajectories(path: Path, episodes: list[Trajectory]) -> None:
    replace_text(path, json.dumps([asdict(episode) for episode in episodes]) + "\n")
