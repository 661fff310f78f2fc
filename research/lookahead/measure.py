"""A policy as its own world model: does it help to look ahead before acting?

    python -m research.lookahead.measure ENV --models LABEL=MODEL ... [--k 1 2 4 8]
        [--world-model FOLDER [--veto-at P ...]] [--replays N] [--out FOLDER]
        [flags of the run script]

Each model plays the held-out panel with K candidate responses per step (running/lookahead.py):

    plain        K = 1
    likelihood   the most likely of K, without a prediction
    veto         the most likely of those that the model does not predict to change nothing
    world model  the same, predicted by the model of `word2world train` in --world-model. It reads
                 the commands and answers of the whole episode, and ALFWorld's hidden state.
    world model, p >= P
                 the same, but a candidate is dropped if the model gives the text of no effect at
                 least this probability, whether or not it is the most likely one (--veto-at)

MODEL: what --model takes, or a run folder, for its newest checkpoint. --eval-tasks is the number of
games, --eval-temperature the temperature of the candidates.

Was a veto right? Environments are deterministic. So the episode's commands up to that step are
repeated, and the vetoed command is executed. The same is done for candidates drawn from all: a veto
is only worth something if it is right more often than that base rate.

With --out, each line is stored when it is measured. Rerun the same command to resume. The same
command with other --k or --veto-at adds lines.

Not in the paper. research/lookahead/README.md explains the table.
"""

import json
import os
import shlex
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import reading, replace_text, writing
from paw_min.base.seeds import generator, request_seed
from paw_min.config import Config, check
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Pool, Tasks
from paw_min.metrics import mean
from paw_min.model.policy import Policy
from paw_min.rows import Episode
from paw_min.running.evaluate import evaluate
from paw_min.running.lookahead import Decision, LookaheadSampler, costs
from paw_min.running.plot import plain, plt
from paw_min.running.runs import newest_checkpoint
from paw_min.running.session import (
    PANEL_SLOTS,
    check_tokenizer,
    find_tasks,
    loaded,
    start_model,
)
from paw_min.running.untrusted import read_json
from paw_min.world_models.training import load_world_model
from paw_min.world_models.trajectories import Recorder
from paw_min.world_models.world_model import WorldModel
from research.lookahead.samplers import SharedDraws, WorldModelSampler
from research.outcomes import has_no_effect
from research.paper.table import MAX_STEPS, markdown_table
from research.paper.transitions import Arguments, arguments, text_rows


class Model(NamedTuple):
    label: str
    folder: str


KINDS = ("plain", "likelihood", "veto", "world model")


class Rule(NamedTuple):
    kind: str  # one of KINDS
    veto_at: float | None = None  # of a world model

    @property
    def name(self) -> str:
        return self.kind if self.veto_at is None else f"{self.kind}, p >= {self.veto_at:g}"


Rate = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=MAX_STEPS)]


@dataclass
class Played:
    """One model with one rule and one K on the panel. None: the rule makes no prediction."""

    model: str
    rule: str  # Rule.name
    k: Annotated[int, Field(ge=1)]
    games: int
    success: Rate
    success_se: Amount  # standard error over the games
    no_effect: Rate  # share of the steps
    vetoed: Rate | None  # share of the candidates
    precision: Rate | None  # share of the replayed vetoes that were right
    base_rate: Rate | None  # share of replayed candidates, drawn from all, without an effect
    replays: int  # vetoes replayed
    # Tokens, and so on: see running/lookahead.py: Costs. A response has an end token at least.
    step_generated: Annotated[float, Field(gt=0, le=MAX_STEPS)]
    step_scored: Amount
    step_passes: Amount
    episode_tokens: Amount  # generated and scored

    @property
    def step_tokens(self) -> float:
        return self.step_generated + self.step_scored


@dataclass
class Trial:
    """A candidate in its state: what a replay needs."""

    task: str
    commands: list[str]  # executed before it
    observation: str  # o_t
    command: str
    unchanged: bool  # was it predicted to change nothing?


@dataclass(frozen=True)
class Plan:
    """The command line."""

    args: Arguments
    models: list[Model]
    ks: list[int]  # rising
    rules: list[Rule]  # for K above 1
    world_model: WorldModel | None
    replays: int
    settings: str  # what a line depends on, besides its own K and threshold


