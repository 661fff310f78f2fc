"""The tables of the pages, made from the recorded files.

    python -m research.tables [PAGE ...]    rewrites them (default: in all pages)
    python -m research.tables --check       only says which pages would change
    python -m research.tables --figure      draws the figure of README.md, too

A table stands between two comments. The first one names files of runs, relative to research/, and
perhaps a world in them:

    <!-- table: objective/mask.jsonl fog -->
    | fog | difference |
    |---|---|
    | rho 0.2 x1 - ce x1 | +12.2 [+5.7, +18.6] |
    <!-- end -->

The page chooses what such a table shows, by the names in it; the numbers are made again. A row is
an arm, or a difference of two, perhaps on some seeds ("ce - grpo, seeds 4 to 7"). A column is a
measure (COLUMNS), or a world. If it is an arm or a difference itself, the rows are worlds. "-": no
seed has what is asked for.

Another table has the name of a function of this file, and its arguments.
"""

import json
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import replace_text
from paw_min.base.flags import Parser
from paw_min.running.runs import read_metrics
from research.bench import memory, step
from research.board import __main__ as the_board
from research.front_figure import draw, reached_table
from research.study import (
    Measure,
    Runs,
    above,
    area,
    difference,
    end,
    level,
    main_measure,
    markdown_table,
    read_runs,
    seeds_of,
)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
BEGIN = re.compile("^<!-- table: ", re.M)
MARKED = re.compile(r"^(<!-- table: (.*) -->\n)((?:(?!<!-- table: ).*\n)*?)<!-- end -->$", re.M)


def load(file: str):
    return json.loads((FOLDER / file).read_text("utf-8"))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


# ---- arms and their differences ----


@dataclass(frozen=True)
class Column:
    """A measure of each row's arm, minus that of `base`."""

    measure: Measure
    base: str = ""
    digits: int = 1


COLUMNS = {
    "mean of the curve": Column(area),
    "minus GRPO": Column(area, "grpo"),
    "minus PaW": Column(area, "paw"),
    "mean": Column(area),
    "at the end": Column(end),
    "end minus GRPO": Column(end, "grpo"),
    "end minus PaW": Column(end, "paw"),
    "last ten": Column(end),
    "last ten updates": Column(end),
    "held out": Column(lambda run: 100 * run["held_out"][-1]),
    "first": Column(lambda run: 100 * run["first"][-1]),
    "p(material)": Column(lambda run: run["material"][-1], digits=2),
    "difference": Column(main_measure),
}
COUNTS = ("seeds", "above on")
WRITTEN = ("world", "expected")  # the page's author writes these; a row's world is that of its arms
# How tables name an arm or a world whose name in the file is another.
NAMES = {
    "GRPO": "grpo", "PaW": "paw", "ECHO": "echo 0.05", "gce": "gce 0.5 x0.05, all",
    "probable": "probable 0.03 x0.05, all", "128 names, the default": "",
}


def filled(table: str, files: list[str], world: str) -> str:
    """A table of a page, with its numbers from these files of runs."""
    worlds = read_runs(*(FOLDER / file for file in files))
    header, _, *body = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    ]
    for row in body:
        cells = dict(zip(header, row))
        for k, column in enumerate(header[1:], start=1):
            if column in COLUMNS or column in COUNTS:
                row[k] = number(worlds[cells.get("world", world)], row[0], column)
            elif column in worlds:
                row[k] = number(worlds[column], row[0], "difference")
            elif column not in WRITTEN:
                row[k] = number(worlds[NAMES.get(row[0], row[0])], column, "difference")
    return markdown_table(header, body)


def number(runs: Runs, row: str, column: str) -> str:
    """A cell. row: "paw", "paw - grpo", or "paw - grpo, seeds 4 to 7"."""
    row, _, seeds = row.partition(", seeds ")
    if seeds:
        first, last = map(int, seeds.split(" to "))
        runs = {(arm, seed): run for (arm, seed), run in runs.items() if first <= seed <= last}
    arms = [arm if seeds_of(runs, arm) else NAMES.get(arm, arm) for arm in row.split(" - ")]
    if column == "seeds":
        return str(len(seeds_of(runs, *arms)))
    if column == "above on":
        return above(runs, *arms, area)
    shown = COLUMNS[column]
    if shown.base:
        arms.append(shown.base)
    if len(arms) == 2:
        return difference(runs, *arms, shown.measure)
    return level(runs, *arms, shown.measure, shown.digits)


