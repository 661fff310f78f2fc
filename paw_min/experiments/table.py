"""Tables 1-5 from finished runs: mean ± standard deviation over seeds, and paired differences.

    python -m paw_min.experiments.table runs/table1-alfworld.json ... | RUN ... [--out FILE.md]

Every number is of a run's last evaluation, in percent. A task counts once, however often it was
played. The difference of an arm to the first arm is taken seed by seed and task by task. Its
interval is a bootstrap: draw seeds, then tasks, both with replacement. All seeds share the panel,
so the tasks of a draw are the same for all seeds. Runs without evaluation.json have no outcomes
per task: their numbers come from metrics.jsonl, and only seeds are drawn. With three seeds, that
interval is the range from the worst to the best seed, which holds the true mean in 75 % of the
cases if the distribution is symmetric.
"""

import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paw_min.running.errors import Parser, UserError, user_errors
from paw_min.running.runs import read_metrics, reading, writing

DRAWS = 2000
TYPES = {  # task type -> the paper's column, in the paper's order
    "pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean", "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2",
    "nq": "NQ", "triviaqa": "TriviaQA", "popqa": "PopQA", "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki", "musique": "MuSiQue", "bamboogle": "Bamboogle",
}  # fmt: skip

Column = dict[str, dict[str, float]]  # part -> task -> percent; the parts have equal weights


@dataclass
class Entry:
    """A run of a sweep, as in its JSON file."""

    label: str
    seed: int
    folder: str  # relative to the file


@dataclass
class Result(Entry):
    """The last evaluation of a run."""

    config: dict
    metrics: dict  # the line of metrics.jsonl
    episodes: list[dict] | None  # of evaluation.json

    def columns(self, per_task: bool) -> dict[str, Column]:
        env = self.config["env"]
        return of_episodes(env, self.episodes) if per_task else of_metrics(env, self.metrics)


@dataclass
class Cell:
    """One arm in one column, over its seeds."""

    seeds: int
    mean: float
    std: float | None = None  # of one seed: None
    difference: float | None = None  # to the first arm, over the seeds of both
    low: float | None = None
    high: float | None = None

    def value(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.std:.1f}" if self.std is not None else "")

    def change(self) -> str:
        span = f" [{self.low:+.1f}, {self.high:+.1f}]" if self.low is not None else ""
        return f"{self.difference:+.1f}{span}" if self.difference is not None else "–"


def value(column: Column) -> float:
    return float(np.mean([np.mean(list(tasks.values())) for tasks in column.values()]))


def paired(ours: list[Column], base: list[Column]) -> list[np.ndarray]:
    """Differences by seed and task -> (seeds, tasks) for each part; only what all runs have."""
    runs = ours + base
    parts = [part for part in base[0] if all(part in run for run in runs)]
    shared = {p: [t for t in base[0][p] if all(t in run[p] for run in runs)] for p in parts}
    return [
        np.array([[a[part][t] - b[part][t] for t in tasks] for a, b in zip(ours, base)])
        for part, tasks in shared.items()
        if tasks
    ]


