"""Which tasks to play: the groups of an update, and the fixed panel of evaluation tasks.

Besides, two questions to a world that may have changed: what does it say, and does the model know
its words?

Groups are drawn from (seed, epoch), without repeats. The panel is the same in every evaluation of
every run; verl-agent draws a new one each time, with repeats.
"""

from itertools import pairwise

from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Pool, Tasks
from paw_min.rows import Episode


def draw_groups(tasks: list[str], n_groups: int, seed: int, update: int) -> list[str]:
    """The tasks of an update, one per group, all different. update counts from 0, train.py from 1.

    Each epoch is a permutation drawn from (seed, epoch). If fewer than n_groups tasks are left at
    its end, they are skipped, so that no update has a task twice.
    """
    if not 1 <= n_groups <= len(tasks):
        raise ValueError(f"--groups {n_groups} (RWML: --tasks) with {len(tasks)} training tasks: "
                         f"choose from 1 to {len(tasks)}, or data with more tasks.")
    epoch, position = divmod(update, len(tasks) // n_groups)
    order = generator("groups", seed, epoch).sample(tasks, len(tasks))
    return order[position * n_groups : (position + 1) * n_groups]


def panel(tasks: list[str], n: int) -> list[str]:
    """n different evaluation tasks, in the order of the list.

    One is drawn from each of n equal parts of the list, so that in a list sorted by type, each type
    is represented in proportion.
    """
    if not 1 <= n <= len(tasks):
        raise ValueError(f"A panel of {n} from {len(tasks)} tasks; choose from 1 to {len(tasks)}.")
    rng = generator("panel", 0)
    cuts = [i * len(tasks) // n for i in range(n + 1)]
    return [tasks[rng.randrange(low, high)] for low, high in pairwise(cuts)]


def sayings(cfg: Config, pool: Pool, tasks: Tasks) -> list[str]:
    """What an environment says in eight tasks: first prompts, and answers to the first command.

    A run that resumes compares it with that of its start (runs.py): a folder may have the old name
    and other contents. Empty if an episode failed, or if the answers are random: played twice, they
    differ.
    """
    said = play_starts(cfg, pool, tasks)
    return said if said == play_starts(cfg, pool, tasks) else []


def play_starts(cfg: Config, pool: Pool, tasks: Tasks) -> list[str]:
    benchmark = BENCHMARKS[cfg.env]
    said = [f"R_max {benchmark.r_max}"]
    for listed in (tasks.train, tasks.held_out):
        for task in panel(listed, min(4, len(listed))):
            pool.reset(0, task)
            steps = [pool.recv().step]
            if steps[0].admissible:
                pool.step(0, steps[0].admissible[0])
                steps.append(pool.recv().step)
            if any(step.failed for step in steps):
                return []
            first = Context(steps[0].task, steps[0].observation, steps[0].admissible)
            said.append(benchmark.prompts[cfg.prompt](first, cfg.history_length))
            for step in steps:
                said += [step.task, step.observation, *step.admissible, f"reward {step.reward}"]
    return said


def unknown_words(cfg: Config, policy, episodes: list[Episode]) -> list[str]:
    """The words of the environment that become <unk>: the model may be one of another world.

    Left out: words of the responses so far, which the environment may repeat, and answers to
    malformed responses, which have words that the stand-in models were never shown.
    """
    render = BENCHMARKS[cfg.env].prompts[cfg.prompt]
    found = {}
    for episode in episodes:
        read = []  # texts of the environment, with the responses before each
        written = ""
        for t in episode.transitions:
            if not read:
                first = Context(episode.instruction, t.observation, t.admissible)
                read.append((render(first, cfg.history_length), written))
            written += f" {t.response.lower()}"
            if t.valid:
                read.append((t.next_observation, written))
        for text, before in read:
            for word in policy.unknown_words(text):
                # A word that has no letter may be the agent's punctuation.
                if any(c.isalnum() for c in word) and word.lower() not in before:
                    found[word] = None
    return list(found)
