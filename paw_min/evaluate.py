"""Evaluation on a fixed panel, and the numbers that describe a set of episodes.

The panel and the sampling seeds are the same at every evaluation, so that two numbers of one run
differ by the policy alone. PaW changes nothing here: the model is prompted and sampled as usual.
"""

from collections import defaultdict

from paw_min.rollout import Episode, rollout


def evaluate(cfg, policy, sampler, pool, tasks: list[str]) -> tuple[dict, list[Episode]]:
    """Play each task of the panel once at the evaluation temperature -> (metrics, episodes)."""
    with sampler.sync(policy):
        episodes, _ = rollout(
            cfg, policy, sampler, pool, tasks, range(len(tasks)),
            temperature=cfg.eval_temperature, seed=(-1,), label="evaluate",
        )  # fmt: skip
    played = [e for e in episodes if not e.failed]
    summary = summarize(episodes)
    shown = ("success", "return", "length", "valid", "score")
    metrics = {f"eval_{key}": summary[key] for key in shown if key in summary}
    by_type = defaultdict(list)
    for episode in played:
        by_type[episode.task_type].append(episode.won)
    metrics |= {f"eval_success/{t}": mean(won) for t, won in sorted(by_type.items())}
    return metrics, episodes


def summarize(episodes: list[Episode]) -> dict:
    """Success, return, length and format of episodes; those whose environment broke are left out.

    score: the benchmark's own, from 0 to 100, where it has one. no_variance: share of groups whose
    episodes all have the same return: their advantages come from format penalties alone.
    """
    played = [e for e in episodes if not e.failed]
    rows = [t for e in played for t in e.transitions]
    returns = defaultdict(set)
    for e in played:
        returns[e.group].add(e.episode_return)
    scored = [e.score for e in played if e.score is not None]
    summary = {"score": 100 * mean(scored)} if scored else {}
    return summary | {
        "success": mean([e.won for e in played]),
        "return": mean([e.episode_return for e in played]),
        "length": mean([len(e.transitions) for e in played]),
        "valid": mean([t.valid for t in rows]),
        "no_variance": mean([len(values) == 1 for values in returns.values()]),
        "failed": len(episodes) - len(played),
        "rows": len(rows),
    }


def mean(values: list) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def transcript(episodes: list[Episode], limit: int = 4) -> str:
    """A few episodes as Markdown: won and lost ones, what was seen, answered and seen next."""
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
