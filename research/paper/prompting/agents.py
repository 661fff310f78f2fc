"""The ReAct and Reflexion agents: their prompts, trials and reflections.

PaW reports both without describing them. Here:

ReAct (Yao et al., 2023): one demonstration, then all thoughts, actions and observations so far,
then the benchmark's plain prompt, without its history. Of a trajectory that is too long, the oldest
steps are left out; the task, the demonstration and the reflections stay. Deviations: one
demonstration per benchmark, written for this project (the authors: one or two, HotpotQA six); each
step has a thought, in <think> tags, where the authors' are sparse in ALFWorld and WebShop; the
admissible commands are listed, as in the plain prompt; the prompt is one message to a chat model.

Reflexion (Shinn et al., 2023): up to three trials per task with the ReAct agent. After a failed
trial, the model reads its transcript and writes a reflection, which the prompts of later trials
show. A task is solved if one trial solves it. As in the original, the tasks are those of the
evaluation, and the feedback is the environment's success signal alone. Deviations: the number of
trials (the authors: 12 in ALFWorld); a reflection prompt of our own, without examples; a trial ends
as an evaluation episode does, not when the agent repeats itself.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paw_min.base.console import say
from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Answer, Benchmark, Context, Pool
from paw_min.metrics import mean
from paw_min.model.sampler import Request
from paw_min.rows import Episode
from paw_min.running.evaluate import evaluate
from paw_min.running.session import Session

TRIALS = 3  # most trials of a task
TRIAL_SEEDS = 1000  # distance of the seeds of two trials

REACT = """\
Solve a task step by step. In each step, first think about what you have seen and what is left to
do, then act. This example solves another task:

{example}

Now it is your turn. Your task: {task}
{steps}
"""

LESSONS = "\n\nYou have failed at this task before. What you noted after each trial:\n"

REFLECT = """\
You are an agent that tried to solve a task. Your task: {task}

This is what you did. It did not solve the task:
{steps}

