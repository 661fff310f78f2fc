"""Playing in a pool of environments, and waiting. Worker processes import this: it has no torch."""

import time


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


def until(condition, seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