# ---- the front page ----

STUDIES = (  # row, file, world, arms, entry of LOG.md
    ("locks, KL term as in the presets", "locks/kl.jsonl", "",
     ("grpo", "paw", "echo"), "locks-with-a-kl-term"),
    ("the same without the KL term", "locks/runs.jsonl", "", ("grpo", "paw", "ce 0.05"), "locks"),
    ("locks with serial numbers, no KL term", "locks/worlds.jsonl", "large",
     ("grpo", "paw", "echo 0.05"), "a-world-for-each-choice"),
    ("locks as games of ALFWorld's engine, KL term", "hidden/runs.jsonl", "",
     ("grpo-kl", "paw-kl", "echo-kl"), "alfworlds-engine"),
    ("locks in English words, SmolLM2-135M, KL term", "boxes/runs.jsonl", "",
     ("grpo", "paw", "echo"), "smollm2"),
)  # fmt: skip
# research/closed.md has it; study/study.json of its commit has the means.
CLOSED = ["small ALFWorld games (held out)", "66.7", "58.3", "-",
          "[8](research/closed.md#does-it-help-our-stand-ins)"]


def front() -> str:
    """Success at the end of GRPO, PaW and ECHO, in percent; "-": not run."""
    lines = []
    for label, file, world, arms, entry in STUDIES:
        runs = read_runs(FOLDER / file)[world]
        cells = [level(runs, arm, end) for arm in arms]
        lines.append([label, *cells, f"[{len(seeds_of(runs, arms[0]))}](research/LOG.md#{entry})"])
    return markdown_table(["", "GRPO", "PaW", "ECHO", "seeds"], [*lines, CLOSED])


# ---- research/README.md: which observation loss ----

SEEDS = 6  # a loss with fewer does not stand in the table
SMALL = "one_rule/runs.jsonl"
MADE = "one_rule/worlds.jsonl"
PRETRAINED = "boxes/runs.jsonl", "one_rule/boxes.jsonl", "boxes/floor.jsonl"
# A world's name in the table, what is hard there, files, its name in them, the end of their arms.
WORLDS = (
    ("plain", "nothing", (SMALL,), "plain", ""),
    ("fog", "3 of 4 observations say the same in place of the fact", (SMALL,), "fog", ""),
    ("outcome", "an observation says opens or shut, and no fact", (SMALL,), "outcome", ""),
    ("serials", "a serial number of 8 words of 256, fixed for a name", (SMALL,), "serials", ""),
    ("long serials", "the same with 16 words", (SMALL,), "long serials", ""),
    ("fresh", "8 words of 256, new each time", (MADE,), "fresh", ""),
    ("fresh, other seeds", "the same", ("locks/worlds.jsonl",), "fresh", ""),
    ("catalog", "a description of 8 words of 64, fixed for a name", (MADE,), "catalog", ""),
    ("crowd", "the same with 8 words of 16", (MADE,), "crowd", ""),
    ("digits", "a serial number of 8 digits of 10", (MADE,), "digits", ""),
    ("corridors", "half of the steps are forced and show random words", (SMALL,), "corridors", ""),
    ("inspect", "forced steps alone show the fact", (MADE,), "inspect", ""),
    ("unseen", "forced steps show one of 40 facts, the others useless words", (SMALL,), "unseen",
     ""),
    ("sensor", "a fact shows as one of 6 readings of 48", (MADE,), "sensor", ""),
    ("metered", "the same; a serial number of 8 words of 256", (MADE,), "metered", ""),
    ("sensor256", "a fact shows as one of 32 readings of 256", (MADE,), "sensor256", ""),
    ("likes", "a fact shows as one of 128 names: p starts below 0.01", (MADE,), "likes", ""),
    ("seldom", "1 of 16 observations shows the fact; a serial number of 2 words of 256", (MADE,),
     "seldom", ""),
    ("log", "3 of 4 observations hide the fact; 8 words of 256, new each time", (MADE,), "log", ""),
    ("long", "nine words that are always the same", (MADE,), "long", ""),
    ("polish, at the end", "the policy wins 44 % at the start; serial numbers", (SMALL,), "polish",
     ""),
    ("one_file.py", "twice as many names, a larger model", ("locks/runs.jsonl",), "", ""),
    ("its outcome alone", "no fact", (SMALL,), "says the outcome", ""),
    ("its material alone", "no label of success", (SMALL,), "says the material", ""),
    ("it with serials", "8 words of 256", ("locks/worlds.jsonl",), "large", ""),
    ("locks in the package", "a KL term", ("locks/package.jsonl",), "", ""),
    ("ALFWorld's engine", "a KL term; text", ("hidden/runs.jsonl", "one_rule/hidden.jsonl"), "",
     "-kl"),
    ("SmolLM2", "pretrained; weights: PaW 10, others 1", PRETRAINED, "", ""),
    ("SmolLM2, serials", "four words of 1,000; weights: PaW 30, ECHO 0.05, others 1", PRETRAINED,
     "", "-serials"),
)  # fmt: skip
LOSSES = {  # the name in the table -> those in the files, of which a world has one
    "GRPO": ("grpo",),
    "PaW": ("paw",),
    "ECHO": ("echo", "echo 0.05", "ce 0.05"),
    "floor 0.01": ("probable 0.01", "floor-0.01"),
    "floor 0.03": ("probable 0.03", "probable"),
    "floor 0.09": ("probable 0.09",),
    "two entropies": ("predictable",),
}