In two or three sentences, say which mistake you made, and what you will do instead when you try
the same task again. Name the objects, places or words that matter. Do not act now.
"""


@dataclass
class React:
    """The prompts of the ReAct agent in one benchmark."""

    plain: Callable[[Context, int], str]  # the benchmark's own prompt
    example: str
    length: Callable[[str], int]  # prompt -> its tokens
    limit: int

    def prompt(self, context: Context, history_length: int) -> str:
        """h_t, with the whole trajectory; as a style of Benchmark.prompts."""
        steps = []
        for turn, response in zip(context.history, context.responses, strict=True):
            steps.append(step(turn.observation, response))
        # The plain prompt comes last. The history and the reflections stand above it already.
        instruction = context.task.partition(LESSONS)[0]
        now = self.plain(replace(context, task=instruction, history=[]), history_length)
        # Search shows the current observation as a part of the history, which is left out here.
        shown = context.observation and context.observation in now
        if steps and not shown:
            steps.append(step(context.observation))

        def render(text: str) -> str:
            return REACT.format(example=self.example, task=context.task, steps=text) + now

        return self._fit(steps, render)

    def reflection(self, task: str, episode: Episode) -> str:
        """The request for a reflection on a failed trial."""
        steps = [step(t.observation, t.response) for t in episode.transitions]
        steps.append(step(episode.transitions[-1].next_observation))

        def render(text: str) -> str:
            return REFLECT.format(task=task, steps=text)

        return self._fit(steps, render)

    def _fit(self, steps: list[str], render: Callable[[str], str]) -> str:
        """Render all steps, or else leave out as many of the oldest as the limit requires."""

        def without(n: int) -> str:
            shown = steps[n:]
            if n > 0:
                shown = [f"(the first {n} steps are left out)", *shown]
            return render("\n".join(shown))

        def fits(n: int) -> bool:
            return self.length(without(n)) <= self.limit

        if fits(0):
            return without(0)
        # The smallest n that fits, by bisection: a prompt is tokenized to know its length. If none
        # fits, all steps are left out, and the rollout reports the prompt as too long.
        n = bisect_left(range(len(steps)), True, key=fits)
        return without(n)


def prompted(cfg: Config, react: React) -> Benchmark:
    """The benchmark with the prompts of the agent in place of its own."""
    return replace(BENCHMARKS[cfg.env], prompts={cfg.prompt: react.prompt})


def step(observation: str, response: str = "") -> str:
    return f"Observation: {observation.strip()}\n{response.strip()}".strip()


@dataclass
class Remembering:
    """A pool that appends the reflections on a task to its instruction.

    A prompt function knows only the instruction, which several games can share; the pool knows the
    task itself.
    """

    pool: Pool
    lessons: dict[str, list[str]] = field(default_factory=dict)  # task -> its lessons, oldest first
    instructions: dict[str, str] = field(default_factory=dict)  # task -> text with its lessons
    tasks: dict[int, str] = field(default_factory=dict)  # slot -> its task

    @property
    def n_envs(self) -> int:
        return self.pool.n_envs

    def reset(self, slot: int, task: str) -> None:
        self.tasks[slot] = task
        self.pool.reset(slot, task)

    def step(self, slot: int, command: str) -> None:
        self.pool.step(slot, command)

    def recv(self, timeout: float | None = None) -> Answer | None:
        answer = self.pool.recv(timeout)
        if answer is None:
            return None
        task = self.tasks[answer.slot]
        seen = answer.step
        lessons = self.lessons.get(task, [])
        notes = [f"Trial {n}: {note}" for n, note in enumerate(lessons, start=1)]
        if notes:
            seen = replace(seen, task=seen.task + LESSONS + "\n".join(notes))
        self.instructions.setdefault(task, seen.task)
        return Answer(answer.slot, seen)

    def close(self) -> None:
        self.pool.close()


def reflexion(
    cfg: Config, s: Session, react: React, tokens: Counter
) -> tuple[list[Episode], dict[str, float]]:
    """Up to TRIALS trials per task -> the last episode of each task, success after each trial.

    tokens: what the model processes is added to it.
    """
    lessons: dict[str, list[str]] = {}  # task -> its lessons
    last: dict[str, Episode] = {}  # task -> its latest episode
    success: dict[str, float] = {}
    remaining = s.tasks.held_out
    for trial in range(1, TRIALS + 1):
        if remaining:  # else all tasks are solved
            memory = Remembering(s.pool, lessons)
            trial_seed = TRIAL_SEEDS * (trial - 1)
            played = evaluate(
                cfg, s.policy, s.sampler, memory, remaining, trial_seed, prompted(cfg, react)
            ).episodes
            tokens += count(played)
            for episode in played:
                # A game that breaks in a later trial does not replace its earlier episode.
                if not episode.failed or episode.task not in last:
                    last[episode.task] = episode
            # A broken game is not played again: it stays broken.
            lost = [episode for episode in played if not episode.won and not episode.failed]
            remaining = [episode.task for episode in lost]
            if trial < TRIALS and lost:
                reflect(cfg, s, react, memory, lost, tokens, trial_seed)
        solved = mean([episode.won for episode in last.values() if not episode.failed])
        success[f"eval_success_trial_{trial}"] = solved
        say(f"trial {trial}: success {solved:.3f}, {len(remaining)} tasks left")
    return list(last.values()), success


def reflect(
    cfg: Config, s: Session, react: React, memory: Remembering, lost: list[Episode],
    tokens: Counter, trial_seed: int,
) -> None:
    """Let the model write one reflection per failed episode, and add it to the memory."""
    requests = []
    for n, episode in enumerate(lost):
        prompt = react.reflection(memory.instructions[episode.task], episode)
        ids = s.policy.encode_chat(prompt)
        # -2 keeps these draws apart from the responses (paw_min/base/seeds.py).
        seed = request_seed(-2, trial_seed, episode.trajectory)
        requests.append(Request(n, ids, seed))
    queue = deque(requests)  # the sampler empties it
    with s.sampler.sync(s.policy):
        for finished in s.sampler.generate(queue, cfg.eval_temperature, cfg.max_response_tokens):
            for response in finished:
                tokens += used(requests[response.slot].prompt_ids, response.ids)
                note = " ".join(s.policy.decode(response.ids).split())
                memory.lessons.setdefault(lost[response.slot].task, []).append(note)


def count(episodes: list[Episode]) -> Counter:
    """Calls and tokens of episodes."""
    total = Counter()
    for episode in episodes:
        for row in episode.transitions:
            total += used(row.prompt_ids, row.response_ids)
    return total


def used(prompt_ids: list[int], response_ids: list[int]) -> Counter:
    return Counter(calls=1, prompt_tokens=len(prompt_ids), completion_tokens=len(response_ids))
