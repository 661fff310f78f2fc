"""A rollout to analyze: settings, its transitions as text and as tokens.

    python -m research.paper.fig2c SOURCE [--episodes N] [--out FOLDER] [flags]

SOURCE: a benchmark (alfworld, webshop, search), with the settings of its run script, or a run
folder, with its settings and its newest checkpoint. A run folder is only read. flags: any of the
run script, for example --model, --preset, --seed, --max-turns. Without --episodes, the rollout has
the size of a training rollout. --out: folder to write the numbers (JSON) and the figure to.

The tasks are those of the first training update. The responses are drawn with seeds of their own,
so they are not the episodes that training saw.
"""

import json
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paw_min.base.console import progress_bar
from paw_min.base.errors import Parser, UserError
from paw_min.base.files import writing
from paw_min.config import Config, parse_config
from paw_min.envs.benchmarks import BENCHMARKS, NAMES, presets_of
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.rollout import Rollout, rollout
from paw_min.rows import Episode, TokenRow, Transition
from paw_min.running.config_json import read_config
from paw_min.running.runs import newest_checkpoint
from paw_min.running.session import find_tasks, loaded
from paw_min.running.tasks import draw_groups
from world_models.teachers import TEACHERS


@dataclass
class TextRow:
    """A transition with its texts."""

    tokens: Transition | TokenRow  # h_t, a_t, o_{t+1} as ids
    task: str
    observation: str  # o_t
    command: str
    next_observation: str  # o_{t+1}


@dataclass
class Arguments:
    cfg: Config
    episodes: int
    out: Path | None
    teacher: bool  # play the rule-based teacher of the generated data instead of the model


@dataclass
class Played:
    """A rollout and the model that played it."""

    cfg: Config
    out: Path | None
    policy: Policy
    rows: list[TextRow]  # steps of all episodes
    summary: str  # one sentence

    def save(self, name: str, numbers: dict) -> None:
        """Write `numbers` to <out>/<name>-<benchmark>.json, if there is an --out."""
        if not self.out:
            return
        path = self.out / f"{name}-{self.cfg.env}.json"
        with writing(path):
            text = json.dumps({"rollout": self.summary} | numbers, indent=2)
            path.write_text(text + "\n")


