"""Every setting of a run: one flat dataclass with the bounds beside each field, and its flags.

The defaults are the paper's for ALFWorld (A.1) and, where it is silent, those of verl-agent, the
code that it builds on; the help texts say which. A run script has presets, dictionaries that
override the defaults: `paper` adds model, schedule and hardware, and the paper's settings for its
benchmark. Without --preset, a run has the script's first preset, `tiny`. The command line overrides
both.
"""

import argparse
import math
import os
import re
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import NamedTuple

from paw_min.base.errors import Parser, UserError, masked
from paw_min.base.files import expanded, is_url

RUN = "run"
ENV = "environment"
MODEL = "policy and prompt"
ROLLOUT = "rollout"
RL = "reinforcement learning"
PAW = "PaW"


def opt(
    group: str, default, help: str, *,
    choices=None, low=None, above=None, high=None, only=(), without=(),
):
    """A dataclass field with a flag.

    Bounds: low <= value <= high, above < value. only: the benchmarks that have this setting;
    without: those that do not.
    """
    metadata = dict(
        group=group, help=help, choices=choices, low=low, above=above, high=high, only=only,
        without=without,
    )
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    env: str = "alfworld"  # the benchmark; set by the run script
    method: str = "paw"  # name of the function that trains on the rows; set by train

    name: str = opt(RUN, "", "run name; default: from the settings that differ from the preset")
    out: str = opt(RUN, "runs", "folder of the run folders")
    seed: int = opt(
        RUN, 0, "seed of training: tasks, sampling, row order", low=-(2**63), high=2**63 - 1,
    )
    updates: int = opt(
        RUN, 150, "RL updates, the outer loop of Alg. 1; 0: only evaluate", low=0, high=999_999,
    )
    eval_every: int = opt(RUN, 5, "updates between evaluations; 0: only first and last", low=0)
    eval_repeats: int = opt(RUN, 1, "episodes per task in an evaluation", low=1, high=1000)
    save_every: int = opt(RUN, 1, "updates between checkpoints; only the latest is kept", low=1)
    precision: str = opt(
        RUN, "auto", "of forward passes; auto: bf16 on a GPU", choices=("auto", "fp32", "bf16")
    )
    track: str = opt(
        RUN, "none", "also log the metrics to a tracker",
        choices=("none", "tensorboard", "wandb"),
    )
    shard: bool = opt(RUN, False, "shard weights and optimizer across ranks (FSDP2); needs vLLM")

    data: str = opt(
        ENV, "", "data folder; default: generated (ALFWorld: $ALFWORLD_DATA)"
    )
    eval_split: str = opt(ENV, "valid_seen", "held-out split")
    eval_tasks: int = opt(ENV, 128, "tasks of the fixed evaluation panel; 0: whole split", low=0)
    human_goals: bool = opt(ENV, False, "use instructions written by people", only=("webshop",))
    n_products: int = opt(ENV, 0, "take the first N products; 0: all", low=0, only=("webshop",))
    retriever: str = opt(
        ENV, "", "server URL or corpus; default: corpus.jsonl in the data folder", only=("search",)
    )
    topk: int = opt(ENV, 3, "passages per query", low=1, only=("search",))
    max_turns: int = opt(ENV, 50, "environment steps per episode, A.1", low=1)
    workers: int = opt(
        ENV, 0, "processes that run environments; 0: this process", low=0,
        without=("search",),  # its searches run in a thread
    )

    model: str = opt(
        MODEL, "", "Hugging Face folder or name; default: the stand-in model",
    )
    prompt: str = opt(
        MODEL, "paper", "the paper's prompt, or a short one", choices=("paper", "compact")
    )
    history_length: int = opt(MODEL, 2, "earlier steps in the prompt, A.1", low=0)
    max_prompt_tokens: int = opt(MODEL, 2048, "prompt limit in tokens, A.1", low=1)
    max_response_tokens: int = opt(MODEL, 512, "response limit in tokens, A.1", low=1)
    max_obs_tokens: int = opt(MODEL, 4096, "tokens of one next observation in the loss", low=1)
    grad_checkpointing: bool = opt(MODEL, False, "recompute activations in the backward pass")
    lora_rank: int = opt(MODEL, 0, "rank of LoRA adapters; 0: full training", low=0, high=4096)

    groups: int = opt(ROLLOUT, 16, "tasks per update, A.1", low=1, high=100_000)
    group_size: int = opt(ROLLOUT, 8, "episodes per task, A.1", low=1, high=10_000)
    sampler: str = opt(
        ROLLOUT, "transformers", "generates the responses", choices=("transformers", "vllm")
    )
    vllm_memory: float = opt(ROLLOUT, 0.4, "vLLM's fraction of the GPU memory", above=0, high=1)
    temperature: float = opt(ROLLOUT, 1.0, "sampling in training, A.1", low=0.01, high=100)
    eval_temperature: float = opt(
        ROLLOUT, 0.4, "sampling in evaluation, A.1; 0: greedy", low=0, high=100
    )

    algo: str = opt(
        RL, "grpo", "advantage estimator; ppo with a preset of the paper: 128 tasks (search: 256), "
        "each played once, A.1", choices=("grpo", "gigpo", "rloo", "ppo"),
    )
    statistics: str = opt(
        RL, "rows", "GRPO, RLOO: what group statistics count", choices=("rows", "trajectories")
    )
    invalid_penalty: float = opt(RL, 0.1, "subtracted for a malformed response, A.1", low=0)
    lr: float = opt(RL, 1e-6, "learning rate of AdamW, constant, A.1", above=0, high=1)
    beta2: float = opt(
        RL, 0.999, "decay of AdamW's second moment; 0.95 in ECHO's text", low=0, high=0.99999
    )
    mini_batch: int = opt(RL, 256, "rows per optimizer step, A.1; 0: all rows", low=0)
    micro_tokens: int = opt(RL, 16384, "tokens per forward pass, padding included", low=1)
    kl_coef: float = opt(RL, 0.01, "k3 KL to the start model; 0: without; verl-agent", low=0)
    entropy_coef: float = opt(RL, 0.001, "entropy bonus; verl-agent", low=0)

    paw: bool = opt(PAW, True, "world-model co-training; off: the RL baseline")
    wm_loss: str = opt(
        PAW, "cmae", "observation loss: Eq. 8, MAE, Eq. 5", choices=("cmae", "mae", "ce")
    )
    rho: float = opt(PAW, 0.2, "confidence threshold of clipped MAE, Eq. 7", above=0, high=1)
    alpha: float = opt(PAW, 0.75, "alpha, Eq. 4: selected fraction", above=0, high=1)
    lambda_g: str = opt(
        PAW, "adaptive", "lambda_g: Eq. 10, or 1", choices=("adaptive", "constant")
    )
    wm_scale: float = opt(PAW, 1.0, "factor of the world-model loss", above=0)
    wm_target: str = opt(
        PAW, "next", "the next observation, or another row's (placebo)",
        choices=("next", "shuffled"),
    )
    wm_separator: str = opt(
        PAW, "turn", "between response and observation: what the chat template puts there, or "
        "nothing", choices=("turn", "none"),
    )

    @property
    def context_length(self) -> int:
        """The most tokens that the sampler sees: a prompt and its response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def row_length(self) -> int:
        """The most tokens of a row in training: with PaW, the next observation comes on top."""
        return self.context_length + (self.max_obs_tokens if self.paw else 0)


# A preset of a method is combined with one of a size: --preset paper echo.
METHOD_PRESETS = {
    # ECHO (arXiv 2605.24517): cross entropy on all observation tokens, constant weight 0.05.
    "echo": dict(wm_loss="ce", alpha=1.0, lambda_g="constant", wm_scale=0.05),
}

# These presets of a size train on published data, with the settings of the paper.
PUBLISHED = ("paper", "24gb", "80gb")

# These may differ on resume: settings of run length, speed, memory and evaluation, and the limit of
# prompts. A higher limit changes no past update, since a run stops at the first prompt over it.
# Where prompts are cut instead, the limit is not free (config_json.differences). Settings that
# change the data or the loss are not free, the response limit and --lr included.
FREE_TO_CHANGE = (
    "out", "updates", "eval_every", "eval_repeats", "save_every", "workers", "track", "shard",
    "grad_checkpointing", "vllm_memory", "micro_tokens", "eval_temperature", "sampler",
    "max_prompt_tokens",
)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings(env: str | None = None) -> list[Field]:
    """The fields that have a flag: of one benchmark, or all."""
    with_flag = [f for f in fields(Config) if "group" in f.metadata]
    if env is None:
        return with_flag

    def has(f) -> bool:
        return env in (f.metadata["only"] or (env,)) and env not in f.metadata["without"]

    return [f for f in with_flag if has(f)]


def names_of(*groups: str) -> set[str]:
    """The settings of these groups, such as PAW."""
    return {f.name for f in settings() if f.metadata["group"] in groups}


# ---- checks ----


def check(cfg: Config) -> None:
    """Raise UserError for settings that cannot work: the value, the reason and the remedy."""
    check_bounds(cfg, settings())
    if cfg.group_size == 1 and cfg.algo != "ppo":
        raise UserError("--group-size 1 leaves nothing to compare an episode with: use 2 or more.")
    if cfg.algo in ("gigpo", "ppo") and cfg.statistics == "trajectories":
        raise UserError(f"--statistics trajectories is not for --algo {cfg.algo}: omit it.")
    if not re.fullmatch(r"(?!\.\.?$)[^/\x00-\x1f\ud800-\udfff]{0,200}", cfg.name):
        shown = cfg.name[:80].encode("unicode_escape").decode()  # no control characters
        raise UserError(f"--name {shown} cannot be a folder in --out: use a plain name.")
    if is_url(cfg.model):
        raise UserError(f"--model {masked(cfg.model)} is a URL: give a folder, or the name of a "
                        "model on the Hugging Face hub.")
    if cfg.method != Config.method and not cfg.paw:
        raise UserError("--no-paw leaves this method no world model: its baseline is the run "
                        "script's.")
    if cfg.shard and cfg.sampler != "vllm":
        raise UserError("--shard leaves no rank a model to generate with: add --sampler vllm.")
    if 0 < cfg.eval_temperature < 0.01:  # far below, logits overflow and every token is the same
        raise UserError(f"--eval-temperature {cfg.eval_temperature} is out of range: it must be 0, "
                        "or from 0.01 to 100.")
    if cfg.sampler == "vllm" and max(cfg.temperature, cfg.eval_temperature) > 2:
        values = f"--temperature {cfg.temperature} or --eval-temperature {cfg.eval_temperature}"
        raise UserError(f"{values} is over 2, vLLM's limit: lower it or use another --sampler.")


def check_bounds(chosen, listed: list[Field]) -> None:
    """Raise UserError unless each of these fields of `chosen` is finite and within its bounds."""
    words = {"low": "at least", "above": "above", "high": "at most"}
    for f in listed:
        value = getattr(chosen, f.name)
        bounds = {key: f.metadata[key] for key in words if f.metadata[key] is not None}
        inside = not isinstance(value, float) or math.isfinite(value)
        inside &= "low" not in bounds or value >= bounds["low"]
        inside &= "above" not in bounds or value > bounds["above"]
        inside &= "high" not in bounds or value <= bounds["high"]
        if not inside:
            texts = [f"{words[key]} {bound}" for key, bound in bounds.items()]
            expected = " and ".join(texts) or "a finite number"
            raise UserError(f"{flag(f.name)} {value!s:.60} is out of range: it must be {expected}.")


# ---- the command line ----


class Choice(NamedTuple):
    """What a command line chooses."""

    size: str  # the preset of a size, such as tiny
    methods: list[str]  # the preset of a method, if there is one
    base: dict[str, object]  # settings of these presets
    given: dict[str, object]  # settings that have a flag on the command line


def parse_args(env: str, presets: dict[str, dict], doc: str, argv=None) -> tuple[Config, str]:
    """Settings of a run script, and its mode: train, eval-only or dry-run."""
    args = vars(make_parser(env, presets, doc).parse_args(argv))
    chosen = choose(env, presets, args)
    cfg = Config(**chosen.base | chosen.given)
    check(cfg)
    complete(cfg, chosen, next(iter(presets)))
    return cfg, args["mode"]


def make_parser(env: str, presets: dict[str, dict], doc: str) -> Parser:
    default = next(iter(presets))
    parser = Parser(usage="%(prog)s [flags]", description=doc)
    # Presets from cli.fork name their own method, so METHOD_PRESETS do not apply.
    of_methods = METHOD_PRESETS if "method" not in presets[default] else {}
    parser.add_argument(
        "--preset", choices=[*presets, *of_methods], nargs="+", default=[default],
        help=f"base settings (default {default})"
        + "".join(f", optionally followed by a method: {name}" for name in of_methods),
    )
    parser.add_argument(
        "--eval-only", dest="mode", action="store_const", const="eval-only", default="train",
        help="evaluate --model or the checkpoint, and exit",
    )
    parser.add_argument(
        "--dry-run", dest="mode", action="store_const", const="dry-run",
        help="check model and data, print the plan, and exit",
    )
    add_settings(parser, presets, settings(env))
    return parser


def choose(env: str, presets: dict[str, dict], args: dict[str, object]) -> Choice:
    """Presets and settings of parsed arguments; UserError for two of a kind."""
    sizes = [name for name in args["preset"] if name in presets]
    methods = [name for name in args["preset"] if name in METHOD_PRESETS]
    for kind, names in (("sizes", sizes), ("methods", methods)):
        if len(names) > 1:
            chosen = " ".join(args["preset"])
            raise UserError(f"--preset {chosen} has {len(names)} {kind}: choose one.")
    size = sizes[0] if sizes else next(iter(presets))
    base = {"env": env} | presets[size]
    for name in methods:
        base |= METHOD_PRESETS[name]
    given = given_settings(args, settings(env))
    if given.get("algo") == "ppo" and size in PUBLISHED:
        # PPO compares no episodes: each is of a task of its own. A.1: 128 tasks for ALFWorld and
        # WebShop. It has no PPO for search, whose 256 tasks stay.
        base |= dict(group_size=1, groups=max(128, base.get("groups", 0)))
    return Choice(size, methods, base, given)


def complete(cfg: Config, chosen: Choice, default: str) -> None:
    """Settings that follow from others: the data, the folder, and the name of the run."""
    if cfg.env == "alfworld" and not cfg.data:
        cfg.data = os.environ.get("ALFWORLD_DATA", "")  # where ALFWorld's own commands look, too
    # A command whose default is `paper` needs no data: it asks an endpoint (paper/prompting).
    if chosen.size in PUBLISHED and chosen.size != default and not cfg.data:
        raise UserError(
            f"--preset {chosen.size} is for published data: give their folder with --data, or use "
            f"--preset {default} for generated ones."
        )
    cfg.out = str(expanded(cfg.out))
    if not cfg.name:
        cfg.name = default_name(cfg, chosen)


def parse_config(env: str, presets: dict[str, dict], doc: str, argv: list[str]) -> Config:
    """parse_args for a command other than a run script; UserError for flags of run scripts only."""
    cfg, mode = parse_args(env, presets, doc, argv)
    if cfg.shard:
        raise UserError("--shard is for the run scripts: omit it.")
    if mode != "train":
        raise UserError(f"--{mode} is for the run scripts: omit it.")
    return cfg


def add_settings(parser: Parser, presets: dict[str, dict], listed: list[Field]) -> None:
    """One flag per field made by `opt`, in groups, with its default and the presets'."""
    groups = {}
    for f in listed:
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        elif f.metadata["choices"]:
            how = dict(choices=f.metadata["choices"])
        else:
            how = dict(type=f.type, metavar=f.type.__name__.upper())
        text = f"{f.metadata['help']} {defaults_of(f, presets)}".strip()
        groups[title].add_argument(flag(f.name), default=MISSING, help=text, **how)


