"""Evaluation on a fixed panel with fixed seeds: only the policy differs between evaluations."""

import json
from collections import defaultdict
from dataclasses import replace
from statistics import stdev

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.interface import Benchmark, Pool
from paw_min.metrics import describe_episodes, mean
from paw_min.model.policy import Policy
from paw_min.model.sampler import Sampler
from paw_min.rollout import Rollout, rollout
from paw_min.rows import Episode


def evaluate(
    cfg: Config, policy: Policy, sampler: Sampler, pool: Pool, tasks: list[str],
    trial_seed: int = 0, benchmark: Benchmark | None = None,
) -> Rollout:
    """Play each task of the panel `eval_repeats` times, at the evaluation temperature.

    trial_seed: another one draws other responses to the same tasks. benchmark: see rollout.
    """
    # -1 instead of the run's seed and update: all evaluations of all runs have the same seeds.
    key = (-1, trial_seed) if trial_seed else (-1,)
    colder = replace(cfg, temperature=cfg.eval_temperature)
    with sampler.sync(policy):
        played = rollout(
            colder, policy, sampler, pool, tasks, key, group_size=cfg.eval_repeats,
            benchmark=benchmark, label="evaluate",
        )
    episodes = played.episodes
    if all(e.failed for e in episodes):
        raise UserError(f"no episode of the evaluation could be played: {episodes[0].failed}")
    metrics = panel_metrics(episodes)
    metrics["eval_responses_cut"] = played.metrics["responses_cut"]
    return Rollout(episodes, metrics)


def panel_metrics(episodes: list[Episode]) -> dict[str, float]:
    """Success of the panel: pooled, by task type, and its standard error over the tasks.

    With k episodes per task also pass@k, the fraction of tasks that at least one of them wins.
    """
    played = [e for e in episodes if not e.failed]
    by_type = defaultdict(list)
    by_task = defaultdict(list)
    for e in played:
        by_type[e.task_type].append(e.won)
        by_task[e.task].append(e.won)
    types = {f"eval_success/{name}": mean(won) for name, won in sorted(by_type.items())}
    # Table 2 averages the data sets of search without weights; eval_success pools all episodes.
    metrics = {"eval_success_types": mean(list(types.values()))}
    described = describe_episodes(episodes)
    for key in ("success", "return", "length", "valid", "score", "failed"):
        if key in described:
            metrics[f"eval_{key}"] = described[key]
    # Repeats of a task are not independent: the error is that of the tasks' means.
    means = [mean(won) for won in by_task.values()]
    metrics["eval_success_se"] = stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    if len(episodes) > len({e.task for e in episodes}):
        metrics["eval_success_at_k"] = mean([any(won) for won in by_task.values()])
    return metrics | types


def outcomes(update: int, episodes: list[Episode]) -> str:
    """Outcome of each episode, as JSON: for tables with paired differences.

    failed: why the environment broke. Such an episode is neither won nor lost.
    """
    listed = [
        {
            "task": short(e.task),
            "task_type": e.task_type,
            "won": e.won,
            "score": e.score,
            "failed": e.failed,
        }
        for e in episodes
    ]
    return json.dumps({"update": update, "episodes": listed}, indent=0) + "\n"


def short(task: str) -> str:
    """A task's name: of a game file, without the folder of the data."""
    return "/".join(task.split("/")[-3:])


def asked(e: Episode) -> str:
    """What an episode was asked to do, on one line; its task where the environment does not say."""
    return " ".join(e.instruction.split()) or short(e.task)


def transcript(episodes: list[Episode]) -> str:
    """At most four episodes as Markdown: two lost ones and two won ones, if there are."""
    by_outcome = sorted((e for e in episodes if e.transitions), key=lambda e: e.won)
    lost_first = by_outcome[:2]
    won_last = by_outcome[2:][-2:]
    lines = []
    for e in lost_first + won_last:
        outcome = "won" if e.won else "not won"
        lines += [f"## {asked(e)}", ""]
        lines += [f"{e.task_type}: {outcome} in {len(e.transitions)} steps, `{short(e.task)}`", ""]
        lines += ["```", e.transitions[0].observation.strip(), ""]
        for step in e.transitions:
            lines += [f"> {step.response.strip()}", step.next_observation.strip(), ""]
        lines += ["```", ""]
    return "\n".join(lines)
