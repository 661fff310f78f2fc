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

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import writing
from paw_min.base.flags import Parser
from paw_min.running.runs import read_metrics
from research.stats import DRAWS, Column, Compared, compare, signed
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


@dataclass
class Result:
    """The last evaluation of a run."""

    entry: Entry
    config: dict
    columns: dict[str, Column]


def columns(env: str, episodes: list[dict]) -> dict[str, Column]:
    """The paper's columns of a benchmark; the last one is the overall success.

    episodes: of an evaluation.json (evaluate.outcomes).
    """
    won, score = defaultdict(list), defaultdict(list)
    type_of = {}
    for episode in episodes:
        if episode.get("failed"):  # lost to a broken environment
            continue
        task = episode["task"]
        won[task].append(100 * episode["won"])
        score[task].append(100 * (episode["score"] or 0))
        type_of[task] = episode["task_type"]
    success = {task: float(np.mean(played)) for task, played in won.items()}
    if env == "webshop":
        scores = {task: float(np.mean(played)) for task, played in score.items()}
        return {"Score": {"": scores}, "Success": {"": success}}
    by_type = defaultdict(dict)
    for task, percent in success.items():
        by_type[type_of[task]][task] = percent
    order = [*(kind for kind in TYPES if kind in by_type), *sorted(by_type.keys() - TYPES.keys())]
    found = {TYPES.get(kind, kind): {"": by_type[kind]} for kind in order}
    if env == "search":
        return found | {"Avg.": dict(by_type)}  # The sets have equal weights.
    return found | {"All": {"": success}}


def find(paths: list[Path]) -> list[Entry]:
    """The runs of sweep files, or run folders as they are: the arm is the name without its seed."""
    entries = []
    for path in paths:
        if path.is_dir():
            label = re.sub(r"-seed\d+$", "", path.resolve().name)
            entries.append(Entry(label, settings_of(path)["seed"], str(path)))
        else:
            for entry in json.loads(path.read_text("utf-8")):
                folder = str(path.parent / entry["folder"])
                entries.append(Entry(**entry | {"folder": folder}))
    return entries


def settings_of(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "config.json").read_text("utf-8"))


def load(paths: list[Path]) -> tuple[list[Result], list[str]]:
    """The last evaluations of the runs, and notes on those that are not finished."""
    results = {}
    notes = []
    for entry in find(paths):
        lines = read_metrics(entry.folder)
        if not any("eval_success" in line for line in lines):
            notes.append(f"No evaluation yet: {entry.folder}.")
            continue
        config = settings_of(entry.folder)
        done = lines[-1]["update"]
        if done < config["updates"]:
            notes.append(f"Not finished: {entry.folder}, {done} of {config['updates']} updates.")
        evaluation = json.loads((Path(entry.folder) / "evaluation.json").read_bytes())
        found = columns(config["env"], evaluation["episodes"])
        result = Result(entry, config, found)
        same = results.setdefault((config["env"], entry.label, entry.seed), result)
        if same is not result:
            raise UserError(f"{entry.label!r}, seed {entry.seed}, is both {same.entry.folder} and "
                            f"{entry.folder}: leave one of them out.")
    if not results:
        raise UserError(f"no evaluation in {', '.join(map(str, paths))}: run the sweep first.")
    return list(results.values()), notes


def compute(results: list[Result]) -> dict[str, dict[str, Compared]]:
    """label -> column -> what stats.py finds, for one benchmark."""
    runs = {(result.entry.label, result.entry.seed): result.columns for result in results}
    return compare(runs, base=results[0].entry.label)


def shown_value(found: Compared) -> str:
    around = "" if found.std is None else f" ± {found.std:.1f}"
    return f"{found.mean:.1f}{around}"


def markdown(table: dict[str, dict[str, Compared]]) -> str:
    """Two tables, means and differences, with the notes that they need."""
    first, *others = table
    names = list(table[first])
    counts = sorted({len(cell.values) for row in table.values() for cell in row.values()})
    note, drawn = "Mean of one seed", "tasks"
    if counts != [1]:
        note = f"Mean ± standard deviation over {' or '.join(map(str, counts))} seeds"
        drawn = "seeds and tasks"
    means = [[arm, *map(shown_value, row.values())] for arm, row in table.items()]
    text = f"{markdown_table(['method', *names], means)}\n\n{note}; last evaluation, in percent.\n"
    if others:
        changes = [
            [arm, *(signed(cell.difference, cell.bootstrap) for cell in table[arm].values())]
            for arm in others
        ]
        text += f"\n{markdown_table([f'difference to {first}', *names], changes)}\n\n"
        text += "Points, same seeds and tasks; 95 % bootstrap interval, "
        text += f"{DRAWS} draws of {drawn}.\n"
    return text


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
            out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("paths", nargs="+", type=Path, help="sweep files or run folders")
        parser.add_argument("--out", type=Path, help="also write it there")
        args = parser.parse_args()
        main(args.paths, args.out)
