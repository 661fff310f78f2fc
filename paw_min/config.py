"""Every setting of a run: one flat dataclass with the bounds beside each field, and its flags.

A run script has presets: dictionaries that override the defaults below; the command line overrides
both. "A.1" marks the paper's settings, "verl-agent" those of the code that it builds on.
"""

import argparse
import math
import re
from dataclasses import MISSING, asdict, dataclass, field, fields

from paw_min.running.errors import Parser, UserError, masked

RUN, ENV, MODEL, ROLLOUT = "run", "environment", "policy and prompt", "rollout"
RL, PAW = "reinforcement learning", "PaW"


def opt(group: str, default, help: str, *, low=None, above=None, high=None, only=()):
    """A field with its help. A tuple as default: the choices, of which the first is the default.

    Bounds: low <= value <= high, above < value. only: the benchmarks that have this setting.
    """
    choices, default = (default, default[0]) if isinstance(default, tuple) else (None, default)
    bounds = dict(low=low, above=above, high=high)
    metadata = bounds | dict(group=group, help=help, choices=choices, only=only)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    env: str = "alfworld"  # the benchmark; set by the run script
    name: str = opt(RUN, "", "run name; default: from the settings that differ from the preset")
    out: str = opt(RUN, "runs", "folder of the run folders")
    seed: int = opt(RUN, 0, "seed of tasks, sampling and row order")
    updates: int = opt(RUN, 150, "RL updates, the outer loop of Alg. 1", low=0, high=999_999)
    eval_seed: int = opt(RUN, 0, "seed of the sampling in evaluations; the tasks stay the same")
    eval_repeats: int = opt(RUN, 1, "episodes per task in an evaluation", low=1, high=1000)
    eval_every: int = opt(RUN, 5, "updates between evaluations; 0: only first and last", low=0)
    save_every: int = opt(RUN, 1, "updates between checkpoints; only the latest is kept", low=1)
    device: str = opt(RUN, "auto", "cpu, cuda, cuda:0 ...; auto: cuda if available")
    threads: int = opt(RUN, 1, "CPU threads of torch, at most the number of idle cores", low=1,
                       high=1024)
    precision: str = opt(RUN, ("auto", "fp32", "bf16"), "precision of passes; auto: bf16 on a GPU")
    track: str = opt(RUN, ("none", "tensorboard", "wandb"), "also log the metrics to a tracker")
    shard: bool = opt(RUN, False, "shard weights and optimizer across ranks (FSDP2); needs vLLM")
    data: str = opt(ENV, "", "data folder; default: generated (ALFWorld: $ALFWORLD_DATA)")
    world: str = opt(ENV, ("home", "changed"), "generated games: which receptacles clean, heat and "
                     "cool, ALFWorld's or others", only=("alfworld",))
    train_split: str = opt(ENV, "train", "training split")
    eval_split: str = opt(ENV, "valid_seen", "held-out split")
    eval_tasks: int = opt(ENV, 128, "tasks of the fixed evaluation panel; 0: whole split", low=0)
    human_goals: bool = opt(ENV, False, "use instructions written by people", only=("webshop",))
    n_products: int = opt(ENV, 0, "take the first N products; 0: all", low=0, only=("webshop",))
    retriever: str = opt(ENV, "", "server URL or corpus; default: corpus.jsonl in the data folder",
                         only=("search",))
    encoder: str = opt(ENV, "", "E5 encoder for a corpus; default: BM25", only=("search",))
    topk: int = opt(ENV, 3, "passages per query", low=1, only=("search",))
    max_turns: int = opt(ENV, 50, "environment steps per episode, A.1", low=1)
    workers: int = opt(ENV, 0, "processes that run environments; 0: this process", low=0,
                       only=("alfworld", "webshop"))
    env_timeout: float = opt(ENV, 60.0, "seconds without an answer before a worker is restarted",
                             above=0, high=86_400, only=("alfworld", "webshop"))
    model: str = opt(MODEL, "", "Hugging Face folder or name; default: the stand-in model; "
                     "sparse: one that almost never wins; smollm2: a pretrained one")
    prompt: str = opt(MODEL, ("paper", "compact"), "the paper's prompt, or a short one")
    history_length: int = opt(MODEL, 2, "earlier steps in the prompt, A.1", low=0)
    max_prompt_tokens: int = opt(MODEL, 2048, "prompt limit in tokens, A.1", low=1)
    prompt_overflow: str = opt(MODEL, ("error", "cut"), "prompts over the limit: stop or cut")
    max_response_tokens: int = opt(MODEL, 512, "response limit in tokens, A.1", low=1)
    max_obs_tokens: int = opt(MODEL, 4096, "tokens of one next observation in the loss", low=1)
    grad_checkpointing: bool = opt(MODEL, False, "recompute activations in the backward pass")
    attention: str = opt(MODEL, ("sdpa", "flash_attention_2"), "kernel; flash packs rows")
    lora_rank: int = opt(MODEL, 0, "rank of LoRA adapters; 0: full training", low=0, high=4096)
    ref_offload: bool = opt(MODEL, False, "keep the reference model in CPU memory between passes")
    groups: int = opt(ROLLOUT, 16, "tasks per update, A.1", low=1, high=100_000)
    group_size: int = opt(ROLLOUT, 8, "episodes per task, A.1", low=1, high=10_000)
    sampler: str = opt(ROLLOUT, ("transformers", "vllm"), "generates the responses")
    vllm_memory: float = opt(ROLLOUT, 0.4, "vLLM's fraction of the GPU memory", above=0, high=1)
    temperature: float = opt(ROLLOUT, 1.0, "sampling in training, A.1", low=0.01, high=100)
    eval_temperature: float = opt(ROLLOUT, 0.4, "sampling in evaluation, A.1; 0: greedy", low=0)
    algo: str = opt(RL, ("grpo", "gigpo", "rloo", "ppo"), "advantage estimator")
    normalize: str = opt(RL, ("std", "mean"), "GRPO, GiGPO: divide by the group's std, or not")
    statistics: str = opt(RL, ("rows", "trajectories"), "GRPO, RLOO: unit of group statistics")
    gamma: float = opt(RL, 0.95, "GiGPO discount of step returns, A.1", low=0, high=1)
    step_weight: float = opt(RL, 1.0, "GiGPO weight of the step advantage (omega), A.1")
    similarity: float = opt(RL, 0.0, "GiGPO: merge anchors this similar; 0: equal", low=0, high=1)
    gae_lambda: float = opt(RL, 1.0, "PPO: lambda of GAE; verl-agent", low=0, high=1)
    critic_lr: float = opt(RL, 0.0, "PPO: critic's rate; 0: ten times --lr, A.1", low=0, high=1)
    invalid_penalty: float = opt(RL, 0.1, "subtracted for a malformed response, A.1", low=0)
    lr: float = opt(RL, 1e-6, "learning rate of AdamW, constant, A.1", above=0, high=1)
    weight_decay: float = opt(RL, 0.01, "weight decay of AdamW; verl-agent", low=0)
    grad_clip: float = opt(RL, 1.0, "maximum gradient norm; verl-agent", above=0)
    mini_batch: int = opt(RL, 256, "rows per optimizer step, A.1; 0: all rows", low=0)
    micro_tokens: int = opt(RL, 16384, "tokens per forward pass, padding included", low=1)
    old_logp: str = opt(RL, ("recomputed", "sampler"), "old log-probs: the trainer's or sampler's")
    is_cap: float = opt(RL, 2.0, "maximum weight with --old-logp sampler", low=1, high=1000)
    clip: float = opt(RL, 0.2, "PPO ratio clip; verl-agent", above=0, high=1)
    dual_clip: float = opt(RL, 3.0, "loss bound for negative advantages; verl-agent", above=1)
    kl_coef: float = opt(RL, 0.01, "k3 KL to the start model; 0: without; verl-agent", low=0)
    entropy_coef: float = opt(RL, 0.001, "entropy bonus; verl-agent", low=0)
    paw: bool = opt(PAW, True, "world-model co-training; off: the RL baseline")
    wm_loss: str = opt(PAW, ("cmae", "mae", "ce"), "observation loss: Eq. 8, 6 or 5")
    rho: float = opt(PAW, 0.2, "confidence threshold of clipped MAE, Eq. 7", above=0, high=1)
    select_ratio: float = opt(PAW, 0.75, "alpha, Eq. 4: selected fraction", above=0, high=1)
    entropy: str = opt(PAW, ("full", "sampled"), "entropy in Eq. 4: full, or of the sampled token")
    wm_weight: str = opt(PAW, ("adaptive", "constant"), "lambda_g: Eq. 10, or 1")
    wm_scale: float = opt(PAW, 1.0, "factor of the world-model loss; 1 in Eq. 11", above=0)
    wm_target: str = opt(PAW, ("next", "shuffled"), "next observation, or another row's (placebo)")
    wm_steps: int = opt(PAW, 1, "next observations to predict, given the actions between", low=1)
    dedup: bool = opt(PAW, False, "Eq. 4: count equal transitions of an update once")
    conflict_every: int = opt(PAW, 0, "updates between gradient-conflict logs; 0: never", low=0)
    r_max: float = opt(PAW, 10.0, "highest possible episode return, A.1", above=0)


