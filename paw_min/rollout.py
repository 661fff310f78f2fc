"""Rollouts: how an episode is played, and many at once. Line 2 of Algorithm 1, and evaluation.

    rollout         tasks -> episodes and metrics, over all ranks
    Player.life     the life of one episode, from its reset to its end
    Player.play     many episodes at once, as many as the pool has environments (session.py)

`rollout` returns all episodes, even those whose environment broke (`episode.failed`): the caller
leaves these out, since their return is unknown. It is called within `sampler.sync(policy)`, so that
the sampler has the current weights.

Each environment step becomes one transition (h_t, a_t, r_t, o_{t+1}). The last step of an episode
also gives one: its observation appears in no later prompt, but the world model learns from it. Each
rank plays whole groups; then every rank gets all episodes.

Environments differ in speed, so a rollout waits for one only when no request is queued: an episode
is queued for generation as soon as its environment has answered, and joins the sampler's next unit
of work (vLLM: a decoding step; transformers: a batch). A slot of the pool starts its next episode
as soon as the last one ends. With environments that take 0.2 s, this makes 1.8 times as many steps
per second as generating for all and then stepping all; with fast environments, it makes no
difference (research/closed.md).

A life is a generator function. After it has asked an environment or the sampler for something, it
stops at a `yield`. Python's `next(life)` runs it from its beginning to the first `yield`.
`life.send(answer)` makes this `yield` return the answer, and runs it to the next one, or to its
end, where `send` raises StopIteration. In between, other episodes go on.

Each request has a seed of its own, so its tokens do not depend on the requests beside it, up to
rounding. Where environments run in other processes, or behind a server, the batches depend on
timing, and so do the last bits of the log-probabilities.
"""

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from paw_min.base import distributed
from paw_min.base.console import progress_bar
from paw_min.base.errors import UserError
from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Pool, Step, Turn
from paw_min.envs.prompting import as_listed
from paw_min.metrics import timed
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response, Sampler
from paw_min.rows import Episode, Transition

COUNTS = ("tokens_generated", "prompts_cut", "responses_cut", "obs_tokens_cut")


@dataclass
class Rollout:
    episodes: list[Episode]  # those of all ranks
    metrics: dict[str, float]


def rollout(
    cfg: Config, policy: Policy, sampler: Sampler, pool: Pool, tasks: Sequence[str],
    seed_key: tuple[int, ...], group_size: int = 1, benchmark: Benchmark | None = None,
    label: str = "rollout",
) -> Rollout:
    """Play each task `group_size` times, within `sampler.sync(policy)`, at cfg.temperature.

    The episodes of a task are a group; each rank plays whole groups. pool: that of this rank, which
    plays pool.n_envs episodes at a time. seed_key: names this rollout; together with trajectory and
    turn it seeds a request (seeds.py). benchmark: whose prompts and parser are used; default:
    BENCHMARKS[cfg.env]. label: of the progress bar. paw_min/README.md explains the metrics.
    """
    began = time.perf_counter()
    mine = _episodes_of_this_rank(tasks, group_size)
    benchmark = benchmark or BENCHMARKS[cfg.env]
    with progress_bar(len(mine), label, "episode") as bar:
        player = Player(cfg, policy, sampler, pool, benchmark, seed_key, bar, waiting=deque(mine))
        player.play()  # fills the episodes of `mine`

    # Fractions of the wall time. While the sampler is idle, we wait for environments, or do our own
    # work: tokenizing, parsing, rows.
    metrics = player.metrics
    seconds = time.perf_counter() - began
    metrics["generator_idle"] = 1.0 - metrics["seconds_generate"] / seconds
    metrics["env_wait"] = metrics["seconds_env"] / seconds
    # Every rank has the episodes of all ranks from here on.
    metrics = _over_ranks(distributed.all_gather([metrics]))
    episodes = distributed.all_gather(mine)
    n_responses = sum(len(episode.transitions) for episode in episodes)
    metrics["responses_cut"] /= max(1, n_responses)  # a fraction from here on
    return Rollout(episodes, metrics)


