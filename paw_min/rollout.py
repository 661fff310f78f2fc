"""Episodes of a group-based rollout, and the transition rows they leave (Alg. 1, lines 2-3).

All episodes of an update run side by side: each turn, one batch of prompts is generated and one
batch of actions goes to the environments. A finished episode leaves the batch at once: it is
neither prompted nor trained on again. Every step becomes one row (h_t, a_t, r_t, o_{t+1}), the
last step included, whose observation o_T no later prompt would show.
"""

import hashlib
import time
from dataclasses import dataclass, field

from tqdm import tqdm

from paw_min.config import UserError
from paw_min.prompts import Context, parse, render


@dataclass
class Transition:
    """One environment step, the unit of training."""

    prompt_ids: list[int]  # h_t
    response_ids: list[int]  # a_t, exactly as sampled
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
    """Play one episode per entry of `tasks` -> (episodes, stats).

    cfg: the prompt, length and turn settings of Config. tasks, groups: one entry per trajectory.
    pool: its slots play the episodes, len(pool) at a time. seed: tuple of ints that names this
    rollout. stats: seconds of generation and environment, generated and cut tokens.
    """
    stats = dict.fromkeys(("seconds_generate", "seconds_env"), 0.0)
    stats |= dict.fromkeys(("tokens_generated", "prompts_cut", "obs_tokens_cut"), 0)
    episodes = [Episode(str(t), g, i) for i, (t, g) in enumerate(zip(tasks, groups, strict=True))]
    with tqdm(total=len(episodes), desc=label, unit="episode", leave=False, disable=None) as bar:
        for i in range(0, len(episodes), pool.n_envs):
            part = episodes[i : i + pool.n_envs]
            _play(cfg, policy, sampler, pool, part, temperature, seed, stats, bar)
    return episodes, stats


def _play(cfg, policy, sampler, pool, episodes, temperature, seed, stats, bar) -> None:
    start = time.perf_counter()
    contexts = {}  # slot -> Context, of the episodes still running
    for slot, (observation, info) in enumerate(pool.reset([e.task for e in episodes])):
        episode = episodes[slot]
        if info.get("failed"):
            episode.failed = info["failed"]
            bar.update()
            continue
        episode.task_type = info["task_type"]
        contexts[slot] = Context(info["task"], observation, info["admissible"])
    stats["seconds_env"] += time.perf_counter() - start

    for turn in range(cfg.max_turns):
        if not contexts:
            break
        slots = list(contexts)
        start = time.perf_counter()
        prompts = [_prompt(cfg, policy, contexts[slot], stats) for slot in slots]
        seeds = [request_seed(*seed, episodes[slot].trajectory, turn) for slot in slots]
        responses = sampler.generate(prompts, seeds, temperature, cfg.max_response_tokens)
        stats["tokens_generated"] += sum(map(len, responses))
        texts = [policy.decode(ids) for ids in responses]
        parsed = [parse(cfg.env, text) for text in texts]
        middle = time.perf_counter()
        results = pool.step({slot: action for slot, (action, _) in zip(slots, parsed)})
        stats["seconds_generate"] += middle - start
        stats["seconds_env"] += time.perf_counter() - middle

        for slot, prompt, response, text, (action, valid) in zip(
            slots, prompts, responses, texts, parsed
        ):
            episode, context = episodes[slot], contexts[slot]
            observation, reward, done, info = results[slot]
            if info.get("failed"):
                episode.failed = info["failed"]
                del contexts[slot]
                bar.update()
                continue
            obs_ids = policy.encode(observation)
            stats["obs_tokens_cut"] += max(0, len(obs_ids) - cfg.max_obs_tokens)
            episode.transitions.append(
                Transition(
                    prompt_ids=prompt,
                    response_ids=response,
                    obs_ids=obs_ids[: cfg.max_obs_tokens],
                    reward=reward,
                    done=done,
                    valid=valid,
                    anchor=context.observation,
                    group=episode.group,
                    trajectory=episode.trajectory,
                    turn=turn,
                )
            )
            episode.log.append((context.observation, text, observation))
            context.history.append((context.observation, action))
            context.observation, context.admissible = observation, info["admissible"]
            episode.score = info.get("score")
            if done:
                episode.won = info["won"]
            if done or turn == cfg.max_turns - 1:
                del contexts[slot]
                bar.update()


def _prompt(cfg, policy, context: Context, stats: dict) -> list[int]:
    ids = policy.encode_chat(render(cfg.env, cfg.prompt, context, cfg.history_length))
    if len(ids) > cfg.max_prompt_tokens:
        if cfg.prompt_overflow == "error":
            raise PromptTooLong(
                f"a prompt of {len(ids)} tokens exceeds max_prompt_tokens={cfg.max_prompt_tokens}: "
                "raise the limit, or cut its beginning with --prompt-overflow cut"
            )
        stats["prompts_cut"] += 1
        ids = ids[-cfg.max_prompt_tokens :]  # the question stands at the end
    return ids