def losses() -> str:
    """The mean of each loss in each world, over the seeds that all of them have; the best bold."""
    lines = []
    for label, hard, files, world, ending in WORLDS:
        runs = read_runs(*(FOLDER / file for file in files))[world]
        arms = {
            loss: arm + ending
            for loss, spelled in LOSSES.items() for arm in reversed(spelled)
            if len(seeds_of(runs, arm + ending)) >= SEEDS
        }
        seeds = seeds_of(runs, *arms.values())
        means = {
            loss: np.mean([main_measure(runs[arm, seed]) for seed in seeds])
            for loss, arm in arms.items()
        }
        cells = {loss: f"{value:.1f}" for loss, value in means.items()}
        best = cells[max(means, key=means.get)]
        cells = {loss: f"**{cell}**" if cell == best else cell for loss, cell in cells.items()}
        lines.append([label, hard, len(seeds), *(cells.get(loss, "-") for loss in LOSSES)])
    return markdown_table(["world", "what is hard there", "seeds", *LOSSES], lines)


# ---- runs ----


def first_and_last(folder: Path, key: str = "eval_success") -> tuple[float, float]:
    """A held-out measure before training and at the end."""
    evaluated = [line[key] for line in read_metrics(folder) if key in line]
    return evaluated[0], evaluated[-1]


def runs() -> str:
    """After: a number per seed. All seeds have one start model and panel."""
    lines = []
    for env in ("alfworld", "webshop", "search"):
        folders = [FOLDER / "runs" / f"{env}-tiny-grpo-paw-seed{seed}" for seed in range(3)]
        before, after = zip(*map(first_and_last, folders))
        line = [env, percent(before[0]), ", ".join(map(percent, after))]
        line.append(percent(np.mean(after) - np.mean(before)))
        score = "-"
        if env == "webshop":
            (start, *_), ends = zip(*(first_and_last(folder, "eval_score") for folder in folders))
            score = f"{start:.1f} to {', '.join(f'{end:.1f}' for end in ends)}"
        lines.append([*line, score])
    return markdown_table(["benchmark", "before", "after", "mean rise", "score"], lines)


# ---- LEARN.md ----


def part(text: str, number: int) -> str:
    """Part 1, 2, ... of a text of several parts with an empty line between them."""
    return text.strip().split("\n\n")[number - 1]


def exercises(number: str) -> str:
    return part((FOLDER / "locks/exercises.txt").read_text("utf-8"), int(number))


def walkthrough(number: str) -> str:
    """A table, a prompt or a response."""
    return part((FOLDER / "walkthrough/tables.txt").read_text("utf-8"), int(number))


# Each step of LEARN.md: its title, the flags of one_file.py that train it, its entry on the board.
LADDER = (
    ("GRPO", "--arms grpo", "grpo"),
    ("+ cross entropy on o'", "--arms paw --loss ce --alpha 1 --lambda-g constant", "ce_all"),
    ("+ the selection", "--arms paw --loss ce --lambda-g constant", "ce_selected"),
    ("+ the clipped MAE", "--arms paw --lambda-g constant", "constant"),
    ("+ λ_g: PaW", "--arms paw", "paw"),
)