def main(argv: list[str] | None = None) -> None:
    plan = parse(sys.argv[1:] if argv is None else argv)
    args = plan.args
    tasks = find_tasks(args.cfg)
    found = begin(args, plan.settings)
    measured = {(one.model, one.rule, one.k) for one in found}
    labels = [model.label for model in plan.models]
    others = {one.model for one in found} - set(labels)
    if others:
        raise UserError(f"{stored(args)} has lines of the model {min(others)!r:.80}: choose "
                        "another --out, or delete it.")  # fmt: skip
    with closing(tasks.make_pool(min(PANEL_SLOTS, len(tasks.held_out)))) as pool:
        for model in plan.models:
            missing = []
            for k in plan.ks:
                for rule in plan.rules if k > 1 else [Rule("plain")]:
                    if (model.label, rule.name, k) not in measured:
                        missing.append((k, rule))
            if not missing:
                continue
            with loaded(args.cfg, model.folder) as (policy, sampler):
                shared = SharedDraws(sampler)
                for k, rule in missing:
                    one = play(plan, model.label, rule, k, policy, shared, pool, tasks)
                    found.append(one)
                    found.sort(key=lambda one: (labels.index(one.model), one.k, rule_order(one)))
                    print(markdown_table(HEADER, [line(one)]), flush=True)
                    if args.out:
                        text = json.dumps([asdict(one) for one in found], indent=1)
                        replace_text(stored(args), text + "\n")
    print(f"\n{table(found)}")
    if args.out:
        with writing(str(args.out)):
            stored(args).with_suffix(".md").write_text(table(found) + "\n")
            draw(found, stored(args).with_suffix(".png"))


def parse(argv: list[str]) -> Plan:
    """Read the command line; UserError before any long work."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", nargs="+", metavar="LABEL=MODEL", required=True)
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 4, 8], help="(default: 1 2 4 8)")
    text = "vetoes to replay, and as many candidates (default: %(default)s)"
    parser.add_argument("--replays", type=int, default=200, help=text)
    text = "of `word2world train`: adds the rule `world model`"
    parser.add_argument("--world-model", type=Path, metavar="FOLDER", help=text)
    text = "least probabilities of a veto: each adds the rule `world model, p >= P`"
    parser.add_argument("--veto-at", nargs="+", type=float, default=[], metavar="P", help=text)
    own, others = parser.parse_known_args(argv)
    args = arguments(__doc__, others)
    if own.replays < 1:
        raise UserError(f"--replays {own.replays} is out of range: it must be at least 1.")
    for threshold in own.veto_at:
        if not 0 < threshold <= 1:
            raise UserError(f"--veto-at {threshold:g} is out of range: it must be above 0 and at "
                            "most 1.")  # fmt: skip
        if not own.world_model:
            raise UserError("--veto-at needs --world-model.")
    for k in own.k:
        check(replace(args.cfg, lookahead=k))
    models = [find_model(args.cfg, text) for text in own.models]
    labels = [model.label for model in models]
    if len(set(labels)) < len(labels):
        raise UserError(f"--models has the labels {', '.join(labels)}: use different ones.")
    rules = [Rule("likelihood"), Rule("veto")]
    world_model = None
    if own.world_model:
        world_model = load_world_model(own.world_model, args.cfg)
        rules.append(Rule("world model"))
        rules += [Rule("world model", threshold) for threshold in sorted(set(own.veto_at))]
    # The folders are those of checkpoints: otherwise, a run that was trained further would keep its
    # old lines.
    settings = [*others, "--replays", str(own.replays), "--world-model", str(own.world_model)]
    settings += [f"{model.label}={model.folder}" for model in models]
    return Plan(
        args=args,
        models=models,
        ks=sorted(set(own.k)),
        rules=rules,
        world_model=world_model,
        replays=own.replays,
        settings=shlex.join(settings),
    )


def find_model(cfg: Config, text: str) -> Model:
    """LABEL=MODEL -> the label and the folder or hub name of a model that can be used."""
    label, sign, name = text.partition("=")
    if not (label and sign and name):
        raise UserError(f"--models {text} is not LABEL=MODEL, for example open=open.")
    folder = start_model(replace(cfg, model=name))
    if Path(folder).is_dir():
        folder = str(newest_checkpoint(Path(folder)) or folder)
    check_tokenizer(cfg, folder)
    return Model(label, folder)


def play(
    plan: Plan, label: str, rule: Rule, k: int, policy: Policy, sampler: SharedDraws, pool: Pool,
    tasks: Tasks,
) -> Played:  # fmt: skip
    """Evaluate one model with one rule and one K; replay some of its candidates."""
    cfg = plan.args.cfg
    if rule.kind == "world model":
        pool = Recorder(cfg.env, pool)
        looking = WorldModelSampler(cfg, sampler, k, plan.world_model, pool, rule.veto_at)
    else:
        looking = LookaheadSampler(cfg, sampler, k, veto=rule.kind == "veto")
    # It is the sampler already: evaluate() must not wrap it.
    panel = evaluate(replace(cfg, lookahead=1), policy, looking, pool, tasks.held_out)
    episodes = [episode for episode in panel.episodes if not episode.failed]
    rows = text_rows(cfg, episodes)
    cost = costs(looking.decisions)
    one = Played(
        model=label, rule=rule.name, k=k, games=len(episodes),
        success=panel.metrics["eval_success"],
        success_se=panel.metrics["eval_success_se"],
        no_effect=mean([has_no_effect(cfg, row) for row in rows]),
        vetoed=None, precision=None, base_rate=None, replays=0,
        step_generated=cost.step_generated,
        step_scored=cost.step_scored,
        step_passes=cost.step_passes,
        episode_tokens=(cost.step_generated + cost.step_scored) * len(rows) / len(episodes),
    )  # fmt: skip
    if rule.kind in ("veto", "world model"):
        one.vetoed = cost.vetoed
        every = trials(cfg, policy, episodes, looking.decisions)
        vetoed = [trial for trial in every if trial.unchanged]
        one.base_rate = share_without_effect(cfg, pool, every, plan.replays)
        one.precision = share_without_effect(cfg, pool, vetoed, plan.replays)
        one.replays = min(plan.replays, len(vetoed))
    return one


def trials(
    cfg: Config, policy: Policy, episodes: list[Episode], decisions: list[Decision]
) -> list[Trial]:
    """All candidates of these episodes with their states."""
    parse = BENCHMARKS[cfg.env].parse
    by_seed = {decision.seed: decision for decision in decisions}
    found = []
    for episode in episodes:
        rows = text_rows(cfg, [episode])
        commands = [row.command for row in rows]
        for turn, row in enumerate(rows):
            seed = request_seed(-1, episode.trajectory, turn)  # that of evaluate
            for candidate in by_seed[seed].candidates:
                command = parse(policy.decode(candidate.response.ids)).text
                trial = Trial(
                    row.task, commands[:turn], row.observation, command, candidate.unchanged
                )
                found.append(trial)
    return found


def share_without_effect(cfg: Config, pool: Pool, every: list[Trial], replays: int) -> float | None:
    """Execute at most `replays` of these -> the share that changed nothing; None without any."""
    drawn = generator("replays", cfg.seed).sample(every, min(replays, len(every)))
    outcomes = [changes_nothing(cfg, pool, trial) for trial in drawn]
    known = [outcome for outcome in outcomes if outcome is not None]
    return mean(known) if known else None


def changes_nothing(cfg: Config, pool: Pool, trial: Trial) -> bool | None:
    """Repeat the episode up to this step and execute the command. None: the environment broke."""
    pool.reset(0, trial.task)
    step = pool.recv().step
    for command in (*trial.commands, trial.command):
        pool.step(0, command)
        step = pool.recv().step
    if step.failed:
        return None
    expected = BENCHMARKS[cfg.env].unchanged(trial.observation)
    return step.observation.strip() == expected.strip()


HEADER = ["model", "rule", "K", "success", "± SE", "steps without effect", "vetoed", "veto right"]
HEADER += ["base rate", "tokens per step", "of these, scored", "tokens per episode", "passes"]


def line(one: Played) -> list:
    return [
        one.model, one.rule, one.k, one.success, one.success_se, one.no_effect, one.vetoed,
        one.precision, one.base_rate, f"{one.step_tokens:.1f}", f"{one.step_scored:.1f}",
        f"{one.episode_tokens:.0f}", f"{one.step_passes:.1f}",
    ]  # fmt: skip


def rule_order(one: Played) -> tuple[int, str]:
    """Place of a line's rule among those of one K."""
    kind = one.rule.partition(",")[0]
    return KINDS.index(kind), one.rule