def _episodes_of_this_rank(tasks: Sequence[str], group_size: int) -> list[Episode]:
    """Whole groups, not yet played."""
    # The members of a group share a task, so the environment's caches and the sampler's prefix
    # cache serve all of them.
    first = distributed.rank() * len(tasks) // distributed.n_ranks()
    end = (distributed.rank() + 1) * len(tasks) // distributed.n_ranks()
    # Episodes are numbered over all ranks, so that the seeds of their requests do not depend on the
    # number of ranks.
    return [
        Episode(str(tasks[group]), group, trajectory=group * group_size + member)
        for group in range(first, end)
        for member in range(group_size)
    ]


def _over_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Counts are summed over the ranks, times and fractions averaged."""
    result = {}
    for key in metrics[0]:
        total = sum(one[key] for one in metrics)
        result[key] = total if key in COUNTS else total / len(metrics)
    return result


def _no_metrics() -> dict[str, float]:
    return {"seconds_generate": 0.0, "seconds_env": 0.0} | dict.fromkeys(COUNTS, 0)


@dataclass
class Player:
    """One rollout on one rank: what it needs, and its state."""

    cfg: Config
    policy: Policy
    sampler: Sampler
    pool: Pool
    benchmark: Benchmark  # whose prompts and parser are used
    seed_key: tuple[int, ...]
    bar: tqdm  # counts the episodes that have ended

    waiting: deque[Episode]  # not started yet
    lives: dict[int, Generator] = field(default_factory=dict)  # slot -> life of the episode in it
    queue: deque[Request] = field(default_factory=deque)  # what the sampler generates next
    metrics: dict[str, float] = field(default_factory=_no_metrics)

    # ---- one episode ----

    def life(self, slot: int, episode: Episode) -> Generator[None, Step | Response, None]:
        """Play the episode in this slot, until it is done, fails, or has had max_turns steps."""
        self.pool.reset(slot, episode.task)
        step = yield  # o_0, once the environment has answered
        if step.failed:
            episode.failed = step.failed
            return
        episode.instruction = step.task
        episode.task_type = step.task_type
        context = Context(step.task, step.observation, step.admissible)

        for turn in range(self.cfg.max_turns):
            prompt_ids = self.prompt_tokens(context)  # h_t
            # A seed of its own for each response: what is drawn does not depend on which requests
            # happen to share a batch.
            seed = request_seed(*self.seed_key, episode.trajectory, turn)
            self.queue.append(Request(slot, prompt_ids, seed))
            response = yield  # a_t, once the sampler has answered
            self.metrics["tokens_generated"] += len(response.ids)
            text = self.policy.decode(response.ids)
            command = self.parse(text, context.admissible)

            self.pool.step(slot, command.text)
            step = yield  # r_t, o_{t+1}
            if step.failed:
                # The environment broke. Its transitions so far stay in the episode, but train.py
                # leaves the whole episode out: its return is unknown.
                episode.failed = step.failed
                return
            # Counted here, because it becomes a fraction of the transitions.
            self.metrics["responses_cut"] += response.cut
            episode.transitions.append(
                self.transition(episode, context, prompt_ids, response, text, command, step)
            )
            episode.score = step.score
            episode.won = step.done and step.won
            if step.done:
                return
            context.history.append(Turn(context.observation, command.text))
            context.responses.append(text)
            context.observation = step.observation
            context.admissible = step.admissible

    def prompt_tokens(self, context: Context) -> list[int]:
        """h_t: one user message, rendered anew in every step."""
        # Only the last history_length steps are shown, so a prompt does not grow with the episode.
        render = self.benchmark.prompts[self.cfg.prompt]
        ids = self.policy.encode_chat(render(context, self.cfg.history_length))
        limit = self.cfg.max_prompt_tokens
        if len(ids) > limit:
            if not self.benchmark.cut_prompts:
                raise UserError(
                    f"a prompt of {len(ids)} tokens exceeds max_prompt_tokens={limit}: raise "
                    "--max-prompt-tokens."
                )
            self.metrics["prompts_cut"] += 1
            ids = ids[-limit:]  # loses the beginning, which states the task
        return ids

    def parse(self, text: str, admissible: list[str]) -> Command:
        """The command in a response, written as the environment lists it."""
        # A malformed response is executed as far as it can be read, and its `valid` = False brings
        # the penalty. Where the template has opened <think> in the prompt, the parser gets it, too.
        opened = self.policy.opened_thought if "</think>" in text else ""
        command, valid = self.benchmark.parse(opened + text)
        return Command(as_listed(command, admissible), valid)

    def transition(
        self, episode: Episode, context: Context, prompt_ids: list[int], response: Response,
        text: str, command: Command, step: Step,
    ) -> Transition:
        """(h_t, a_t, r_t, o_{t+1}): context is that of h_t, text the decoded a_t."""
        separator_ids = []
        if self.cfg.wm_separator == "turn":
            separator_ids = self.policy.separator(response.ids)
        used = len(prompt_ids) + len(response.ids) + len(separator_ids)
        return Transition(
            prompt_ids=prompt_ids,
            response_ids=response.ids,  # sampled ids: decoding may change them
            separator_ids=separator_ids,
            obs_ids=self.observation_tokens(step.observation, used),
            sampler_logp=response.logps,
            reward=step.reward,
            valid=command.valid,
            observation=context.observation,
            group=episode.group,
            trajectory=episode.trajectory,
            admissible=context.admissible,
            response=text,
            command=command.text,
            next_observation=step.observation,
        )

    def observation_tokens(self, observation: str, used: int) -> list[int]:
        """o_{t+1}, in a row that has `used` tokens before it."""
        # It is tokenized alone, not with the prompt that will show it: the target of the world
        # model does not depend on the next prompt.
        ids = self.policy.encode(observation)
        # It is cut here, because rotary models give no error beyond their positions.
        limit = min(self.cfg.max_obs_tokens, max(0, self.policy.positions - used))
        self.metrics["obs_tokens_cut"] += max(0, len(ids) - limit)
        return ids[:limit]

    # ---- many at once ----

    def play(self) -> None:
        """Play all waiting episodes, pool.n_envs at a time."""
        # Fill the pool. From here on, a slot gets its next episode when its own has ended, so that
        # a short episode does not wait for a long one.
        for slot in range(self.pool.n_envs):
            self.begin(slot)
        while self.lives:
            # All requests have been answered, so block until an environment has.
            self.take_answers(timeout=None)
            self.generate()

    def generate(self) -> None:
        """Answer all requests, those that come in meanwhile, too."""
        # A generator. Each `next` runs one unit of work: one batch (transformers), or one decoding
        # step of all running sequences (vLLM). Requests that are queued in between join the next
        # unit. It ends when all requests have been answered.
        cfg = self.cfg
        units = self.sampler.generate(self.queue, cfg.temperature, cfg.max_response_tokens)
        while True:
            with timed(self.metrics, "seconds_generate"):
                finished = next(units, None)  # responses; a unit may finish none of them
            if finished is None:
                return
            for response in finished:
                self.resume(response.slot, response)
            # Environments that have answered meanwhile join the next unit of work. With --workers
            # 0, they are computed here.
            self.take_answers(timeout=0)

    def take_answers(self, timeout: float | None) -> None:
        """Resume all episodes whose environment has answered; None waits for the first answer."""
        while True:
            with timed(self.metrics, "seconds_env"):
                answer = self.pool.recv(timeout)
            if answer is None:
                return
            self.resume(answer.slot, answer.step)
            # Others may be ready as well: take them all, so that they generate in one batch.
            timeout = 0

    def begin(self, slot: int) -> None:
        """Give a free slot the next episode, if there is one."""
        if self.waiting:
            self.lives[slot] = self.life(slot, self.waiting.popleft())
            next(self.lives[slot])  # It asks for its reset.

    def resume(self, slot: int, answer: Step | Response) -> None:
        """Give an episode what it has waited for; at its end, its slot gets the next one."""
        try:
            self.lives[slot].send(answer)
        except StopIteration:
            del self.lives[slot]
            self.bar.update()
            self.begin(slot)
