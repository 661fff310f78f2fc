"""Which tasks to play: the groups of an update, and the fixed panel of evaluation tasks.

Groups are drawn from (seed, epoch), without repeats. The panel is the same in every evaluation of
every run; verl-agent draws a new one each time, with repeats.
"""

from itertools import pairwise

from paw_min.base.seeds import generator


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
    """n different evaluation tasks, in the order of the list; all, if n is 0 or there are fewer.

    One is drawn from each of n equal parts of the list, so that in a list sorted by type, each type
    is represented in proportion.
    """
    n = min(n or len(tasks), len(tasks))
    rng = generator("panel", 0)
    cuts = [i * len(tasks) // n for i in range(n + 1)]
    return [tasks[rng.randrange(low, high)] for low, high in pairwise(cuts)]
