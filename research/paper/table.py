"""Tables 1-5 from finished runs: mean ± standard deviation over seeds, and paired differences.

    python -m research.paper.table runs/table1-alfworld.json ... | RUN ... [--out FILE.md]

Every number is of a run's last evaluation, in percent. A task counts once, however often it was
played; episodes lost to a broken environment do not count. Differences are to the first arm, with
bootstrap intervals over seeds and tasks (research/stats.py).
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import writing
from paw_min.running.runs import read_metrics
from research.stats import DRAWS, Column, Compared, Record, compare, signed
from research.study import markdown_table

TYPES = {  # task type -> the paper's column, in the paper's order
    "pick_and_place_simple": "Pick", "look_at_obj_in_light": "Look",
    "pick_clean_then_place_in_recep": "Clean", "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool", "pick_two_obj_and_place": "Pick2",
    "nq": "NQ", "triviaqa": "TriviaQA", "popqa": "PopQA", "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki", "musique": "MuSiQue", "bamboogle": "Bamboogle",
}


@dataclass
class Entry:
    """A run of a sweep, as in its JSON file."""

    label: str
    seed: int
    folder: str  # relative to the file


@dataclass(kw_only=True)
class Result(Entry):
    """The last evaluation of a run."""

    config: dict
    episodes: list[dict]  # see evaluate.outcomes

    def columns(self) -> dict[str, Column]:
        return columns(self.config["env"], self.episodes)

    def records(self) -> list[Record]:
        """The numbers of each column, as a measure with its name."""
        return [
            Record(self.label, self.seed, name, percent, task, part)
            for name, column in self.columns().items()
            for part, tasks in column.items()
            for task, percent in tasks.items()
        ]


def columns(env: str, episodes: list[dict]) -> dict[str, Column]:
    """The paper's columns of a benchmark; the last one is the overall success."""
    won = defaultdict(list)
    score = defaultdict(list)
    tasks_of = defaultdict(set)  # task type -> tasks
    for episode in episodes:
        task = episode["task"]
        won[task].append(100 * episode["won"])
        score[task].append(100 * (episode["score"] or 0))
        tasks_of[episode["task_type"]].add(task)
    pooled = mean_by_task(won)
    if env == "webshop":
        return {"Score": {"": mean_by_task(score)}, "Success": {"": pooled}}
    by_type = {}
    for kind, tasks in tasks_of.items():
        by_type[kind] = {task: percent for task, percent in pooled.items() if task in tasks}
    order = [kind for kind in TYPES if kind in by_type]
    order += sorted(by_type.keys() - TYPES.keys())
    found = {TYPES.get(kind, kind): {"": by_type[kind]} for kind in order}
    if env == "search":
        found["Avg."] = by_type  # The types have equal weights.
    else:
        found["All"] = {"": pooled}
    return found


def mean_by_task(percents: dict[str, list[float]]) -> dict[str, float]:
    return {task: float(np.mean(played)) for task, played in percents.items()}


def find(paths: list[Path]) -> list[Entry]:
    """The runs of sweep files, or run folders as they are: the arm is the name without its seed."""
    entries = []
    for path in paths:
        if path.is_dir():
            label = re.sub(r"-seed\d+$", "", path.resolve().name)
            seed = settings_of(path)["seed"]
            entries.append(Entry(label, seed, str(path)))
        else:
            for entry in json.loads(path.read_text()):
                folder = str(path.parent / entry["folder"])
                entries.append(Entry(**entry | {"folder": folder}))
    return entries


def load(paths: list[Path]) -> tuple[list[Result], list[str]]:
    """The last evaluations of the runs, and notes on those that are not finished."""
    results = {}
    notes = []
    for entry in find(paths):
        folder = Path(entry.folder)
        lines = read_metrics(entry.folder)
        if not any("eval_success" in line for line in lines):
            notes.append(f"No evaluation yet: {folder}.")
            continue
        config = settings_of(folder)
        if lines[-1]["update"] < config["updates"]:
            progress = f"{lines[-1]['update']} of {config['updates']} updates"
            notes.append(f"Not finished: {folder}, {progress}.")
        result = Result(
            label=entry.label,
            seed=entry.seed,
            folder=entry.folder,
            config=config,
            episodes=played(folder / "evaluation.json"),
        )
        same = results.setdefault((config["env"], entry.label, entry.seed), result)
        if same.folder != entry.folder:
            raise UserError(f"{entry.label!r}, seed {entry.seed}, is both {same.folder} and "
                            f"{folder}: leave one of them out.")
    if not results:
        raise UserError(f"no evaluation in {', '.join(map(str, paths))}: run the sweep first.")
    return list(results.values()), notes


def settings_of(folder: Path) -> dict:
    """What tables and figures use of a run's settings."""
    stored = json.loads((folder / "config.json").read_text())
    return {name: stored[name] for name in ("env", "seed", "updates", "rho", "alpha")}


def played(file: Path) -> list[dict]:
    """The episodes of an evaluation.json, without those that were lost."""
    names = ("task", "task_type", "won", "score")
    listed = json.loads(file.read_text())["episodes"]
    # Earlier versions left out the lost ones, and `failed`.
    return [{name: e[name] for name in names} for e in listed if not e.get("failed")]


def compute(results: list[Result]) -> dict[str, dict[str, Compared]]:
    """label -> column -> what stats.py finds, for one benchmark."""
    records = [record for result in results for record in result.records()]
    return compare(records, results[0].label)


def shown_value(found: Compared) -> str:
    around = "" if found.std is None else f" ± {found.std:.1f}"
    return f"{found.mean:.1f}{around}"


def changes(row: dict[str, Compared]) -> list[str]:
    return [signed(found.difference, found.bootstrap) for found in row.values()]


def markdown(table: dict[str, dict[str, Compared]]) -> str:
    """Two tables, means and differences, with the notes that they need."""
    first, *others = table
    names = list(table[first])
    counts = sorted({len(cell.values) for row in table.values() for cell in row.values()})
    means = [[arm, *map(shown_value, row.values())] for arm, row in table.items()]
    note = "Mean of one seed"
    drawn = "tasks"
    if counts != [1]:
        note = f"Mean ± standard deviation over {' or '.join(map(str, counts))} seeds"
        drawn = "seeds and tasks"
    lines = [markdown_table(["method", *names], means), ""]
    lines += [f"{note}; last evaluation, in percent.", ""]
    if others:
        lines += [markdown_table([f"difference to {first}", *names],
                                 [[arm, *changes(table[arm])] for arm in others]), ""]
        lines += [f"Points, same seeds and tasks; 95 % bootstrap interval, {DRAWS} draws of "
                  f"{drawn}.", ""]
    return "\n".join(lines)


def main(paths: list[Path], out: Path | None) -> None:
    results, notes = load(paths)
    text = ""
    for env in dict.fromkeys(result.config["env"] for result in results):
        table = compute([result for result in results if result.config["env"] == env])
        text += f"### {env}\n\n{markdown(table)}\n"
    text = (text + "\n".join(notes)).rstrip()
    print(text)
    if out:
        with writing(str(out)):
            out.write_text(text + "\n")


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("paths", nargs="+", type=Path, help="sweep files or run folders")
        parser.add_argument("--out", type=Path, help="also write it there")
        args = parser.parse_args()
        main(args.paths, args.out)
