"""What the studies share: a file of runs, measures of a run, and tables of arms over their seeds.

A file of runs has a line for each, a JSON object: its arm, its seed, and for each measure a list
with a value per update or evaluation. A comparison is paired: each seed has the same world, start
model and tasks for all arms.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

from tqdm import tqdm

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import reading
from paw_min.base.flags import Parser
from paw_min.running.runs import read_metrics
from research.stats import signed, t_interval

ROOT = Path(__file__).parents[1]
KEY = ("arm", "seed")  # names a run of a study

Runs = dict[tuple[str, int], dict]  # (arm, seed) -> the run's line
Measure = Callable[[dict], float]  # a run's line -> a number


# ---- runs ----


def play(module: str, flags: list[str], folder: Path) -> list[dict]:
    """Run a module in its run folder, or resume it -> the lines of its metrics.jsonl."""
    command = [sys.executable, "-m", module, *flags]
    command += ["--out", str(folder.parent), "--name", folder.name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"the run {folder} ended with exit code {done.returncode}, see above: "
                        "rerun the same command when its cause is gone.")
    return read_metrics(folder)


def read_lines(path: Path) -> list[dict]:
    """The runs in a file, none if it is missing; UserError for a line that is damaged.

    A kill can leave half a line at the end. It is cut off, so that a rerun makes this run again and
    does not append to it.
    """
    if not path.exists():
        return []
    with reading(path):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)
        return [json.loads(line) for line in whole.splitlines()]


def read_runs(path: Path, key: tuple[str, ...] = KEY) -> dict[tuple, dict]:
    """The runs in a file by the values of `key`, in the order of the file."""
    return {tuple(line[name] for name in key): line for line in read_lines(path)}


def train_missing(
    path: Path,
    jobs: Iterable[tuple],
    train: Callable[[tuple], dict],
    workers: int = 1,
    key: tuple[str, ...] = KEY,
) -> None:
    """Train the jobs that the file lacks, in their order, and append a line after each.

    jobs: values of `key`. train: a job -> its line. workers: processes that train at the same time.
    """
    trained = read_runs(path, key)
    missing = [job for job in jobs if job not in trained]
    with ExitStack() as stack:
        each = map  # one worker is this process
        if workers > 1:
            each = stack.enter_context(get_context("spawn").Pool(workers)).imap
        for line in tqdm(each(train, missing), total=len(missing), unit="run"):
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def command(
    doc: str,
    path: Path,
    jobs: list[tuple],
    train: Callable[[tuple], dict],
    table: Callable[[], None],
    key: tuple[str, ...] = KEY,
) -> None:
    """The command line of a study: `run` trains what its file lacks, `table` prints its tables."""
    arm = key.index("arm")
    arms = list(dict.fromkeys(job[arm] for job in jobs))
    with user_errors():
        parser = Parser(description=doc)
        parser.add_argument("command", choices=["run", "table"])
        parser.add_argument("--arms", nargs="+", choices=arms, default=arms, help="of `run`")
        parser.add_argument("--workers", type=int, default=2, help="processes of `run` (default 2)")
        args = parser.parse_args()
        if args.command == "run":
            chosen = [job for job in jobs if job[arm] in args.arms]
            train_missing(path, chosen, train, args.workers, key)
        else:
            table()


def columns(points: list[dict]) -> dict[str, list[float]]:
    """Evaluations -> a list for each of their measures, with five digits."""
    return {name: [float(f"{point[name]:.5g}") for point in points] for name in points[0]}


# ---- measures of a run, in percent ----


def area(run: dict) -> float:
    """Mean success over the evaluations after the start."""
    return 100 * mean(run["success"][1:])


def end(run: dict) -> float:
    """Success at the last evaluation."""
    return 100 * run["success"][-1]


def training_area(run: dict) -> float:
    """Mean success over the updates, of the episodes on which they train."""
    return 100 * mean(run["success"])


def training_end(run: dict) -> float:
    """The same over the last ten updates."""
    return 100 * mean(run["success"][-10:])


# ---- arms over their seeds ----


def complete(runs: Runs, seeds: Iterable[int]) -> Runs:
    """The runs of the arms that have all of these seeds."""
    arms = {arm for arm, _ in runs}
    whole = {arm for arm in arms if all((arm, seed) in runs for seed in seeds)}
    return {(arm, seed): run for (arm, seed), run in runs.items() if arm in whole}


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


def curves(runs: Runs, arms: Iterable[str], window: int = 1) -> dict[str, list[list[float]]]:
    """Success in percent, averaged over `window` updates each: arm -> a list for each of its seeds.

    An arm without runs is left out.
    """
    found = {}
    for arm in arms:
        for seed in seeds_of(runs, arm):
            success = runs[arm, seed]["success"]
            ends = range(window, len(success) + 1, window)
            averaged = [100 * mean(success[end - window : end]) for end in ends]
            found.setdefault(arm, []).append(averaged)
    return found


# ---- tables ----


def level(runs: Runs, arm: str, measure: Measure, digits: int = 1) -> str:
    """The mean of an arm over its seeds."""
    values = values_of(runs, arm, measure)
    return f"{mean(values):.{digits}f}" if values else "not run"


def difference(runs: Runs, a: str, b: str, measure: Measure, least: int = 2) -> str:
    """The mean of a - b over the seeds that both have, with its 95 % t interval.

    With fewer than `least` seeds, the number that a protocol asks for, the value of each.
    """
    if a == b:
        return ""
    values = gains(runs, a, b, measure)
    if len(values) >= least:
        return signed(mean(values), t_interval(values))
    return ", ".join(f"{value:+.1f}" for value in values) or "not run"


def above(runs: Runs, a: str, b: str, measure: Measure) -> str:
    """How many of these seeds have a above b."""
    values = gains(runs, a, b, measure)
    return f"{sum(value > 0 for value in values)} of {len(values)}" if values and a != b else ""


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
