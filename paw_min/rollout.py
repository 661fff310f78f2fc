"""Rollouts: groups of episodes as transition rows (Alg. 1, line 2).

Asynchronous: an episode is queued for generation as soon as its environment returns, and a slot
starts the next task as soon as its episode ends. Every step becomes one row (h_t, a_t, r_t,
o_{t+1}), including the last, whose observation appears in no later prompt.

With environments in other processes or a retrieval server, batch composition depends on timing, and
log-probs differ by rounding. Otherwise rollouts are reproducible: each request has its own seed.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Answer, Command, Context, Pool, Step, Turn
from paw_min.model.batches import TokenRow
from paw_min.model.sampler import Request, Response
from paw_min.running import distributed
from paw_min.running.console import progress_bar
from paw_min.running.errors import UserError


@dataclass
class Transition(TokenRow):
    """One environment step, the unit of training: TokenRow has the tokens h_t, a_t and o_{t+1}."""

    response_logps: list[float]  # the sampler's, one per response token, at its temperature
    reward: float  # r_t of the environment, without penalties
    valid: bool  # is the response well formed?
    anchor: str  # o_t, the state in GiGPO's sense
    group: int
    trajectory: int


@dataclass
class Episode:
    """One trajectory: its rows, its task and its outcome."""

    task: str  # e.g. a game file
    group: int
    trajectory: int
    transitions: list[Transition] = field(default_factory=list)
    log: list[tuple[str, str, str]] = field(default_factory=list)  # (o_t, response, o_{t+1})
    task_type: str = ""
    won: bool = False
    score: float | None = None  # the benchmark's own score in [0, 1], where it has one (WebShop)
    failed: str = ""  # why the environment broke, if it did; such an episode is not trained on

    @property
    def episode_return(self) -> float:
        """R(tau): undiscounted sum of the environment's rewards."""
        return sum(t.reward for t in self.transitions)


@dataclass
class Rollout:
    episodes: list[Episode]  # of all ranks
    metrics: dict[str, float]


def request_seed(*key: int) -> int:
    """A 63-bit seed from seed_key (run seed, update; evaluation: -1), trajectory and turn."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rollout(
    cfg: Config, policy, sampler, pool: Pool, tasks: Sequence[str], groups: Sequence[int], *,
    temperature: float, seed_key: tuple[int, ...], label: str = "rollout",
) -> Rollout:  # fmt: skip
    """Play one episode per entry of `tasks`, within `sampler.sync(policy)`.

    tasks, groups: one entry per trajectory, group by group; each rank plays whole groups. pool:
    plays pool.n_envs episodes at a time. seed_key: names this rollout; together with trajectory
    and turn it seeds a request. results/README.md explains the metrics.
    """
    start = time.perf_counter()
    entries = enumerate(zip(tasks, groups, strict=True))
    episodes = [Episode(str(task), group, n) for n, (task, group) in entries]
    names = list(dict.fromkeys(groups))
    rank, world = distributed.rank(), distributed.world()
    my_groups = set(names[rank * len(names) // world : (rank + 1) * len(names) // world])
    mine = [e for e in episodes if e.group in my_groups]
    with progress_bar(len(mine), label, "episode") as bar:
        player = _Player(cfg, policy, pool, mine, seed_key, bar)
        while player.seats:
            player.take_answers(wait=True)
            work = sampler.generate(player.queue, temperature, cfg.max_response_tokens)
            for finished in player.timed("seconds_generate", work):
                for response in finished:
                    player.act(response)
                player.take_answers(wait=False)
    seconds, metrics = time.perf_counter() - start, player.metrics
    metrics["generator_idle"] = 1.0 - metrics["seconds_generate"] / seconds
    metrics["env_wait"] = metrics["seconds_env"] / seconds
    return Rollout(distributed.all_gather(mine), _over_ranks(distributed.all_gather([metrics])))


COUNTS = ("tokens_generated", "prompts_cut", "obs_tokens_cut")


def _over_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Counts are summed over the ranks, times and fractions averaged."""
    totals = {key: sum(one[key] for one in metrics) for key in metrics[0]}
    return {k: v if k in COUNTS else v / len(metrics) for k, v in totals.items()}


@dataclass
class _Seat:
    """The episode in a slot of the pool, and its current step."""

    episode: Episode
    context: Context | None = None  # None: the reset is not answered yet
    prompt_ids: list[int] | None = None
    response: Response | None = None
    text: str = ""  # the response, decoded
    command: Command | None = None