def ladder() -> str:
    results = the_board.read_results()
    lines = []
    for title, flags, entry in LADDER:
        means = [f"{np.mean(results[entry][world]):.1f}" for world in the_board.WORLDS]
        lines.append([title, f"`{flags}`", *means])
    return markdown_table(["step", "flags", *the_board.WORLDS], lines)


# ---- rwml and word2world ----


def rwml_models() -> str:
    keys = ("eval_success", "eval_invalid", "held_out_exact", "held_out_cosine", "held_out_reward")
    measured = {"start": read_metrics(FOLDER / "rwml/rwml")[0]}
    for name in ("rwml", "wm-sft", "early-experience"):
        measured[name] = read_metrics(FOLDER / "rwml" / name)[-1]
    collector = load("rwml/collected.json")["panel"].values()
    lines = [["collector", *map(percent, collector), "-", "-", "-"]]
    lines += [[name, *(percent(line[key]) for key in keys)] for name, line in measured.items()]
    header = ["model", "success", "invalid actions", "exact", "cosine", "reward"]
    return markdown_table(header, lines)


def fidelity(*folders: str) -> str:
    lines = []
    for folder in folders:
        found = load(f"word2world/{folder}/fidelity.json")
        matches = [percent(found[key]) for key in ("em", "em_observation")]
        lines.append([folder, *matches, found["n"]])
    header = ["folder", "exact match", "without the list of actions", "steps"]
    return markdown_table(header, lines)


def consistency() -> str:
    lines = []
    for folder in ("alfworld", "webshop"):
        for agent in ("teacher", "model"):
            cell = load(f"word2world/{folder}/consistency.json").get(agent)
            if cell:
                names = ("real", "wm", "w2r", "cr", "pairwise_cr")
                lines.append([folder, agent, *(percent(cell[name]) for name in names), cell["n"]])
    header = ["environment", "agent", "Real", "WM", "W2R", "CR", "pairwise CR", "episodes"]
    return markdown_table(header, lines)


# ---- what its command prints ----


def reached() -> str:
    return reached_table()


def board() -> str:
    return the_board.table(the_board.read_results())


def bench_memory() -> str:
    return memory.table()


def bench_step() -> str:
    return step.table()


# ---- the pages ----


def with_new_tables(text: str) -> str:
    """The text of a page with its tables made again."""
    new, number = MARKED.subn(
        lambda found: f"{found[1]}{table_of(found[2], found[3])}\n<!-- end -->", text
    )
    if number != len(BEGIN.findall(text)):
        raise UserError("a table has no <!-- end -->: add it after its last line.")
    return new


def table_of(call: str, before: str) -> str:
    """The table of a marker. before: as it stands on the page."""
    name, *words = shlex.split(call)
    if name.endswith(".jsonl"):
        files = [name, *(word for word in words if word.endswith(".jsonl"))]
        return filled(before, files, "".join(words[len(files) - 1 :]))
    function = globals().get(name)
    if not callable(function):
        raise UserError(f"<!-- table: {call} -->: research/tables.py has no function {name!r}.")
    return function(*words)


def pages() -> list[Path]:
    """All tracked pages with tables."""
    command = ["git", "ls-files", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [ROOT / name for name in done.stdout.splitlines()]
    return [page for page in found if page.exists() and BEGIN.search(page.read_text("utf-8"))]


def main(given: list[Path], check: bool) -> None:
    stale = []
    for page in given or pages():
        text = page.read_text("utf-8")
        new = with_new_tables(text)
        if new != text:
            stale.append(page)
            if not check:
                replace_text(page, new)
    for page in stale:
        print(page)
    if check and stale:
        raise UserError("these pages have other tables: run python -m research.tables.")


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("pages", nargs="*", type=Path, help="Markdown files (default: all)")
        parser.add_argument("--check", action="store_true", help="rewrite nothing")
        parser.add_argument("--figure", action="store_true", help="draw research/locks/curves.png")
        args = parser.parse_args()
        if args.figure:
            draw()
        main(args.pages, args.check)
