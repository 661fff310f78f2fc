"""What the tables share: a file of runs, measures of a run, and arms over their seeds.

A file of runs has a line for each, a JSON object: its arm, its seed, its world if the file has
several, and for each measure a list with a value per update or evaluation. A comparison is paired:
each seed has the same world, start model and tasks for all arms.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from paw_min.base.files import reading
from research.stats import signed, t_interval

LEAST = 4  # seeds; with fewer, a difference has no interval

Runs = dict[tuple[str, int], dict]  # (arm, seed) -> the run's line
Measure = Callable[[dict], float]  # a run's line -> a number


# ---- runs ----


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSONL file, none if it is missing; UserError for a line that is damaged.

    A kill can leave half a line at the end. It is cut off, so that nothing is appended to it.
    """
    if not path.exists():
        return []
    with reading(path):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)
        return [json.loads(line) for line in whole.splitlines()]


def read_runs(*paths: Path) -> dict[str, Runs]:
    """The runs of these files by their world.

    A line without a world has that behind its arm, as in "paw, outcome", or none, "".
    """
    found = {}
    for path in paths:
        for run in read_lines(path):
            arm, world = run["arm"], run.get("world")
            if world is None:
                arm, _, world = arm.partition(", ")
            found.setdefault(world, {})[arm, run["seed"]] = run
    return found


# ---- measures of a run, in percent ----


def area(run: dict) -> float:
    """Mean success over the evaluations after the start, or over the updates.

    A run with `held_out` has success in the episodes of each update, which it trains on.
    """
    return 100 * mean(run["success"] if "held_out" in run else run["success"][1:])


def end(run: dict) -> float:
    """Success at the last evaluation, or over the last ten updates."""
    return 100 * mean(run["success"][-10:] if "held_out" in run else run["success"][-1:])


def main_measure(run: dict) -> float:
    """The mean of the curve; in the world where the start model wins already, the end."""
    return end(run) if run.get("world") == "polish" else area(run)


# ---- arms over their seeds ----


def seeds_of(runs: Runs, *arms: str) -> list[int]:
    """The seeds that have all of `arms`."""
    seeds = sorted({seed for _, seed in runs})
    return [seed for seed in seeds if all((arm, seed) in runs for arm in arms)]


def values_of(runs: Runs, arm: str, measure: Measure) -> list[float]:
    """One value per seed."""
    return [measure(runs[arm, seed]) for seed in seeds_of(runs, arm)]


def gains(runs: Runs, a: str, b: str, measure: Measure) -> list[float]:
    """a - b, one value per seed that both arms have."""
    return [measure(runs[a, seed]) - measure(runs[b, seed]) for seed in seeds_of(runs, a, b)]


# ---- tables ----


def level(runs: Runs, arm: str, measure: Measure, digits: int = 1) -> str:
    """The mean of an arm over its seeds."""
    values = values_of(runs, arm, measure)
    return f"{mean(values):.{digits}f}" if values else "-"


def difference(runs: Runs, a: str, b: str, measure: Measure) -> str:
    """The mean of a - b over the seeds that both have, with its 95 % t interval.

    With fewer than LEAST seeds, the value of each.
    """
    if a == b:
        return ""
    values = gains(runs, a, b, measure)
    if len(values) >= LEAST:
        return signed(mean(values), t_interval(values))
    return ", ".join(f"{value:+.1f}" for value in values) or "-"


def above(runs: Runs, a: str, b: str, measure: Measure) -> str:
    """How many of these seeds have a above b."""
    values = gains(runs, a, b, measure)
    return f"{sum(value > 0 for value in values)} of {len(values)}"


def markdown_table(header: list[str], lines: list[list]) -> str:
    """Floats with three digits, a dash for None."""
    rows = []
    for line in [header, *lines]:
        rows.append(f"| {' | '.join(shown(entry) for entry in line)} |")
    rows.insert(1, "|---" * len(header) + "|")
    return "\n".join(rows)


def shown(entry: str | int | float | None) -> str:
    if entry is None:
        return "-"
    if isinstance(entry, float):
        return f"{entry:.3f}"
    return str(entry)