def interval(parts: list[np.ndarray], draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of the parts' means, parts: (seeds, tasks) each."""
    rng, n_seeds, means = np.random.default_rng(seed), len(parts[0]), []
    for _ in range(draws):
        seeds = rng.integers(n_seeds, size=n_seeds)
        by_task = [part[seeds].mean(0) for part in parts]  # (tasks,) each
        drawn = [d[rng.integers(len(d), size=len(d))].mean() for d in by_task]
        means.append(np.mean(drawn))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def compare(ours: dict[int, Column], base: dict[int, Column], per_task: bool) -> Cell:
    """One cell from the columns by seed; base: those of the first arm, {} for that arm itself."""
    values = [value(column) for column in ours.values()]
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    cell, seeds = Cell(len(values), float(np.mean(values)), std), sorted(ours.keys() & base.keys())
    if parts := paired([ours[s] for s in seeds], [base[s] for s in seeds]) if seeds else []:
        cell.difference = float(np.mean([part.mean() for part in parts]))
        if per_task or len(seeds) > 1:
            cell.low, cell.high = interval(parts)
    return cell


def columns(env: str, by_type: Column, pooled: dict, score: dict) -> dict[str, Column]:
    """The paper's columns of a benchmark; the last one is the overall success."""
    if env == "webshop":
        return {"Score": {"": score}, "Success": {"": pooled}}
    order = [t for t in TYPES if t in by_type] + sorted(by_type.keys() - TYPES.keys())
    types = {TYPES.get(t, t): {"": by_type[t]} for t in order}
    return types | ({"Avg.": by_type} if env == "search" else {"All": {"": pooled}})


def of_episodes(env: str, episodes: list[dict]) -> dict[str, Column]:
    """Columns from the outcomes in evaluation.json."""
    won, score, types = defaultdict(list), defaultdict(list), defaultdict(set)
    for e in episodes:
        won[e["task"]].append(100 * e["won"])
        score[e["task"]].append(100 * (e["score"] or 0))
        types[e["task_type"]].add(e["task"])
    pooled, score = ({t: float(np.mean(x)) for t, x in d.items()} for d in (won, score))
    by_type = {kind: {t: pooled[t] for t in pooled if t in types[kind]} for kind in types}
    return columns(env, by_type, pooled, score)


def of_metrics(env: str, line: dict) -> dict[str, Column]:
    """Columns from a line of metrics.jsonl; the whole panel stands for one task."""
    types = {k.partition("/")[2]: v for k, v in line.items() if k.startswith("eval_success/")}
    by_type = {kind: {"": 100 * v} for kind, v in types.items()}
    pooled = {"": 100 * line["eval_success"]}
    return columns(env, by_type, pooled, {"": line.get("eval_score", 0.0)})


def read_json(path: Path):
    with reading(path):
        return json.loads(path.read_text())


def find(paths: list[Path]) -> list[Entry]:
    """The runs of sweep files, or run folders as they are: the arm is the name without its seed."""
    entries = []
    for path in paths:
        if path.is_dir():
            label = re.sub(r"-seed\d+$", "", path.resolve().name)
            entries.append(Entry(label, read_json(path / "config.json")["seed"], str(path)))
        else:
            found = [Entry(**entry) for entry in read_json(path)]
            entries += [Entry(e.label, e.seed, str(path.parent / e.folder)) for e in found]
    return entries


def load(paths: list[Path]) -> tuple[list[Result], list[str]]:
    """The last evaluations of the runs, and notes on those that are not finished."""
    results, notes = {}, []
    for e in find(paths):
        lines, folder = read_metrics(e.folder), Path(e.folder)
        evaluated = [m for m in lines if "eval_success" in m]
        if not evaluated:
            notes.append(f"No evaluation yet: {folder}.")
            continue
        config, file = read_json(folder / "config.json"), folder / "evaluation.json"
        if lines[-1]["update"] < config["updates"]:
            progress = f"{lines[-1]['update']} of {config['updates']} updates"
            notes.append(f"Not finished: {folder}, {progress}.")
        episodes = read_json(file)["episodes"] if file.exists() else None
        result = Result(e.label, e.seed, e.folder, config, evaluated[-1], episodes)
        same = results.setdefault((config["env"], e.label, e.seed), result)
        if same.folder != e.folder:
            raise UserError(f"{e.label}, seed {e.seed}, is both {same.folder} and {folder}: leave "
                            "one of them out.")  # fmt: skip
    if not results:
        raise UserError(f"no evaluation in {', '.join(map(str, paths))}: run the sweep first.")
    return list(results.values()), notes


def compute(results: list[Result]) -> tuple[dict[str, dict[str, Cell]], bool]:
    """label -> column -> cell, for the runs of one benchmark; do all have outcomes per task?"""
    per_task, by_arm = all(r.episodes is not None for r in results), defaultdict(dict)
    for r in results:
        by_arm[r.label][r.seed] = r.columns(per_task)
    first, found = results[0].label, [c for arm in by_arm.values() for c in arm.values()]
    names = [name for name in found[0] if all(name in columns for columns in found)]
    table = {}
    for label, runs in by_arm.items():
        base = {} if label == first else by_arm[first]
        table[label] = {
            name: compare(*({s: c[name] for s, c in arm.items()} for arm in (runs, base)), per_task)
            for name in names
        }
    return table, per_task


def markdown_table(header: list[str], lines: list[list]) -> str:
    """Floats with three digits, a dash for None."""

    def cell(value) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    first, *rows = [f"| {' | '.join(map(cell, line))} |" for line in [header, *lines]]
    return "\n".join([first, "|---" * len(header) + "|", *rows])


def markdown(table: dict[str, dict[str, Cell]], per_task: bool) -> str:
    """Two tables, means and differences, with the notes that they need."""
    first, *others = table
    names, counts = list(table[first]), {c.seeds for row in table.values() for c in row.values()}

    def block(corner: str, labels: list[str], show) -> list[str]:
        rows = [[label, *map(show, table[label].values())] for label in labels]
        return [markdown_table([corner, *names], rows), ""]

    over = f"over {' or '.join(map(str, sorted(counts)))} seeds" if counts != {1} else "of one seed"
    spread = "" if counts == {1} else " ± standard deviation"
    lines = block("method", list(table), Cell.value)
    lines += [f"Mean{spread} {over}; last evaluation, in percent.", ""]
    if others:
        drawn = ["seeds"] * (counts != {1}) + ["tasks"] * per_task
        text = f"95 % bootstrap interval, {DRAWS} draws of {' and '.join(drawn)}"
        text = text if drawn else "no interval"
        if not per_task:
            text += " (a run has no evaluation.json, so tasks are not drawn)"
        lines += block(f"difference to {first}", others, Cell.change)
        lines += [f"Points, same seeds and tasks; {text}.", ""]
    return "\n".join(lines)


def main(paths: list[Path], out: Path | None) -> None:
    results, notes = load(paths)
    text, tables = "", {}
    for env in dict.fromkeys(r.config["env"] for r in results):
        table, per_task = compute([r for r in results if r.config["env"] == env])
        text += f"### {env}\n\n{markdown(table, per_task)}\n"
        tables[env] = {a: {n: asdict(c) for n, c in row.items()} for a, row in table.items()}
    text = (text + "\n".join(notes)).rstrip()
    print(text)
    if out:
        plain = json.dumps(tables, indent=1, ensure_ascii=False)
        with writing(str(out)):
            out.write_text((plain if out.suffix == ".json" else text) + "\n")


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="sweep files or run folders")
    parser.add_argument("--out", type=Path, help="also write it there, as .md or .json")
    args = parser.parse_args()
    with user_errors():
        main(args.paths, args.out)