class _Player:
    """The state of one rollout: which episode is in which slot, and the requests to generate."""

    def __init__(self, cfg, policy, pool, episodes: list[Episode], seed_key, bar):
        self.cfg, self.policy, self.pool, self.seed_key = cfg, policy, pool, seed_key
        self.benchmark, self.bar = BENCHMARKS[cfg.env], bar
        self.metrics = {"seconds_generate": 0.0, "seconds_env": 0.0} | dict.fromkeys(COUNTS, 0)
        self.seats: dict[int, _Seat] = {}  # by slot
        self.queue: deque[Request] = deque()
        self.waiting = deque(episodes)  # episodes not started yet
        for slot in range(pool.n_envs):
            self._begin(slot)

    def _begin(self, slot: int) -> None:
        """Give a free slot the next episode, if there is one."""
        if self.waiting:
            self.seats[slot] = seat = _Seat(self.waiting.popleft())
            self.pool.reset(slot, seat.episode.task)

    def act(self, response: Response) -> None:
        """Send the command of a finished response to its environment."""
        seat = self.seats[response.slot]
        seat.response, seat.text = response, self.policy.decode(response.ids)
        seat.command = self.benchmark.parse(seat.text)
        self.metrics["tokens_generated"] += len(response.ids)
        self.pool.step(response.slot, seat.command.text)

    def take_answers(self, wait: bool) -> None:
        """Process all ready answers; with `wait`, block until the first arrives."""
        for answer in self.timed("seconds_env", _answers(self.pool, wait)):
            self._observe(answer.slot, answer.step)

    def timed(self, name: str, work: Iterable) -> Iterator:
        """The items of `work`; the time spent in producing them is added to metrics[name]."""
        work = iter(work)
        while True:
            start = time.perf_counter()
            item = next(work, None)
            self.metrics[name] += time.perf_counter() - start
            if item is None:
                return
            yield item

    def _observe(self, slot: int, step: Step) -> None:
        """An environment has answered: request the next response, or start the next episode."""
        seat, over = self.seats[slot], False
        if step.failed:
            seat.episode.failed, over = step.failed, True
        elif seat.context is None:
            seat.episode.task_type = step.task_type
            seat.context = Context(step.task, step.observation, step.admissible)
        else:
            over = self._add_row(seat, step)
        if over:
            del self.seats[slot]
            self.bar.update()
            self._begin(slot)
        else:
            seat.prompt_ids = self._prompt(seat.context)
            key = (*self.seed_key, seat.episode.trajectory, len(seat.episode.transitions))
            self.queue.append(Request(slot, seat.prompt_ids, request_seed(*key)))

    def _add_row(self, seat: _Seat, step: Step) -> bool:
        """Add the row of a step -> whether the episode is over."""
        episode, context, limit = seat.episode, seat.context, self.cfg.max_obs_tokens
        obs_ids = self.policy.encode(step.observation)
        self.metrics["obs_tokens_cut"] += max(0, len(obs_ids) - limit)
        episode.transitions.append(
            Transition(
                prompt_ids=seat.prompt_ids, response_ids=seat.response.ids, obs_ids=obs_ids[:limit],
                response_logps=seat.response.logps, reward=step.reward, valid=seat.command.valid,
                anchor=context.observation, group=episode.group, trajectory=episode.trajectory,
            )
        )  # fmt: skip
        episode.log.append((context.observation, seat.text, step.observation))
        context.history.append(Turn(context.observation, seat.command.text))
        context.responses.append(seat.text)
        context.observation, context.admissible = step.observation, step.admissible
        episode.score = step.score
        episode.won = step.done and step.won
        return step.done or len(episode.transitions) == self.cfg.max_turns

    def _prompt(self, context: Context) -> list[int]:
        cfg = self.cfg
        message = self.benchmark.prompts[cfg.prompt](context, cfg.history_length)
        ids = self.policy.encode_chat(message)
        if len(ids) > cfg.max_prompt_tokens:
            if cfg.prompt_overflow == "error":
                raise UserError(
                    f"a prompt of {len(ids)} tokens exceeds max_prompt_tokens="
                    f"{cfg.max_prompt_tokens}: raise --max-prompt-tokens, or cut the beginning of "
                    "prompts with --prompt-overflow cut"
                )
            self.metrics["prompts_cut"] += 1
            ids = ids[-cfg.max_prompt_tokens :]  # loses the beginning, which states the task
        return ids


def _answers(pool: Pool, wait: bool) -> Iterator[Answer]:
    """All ready answers; with `wait`, block until the first arrives."""
    answer = pool.recv(None if wait else 0)
    while answer is not None:
        yield answer
        answer = pool.recv(0)
