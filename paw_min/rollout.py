"""Episodes of a group-based rollout, and the transition rows they leave (Alg. 1, lines 2-3).

No lock-step: an episode whose environment has answered is queued for generation at once, whatever
the others are doing, and an episode that is over leaves its slot to the next task. Every step
becomes one row (h_t, a_t, r_t, o_{t+1}), the last step included, whose observation o_T no later
prompt would show.

Each request has its own seed, so the random draws never depend on the company. Where environments
answer from other processes or a search server, timing decides which requests share a batch, and
that changes the last bits of the logits; with workers=0 a rollout replays exactly.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from paw_min import dist
from paw_min.config import UserError
from paw_min.prompts import Context, parse, render
from paw_min.sampler import Request, Response


@dataclass
class Transition:
    """One environment step, the unit of training."""

    prompt_ids: list[int]  # h_t
    response_ids: list[int]  # a_t, exactly as sampled
    response_logps: list[float]  # the sampler's log-probability of each, at its temperature
    obs_ids: list[int]  # o_{t+1}, the environment's own text; may be empty
    reward: float  # r_t of the environment, no penalty
    done: bool
    valid: bool  # was the response well formatted?
    anchor: str  # o_t, the state in GiGPO's sense
    group: int
    trajectory: int
    turn: int


@dataclass
class Episode:
    """One trajectory: its rows, what it was about and how it went."""

    task: str  # the environment's name of the task, e.g. a game file
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
        """R(tau): undiscounted sum of environment rewards."""
        return sum(t.reward for t in self.transitions)


class PromptTooLong(UserError):
    """A prompt over the limit, where the configuration says to stop."""


def request_seed(*key: int) -> int:
    """A 63-bit seed from (run seed, update, trajectory, turn), the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rollout(cfg, policy, sampler, pool, tasks, groups, *, temperature, seed, label="rollout"):
    """Play one episode per entry of `tasks` -> (episodes, stats); within `sampler.sync(policy)`.

    cfg: the prompt, length and turn settings of Config. tasks, groups: one entry per trajectory,
    group by group. pool: its slots play the episodes, pool.n_envs at a time. seed: tuple of ints
    that names this rollout; it and the number of the trajectory make the draws.
    Of several ranks each plays whole groups; all get the episodes of all, and the stats:
        seconds_generate  in the sampler, mean over the ranks
        seconds_env       waiting for environments, or serving them where the pool has no workers
        generator_idle    share of the rollout's time in which the sampler did not work
        env_wait          share of it that is seconds_env
        tokens_generated, prompts_cut, obs_tokens_cut
    """
    start = time.perf_counter()
    entries = enumerate(zip(tasks, groups, strict=True))
    episodes = [Episode(str(task), group, n) for n, (task, group) in entries]
    names = list(dict.fromkeys(groups))
    share = slice(*(r * len(names) // dist.world() for r in (dist.rank(), dist.rank() + 1)))
    mine = [e for e in episodes if e.group in names[share]]
    quiet = True if dist.rank() > 0 else None  # None: no bar where nobody looks
    with tqdm(total=len(mine), desc=label, unit="episode", leave=False, disable=quiet) as bar:
        table = _Table(cfg, policy, pool, mine, seed, bar)
        while table.plays:
            table.take_answers(wait=True)
            work = sampler.generate(table.queue, temperature, cfg.max_response_tokens)
            for finished in table.timed("seconds_generate", work):
                for response in finished:
                    table.act(response)
                table.take_answers(wait=False)
    seconds = time.perf_counter() - start
    table.stats["generator_idle"] = 1.0 - table.stats["seconds_generate"] / seconds
    table.stats["env_wait"] = table.stats["seconds_env"] / seconds
    return dist.gather(mine), _over_ranks(dist.gather([table.stats]))


def _over_ranks(stats: list[dict]) -> dict:
    """Counts are added up; of times and shares the mean is taken."""
    totals = {key: sum(one[key] for one in stats) for key in stats[0]}
    counts = ("tokens_generated", "prompts_cut", "obs_tokens_cut")
    return {k: v if k in counts else v / len(stats) for k, v in totals.items()}


@dataclass
class _Play:
    """An episode in a slot: what its agent knows, and the step under way."""

    episode: Episode
    context: Context | None = None  # None: its reset is not answered yet
    prompt_ids: list[int] | None = None
    response: Response | None = None
    text: str = ""  # the response, decoded
    action: str = ""
    valid: bool = False


class _Table:
    """The state of one rollout: who plays where, and the requests that wait for generation."""

    def __init__(self, cfg, policy, pool, episodes, seed, bar):
        self.cfg, self.policy, self.pool, self.seed, self.bar = cfg, policy, pool, seed, bar
        self.stats = dict.fromkeys(("seconds_generate", "seconds_env"), 0.0)
        self.stats |= dict.fromkeys(("tokens_generated", "prompts_cut", "obs_tokens_cut"), 0)
        self.plays: dict[int, _Play] = {}  # by slot
        self.queue: deque[Request] = deque()
        self.waiting = deque(episodes)  # for a slot
        for slot in range(pool.n_envs):
            self._begin(slot)

    def _begin(self, slot: int) -> None:
        """Give a free slot the next episode, if there is one."""
        if self.waiting:
            self.plays[slot] = play = _Play(self.waiting.popleft())
            self.pool.send(slot, "reset", play.episode.task)

    def act(self, response: Response) -> None:
        """A response has been generated: its action goes to the environment."""
        play = self.plays[response.key]
        self.stats["tokens_generated"] += len(response.ids)
        play.response, play.text = response, self.policy.decode(response.ids)
        play.action, play.valid = parse(self.cfg.env, play.text)
        self.pool.send(response.key, "step", play.action)

    def take_answers(self, wait: bool) -> None:
        """All that environments have answered by now; with `wait`, at least one answer."""
        for slot, answer in self.timed("seconds_env", _answers(self.pool, wait)):
            self._observe(slot, answer)

    def timed(self, key: str, work: Iterator) -> Iterator:
        """Pass on what `work` yields; stats[key] grows by the time spent in it."""
        while True:
            start = time.perf_counter()
            item = next(work, None)
            self.stats[key] += time.perf_counter() - start
            if item is None:
                return
            yield item

    def _observe(self, slot: int, answer: tuple) -> None:
        """An environment has answered: the next prompt, or the next episode."""
        play, over = self.plays[slot], False
        if failed := answer[-1].get("failed"):
            play.episode.failed, over = failed, True
        elif play.context is None:
            self._start(play, *answer)
        else:
            over = self._add_row(play, *answer)
        if over:
            del self.plays[slot]
            self.bar.update()
            self._begin(slot)
        else:
            play.prompt_ids = self._prompt(play.context)
            key = (*self.seed, play.episode.trajectory, len(play.episode.transitions))
            self.queue.append(Request(slot, play.prompt_ids, request_seed(*key)))

    def _start(self, play: _Play, observation: str, info: dict) -> None:
        play.episode.task_type = info["task_type"]
        play.context = Context(info["task"], observation, info["admissible"])

    def _add_row(self, play: _Play, observation: str, reward: float, done: bool, info) -> bool:
        """Add the row of the step under way; is the episode over?"""
        episode, context, limit = play.episode, play.context, self.cfg.max_obs_tokens
        obs_ids = self.policy.encode(observation)
        self.stats["obs_tokens_cut"] += max(0, len(obs_ids) - limit)
        episode.transitions.append(
            Transition(
                prompt_ids=play.prompt_ids,
                response_ids=play.response.ids,
                response_logps=play.response.logps,
                obs_ids=obs_ids[:limit],
                reward=reward,
                done=done,
                valid=play.valid,
                anchor=context.observation,
                group=episode.group,
                trajectory=episode.trajectory,
                turn=len(episode.transitions),
            )
        )
        episode.log.append((context.observation, play.text, observation))
        context.history.append((context.observation, play.action))
        context.observation, context.admissible = observation, info["admissible"]
        episode.score = info.get("score")
        episode.won = done and info["won"]
        return done or len(episode.transitions) == self.cfg.max_turns

    def _prompt(self, context: Context) -> list[int]:
        cfg = self.cfg
        message = render(cfg.env, cfg.prompt, context, cfg.history_length)
        ids = self.policy.encode_chat(message)
        if len(ids) > cfg.max_prompt_tokens:
            if cfg.prompt_overflow == "error":
                raise PromptTooLong(
                    f"a prompt of {len(ids)} tokens exceeds max_prompt_tokens="
                    f"{cfg.max_prompt_tokens}: raise the limit, or cut its beginning with "
                    "--prompt-overflow cut"
                )
            self.stats["prompts_cut"] += 1
            ids = ids[-cfg.max_prompt_tokens :]  # the question stands at the end
        return ids


def _answers(pool, wait: bool) -> Iterator[tuple]:
    """(slot, answer) as long as there are any; with `wait`, the first is waited for."""
    answer = pool.recv(None if wait else 0)
    while answer is not None:
        yield answer
        answer = pool.recv(0)
