"""Who plays: a language model, the rule-based teacher of the generated data, or chance.

All of them play in any pool, real or dreamed.
"""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Pool
from paw_min.model.loading import load_tokenizer
from paw_min.rollout import rollout
from paw_min.running.session import loaded, start_model
from world_models.teachers.alfworld import Expert
from world_models.teachers.demonstrate import Action, Player, play
from world_models.teachers.webshop import Shopper
from world_models.word2world.trajectories import Recorder, Trajectory

# (pool, tasks, name of the progress bar) -> one episode per task
Play = Callable[[Pool, list[str], str], list[Trajectory]]


@contextmanager
def open_agent(cfg: Config, name: str, slips: float) -> Iterator[Play]:
    """A function that plays one episode per task in a pool."""
    if name != "model":
        yield partial(play_rules, cfg, name, slips)
        return
    # UserError if a prompt may be longer than the model's positions.
    load_tokenizer(start_model(cfg), cfg.context_length)
    with loaded(cfg) as (policy, sampler):
        yield partial(play_model, cfg, policy, sampler)


def play_model(
    cfg: Config, policy, sampler, pool: Pool, tasks: list[str], label: str = "play"
) -> list[Trajectory]:
    """One episode per task by a language model, at --temperature (1, as in the paper)."""
    recorder = Recorder(cfg.env, pool)
    # Prompts are cut in every benchmark: a dream may have pages that are longer than any real one.
    with sampler.sync(policy):
        played = rollout(
            cfg, policy, sampler, recorder, tasks, (cfg.seed, 0),
            benchmark=replace(BENCHMARKS[cfg.env], cut_prompts=True), label=label,
        )
    if n_cut := played.metrics["prompts_cut"]:
        say(f"{label}: {n_cut} prompts lost their beginning, with the task: raise "
            "--max-prompt-tokens.")
    for trajectory, episode in zip(recorder.trajectories, played.episodes, strict=True):
        # They begin with what the template wrote: `imitate` may train a model with another one.
        opened = policy.opened_thought
        trajectory.responses = [opened + step.response for step in episode.transitions]
    return recorder.trajectories


def play_rules(
    cfg: Config, name: str, slips: float, pool: Pool, tasks: list[str], label: str = "play"
) -> list[Trajectory]:
    """The same by the rule-based teacher, or by a player of random commands."""

    def start(number: int, task: str, context: Context) -> RulePlayer:
        rng = generator(name, cfg.seed, number)
        teacher = None
        try:
            if name == "teacher" and cfg.env == "webshop":
                teacher = Shopper(context.task)
            elif name == "teacher":
                teacher = Expert(context.observation, rng)
        except ValueError as error:
            raise UserError(f"the teacher reads generated tasks only, not {context.task[:80]!r}: "
                            "use --agents model.") from error
        return RulePlayer(teacher, slips, rng)

    recorder = Recorder(cfg.env, pool)
    episodes = play(cfg.env, recorder, tasks, start, cfg.max_turns, label)
    for trajectory, steps in zip(recorder.trajectories, episodes, strict=True):
        trajectory.responses = [step.response for step in steps]
    return recorder.trajectories


class RulePlayer:
    """Plays one episode: the teacher's commands, or random ones if there is no teacher.

    slips: share of the teacher's commands that are replaced by random ones.
    """

    def __init__(self, teacher: Player | None, slips: float, rng: random.Random):
        self.teacher = teacher
        self.slips = slips
        self.rng = rng

    def act(self, context: Context) -> Action:
        command = self._random(context)
        if not self.teacher:
            return Action(command, "try")
        try:
            chosen = self.teacher.act(context)
        except Exception:  # noqa: BLE001 - whatever the rules raise on a page of a dream
            chosen = Action(command, "try")
        if self.rng.random() >= self.slips:
            return chosen
        return chosen._replace(command=command)

    def _random(self, context: Context) -> str:
        if not context.admissible:
            return "look"
        command = self.rng.choice(context.admissible)
        if command == "search[<your query>]":
            words = re.findall(r"\w+", context.task)
            command = f"search[{' '.join(self.rng.sample(words, min(3, len(words))))}]"
        return command
