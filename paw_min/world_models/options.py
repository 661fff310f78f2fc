"""The command line of word2world.py."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from paw_min.base.distributed import refuse_ranks
from paw_min.base.errors import Parser, UserError
from paw_min.base.files import expanded
from paw_min.config import FREE_IN_STAGES, Config, flag, parse_args
from paw_min.running.presets import presets_of
from paw_min.running.stages import Pieces
from paw_min.running.stored import public
from paw_min.world_models.players import AGENTS

ENVS = ("alfworld", "webshop", "textworld")
MAX_WIDTH = 4096  # of a model from scratch; far more than fits the data
COMMANDS = ("collect", "train", "fidelity", "consistency", "verify", "imitate")


@dataclass(frozen=True)
class Job:
    """One command: its flags, which `parse` explains, and the settings of the benchmark."""

    cfg: Config
    line: str  # the whole command
    command: str
    env: str
    out: Path
    # Who plays, what, and where.
    agents: list[str]
    slips: float
    split: str
    episodes: int
    world_model: str
    shots: int | None  # None: a trained world model
    examples: list[Path]
    ground: bool
    answer_tokens: int
    budgets: list[int]
    # What is trained, and how.
    trajectories: list[Path]
    start: str
    limit: int
    width: int
    context: int
    wins: int
    epochs: int
    batch: int
    lr: float

    def pieces(self) -> Pieces:
        """What is complete of this command. What is free to change in a run is so here, too."""
        cfg = {k: v for k, v in public(self.cfg).items() if k not in ("name", *FREE_IN_STAGES)}
        names = [f.name for f in fields(Job) if f.name not in ("cfg", "line", "out")]
        own = {name: str(getattr(self, name)) for name in names}
        return Pieces(self.out / f"{self.command}.unfinished", cfg | own)


def parse(doc: str, argv: list[str]) -> Job:
    """Read the command line; UserError for flags that are out of range or do not fit."""
    parser = Parser(description=doc, allow_abbrev=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("env", choices=ENVS)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--agents", nargs="+", choices=AGENTS, default=["model"], help="who plays (model)")
    add("--slips", type=float, default=0.0, help="share of the teacher's steps that are random (0)")
    add("--split", choices=("train", "held_out"), default="train", help="collect: tasks (train)")
    add("--episodes", type=int, default=0, help="collect: 0 is one per task (0)")
    text = "folder of a trained one, or with --shots any model; collect: play in it"
    add("--world-model", default="", help=text)
    text = "prompt --world-model, which is not trained, with so many examples"
    add("--shots", type=int, choices=(0, 3), help=text)
    text = "files of collect --split train, for the examples of --shots 3"
    add("--examples", type=Path, nargs="+", default=[], help=text)
    add("--ground", action="store_true", help="webshop: the first results of a search are real")
    add("--answer-tokens", type=int, help="longest answer (512; fidelity: 2000)")
    text = "verify: most checks per episode (0 2 4 10)"
    add("--budgets", type=int, nargs="+", default=[0, 2, 4, 10], help=text)
    add("--trajectories", type=Path, nargs="+", default=[], help="files of collect")
    add("--start", default="", help="what train starts from, as --model (default: from scratch)")
    add("--limit", type=int, default=0, help="train: number of trajectories; 0: all (0)")
    add("--width", type=int, default=128, help="of a model from scratch, a multiple of 32 (128)")
    add("--context", type=int, default=12288, help="train: most tokens of a chat (12288)")
    add("--wins", type=int, default=0, help="imitate: won trajectories of each file; 0: all (0)")
    add("--epochs", type=int, default=5, help="train, imitate: passes over the data (5)")
    add("--batch", type=int, default=128, help="trajectories, or steps, per gradient step (128)")
    add("--lr", type=float, default=1e-5, help="learning rate (1e-5)")
    args, flags = parser.parse_known_args(argv)
    args.out = expanded(args.out)
    if args.answer_tokens is None:  # the paper's
        args.answer_tokens = 2000 if args.command == "fidelity" else 512
    cfg, _ = parse_args(args.env, presets_of(args.env), doc, ["--max-turns", "50", *flags])
    if cfg.shard:
        raise UserError("--shard is for the run scripts: omit it.")
    if cfg.lora_rank and args.command in ("train", "imitate"):
        raise UserError(f"--lora-rank {cfg.lora_rank}: {args.command} trains all weights; use "
                        "--lora-rank 0.")  # fmt: skip
    refuse_ranks("word2world")
    line = shlex.join(["word2world", *argv])
    job = Job(cfg=cfg, line=line, **vars(args))
    check(job)
    return job


def check_width(name: str, width: int) -> None:
    if width % 32 or not 32 <= width <= MAX_WIDTH:
        raise UserError(f"{name} {width} is not a multiple of 32 up to {MAX_WIDTH}: use 64, 128 "
                        "and so on.")  # fmt: skip


def check(job: Job) -> None:
    """UserError for flags that cannot work together, or are out of range."""
    needs = {
        "train": "trajectories", "imitate": "trajectories", "fidelity": "trajectories",
        "consistency": "world_model", "verify": "world_model",
    }  # fmt: skip
    needed = [needs[job.command]] if job.command in needs else []
    if job.command == "fidelity":
        needed.append("world_model")
    for name in needed:
        if not getattr(job, name):
            raise UserError(f"{job.command} needs {flag(name)}: add it.")
    for name in ("episodes", "limit", "wins"):
        if getattr(job, name) < 0:
            raise UserError(f"{flag(name)} {getattr(job, name)} is out of range: 0 or more.")
    for name in ("answer_tokens", "context", "epochs", "batch"):
        if getattr(job, name) < 1:
            raise UserError(f"{flag(name)} {getattr(job, name)} is out of range: 1 or more.")
    if len(set(job.agents)) < len(job.agents):
        raise UserError(f"--agents {' '.join(job.agents)}: name each once.")
    if min(job.budgets) < 0:
        raise UserError(f"--budgets {min(job.budgets)} is out of range: 0 or more.")
    if not 0 <= job.slips <= 1:
        raise UserError(f"--slips {job.slips} is out of range: 0 to 1.")
    if not 0 < job.lr <= 1:
        raise UserError(f"--lr {job.lr} is out of range: above 0, at most 1.")
    check_width("--width", job.width)
    if job.env != "webshop" and (job.ground or job.command == "verify"):
        what = "verify" if job.command == "verify" else "--ground"
        raise UserError(f"{what} is for webshop: {job.env} has no search, and no "
                        "purchase.")
    if job.shots is not None and not job.world_model:
        raise UserError(f"--shots {job.shots} needs --world-model: add it.")
    if job.shots == 3 and not job.examples:
        raise UserError("--shots 3 needs --examples: add it.")
    if job.examples and job.shots != 3:
        raise UserError("--examples is for --shots 3: add that, or omit it.")
    if job.ground and not job.world_model:
        raise UserError("--ground needs --world-model: without one, all pages are real.")
