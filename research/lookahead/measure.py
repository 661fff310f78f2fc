"""A policy as its own world model: does it help to look ahead before acting?

    python -m research.lookahead.measure ENV --models LABEL=MODEL ... --out FOLDER
        [--k 1 2 4 8] [--world-model FOLDER [--veto-at P ...]] [--replays N]
        [flags of the run script]

Each model plays the held-out panel with K candidate responses per step (samplers.py):

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

Each line is stored in a file of its own when it is measured. Rerun the same command to resume, or
with other --models, --k or --veto-at for other lines. All lines of the command are written to
lookahead-ENV.json; seeds.py draws them.

Not in the paper. What it found: research/lookahead/README.md.
"""

import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paw_min.base.errors import Parser, UserError, command_line, user_errors
from paw_min.base.files import replace_text
from paw_min.base.seeds import generator, request_seed
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Pool, Tasks
from paw_min.metrics import mean
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import Episode
from paw_min.running.evaluate import evaluate
from paw_min.running.runs import newest_checkpoint
from paw_min.running.session import (
    PANEL_SLOTS,
    check_tokenizer,
    find_tasks,
    loaded,
    start_model,
)
from paw_min.running.stages import stage
from paw_min.world_models.training import load_world_model
from paw_min.world_models.trajectories import Recorder
from paw_min.world_models.world_model import WorldModel
from research.lookahead.samplers import Candidate, Drawn, LookaheadSampler, WorldModelSampler
from research.outcomes import has_no_effect
from research.paper.table import markdown_table
from research.paper.transitions import arguments, text_rows


class Model(NamedTuple):
    label: str
    folder: str


class Rule(NamedTuple):
    kind: str  # plain, likelihood, veto or world model
    veto_at: float | None = None  # of a world model

    @property
    def name(self) -> str:
        return self.kind if self.veto_at is None else f"{self.kind}, p >= {self.veto_at:g}"


@dataclass
class Played:
    """One model with one rule and one K on the panel. None: the rule makes no prediction.

    Costs are means over the steps. Tokens of the prompt are not counted.
    """

    model: str
    rule: str  # Rule.name
    k: int
    games: int
    success: float
    success_se: float  # standard error over the games
    no_effect: float  # share of the steps
    vetoed: float | None  # share of the candidates
    precision: float | None  # share of the replayed vetoes that were right
    base_rate: float | None  # share of replayed candidates, drawn from all, without an effect
    replays: int  # vetoes replayed
    step_generated: float  # tokens of all candidates
    step_scored: float  # tokens of separator and text
    step_passes: float  # of one sequence: one per generated token and one per prediction
    episode_tokens: float  # generated and scored

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

    cfg: Config
    out: Path
    models: list[Model]
    ks: list[int]  # rising
    rules: list[Rule]  # for K above 1
    world_model: WorldModel | None
    replays: int
    settings: list[str]  # what a line depends on, besides its model, rule and K