def given_settings(args: dict[str, object], listed: list[Field]) -> dict[str, object]:
    """The values of these flags, without those that were omitted."""
    return {f.name: args[f.name] for f in listed if args[f.name] is not MISSING}


def defaults_of(f, presets: dict[str, dict]) -> str:
    """A setting's default and the presets that have another value, for the help."""
    names = {}  # value -> presets that have it
    for name, preset in presets.items():
        value = preset.get(f.name, f.default)
        if value != f.default:
            names.setdefault(value, []).append(name)
    texts = [f"default {f.default}"] if f.default != "" else []
    texts += [f"{', '.join(having)}: {value}" for value, having in names.items()]
    return f"({'; '.join(texts)})" if texts else ""


def default_name(cfg: Config, chosen: Choice) -> str:
    """ENV-MODEL-METHOD-CHANGES-SEED, for example alfworld-tiny-grpo-paw-rho=0.1-seed0.

    CHANGES are the given settings that differ from the preset and change the numbers of a run,
    except sources of data: a run folder refuses settings that are not its own anyway. Without PaW,
    its settings change none.
    """
    size, methods, base, given = chosen
    model = size
    if given.get("model") or "/" in cfg.model:  # the preset's stand-in is named by the preset
        *parents, model = cfg.model.rstrip("/").split("/")
        if model.startswith("checkpoint-"):  # The name needs its run, too.
            model = "-".join([*parents[-1:], model])
    if size.endswith("gb"):
        model += f"-{size}"  # these presets share their models with `paper`
    method = cfg.algo
    if cfg.method != Config.method:
        method += f"-{cfg.method}".replace("_", "-")
    elif cfg.paw:
        method += f"-{methods[0] if methods else 'paw'}"
    before = asdict(Config()) | base
    elsewhere = {"model", "algo", "paw", "seed", "data", "retriever", *FREE_TO_CHANGE}
    if not cfg.paw:
        elsewhere |= names_of(PAW)
    changed = [key for key in given if key not in elsewhere and given[key] != before[key]]
    changes = [f"{key}={getattr(cfg, key)}".replace("_", "-") for key in changed]
    # If the model has the name of the environment, the name stands once.
    parts = [*dict.fromkeys([cfg.env, model]), method, *changes, f"seed{cfg.seed}"]
    return "-".join(parts).replace("/", "_")
