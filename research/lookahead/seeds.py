"""Lookahead over several seeds: the lines of `measure`, averaged, and how much each rule gains.

    python -m research.lookahead.seeds FILE ... --out FOLDER

FILE: lookahead-ENV.json of one seed, written by `measure` with the same labels. Lines with the
same model, rule and K belong together. A seed that lacks a line is left out of it. The draws of an
evaluation do not depend on the seed, so a model with the same lines in two files is the same model
(the start model, for example): it counts once.

Each rule is compared with `likelihood`, seed by seed, with 95 % paired t intervals (curves.py):

    same K         success, minus that of `likelihood` with the same K
    same tokens    success, minus that of `likelihood` with as many tokens per step, read off the
                   line through its points at K = 1, 2, 4 and so on, over log tokens. It ends at the
                   largest K, so there is no comparison for a rule that takes more tokens
    above base     share of the vetoes that were right, minus the base rate: above 0 if the vetoes
                   know more than chance. Seeds without a veto are left out

Each difference is followed by its interval and, where seeds were left out, by the number of seeds.

Writes lookahead-seeds.md, lookahead-seeds.json and lookahead-seeds.png.
"""

import json
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

import numpy as np

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import writing
from paw_min.metrics import mean
from paw_min.running.plot import plain, plt
from paw_min.running.untrusted import read_json
from research.lookahead.measure import Played
from research.paper.figures import save
from research.paper.table import markdown_table
from research.stats import t_interval

BASE = "likelihood"
Key = tuple[str, str, int]  # model, rule, K
Seed = dict[Key, Played]


@dataclass
class Difference:
    """The mean of paired differences, and its interval; None with one seed."""

    mean: float
    t: tuple[float, float] | None
    seeds: int


@dataclass
class Line:
    """One model with one rule and one K, over its seeds. None: the rule has no such number."""

    model: str
    rule: str
    k: int
    success: list[float]  # of each seed
    no_effect: float
    vetoed: float | None
    precision: float | None
    base_rate: float | None
    step_tokens: float
    same_k: Difference | None
    same_tokens: Difference | None
    above_base: Difference | None


def read(path: Path) -> Seed:
    return {(one.model, one.rule, one.k): one for one in read_json(path, list[Played])}


def read_all(files: list[Path]) -> list[Seed]:
    """The lines of all files; a model that an earlier file has with the same lines is left out."""
    seeds = [read(path) for path in files]
    for number, seed in enumerate(seeds):
        for model in {key[0] for key in seed}:
            if any(of_model(seed, model) == of_model(other, model) for other in seeds[:number]):
                for key in of_model(seed, model):
                    del seed[key]
    return seeds


def ordered(seeds: list[Seed]) -> list[Key]:
    """All keys: models as in the files, K rising, rules as in the files."""
    keys = list(dict.fromkeys(key for seed in seeds for key in seed))
    models = list(dict.fromkeys(model for model, _, _ in keys))
    return sorted(keys, key=lambda key: (models.index(key[0]), key[2]))  # the rules stay in order


def of_model(seed: Seed, model: str) -> Seed:
    return {key: one for key, one in seed.items() if key[0] == model}


def difference(differences: list[float]) -> Difference | None:
    if not differences:
        return None
    several = len(differences) > 1
    t = t_interval(differences) if several else None
    return Difference(mean(differences), t, len(differences))


def success_at(seed: Seed, model: str, tokens: float) -> float | None:
    """Success of `likelihood` with as many tokens per step; None outside its points."""
    points = [one for one in of_model(seed, model).values() if one.rule in ("plain", BASE)]
    points.sort(key=lambda one: one.step_tokens)
    if not points or not points[0].step_tokens <= tokens <= points[-1].step_tokens:
        return None
    x = [log(one.step_tokens) for one in points]
    return float(np.interp(log(tokens), x, [one.success for one in points]))


