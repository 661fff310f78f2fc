"""What the command line of Word2World asks for: settings, and flags that do not fit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paw_min.base.errors import UserError
from paw_min.base.files import expanded
from paw_min.base.flags import Parser, add_flags, check_bounds, flag, sections
from paw_min.cli import parse_config
from paw_min.config import Config
from paw_min.envs.benchmarks import presets_of
from world_models.stage import command_line, refuse_ranks

ENVS = ("alfworld", "webshop")
MAX_WIDTH = 4096  # widest model from scratch; far more than fits the data
# Each command with the settings that it cannot do without.
COMMANDS = {
    "collect": (),
    "train": ("trajectories",),
    "fidelity": ("trajectories", "world_model"),
    "consistency": ("world_model",),
    "verify": ("world_model",),
    "imitate": ("trajectories",),
}
# Settings of one command, which would change nothing in another.
OF_ONE = {
    "split": "collect", "episodes": "collect", "start": "train", "limit": "train",
    "width": "train", "context": "train", "wins": "imitate", "budgets": "verify",
}


@dataclass(frozen=True)
class Word2WorldSettings:
    """Word2World's settings beyond those of the benchmark; Table 7 and section 7.1."""

    # ---- Word2World: who plays, what, and where ----
    agents: tuple[Literal["model", "teacher", "random"], ...] = ("model",)  # who plays
    slips: float = 0.0  # share of the teacher's steps that are random
    split: Literal["train", "held_out"] = "train"  # collect: tasks
    episodes: int = 0  # collect: number of episodes; 0: one per task
    world_model: str = ""  # folder of a trained one, or with --shots any model
    shots: Literal["", "0", "3"] = ""  # ask --world-model untrained, with so many examples
    examples: tuple[Path, ...] = ()  # files of collect --split train, for --shots 3
    budgets: tuple[int, ...] = (0, 2, 4, 10)  # verify: most checks per episode
    answer_tokens: int = 0  # longest answer; 0: the paper's 512, for fidelity 2000

    # ---- Word2World: what is trained, and how ----
    trajectories: tuple[Path, ...] = ()  # files of collect
    start: str = ""  # what train starts from, as --model; default: from scratch
    limit: int = 0  # train: number of trajectories; 0: all
    width: int = 128  # train: of a model from scratch, a multiple of 32
    context: int = 12288  # train: most tokens of a chat
    wins: int = 0  # imitate: won trajectories of each file; 0: all
    epochs: int = 5  # train, imitate: passes over the data
    batch: int = 128  # trajectories, or steps, per gradient step
    lr: float = 1e-5  # learning rate


FLAGS = [name for names in sections(Word2WorldSettings).values() for name in names]
BOUNDS = {
    "[0, inf)": ("episodes", "answer_tokens", "limit", "wins"),
    "[1, inf)": ("context", "epochs", "batch"),
    "[0, 1]": ("slips",),
    "(0, 1]": ("lr",),
}


@dataclass(frozen=True)
class Word2WorldJob:
    """What the command line asks for."""

    command: str
    line: str  # the whole command
    cfg: Config  # settings of the benchmark and the agent
    settings: Word2WorldSettings
    out: Path


def parse(doc: str, argv: list[str]) -> Word2WorldJob:
    """Read the command line; UserError for flags that are out of range or do not fit."""
    parser = Parser(description=doc)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("env", help=f"{', '.join(ENVS)}, or a module with an environment")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    add_flags(parser, Word2WorldSettings)
    args, flags = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(args).items() if name in FLAGS}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    for name in given:
        if OF_ONE.get(name, args.command) != args.command:
            raise UserError(f"{flag(name)} is for {OF_ONE[name]}, not for {args.command}: omit it.")
    settings = Word2WorldSettings(**given)
    if not settings.answer_tokens:
        longest = 2000 if args.command == "fidelity" else 512
        settings = replace(settings, answer_tokens=longest)
    if args.env not in ENVS and "." not in args.env:
        raise UserError(f"{args.env} is none of {', '.join(ENVS)}, and no module with an "
                        "environment, such as examples.locks.")
    if args.command == "train" and any(word.partition("=")[0] == "--model" for word in flags):
        raise UserError("--model is the agent, and train has none: name what it starts from with "
                        "--start.")
    presets = presets_of(args.env)
    env = args.env.rpartition(".")[2]  # a module has the name of its benchmark
    cfg = parse_config(env, presets, doc, ["--max-turns", "50", *flags])
    refuse_ranks("word2world")
    check(args.command, settings, cfg)
    return Word2WorldJob(
        command=args.command,
        line=command_line(["word2world", *argv]),
        cfg=cfg,
        settings=settings,
        out=expanded(args.out),
    )


def check(command: str, settings: Word2WorldSettings, cfg: Config) -> None:
    """UserError for flags that cannot work together, or are out of range."""
    check_bounds(settings, BOUNDS)
    if min(settings.budgets) < 0:
        raise UserError(f"--budgets {min(settings.budgets)} is out of range: it must be at least "
                        "0.")
    if settings.width % 32 or not 32 <= settings.width <= MAX_WIDTH:
        raise UserError(f"--width {settings.width} is not a multiple of 32 up to {MAX_WIDTH}: use "
                        "64, 128 and so on.")
    if cfg.lora_rank and command in ("train", "imitate"):
        raise UserError(f"--lora-rank {cfg.lora_rank}: {command} trains all weights; use "
                        "--lora-rank 0.")
    for name in COMMANDS[command]:
        if not getattr(settings, name):
            raise UserError(f"{command} needs {flag(name)}: add it.")
    if cfg.env != "webshop" and command == "verify":
        raise UserError(f"verify is for webshop: {cfg.env} has no purchase.")
    if len(set(settings.agents)) < len(settings.agents):
        raise UserError(f"--agents {' '.join(settings.agents)} has one twice: give each once.")
    if settings.shots and not settings.world_model:
        raise UserError(f"--shots {settings.shots} needs --world-model: add it.")
    if (settings.shots == "3") != bool(settings.examples):
        raise UserError("--shots 3 needs --examples, and only this: give both or none.")
    if settings.world_model and "world_model" not in COMMANDS[command]:
        raise UserError(f"--world-model: {command} asks none; omit it.")
