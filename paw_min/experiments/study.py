"""Tables and figure of the study in results/: what PaW teaches, and what that does to success.

    python -m paw_min.experiments.study runs/SETTING/study-alfworld.json ... --out FOLDER

A setting is a folder with a sweep, GRID-ENV.json, and GRID-ENV-knowledge.json, which knowledge.py
has made from it. Measures of a run, in percent:

    success     held-out success at the end
    area        success of all training episodes: the mean height of the learning curve
    p, exact, nothing, repeated, tool    see knowledge.py

Each arm is compared with the first one, GRPO, and those of PAIRS with their counterpart, seed by
seed. Intervals: 95 %, bootstrap as in table.py, for success over seeds and tasks, else over seeds.
A further table has metrics of training, see `training`. Writes study.md, study.json, study.png.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paw_min.experiments import table
from paw_min.experiments.figures import save
from paw_min.experiments.table import Cell, compare, interval, load, markdown_table, read_json
from paw_min.running.errors import Parser, UserError, user_errors
from paw_min.running.plot import plt
from paw_min.running.runs import read_metrics, writing

KNOWN = ("p", "exact", "nothing", "repeated", "tool")
PAIRS = {"GRPO w/ PaW": "placebo: shuffled targets", "GiGPO w/ PaW": "GiGPO"}
GRADIENTS = ("grad_norm_rl", "grad_norm_wm", "grad_cosine")
TITLES = {"p": "mean p of next-observation tokens (%)", "success": "held-out success (%)"}


@dataclass
class Setting:
    name: str
    start: dict[str, float]  # measures of the start model
    seeds: dict[str, dict[str, list[float]]]  # arm -> measure -> one value per seed
    cells: dict[str, dict[str, Cell]]  # arm -> measure -> mean, difference to GRPO, interval
    pairs: dict[str, dict[str, Cell]]  # the same for the arms of PAIRS: difference to the other
    training: dict[str, dict[str, float]]  # arm -> metric -> mean over seeds
    curves: dict[str, list[list[float]]]  # arm -> training success of each seed and update


def training(lines: list[dict]) -> dict[str, float]:
    """How a run moved: gradient norms, and distances from the start model (where there is a KL
    term); with --conflict-every, the two losses' gradients, averaged over the updates."""
    updates = [m for m in lines if "success" in m]
    found = {"grad_norm, update 1": updates[0]["grad_norm"]}
    if "ref_kl" in updates[0]:
        second, last = updates[:2][-1], updates[-1]
        found |= {"ref_kl, update 2": second["ref_kl"], "ref_kl, last": last["ref_kl"]}
    measured = [m for m in updates if GRADIENTS[0] in m]
    return found | {k: float(np.mean([m[k] for m in measured])) for k in GRADIENTS if measured}


