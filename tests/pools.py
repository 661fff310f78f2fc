"""Playing in a pool of environments. Worker processes import this module, so it has no torch."""


def reset(pool, tasks):
    """Reset slot i to tasks[i]; returns their Steps in the order of the slots."""
    for slot, task in enumerate(tasks):
        pool.reset(slot, task)
    answers = dict(pool.recv() for _ in tasks)
    return [answers[slot] for slot in range(len(tasks))]


def step(pool, commands):
    """{slot: command} -> {slot: Step}"""
    for slot, command in commands.items():
        pool.step(slot, command)
    return dict(pool.recv() for _ in commands)
