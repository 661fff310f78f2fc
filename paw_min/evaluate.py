"""Evaluation on a fixed panel of held-out tasks, with the same sampling seeds every time, so that
two numbers of a run differ by the policy alone. PaW changes nothing at inference.
"""

from collections import defaultdict

from paw_min.config import Config
from paw_min.envs.protocol import Pool
from paw_min.metrics import describe_episodes, mean
from paw_min.rollout import Episode, Rollout, rollout


def evaluate(cfg: Config, policy, sampler, pool: Pool, tasks: list[str]) -> Rollout:
    """Play each task of the panel once, at the evaluation temperature."""
    with sampler.sync(policy):
        episodes = rollout(
            cfg, policy, sampler, pool, tasks, range(len(tasks)),
            temperature=cfg.eval_temperature, seed_key=(-1,), label="evaluate",
        ).episodes  # fmt: skip
    described = describe_episodes(episodes)
    shown = ("success", "return", "length", "valid", "score")
    metrics = {f"eval_{key}": described[key] for key in shown if key in described}
    by_type = defaultdict(list)
    for episode in episodes:
        if not episode.failed:
            by_type[episode.task_type].append(episode.won)
    metrics |= {f"eval_success/{t}": mean(won) for t, won in sorted(by_type.items())}
    return Rollout(episodes, metrics)


def transcript(episodes: list[Episode], limit: int = 4) -> str:
    """A few lost and won episodes as Markdown."""
    chosen = sorted((e for e in episodes if e.log), key=lambda e: e.won)
    chosen = chosen[: limit // 2] + chosen[limit // 2 :][-(limit - limit // 2) :]
    lines = []
    for e in chosen:
        lines += [f"## {e.task_type}: {'won' if e.won else 'not won'} in {len(e.log)} steps", ""]
        lines += [f"`{'/'.join(e.task.split('/')[-3:])}`", "", "```", e.log[0][0].strip(), ""]
        for _, response, observation in e.log:
            lines += [f"> {response.strip()}", observation.strip(), ""]
        lines += ["```", ""]
    return "\n".join(lines)