def read(sweep: Path) -> Setting:
    results, notes = load([sweep])
    if notes:
        raise UserError(" ".join(notes) + " Finish the sweep first.")
    knowledge = sweep.with_name(f"{sweep.stem}-knowledge.json")
    reports = {(r["label"], r["seed"]): r for r in read_json(knowledge)}
    columns = defaultdict(lambda: defaultdict(dict))  # measure -> arm -> seed -> column
    trained, curves = defaultdict(list), defaultdict(list)
    for r in results:
        found = reports.get((r.label, r.seed))
        if not found:
            raise UserError(f"{knowledge} has no {r.label}, seed {r.seed}: run knowledge again.")
        lines = read_metrics(r.folder)
        trained[r.label].append(training(lines))
        curves[r.label].append([100 * m["success"] for m in lines if "success" in m])
        single = {key: 100 * found[key] for key in KNOWN}
        single["area"] = float(np.mean(curves[r.label][-1]))
        if r.episodes is None:
            raise UserError(f"{r.folder} has no evaluation.json: train the run again.")
        *_, columns["success"][r.label][r.seed] = r.columns(per_task=True).values()  # overall
        for key, share in single.items():
            columns[key][r.label][r.seed] = {"": {"": share}}
    cells, seeds, pairs = defaultdict(dict), defaultdict(dict), defaultdict(dict)
    for key in ("success", "area", *KNOWN):
        first, *_ = columns[key]
        for label, runs in columns[key].items():
            base = {} if label == first else columns[key][first]
            cells[label][key] = compare(runs, base, per_task=key == "success")
            seeds[label][key] = [table.value(run) for run in runs.values()]
        for label, other in PAIRS.items():
            if {label, other} <= columns[key].keys():
                runs, base = columns[key][label], columns[key][other]
                pairs[label][key] = compare(runs, base, per_task=key == "success")
    start = {key: 100 * reports["start model", 0][key] for key in ("success", *KNOWN)}
    means = {
        label: {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
        for label, runs in trained.items()
    }
    return Setting(
        sweep.parent.name, start, dict(seeds), dict(cells), dict(pairs), means, dict(curves)
    )


def markdown(setting: Setting) -> str:
    (first, cells), *others = setting.cells.items()
    start = [f"{setting.start[k]:.1f}" if k in setting.start else "" for k in cells]
    values = [[a, *map(Cell.value, row.values())] for a, row in setting.cells.items()]
    changes = [[a, *map(Cell.change, row.values())] for a, row in others]
    tables = [
        markdown_table(["method", *cells], [["start model", *start], *values]),
        markdown_table([f"difference to {first}", *cells], changes),
    ]
    for label, row in setting.pairs.items():
        changes = [[label, *map(Cell.change, row.values())]]
        tables += [markdown_table([f"difference to {PAIRS[label]}", *cells], changes)]
    names = list(dict.fromkeys(key for row in setting.training.values() for key in row))
    rows = [
        [arm, *(f"{row[key]:.4f}" if key in row else "" for key in names)]
        for arm, row in setting.training.items()
    ]
    tables += [markdown_table(["training", *names], rows)]
    return "\n\n".join([f"### {setting.name}", *tables]) + "\n"


def picture(settings: list[Setting], out: Path) -> None:
    """Per setting, a row: training success, what the arms know, and how often they succeed."""
    heights = [1.5 + 0.3 * len(setting.cells) for setting in settings]  # inches
    figure, axes = plt.subplots(
        len(settings), 1 + len(TITLES), figsize=(13, 0.6 + sum(heights)), height_ratios=heights,
        squeeze=False, layout="constrained", sharex="col",
    )  # fmt: skip
    for (curve, *dots), setting in zip(axes, settings):
        colors = {label: f"C{k}" if k else "0.25" for k, label in enumerate(setting.cells)}
        for label, runs in setting.curves.items():
            updates, values = range(1, 1 + len(runs[0])), np.array(runs)  # (seeds, updates)
            low, high = zip(*(interval([column[:, None]]) for column in values.T))  # over seeds
            curve.fill_between(updates, low, high, color=colors[label], alpha=0.15, lw=0)
            curve.plot(updates, values.mean(0), color=colors[label])
        curve.set_title(setting.name, loc="left", fontsize=10, fontweight="bold")
        for axis, key in zip(dots, TITLES):
            axis.axvline(setting.start[key], color="0.6", ls=":")
            for y, (label, color) in enumerate(colors.items()):
                values = np.array(setting.seeds[label][key])  # (seeds,)
                axis.plot(values, [y] * len(values), "|", color=color, alpha=0.5)
                axis.plot(interval([values[:, None]]), [y, y], color=color, lw=2)
                axis.plot(values.mean(), y, "o", color=color)
            axis.set_ylim(len(colors) - 0.5, -0.5)  # the first arm is at the top
        dots[0].set_yticks(range(len(colors)), colors)
        dots[1].set_yticks(range(len(colors)), [])
        for axis in (curve, *dots):
            axis.grid(alpha=0.3)
    for axis, title in zip(axes[-1], ("update", *TITLES.values())):
        axis.set_xlabel(title)
    axes[0, 0].set_ylabel("training success (%)")
    save(figure, out)


def main(sweeps: list[Path], out: Path) -> None:
    settings = [read(sweep) for sweep in sweeps]
    text = "\n".join(markdown(setting) for setting in settings)
    print(text)
    with writing(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        (out / "study.md").write_text(text)
        plain = json.dumps([asdict(setting) for setting in settings], indent=1, ensure_ascii=False)
        (out / "study.json").write_text(plain + "\n")
    picture(settings, out / "study.png")


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("sweeps", nargs="+", type=Path, help="JSON files of the sweeps")
    parser.add_argument("--out", type=Path, required=True, help="folder of table and picture")
    args = parser.parse_args()
    with user_errors():
        main(args.sweeps, args.out)
