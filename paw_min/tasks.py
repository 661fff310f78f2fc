"""Which tasks to play: the groups of an update, and the fixed panel of the evaluations.

A task is what an environment's `reset` takes, e.g. a game file or the number of a goal. Groups are
drawn from (seed, update) and the panel from a seed, both without repeats: each evaluation sees the
same tasks, where the code base draws new ones, with repeats.
"""

import random
from itertools import pairwise


def draw_groups(tasks: list[str], n_groups: int, seed: int, update: int) -> list[str]:
    """The tasks of training update `update` (from 0), one per group, all different.

    Each pass over the tasks is a permutation of its own, made from (seed, pass); the up to
    n_groups - 1 tasks left at its end are skipped, so that no update has a task twice.
    """
    if not 1 <= n_groups <= len(tasks):
        raise ValueError(f"n_groups is {n_groups} with {len(tasks)} tasks; choose from 1 to "
                         f"{len(tasks)} or take more tasks.")
    number, position = divmod(update, len(tasks) // n_groups)
    order = random.Random(f"groups {seed} {number}").sample(tasks, len(tasks))
    return order[position * n_groups:(position + 1) * n_groups]


def panel(tasks: list[str], n: int, seed: int) -> list[str]:
    """n different tasks for evaluation, the same at each call, in the order of the list.

    One is drawn from each of n equal stretches of the list: where it is sorted by type, each type
    has its share, to within a task or two.
    """
    if not 1 <= n <= len(tasks):
        raise ValueError(f"A panel of {n} from {len(tasks)} tasks; choose from 1 to {len(tasks)}.")
    rng = random.Random(f"panel {seed}")
    cuts = [i * len(tasks) // n for i in range(n + 1)]
    return [tasks[rng.randrange(low, high)] for low, high in pairwise(cuts)]