# Presets of the method, on top of one of the size (--preset paper echo).
METHODS = {
    # ECHO (arXiv 2605.24517): cross entropy on all observation tokens, constant weight 0.05.
    "echo": dict(wm_loss="ce", select_ratio=1.0, wm_weight="constant", wm_scale=0.05),
}

# Settings that may differ on resume: of run length, speed, memory and evaluation.
FREE_TO_CHANGE = (
    "out", "updates", "eval_every", "eval_seed", "eval_repeats", "save_every", "workers",
    "env_timeout", "device", "threads", "track", "shard", "grad_checkpointing", "ref_offload",
    "attention", "vllm_memory", "micro_tokens", "conflict_every",
)  # fmt: skip


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings(env: str | None = None) -> list:
    """The fields that have a flag: of one benchmark, or all."""
    with_flag = [f for f in fields(Config) if "group" in f.metadata]
    return [f for f in with_flag if env is None or env in (f.metadata["only"] or (env,))]


def check(cfg: Config) -> None:
    """Raise UserError for settings that cannot work: the value, the reason and the remedy."""
    for f in settings():
        value, b = getattr(cfg, f.name), f.metadata
        inside = not isinstance(value, float) or math.isfinite(value)
        inside &= b["low"] is None or value >= b["low"]
        inside &= b["above"] is None or value > b["above"]
        inside &= b["high"] is None or value <= b["high"]
        if not inside:
            words = {"low": "at least", "above": "above", "high": "at most"}
            bounds = [f"{text} {b[key]}" for key, text in words.items() if b[key] is not None]
            raise UserError(
                f"{flag(f.name)} {value} is out of range: it must be "
                f"{' and '.join(bounds) or 'a finite number'}."
            )
    if cfg.group_size == 1 and cfg.algo != "ppo":
        raise UserError("--group-size 1 leaves nothing to compare an episode with: use 2 or more.")
    if cfg.algo in ("gigpo", "ppo") and cfg.statistics == "trajectories":
        raise UserError(f"--statistics trajectories is not for --algo {cfg.algo}: omit it.")
    if not re.fullmatch(r"(?!\.\.?$)[^/\x00-\x1f\ud800-\udfff]{0,200}", cfg.name):
        shown = cfg.name[:80].encode("unicode_escape").decode()  # no control characters
        raise UserError(f"--name {shown} cannot be a folder in --out: use a plain name.")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", cfg.device):
        raise UserError(f"--device {cfg.device} is not supported: use cpu, cuda or cuda:0 etc.")
    if cfg.ref_offload and cfg.lora_rank:
        raise UserError("--ref-offload has no second model to move with --lora-rank: omit it.")
    if cfg.shard and cfg.sampler != "vllm":
        raise UserError("--shard leaves no rank a model to generate with: add --sampler vllm.")
    if cfg.sampler == "vllm" and max(cfg.temperature, cfg.eval_temperature) > 2:
        values = f"--temperature {cfg.temperature} or --eval-temperature {cfg.eval_temperature}"
        raise UserError(f"{values} is over 2, vLLM's limit: lower it or use another --sampler.")
    import torch  # not at the top: environment workers import this file and need no torch

    gpu = torch.cuda.is_available()
    if cfg.device.startswith("cuda") and not gpu:
        raise UserError(f"--device {cfg.device}: torch sees no GPU here; use --device cpu.")
    if cfg.sampler == "vllm" and gpu and cfg.device not in ("auto", "cuda"):
        choose = "omit it and set CUDA_VISIBLE_DEVICES, or use --sampler transformers"
        raise UserError(f"--device {cfg.device}: vLLM uses the first visible GPU; {choose}.")


