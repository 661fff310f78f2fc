"""How are many episodes played at once? Line 2 of Algorithm 1, and evaluation.

`rollout` takes tasks, a policy, its sampler and a pool of environments, and plays as many episodes
at a time as the pool has environments. It returns all of them, even those whose environment broke
(`episode.failed`): the caller leaves these out, since their return is unknown. It is called within
`sampler.sync(policy)`, so that the sampler has the current weights.

Each environment step becomes one transition (h_t, a_t, r_t, o_{t+1}). The last step of an episode
also gives one: its observation appears in no later prompt, but the world model learns from it. Each
rank plays whole groups; then every rank gets all episodes.

Environments differ in speed, so a rollout waits for none: an episode is queued for generation as
soon as its environment has answered, and joins the sampler's next unit of work (vLLM: a decoding
step; transformers: a batch). A slot of the pool starts its next episode as soon as the last one
ends. With environments that take 0.2 s, this makes 1.8 times as many steps per second as generating
for all and then stepping all; with fast environments, it makes no difference (research/closed.md).

Each request has a seed of its own, so its tokens do not depend on the requests beside it, up to
rounding. Where environments run in other processes, or behind a server, the batches depend on
timing, and so do the last bits of the log-probabilities.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paw_min.base import distributed
from paw_min.base.console import progress_bar
from paw_min.base.errors import UserError
from paw_min.base.seeds import request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Pool, Step, Turn
from paw_min.envs.prompting import as_listed
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response, Sampler
from paw_min.rows import Episode, Transition


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

    The episodes of a task are a group; each rank plays whole groups. pool: plays pool.n_envs
    episodes at a time. seed_key: names this rollout; together with trajectory and turn it seeds a
    request (seeds.py). benchmark: whose prompts and parser are used; default: BENCHMARKS[cfg.env].
    label: of the progress bar. paw_min/README.md explains the metrics.
    """
    began = time.perf_counter()
    mine = _episodes_of_this_rank(tasks, group_size)
    with progress_bar(len(mine), label, "episode") as bar:
        player = _Player(cfg, policy, pool, mine, seed_key, bar, benchmark or BENCHMARKS[cfg.env])
        while player.seats:
            # No prompt is waiting, so block until an environment has answered.
            player.take_answers(wait=True)
            player.generate(sampler)

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


COUNTS = ("tokens_generated", "prompts_cut", "responses_cut", "obs_tokens_cut")


