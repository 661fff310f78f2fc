"""The tables of the pages, made from the recorded files.

    python -m research.tables [PAGE ...]    rewrites them (default: in all pages)
    python -m research.tables --check       only says which pages would change

In a page, a table stands between two comments; the first one has the name of a function of this
file and its arguments:

    <!-- table: fidelity alfworld webshop -->
    ...
    <!-- end -->

Files are named relative to research/. How they were made is on the page.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import replace_text
from paw_min.base.flags import Parser
from paw_min.running.runs import read_metrics
from research.bench import step as bench_of_a_step
from research.board import __main__ as the_board
from research.boxes import study as boxes_study
from research.hidden import study as hidden_study
from research.locks import package as locks_package
from research.locks import study as locks_study
from research.locks import worlds as locks_worlds
from research.objective import mask as objective_mask
from research.objective import study as objective_study
from research.one_file_runs import KEY, in_world
from research.study import (
    Measure,
    Runs,
    area,
    end,
    markdown_table,
    read_runs,
    seeds_of,
    training_area,
    training_end,
)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
BEGIN = re.compile("^<!-- table: ", re.M)
MARKED = re.compile(r"^(<!-- table: (.*) -->\n)(?:(?!<!-- table: ).*\n)*?<!-- end -->$", re.M)


def load(file: str):
    return json.loads((FOLDER / file).read_text())


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def part(text: str, number: int) -> str:
    """Part 1, 2, ... of a text of several parts with an empty line between them."""
    return text.strip().split("\n\n")[number - 1]


def excerpt(call: str, rows: str, columns: str) -> str:
    """Some rows (or "", all) and columns of another table; names are separated by ";"."""
    lines = [line.strip("| ").split("|") for line in table_of(call).splitlines()]
    header, _, *body = [[cell.strip() for cell in line] for line in lines]
    by_name = {line[0]: dict(zip(header, line)) for line in body}
    names = columns.split(";")
    shown = rows.split(";") if rows else by_name
    lines = [[row, *(by_name[row].get(name, "") for name in names)] for row in shown]
    return markdown_table([header[0], *names], lines)


def exercises(number: str) -> str:
    return part((FOLDER / "locks/exercises.txt").read_text(), int(number))


def board() -> str:
    return the_board.table(the_board.read_results())


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


# ---- bench ----


def bench_step() -> str:
    return bench_of_a_step.table()


def bench_lora() -> str:
    """The trainer's sums x vLLM's rounding: both as in this project, one of them, and neither."""
    lines = []
    for entry in load("bench/results/lora.json")[1:]:
        ours, near = entry["random"], entry["nearest"]
        here, peft = entry["gain"], entry["gain of peft"]
        for way, gain, engine, gap in (
            ("both", here, ours, ours["gap"]),
            ("random rounding alone", peft, ours, ours["gap_of_peft"]),
            ("exact sums alone", here, near, near["gap"]),
            ("neither", peft, near, near["gap_of_peft"]),
        ):
            arrives = f"{percent(engine['arrives'])} %"
            lines.append([str(entry["steps"]), way, gain, engine["gain"], arrives, gap])
    header = ["steps", "repaired", "gain of the trainer", "in vLLM", "s B A in vLLM", "gap"]
    return markdown_table(header, lines)


def bench_update() -> str:
    reports = {name: load(f"bench/results/gpu/update-{name}.json") for name in ("1.5b", "smollm2")}
    lines = {}
    for name, report in reports.items():
        cells = {
            f"{what}, seconds": f"{report['seconds'][what]:.2f}"
            for what in ("generate", "old and reference pass", "learn")
        }
        for what, speed in report["tokens_per_s"].items():
            cells[f"{what}, tokens per second"] = f"{speed:,.0f}"
        cells["gap, nats per token"] = f"{report['gap']:.1e}"
        cells["learn, MFU in %"] = f"{100 * report['mfu']:.0f}"
        cells["peak of the trainer, GB"] = f"{report['peak_gb']:.1f}"
        for shape, percent in report["paw_over_grpo_percent"].items():
            for what, value in percent.items():
                cells[f"PaW over GRPO, {shape}, {what} in %"] = f"{value:+.1f}"
        for what, cell in cells.items():
            lines.setdefault(what, [what]).append(cell)
    return markdown_table(["an update", *reports], [*lines.values()])


# ---- the front page ----

# In research/closed.md; at its commit, study/study.json has the means.
STAND_IN = "[8](research/closed.md#does-it-help-our-stand-ins)"
CLOSED = [
    ["generated ALFWorld, 0.9 M parameters", "66.7", "58.3", "55.4", "-", STAND_IN],
    ["the same with rare rewards", "40.8", "23.6", "21.1", "13.2", STAND_IN],
]


def front() -> str:
    """Success of GRPO, PaW, the placebo and ECHO where they were compared.

    A cell has success at the end and its mean over training; "-": not run.
    """
    in_locks, in_package, in_engine, in_words = (
        read_runs(study.RUNS) for study in (locks_study, locks_package, hidden_study, boxes_study)
    )
    in_worlds = read_runs(locks_worlds.RUNS, KEY)
    serials, large = (in_world(world, in_worlds) for world in ("serials", "large"))
    exact, trained = (end, area), (training_end, training_area)
    ours = ["grpo", "paw", "placebo"]
    rows = [
        ("locks, 0.1 M parameters", exact, in_locks, [*ours, "ce 0.05"],
         "locks"),
        ("locks in the package, KL term, other seeds", exact, in_package,
         [*ours, "echo"], "locks-in-the-package"),
        ("locks with serial numbers", exact, large, [*ours, "echo 0.05"],
         "a-world-for-each-choice"),
        ("the same, smaller model, 64 locks, 120 updates", exact, serials,
         [*ours, "echo 0.05"], "a-world-for-each-choice"),
        ("locks as games of ALFWorld's engine, KL term", trained, in_engine,
         [f"{arm}-kl" for arm in (*ours, "echo")], "alfworlds-engine"),
        ("locks in English words, SmolLM2-135M, KL term (weight: PaW 10, ECHO 1)", trained,
         in_words, [*ours, "echo"], "smollm2"),
    ]  # fmt: skip
    lines = []
    for label, measures, runs, arms, entry in rows:
        cells = [both_means(runs, arm, arms[0], measures) for arm in arms]
        seeds = len(seeds_of(runs, arms[0]))
        lines.append([label, *cells, f"[{seeds}](research/LOG.md#{entry})"])
    return markdown_table(["", "GRPO", "PaW", "placebo", "ECHO", "seeds"], [*lines, *CLOSED])


def both_means(runs: Runs, arm: str, base: str, measures: tuple[Measure, Measure]) -> str:
    """ "end / mean of the curve" over the seeds of `base`; their number, if `arm` lacks some."""
    seeds = seeds_of(runs, arm, base)
    if not seeds:
        return "-"
    cell = "\u00a0/\u00a0".join(  # spaces that do not break a line
        f"{np.mean([measure(runs[arm, seed]) for seed in seeds]):.1f}" for measure in measures
    )
    return cell if len(seeds) == len(seeds_of(runs, base)) else f"{cell} ({len(seeds)} seeds)"


# ---- locks and hidden ----


def locks(number: str) -> str:
    return locks_study.tables(read_runs(locks_study.RUNS))[int(number) - 1]


def package() -> str:
    return locks_package.table()


def worlds(name: str) -> str:
    """name: by_world or pairs."""
    return getattr(locks_worlds, name)(read_runs(locks_worlds.RUNS, KEY))


def hidden(kind: str, suffix: str = "") -> str:
    """kind: means or differences. suffix: of the arms."""
    return hidden_study.tables(read_runs(hidden_study.RUNS), suffix)[kind]


def boxes(kind: str = "") -> str:
    """kind: serials, norms, holm, or none, the differences without serial numbers."""
    runs = read_runs(boxes_study.RUNS)
    if kind == "norms":
        return boxes_study.norms()
    if kind == "holm":
        return boxes_study.holm(runs)
    pairs = boxes_study.OF_SERIALS if kind else boxes_study.DIFFERENCES
    return boxes_study.differences(runs, pairs)


def objective() -> str:
    return objective_study.differences()


def mask(kind: str, world: str) -> str:
    """kind: means or differences."""
    return getattr(objective_mask, kind)(world)


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


# ---- walkthrough ----


def walkthrough(number: str) -> str:
    """A table, a prompt or a response."""
    return part((FOLDER / "walkthrough/tables.txt").read_text(), int(number))


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


# ---- the pages ----


def with_new_tables(text: str) -> str:
    """The text of a page with its tables made again."""
    new, number = MARKED.subn(lambda found: f"{found[1]}{table_of(found[2])}\n<!-- end -->", text)
    if number != len(BEGIN.findall(text)):
        raise UserError("a table has no <!-- end -->: add it after its last line.")
    return new


def table_of(call: str) -> str:
    """The table of a marker: the name of a function of this file, and its arguments."""
    name, *words = shlex.split(call)
    function = globals().get(name)
    if not callable(function):
        raise UserError(f"<!-- table: {call} -->: research/tables.py has no function {name!r}.")
    return function(*words)


def pages() -> list[Path]:
    """All tracked pages with tables."""
    command = ["git", "ls-files", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [ROOT / name for name in done.stdout.splitlines()]
    return [page for page in found if page.exists() and BEGIN.search(page.read_text())]


def main(given: list[Path], check: bool) -> None:
    stale = []
    for page in given or pages():
        text = page.read_text()
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
        args = parser.parse_args()
        main(args.pages, args.check)