def table(found: list[Played]) -> str:
    return markdown_table(HEADER, [line(one) for one in found])


def stored(args: Arguments) -> Path:
    """The file of the lines; the table and the figure have its name, too."""
    return args.out / f"lookahead-{args.cfg.env}.json"


def begin(args: Arguments, settings: str) -> list[Played]:
    """The lines that were measured with these settings; UserError if there are others."""
    if not args.out:
        return []
    path = stored(args)
    noted = path.with_suffix(".settings")
    if path.is_file():
        if not noted.is_file() or noted.read_bytes() != os.fsencode(settings):
            raise UserError(f"{path} has lines of other settings: choose another --out, or delete "
                            "it.")  # fmt: skip
        return read_lines(path)
    replace_text(noted, settings)
    return []


def read_lines(path: Path) -> list[Played]:
    """The lines in a file; UserError for one that no evaluation writes."""
    found = read_json(path, list[Played])
    with reading(path):
        for one in found:
            if one.rule.partition(",")[0] not in KINDS:
                raise ValueError(f"a line has the rule {one.rule!r:.80}")
            if one.precision is not None and one.base_rate is None:
                raise ValueError(f"{one.model!r:.80}, {one.rule}, K = {one.k} has no base_rate")
    return found


def draw(found: list[Played], path: Path) -> None:
    """Success over tokens per step: a color per model, a line per rule, from K = 1 on."""
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    labels = list(dict.fromkeys(one.model for one in found))
    rules = list(dict.fromkeys(one.rule for one in found if one.rule != "plain"))
    for color, label in enumerate(labels):
        for rule, style in zip(rules, cycle(["--", "-", ":", "-."])):
            line_of = [one for one in found if one.model == label and one.rule in ("plain", rule)]
            axis.errorbar(
                [one.step_tokens for one in line_of],
                [one.success for one in line_of],
                yerr=[one.success_se for one in line_of],
                color=f"C{color}", linestyle=style, marker="o", capsize=2,
                label=plain(f"{label}, {rule}"),
            )  # fmt: skip
    axis.set(xlabel="tokens per step, generated and scored", ylabel="held-out success")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.legend(fontsize=8, handlelength=4)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    with user_errors():
        main()