def averaged(seeds: list[Seed], key: Key) -> Line:
    """One line of the table."""
    model, rule, k = key
    mine = [seed[key] for seed in seeds if key in seed]

    def known(name: str) -> float | None:
        values = [getattr(one, name) for one in mine if getattr(one, name) is not None]
        return mean(values) if values else None

    same_k = []
    same_tokens = []
    if rule not in ("plain", BASE):
        for seed in seeds:
            if key not in seed:
                continue
            one = seed[key]
            if (model, BASE, k) in seed:
                same_k.append(one.success - seed[model, BASE, k].success)
            other = success_at(seed, model, one.step_tokens)
            if other is not None:
                same_tokens.append(one.success - other)
    above_base = [one.precision - one.base_rate for one in mine if one.precision is not None]
    return Line(
        model=model, rule=rule, k=k,
        success=[one.success for one in mine],
        no_effect=known("no_effect"),
        vetoed=known("vetoed"),
        precision=known("precision"),
        base_rate=known("base_rate"),
        step_tokens=known("step_tokens"),
        same_k=difference(same_k),
        same_tokens=difference(same_tokens),
        above_base=difference(above_base),
    )


def markdown(lines: list[Line]) -> str:
    """Two tables: what each rule wins, and what its vetoes know."""
    won = []
    known = []
    for one in lines:
        own = [one.model, one.rule, one.k, len(one.success)]
        low = min(one.success)
        high = max(one.success)
        success = f"{mean(one.success):.3f} ({low:.3f} to {high:.3f})"
        differences = [shown(one, one.same_k), shown(one, one.same_tokens)]
        won.append([*own, success, f"{one.step_tokens:.1f}", *differences, one.no_effect])
        if one.vetoed is not None:
            above = shown(one, one.above_base)
            known.append([*own, one.vetoed, one.precision, one.base_rate, above])
    own = ["model", "rule", "K", "seeds"]
    first = [*own, "success (lowest to highest)", "tokens per step", "same K", "same tokens"]
    second = [*own, "vetoed", "veto right", "base rate", "above base"]
    tables = [markdown_table([*first, "steps without effect"], won), markdown_table(second, known)]
    return "\n\n".join(tables)


def shown(line: Line, found: Difference | None) -> str | None:
    if not found:
        return None
    around = f" [{found.t[0]:+.3f}, {found.t[1]:+.3f}]" if found.t else ""
    some = f" ({found.seeds})" if found.seeds < len(line.success) else ""
    return f"{found.mean:+.3f}{around}{some}"


def draw(lines: list[Line], path: Path) -> None:
    """A panel per model: success over tokens per step, a line per rule, with the seeds' range.

    Only the values of K that the most seeds have, so that the points of a line have the same seeds.
    """
    models = list(dict.fromkeys(one.model for one in lines))
    rules = list(dict.fromkeys(one.rule for one in lines if one.rule != "plain"))
    figure, axes = plt.subplots(
        1, len(models), figsize=(3.4 * len(models), 3.4), sharey=True, squeeze=False,
        layout="constrained",
    )
    for axis, model in zip(axes[0], models):
        mine = [one for one in lines if one.model == model]
        n = max(len(one.success) for one in mine)
        mine = [one for one in mine if len(one.success) == n]
        for number, rule in enumerate(rules):
            line = [one for one in mine if one.rule in ("plain", rule)]
            heights = np.array([mean(one.success) for one in line])
            below = heights - [min(one.success) for one in line]
            above = [max(one.success) for one in line] - heights
            axis.errorbar(
                [one.step_tokens for one in line], heights, yerr=[below, above],
                color=f"C{number}", marker="o", capsize=2, lw=1.2, label=plain(rule),
            )
        title = plain(f"{model}: {n} seed{'s' if n != 1 else ''}")
        axis.set(title=title, xlabel="tokens per step")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out success")
    axes[0, 0].legend(fontsize=8)
    save(figure, path)


def main(files: list[Path], out: Path) -> None:
    seeds = read_all(files)
    lines = [averaged(seeds, key) for key in ordered(seeds)]
    if not lines:
        raise UserError(f"{files[0]} has no lines: finish `measure` first.")
    text = markdown(lines)
    print(text)
    with writing(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        (out / "lookahead-seeds.md").write_text(text + "\n")
        numbers = json.dumps([asdict(one) for one in lines], indent=1, ensure_ascii=False)
        (out / "lookahead-seeds.json").write_text(numbers + "\n")
    draw(lines, out / "lookahead-seeds.png")


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("files", nargs="+", type=Path, help="lookahead-ENV.json, one per seed")
        parser.add_argument("--out", type=Path, required=True, help="folder of table and figure")
        args = parser.parse_args()
        main(args.files, args.out)