def arguments(doc: str, argv: list[str] | None = None, teacher: bool = False) -> Arguments:
    """Read the command line. teacher: whether the analysis has the flag --teacher."""
    others = "All other flags: see the run scripts."
    parser = Parser(description=doc, epilog=others)
    parser.add_argument("source", help="alfworld, webshop, search, or a run folder")
    parser.add_argument("--episodes", type=int, help="episodes to play (default: as in one update)")
    parser.add_argument("--out", type=Path, help="folder for JSON and figure (default: none)")
    if teacher:
        text = "score the steps of the generated data's rule-based teacher instead of the model's"
        parser.add_argument("--teacher", action="store_true", help=text)
    args, flags = parser.parse_known_args(argv)
    if args.source in NAMES:
        env = args.source
        presets = presets_of(env)
    else:
        env, presets = stored_settings(Path(args.source))
    cfg = parse_config(env, presets, doc, flags)
    if args.episodes is None:
        args.episodes = cfg.groups * cfg.group_size
    if args.episodes < 1:
        raise UserError(f"--episodes {args.episodes} is out of range: it must be at least 1.")
    groups = -(-args.episodes // cfg.group_size)  # rounded up: the last may be smaller
    if args.out:
        with writing(f"the folder {args.out}"):
            args.out.mkdir(parents=True, exist_ok=True)
    return Arguments(
        cfg=replace(cfg, groups=groups),
        episodes=args.episodes,
        out=args.out,
        teacher=teacher and args.teacher,
    )


def stored_settings(folder: Path) -> tuple[str, dict[str, dict]]:
    """Benchmark and settings of a run folder, with its newest checkpoint as the model."""
    path = folder / "config.json"
    if not path.is_file():
        names = ", ".join(NAMES)
        raise UserError(f"{folder} is neither a run folder (no config.json) nor one of {names}.")
    stored = asdict(read_config(path))
    checkpoint = newest_checkpoint(folder) or stored["model"]
    return stored["env"], {"run": stored | {"model": str(checkpoint)}}


def collect(
    cfg: Config, policy: Policy, sampler, episodes: int, update: int = 0
) -> Rollout:
    """Play this many episodes of the training tasks, in groups as in training.

    update: whose seeds the responses have. Training counts from 1, so 0 gives other responses.
    """
    tasks = find_tasks(cfg)
    drawn = draw_groups(tasks.train, cfg.groups, cfg.seed, 0)
    played = [drawn[number // cfg.group_size] for number in range(episodes)]
    with closing(tasks.make_pool(episodes)) as pool, sampler.sync(policy):
        return rollout(cfg, policy, sampler, pool, played, (cfg.seed, update))


def text_rows(episodes: list[Episode]) -> list[TextRow]:
    return [
        TextRow(t, episode.task, t.observation, t.command, t.next_observation)
        for episode in episodes
        for t in episode.transitions
    ]


def teacher_rows(cfg: Config, policy: Policy, episodes: int) -> list[TextRow]:
    """Steps of the teacher on generated data, with h_t, a_t and o_{t+1} as tokens of this model."""
    teacher = TEACHERS[cfg.env]
    benchmark = BENCHMARKS[cfg.env]
    games = teacher.training_tasks()
    if episodes > len(games):
        raise UserError(f"--episodes {episodes} is over {len(games)}, the number of tasks.")
    tasks = draw_groups(games, episodes, cfg.seed, 0)
    rows = []
    for step in teacher.demonstrations(tasks, cfg.seed, haste=0.0, episodes=1):
        prompt = benchmark.prompts[cfg.prompt](step.context, cfg.history_length)
        response_ids = policy.encode_response(step.response)
        obs_ids = policy.encode(step.observation)[: cfg.max_obs_tokens]
        separator_ids = policy.separator(response_ids) if cfg.wm_separator == "turn" else []
        tokens = TokenRow(
            policy.encode_chat(prompt), response_ids, obs_ids, separator_ids=separator_ids
        )
        row = TextRow(
            tokens=tokens,
            task=step.task,
            observation=step.context.observation,
            command=benchmark.parse(step.response).text,
            next_observation=step.observation,
        )
        rows.append(row)
    return rows


def play(args: Arguments) -> Played:
    """Load the model, and play with it, or let the teacher play."""
    cfg = args.cfg
    with loaded(cfg) as (policy, sampler):
        if args.teacher:
            rows = teacher_rows(cfg, policy, args.episodes)
        else:
            played = collect(cfg, policy, sampler, args.episodes).episodes
            rows = text_rows([episode for episode in played if not episode.failed])
    if not rows:
        raise UserError("no episode could be played: check the data with --dry-run of the script.")
    who = " (the teacher's)" if args.teacher else ""
    summary = f"{cfg.env}, {cfg.model or 'stand-in model'}: {len(rows)} transitions{who} of "
    summary += f"{args.episodes} episodes, seed {cfg.seed}."
    return Played(cfg, args.out, policy, rows, summary)


@torch.no_grad()
def observation_logps(cfg: Config, policy: Policy, rows: list[TokenRow]) -> list[Tensor]:
    """log p of each token of o_{t+1} given h_t, a_t and the tokens before -> N x (|o|,), nats."""
    logps = [torch.empty(0)] * len(rows)
    bar = progress_bar(len(rows), "score", "row")
    everything = list(range(len(rows)))
    with_obs = [True] * len(rows)
    for batch in micro_batches(policy, rows, everything, with_obs, cfg.micro_tokens):
        logp, _ = policy(batch)  # (B, S)
        for number, row, mask in zip(batch.index, logp, batch.obs_mask):
            logps[number] = row[mask].cpu()  # (|o|,)
        bar.update(len(batch.index))
    bar.close()
    return logps


def shorten(text: str, n: int) -> str:
    """A text cut to n words, half from its beginning, half from its end."""
    words = text.split()
    if len(words) > n:
        half = n // 2
        words = [*words[:half], "...", *words[-half:]]
    return " ".join(words)