def _over_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Counts are summed over the ranks, times and fractions averaged."""
    result = {}
    for key in metrics[0]:
        total = sum(one[key] for one in metrics)
        result[key] = total if key in COUNTS else total / len(metrics)
    return result


@dataclass
class _Seat:
    """The episode in a slot of the pool, and its current step."""

    episode: Episode
    context: Context | None = None  # None: the reset is not answered yet
    prompt_ids: list[int] | None = None
    response: Response | None = None
    text: str = ""  # the response, decoded
    command: Command | None = None

    def transition(self, step: Step, separator_ids: list[int], obs_ids: list[int]) -> Transition:
        """(h_t, a_t, r_t, o_{t+1}) of the current step, which `step` has answered."""
        return Transition(
            prompt_ids=self.prompt_ids,
            response_ids=self.response.ids,  # sampled ids: decoding may change them
            separator_ids=separator_ids,
            obs_ids=obs_ids,
            response_logps=self.response.logps,
            reward=step.reward,
            valid=self.command.valid,
            observation=self.context.observation,
            group=self.episode.group,
            trajectory=self.episode.trajectory,
            admissible=self.context.admissible,
            response=self.text,
            command=self.command.text,
            next_observation=step.observation,
        )

    def advance(self, step: Step) -> None:
        """Add the current step to the history, and make o_{t+1} the current observation."""
        context = self.context
        context.history.append(Turn(context.observation, self.command.text))
        context.responses.append(self.text)
        context.observation = step.observation
        context.admissible = step.admissible


class _Player:
    """The state of one rollout: which episode is in which slot, and the requests to generate.

    The life of a seat, and the data that go in and come out:

        begin         task       -> pool.reset
        on_answer     Step o_0   -> Context                                        -> request
        request       Context    -> prompt h_t -> Request                          -> sampler
        on_response   Response   -> Command a_t                                    -> pool.step
        on_answer     Step o_t+1 -> Transition (h_t, a_t, r_t, o_t+1), new Context -> request, or
        end                         the episode is over: begin with the next one
    """

    def __init__(
        self, cfg, policy, pool, episodes: list[Episode], seed_key, bar, benchmark: Benchmark
    ):
        self.cfg = cfg
        self.policy = policy
        self.pool = pool
        self.seed_key = seed_key
        self.bar = bar
        self.benchmark = benchmark
        self.render = benchmark.prompts[cfg.prompt]
        self.metrics = {"seconds_generate": 0.0, "seconds_env": 0.0} | dict.fromkeys(COUNTS, 0)
        self.seats: dict[int, _Seat] = {}  # slot -> its episode
        self.queue: deque[Request] = deque()  # what the sampler generates next
        self.waiting = deque(episodes)  # episodes not started yet
        # Fill the pool. From here on, a slot gets its next episode when its own has ended, so that
        # a short episode does not wait for a long one.
        for slot in range(pool.n_envs):
            self.begin(slot)

    def begin(self, slot: int) -> None:
        """Give a free slot the next episode, if there is one."""
        if self.waiting:
            seat = _Seat(self.waiting.popleft())
            self.seats[slot] = seat
            self.pool.reset(slot, seat.episode.task)

    def take_answers(self, wait: bool) -> None:
        """Process all answers that are ready; with `wait`, block until the first arrives."""
        timeout = None if wait else 0
        while True:
            began = time.perf_counter()
            answer = self.pool.recv(timeout)
            self.metrics["seconds_env"] += time.perf_counter() - began
            if answer is None:
                return
            self.on_answer(answer.slot, answer.step)
            # Others may be ready as well: take them all, so that they generate in one batch.
            timeout = 0

    def generate(self, sampler: Sampler) -> None:
        """Answer all requests, those that come in meanwhile, too."""
        # A generator. Each `next` runs one unit of work: one batch (transformers), or one decoding
        # step of all running sequences (vLLM). Requests that are queued in between join the next
        # unit. It ends when the queue is empty.
        cfg = self.cfg
        generated = sampler.generate(self.queue, cfg.temperature, cfg.max_response_tokens)
        while True:
            began = time.perf_counter()
            finished = next(generated, None)
            self.metrics["seconds_generate"] += time.perf_counter() - began
            if finished is None:
                return
            for response in finished:
                self.on_response(response)
            # Environments that have answered meanwhile join the next unit of work.
            self.take_answers(wait=False)

    def on_response(self, response: Response) -> None:
        """Send the command of a finished response to its environment."""
        seat = self.seats[response.slot]
        seat.response = response
        seat.text = self.policy.decode(response.ids)
        # A malformed response is executed as far as it can be read, and its `valid` = False brings
        # the penalty. Where the template has opened <think> in the prompt, the parser gets it, too.
        opened = self.policy.opened_thought if "</think>" in seat.text else ""
        text, valid = self.benchmark.parse(opened + seat.text)
        seat.command = Command(as_listed(text, seat.context.admissible), valid)
        self.metrics["tokens_generated"] += len(response.ids)
        self.pool.step(response.slot, seat.command.text)

    def on_answer(self, slot: int, step: Step) -> None:
        """An environment has answered: request the next response, or end the episode."""
        seat = self.seats[slot]
        if step.failed:
            # The environment broke. Its transitions so far stay in the episode, but train.py leaves
            # the whole episode out: its return is unknown.
            seat.episode.failed = step.failed
            self.end(slot)
        elif seat.context is None:  # the reset's answer, o_0
            seat.episode.instruction = step.task
            seat.episode.task_type = step.task_type
            seat.context = Context(step.task, step.observation, step.admissible)
            self.request(slot)
        else:
            self.record(seat, step)
            seat.advance(step)
            if step.done or len(seat.episode.transitions) == self.cfg.max_turns:
                self.end(slot)
            else:
                self.request(slot)

    def end(self, slot: int) -> None:
        """The episode in this slot is over; the slot gets the next one."""
        del self.seats[slot]
        self.bar.update()
        self.begin(slot)

    def request(self, slot: int) -> None:
        """Queue the request for the next response of a slot."""
        seat = self.seats[slot]
        # h_t is one user message, rendered anew in every step. Only the last history_length steps
        # are shown, so a prompt does not grow with the episode.
        ids = self.policy.encode_chat(self.render(seat.context, self.cfg.history_length))
        limit = self.cfg.max_prompt_tokens
        if len(ids) > limit:
            if not self.benchmark.cut_prompts:
                raise UserError(
                    f"a prompt of {len(ids)} tokens exceeds max_prompt_tokens={limit}: raise "
                    "--max-prompt-tokens."
                )
            self.metrics["prompts_cut"] += 1
            ids = ids[-limit:]  # loses the beginning, which states the task
        seat.prompt_ids = ids
        # A seed of its own for each response: what is drawn does not depend on which requests
        # happen to share a batch.
        turn = len(seat.episode.transitions)
        seed = request_seed(*self.seed_key, seat.episode.trajectory, turn)
        self.queue.append(Request(slot, seat.prompt_ids, seed))

    def record(self, seat: _Seat, step: Step) -> None:
        """Add (h_t, a_t, r_t, o_{t+1}) to the episode."""
        # o_{t+1} is tokenized alone, not with the prompt that will show it: the target of the
        # world model does not depend on the next prompt.
        obs_ids = self.policy.encode(step.observation)
        separator_ids = []
        if self.cfg.wm_separator == "turn":
            separator_ids = self.policy.separator(seat.response.ids)
        # The observation is cut here, because rotary models give no error beyond their positions.
        used = len(seat.prompt_ids) + len(seat.response.ids) + len(separator_ids)
        limit = min(self.cfg.max_obs_tokens, max(0, self.policy.positions - used))
        self.metrics["obs_tokens_cut"] += max(0, len(obs_ids) - limit)
        self.metrics["responses_cut"] += seat.response.cut
        seat.episode.transitions.append(seat.transition(step, separator_ids, obs_ids[:limit]))
        seat.episode.score = step.score
        seat.episode.won = step.done and step.won