def parse_args(env: str, presets: dict[str, dict], doc: str, argv=None) -> tuple[Config, str]:
    """Settings of a run script, and its mode: train, eval-only or dry-run."""
    parser = Parser(usage="%(prog)s [flags]", description=doc)
    add, default = parser.add_argument, next(iter(presets))
    add("--preset", choices=[*presets, *METHODS], nargs="+", default=[default],
        help=f"base settings (default {default}), optionally followed by a method: echo")
    for mode, text in (("eval-only", "evaluate --model or the checkpoint, and exit"),
                       ("dry-run", "check model and data, print the plan, and exit")):  # fmt: skip
        add(f"--{mode}", dest="mode", action="store_const", const=mode, default="train", help=text)
    groups = {}
    for f in settings(env):
        title, choices = f.metadata["group"], f.metadata["choices"]
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        values = ", ".join(f"{name} {p[f.name]}" for name, p in presets.items() if f.name in p)
        text = f"{f.metadata['help']} (default {f.default!r}{'; ' + values if values else ''})"
        kind = dict(type=f.type, metavar=f.type.__name__.upper())
        if f.type is bool:
            kind = dict(action=argparse.BooleanOptionalAction)
        elif choices:
            kind = dict(choices=choices)
        groups[title].add_argument(flag(f.name), default=MISSING, help=text, **kind)
    args = vars(parser.parse_args(argv))
    given = {f.name: args[f.name] for f in settings(env) if args[f.name] is not MISSING}
    names = args["preset"]
    sizes = [name for name in names if name in presets]
    if len(sizes) > 1:
        raise UserError(f"--preset {' '.join(names)} has {len(sizes)} sizes: choose one.")
    base = {"env": env}
    for name in [default] * (not sizes) + names:
        base |= (presets | METHODS)[name]
    cfg = Config(**base | given)
    check(cfg)
    if not cfg.name:  # from what differs from the preset; Run refuses a collision
        model = cfg.model.rstrip("/").split("/")[-1] or (sizes or [default])[0]
        model += "".join(f"-{name}" for name in sizes if name.endswith("gb"))  # paper's model
        auxiliary = next((name for name in names if name in METHODS), "paw")
        method = cfg.algo + (f"-{auxiliary}" if cfg.paw else "")
        base = asdict(Config()) | base
        named = ("model", "algo", "paw", "seed", "data", "retriever", "encoder", *FREE_TO_CHANGE)
        changed = [k for k, value in given.items() if k not in named and value != base[k]]
        parts = [f"{key}={given[key]}".replace("_", "-") for key in changed]
        cfg.name = "-".join([cfg.env, model, method, *parts, f"seed{cfg.seed}"]).replace("/", "_")
    return cfg, args["mode"]


def public(cfg: Config) -> dict:
    """All settings, without the password in a URL."""
    return asdict(cfg) | {"retriever": masked(cfg.retriever)}


def differences(old: dict, cfg: Config) -> list[str]:
    """The flags of a stored config that differ from `cfg`, without those that may change."""
    old = asdict(Config()) | old  # a setting that is newer than the run had its default
    return [
        f"{flag(key)} {old[key]!r}"
        for key, value in public(cfg).items()
        if key not in FREE_TO_CHANGE and old[key] != value
    ]