def main(argv: list[str] | None = None) -> None:
    plan = parse(sys.argv[1:] if argv is None else argv)
    tasks = find_tasks(plan.cfg)
    found = []
    with closing(tasks.make_pool(min(PANEL_SLOTS, len(tasks.held_out)))) as pool:
        for model in plan.models:
            # The folder is that of a checkpoint: a run that was trained further has other lines.
            command = command_line([*plan.settings, "--models", "=".join(model)])
            with loaded(plan.cfg, model.folder) as (policy, sampler):
                drawn = {}
                for k in plan.ks:
                    for rule in plan.rules if k > 1 else [Rule("plain")]:
                        name = f"{model.label}, {rule.name}, {k}.json".replace("/", "_")
                        make = partial(
                            played, plan, model.label, rule, k, policy, sampler, drawn, pool, tasks
                        )
                        stored = stage(plan.out / name, {"command": command}, make)
                        found.append(Played(**stored["played"]))
                        print(markdown_table(HEADER, [cells(found[-1])]), flush=True)
    path = plan.out / f"lookahead-{plan.cfg.env}.json"
    print(f"\n{table(found)}")
    replace_text(path, json.dumps([asdict(one) for one in found], indent=1) + "\n")


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
    if not args.out:
        raise UserError("--out FOLDER is missing: add it.")
    if own.replays < 1:
        raise UserError(f"--replays {own.replays} is out of range: it must be at least 1.")
    if min(own.k) < 1:
        raise UserError(f"--k {min(own.k)} is out of range: it must be at least 1.")
    if max(own.k) > 1 and args.cfg.eval_temperature == 0:
        raise UserError(f"--k {max(own.k)} draws equal candidates with --eval-temperature 0: raise "
                        "the temperature.")
    for threshold in own.veto_at:
        if not 0 < threshold <= 1:
            raise UserError(f"--veto-at {threshold:g} is out of range: it must be above 0 and at "
                            "most 1.")
        if not own.world_model:
            raise UserError("--veto-at needs --world-model.")
    models = [find_model(args.cfg, text) for text in own.models]
    labels = [model.label for model in models]
    if len(set(labels)) < len(labels):
        raise UserError(f"--models has the labels {', '.join(labels)}: use different ones.")
    rules = [Rule("likelihood"), Rule("veto")]
    world_model = None
    if own.world_model:
        world_model = load_world_model(own.world_model, args.cfg)
        thresholds = [None, *sorted(set(own.veto_at))]
        rules += [Rule("world model", threshold) for threshold in thresholds]
    return Plan(
        cfg=args.cfg,
        out=args.out,
        models=models,
        ks=sorted(set(own.k)),
        rules=rules,
        world_model=world_model,
        replays=own.replays,
        settings=[*others, "--replays", str(own.replays), "--world-model", str(own.world_model)],
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


def played(
    plan: Plan, label: str, rule: Rule, k: int, policy: Policy, sampler: HFSampler | VLLMSampler,
    drawn: Drawn, pool: Pool, tasks: Tasks,
) -> dict:
    """Evaluate one model with one rule and one K, and replay some of its candidates.

    -> {"played": a Played}, for its file.
    """
    cfg = plan.cfg
    if rule.kind == "world model":
        pool = Recorder(cfg.env, pool)
        looking = WorldModelSampler(
            cfg, sampler, k, plan.world_model, pool, rule.veto_at, drawn
        )
    else:
        looking = LookaheadSampler(cfg, sampler, k, rule.kind == "veto", drawn)
    panel = evaluate(cfg, policy, looking, pool, tasks.held_out)
    episodes = [episode for episode in panel.episodes if not episode.failed]
    rows = text_rows(cfg, episodes)
    cost = costs(list(looking.candidates.values()))
    one = Played(
        model=label, rule=rule.name, k=k, games=len(episodes),
        success=panel.metrics["eval_success"],
        success_se=panel.metrics["eval_success_se"],
        no_effect=mean([has_no_effect(cfg, row) for row in rows]),
        vetoed=None, precision=None, base_rate=None, replays=0,
        step_generated=cost.generated,
        step_scored=cost.scored,
        step_passes=cost.passes,
        episode_tokens=(cost.generated + cost.scored) * len(rows) / len(episodes),
    )
    if rule.kind in ("veto", "world model"):
        every = trials(cfg, policy, episodes, looking.candidates)
        vetoed = [trial for trial in every if trial.unchanged]
        one.vetoed = cost.vetoed
        one.base_rate = share_without_effect(cfg, pool, every, plan.replays)
        one.precision = share_without_effect(cfg, pool, vetoed, plan.replays)
        one.replays = min(plan.replays, len(vetoed))
    return {"played": asdict(one)}


class Costs(NamedTuple):
    """Of a step, averaged over the steps (Played explains them); the share of vetoes."""

    vetoed: float
    generated: float
    scored: float
    passes: float


def costs(steps: list[list[Candidate]]) -> Costs:
    """Of these steps, from the candidates of each."""
    candidates = [candidate for step in steps for candidate in step]
    generated = sum(len(candidate.response.ids) for candidate in candidates)
    predictions = sum(candidate.scored > 0 for candidate in candidates)
    return Costs(
        vetoed=mean([candidate.unchanged for candidate in candidates]),
        generated=generated / len(steps),
        scored=sum(candidate.scored for candidate in candidates) / len(steps),
        passes=(generated + predictions) / len(steps),
    )


def trials(
    cfg: Config, policy: Policy, episodes: list[Episode], candidates: dict[int, list[Candidate]]
) -> list[Trial]:
    """All candidates of these episodes with their states."""
    parse = BENCHMARKS[cfg.env].parse
    found = []
    for episode in episodes:
        rows = text_rows(cfg, [episode])
        commands = [row.command for row in rows]
        for turn, row in enumerate(rows):
            seed = request_seed(-1, episode.trajectory, turn)  # that of evaluate
            for one in candidates[seed]:
                command = parse(policy.decode(one.response.ids)).text
                before = commands[:turn]
                found.append(Trial(row.task, before, row.observation, command, one.unchanged))
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


def cells(one: Played) -> list:
    return [
        one.model, one.rule, one.k, one.success, one.success_se, one.no_effect, one.vetoed,
        one.precision, one.base_rate, f"{one.step_tokens:.1f}", f"{one.step_scored:.1f}",
        f"{one.episode_tokens:.0f}", f"{one.step_passes:.1f}",
    ]


def table(found: list[Played]) -> str:
    return markdown_table(HEADER, [cells(one) for one in found])


if __name__ == "__main__":
    with user_errors():
        main()
