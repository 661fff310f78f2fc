"""Every setting of a run: one flat dataclass, its command line and its checks.

A `run_*.py` script names presets, dictionaries of overrides; `parse_args` lays the chosen preset
over the defaults below and the command line over the preset. Numbers of the paper carry its
section (A.1); numbers that the paper leaves to its code base say so.
"""

import argparse
from dataclasses import MISSING, asdict, dataclass, field, fields


class UserError(ValueError):
    """What the user can mend: shown as one sentence, without a traceback."""


def opt(default, help: str, choices: tuple | None = None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    # ---- run ----
    name: str = opt("", "run name; default: made of environment, model, algorithm and seed")
    out: str = opt("runs", "folder that holds the run folders")
    seed: int = opt(0, "seed of games, sampling and row order")
    updates: int = opt(150, "RL updates, Alg. 1's outer loop")
    eval_every: int = opt(5, "updates between evaluations; 0: only before and after")
    save_every: int = opt(1, "updates between checkpoints; the last one is kept")
    device: str = opt("auto", "cpu, cuda, cuda:0 ...; auto: cuda where there is one")
    threads: int = opt(1, "CPU threads of torch; more than the idle cores is far slower than one")
    precision: str = opt("auto", "of the forward pass, weights stay fp32; auto: bf16 on a GPU",
                         ("auto", "fp32", "bf16"))
    shard: bool = opt(False, "spread weights and optimizer over the ranks (FSDP2), needs vLLM")
    # ---- environment ----
    env: str = opt("alfworld", "benchmark", ("alfworld", "webshop", "search"))
    data: str = opt("", "data folder; default: small generated data (ALFWorld: $ALFWORLD_DATA)")
    train_split: str = opt("train", "split that trains")
    eval_split: str = opt("valid_seen", "split that is held out (WebShop: test or eval)")
    eval_tasks: int = opt(128, "tasks of the fixed evaluation panel; 0: the whole split")
    human_goals: bool = opt(False, "WebShop: instructions written by people, else synthetic ones")
    n_products: int = opt(0, "WebShop: take the first so many products; 0: all")
    retriever: str = opt("", "search: server URL or corpus; default: corpus.jsonl beside the data")
    encoder: str = opt("", "search: sentence encoder for a corpus; default: BM25")
    topk: int = opt(3, "search: passages per query")
    max_turns: int = opt(50, "environment steps per episode, A.1")
    workers: int = opt(0, "processes that step environments; 0: in this one")
    env_timeout: float = opt(60.0, "seconds after which a silent environment counts as dead")
    # ---- policy and prompt ----
    model: str = opt("", "Hugging Face folder or name; default: the stand-in of tiny.py")
    prompt: str = opt("paper", "the paper's prompt, or a short one", ("paper", "compact"))
    history_length: int = opt(2, "earlier steps shown in the prompt, A.1")
    max_prompt_tokens: int = opt(2048, "prompt limit in tokens, A.1")
    prompt_overflow: str = opt("error", "longer prompts: stop, or cut the front", ("error", "cut"))
    max_response_tokens: int = opt(512, "response limit in tokens, A.1")
    max_obs_tokens: int = opt(512, "next-observation tokens per row that the world model sees")
    grad_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    attention: str = opt("sdpa", "of transformers; flash_attention_2 packs rows without padding",
                         ("sdpa", "flash_attention_2"))
    ref_offload: bool = opt(False, "keep the reference model in CPU memory between its passes")
    # ---- rollout ----
    groups: int = opt(16, "tasks per update, A.1")
    group_size: int = opt(8, "episodes per task, A.1")
    sampler: str = opt("transformers", "generator of the responses", ("transformers", "vllm"))
    vllm_memory: float = opt(0.4, "vLLM's share of the GPU memory while it generates")
    temperature: float = opt(1.0, "sampling temperature in training, A.1")
    eval_temperature: float = opt(0.4, "sampling temperature in evaluation, A.1; 0: greedy")
    # ---- RL ----
    algo: str = opt("grpo", "advantage estimator", ("grpo", "gigpo"))
    normalize: str = opt("std", "advantages: divide by the group's std, or not", ("std", "mean"))
    statistics: str = opt("rows", "GRPO group statistics over", ("rows", "trajectories"))
    gamma: float = opt(0.95, "GiGPO discount of step returns, A.1")
    step_weight: float = opt(1.0, "GiGPO weight of the step advantage, omega, A.1")
    similarity: float = opt(0.0, "GiGPO anchors at least so alike are one state; 0: equal texts")
    invalid_penalty: float = opt(0.1, "score taken off a badly formatted response, A.1")
    lr: float = opt(1e-6, "learning rate of AdamW, constant, A.1")
    weight_decay: float = opt(0.01, "of AdamW; code base")
    grad_clip: float = opt(1.0, "bound of the gradient norm; code base")
    mini_batch: int = opt(256, "rows per optimizer step, A.1; 0: all rows of the update")
    micro_tokens: int = opt(16384, "tokens per forward pass, padding included")
    old_logp: str = opt("recomputed", "of the surrogate, see update.py", ("recomputed", "sampler"))
    is_cap: float = opt(2.0, "bound of the importance weights, if --old-logp is sampler")
    clip: float = opt(0.2, "PPO ratio clip; code base")
    dual_clip: float = opt(3.0, "bound of the loss for negative advantages; code base")
    kl_coef: float = opt(0.01, "k3 KL to the initial policy; 0: no reference model; code base")
    entropy_coef: float = opt(0.001, "entropy bonus; code base")
    # ---- PaW ----
    paw: bool = opt(True, "world-model co-training; off: the plain RL baseline")
    wm_loss: str = opt("cmae", "observation loss: Eq. 5, 6 or 8", ("ce", "mae", "cmae"))
    rho: float = opt(0.2, "confidence threshold of clipped MAE, Eq. 7")
    select_ratio: float = opt(0.75, "share of transitions kept by action entropy, alpha, Eq. 4")
    entropy: str = opt("full", "entropy of Eq. 4: vocabulary or sampled token", ("full", "sampled"))
    wm_weight: str = opt("adaptive", "lambda_g: Eq. 10, or 1", ("adaptive", "constant"))
    r_max: float = opt(10.0, "best possible episode return, A.1")


# What may change when a run goes on: none of these touches what has been computed so far.
FREE_TO_CHANGE = (
    "out", "updates", "eval_every", "save_every", "workers", "env_timeout", "device", "threads",
    "shard", "grad_checkpointing", "ref_offload", "attention", "vllm_memory", "micro_tokens",
)  # fmt: skip

RANGES = {  # field: (smallest, largest, is the smallest itself allowed)
    "updates": (0, None, True), "eval_every": (0, None, True), "save_every": (1, None, True),
    "threads": (1, None, True), "eval_tasks": (0, None, True), "n_products": (0, None, True),
    "max_turns": (1, None, True), "topk": (1, None, True),
    "workers": (0, None, True), "env_timeout": (0, None, False),
    "history_length": (0, None, True), "max_prompt_tokens": (1, None, True),
    "max_response_tokens": (1, None, True), "max_obs_tokens": (1, None, True),
    "groups": (1, None, True), "group_size": (1, None, True),
    "temperature": (0, None, False), "eval_temperature": (0, None, True),
    "gamma": (0, 1, True), "similarity": (0, 1, True), "invalid_penalty": (0, None, True),
    "lr": (0, None, False), "weight_decay": (0, None, True), "grad_clip": (0, None, False),
    "mini_batch": (0, None, True), "micro_tokens": (1, None, True), "clip": (0, 1, False),
    "dual_clip": (1, None, False), "kl_coef": (0, None, True), "entropy_coef": (0, None, True),
    "is_cap": (1, None, True), "vllm_memory": (0, 1, False), "rho": (0, 1, False),
    "select_ratio": (0, 1, False), "r_max": (0, None, False),
}  # fmt: skip


def check(cfg: Config) -> None:
    """Raise UserError, in one sentence with value and remedy, for settings that cannot work."""
    for key, (low, high, inclusive) in RANGES.items():
        value, flag = getattr(cfg, key), "--" + key.replace("_", "-")
        if not (value >= low if inclusive else value > low) or (high is not None and value > high):
            bound = f"{'at least' if inclusive else 'above'} {low}"
            bound += f" and at most {high}" if high is not None else ""
            raise UserError(f"{flag} {value} is out of range: it must be {bound}.")
    if cfg.group_size == 1:
        raise UserError(
            f"--group-size 1 leaves nothing to compare an episode with: {cfg.algo} needs 2 or more."
        )
    if cfg.shard and cfg.sampler != "vllm":
        raise UserError(
            "--shard leaves no rank a whole model that transformers could generate with: add "
            "--sampler vllm."
        )
    if cfg.sampler == "vllm" and max(cfg.temperature, cfg.eval_temperature) > 2:
        raise UserError(
            f"--temperature {cfg.temperature} or --eval-temperature {cfg.eval_temperature}: vLLM "
            "stops at 2; use less, or --sampler transformers."
        )
    if cfg.device != "auto":
        check_device(cfg)


def check_device(cfg: Config) -> None:
    import torch

    gpu = torch.cuda.is_available()
    if cfg.device.startswith("cuda") and not gpu:
        raise UserError(f"--device {cfg.device}: torch sees no GPU here; use --device cpu.")
    if cfg.sampler == "vllm" and gpu and cfg.device != "cuda":
        raise UserError(
            f"--device {cfg.device}: vLLM takes the first GPU that it sees; leave --device out and "
            "choose the GPU by CUDA_VISIBLE_DEVICES, or use --sampler transformers."
        )


def parse_args(presets: dict[str, dict], doc: str, argv: list[str] | None = None):
    """(Config, remaining namespace) from the command line; the first preset is the default.

    The namespace holds what is not a setting of the run: preset, eval_only and dry_run.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = next(iter(presets))
    parser.add_argument(
        "--preset", choices=list(presets), default=default, help=f"base settings ({default})"
    )
    parser.add_argument(
        "--eval-only", action="store_true", help="evaluate --model or the run's checkpoint, and end"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check model and data, print the plan, and end"
    )
    for f in fields(Config):
        flag = "--" + f.name.replace("_", "-")
        values = ", ".join(f"{name} {p[f.name]}" for name, p in presets.items() if f.name in p)
        text = f"{f.metadata['help']} (default {f.default!r}{'; ' + values if values else ''})"
        how = {"help": text.replace("%", "%%"), "default": MISSING}
        if f.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **how)
        else:
            kind = {"choices": f.metadata["choices"]} if f.metadata["choices"] else {}
            metavar = None if kind else f.type.__name__.upper()
            parser.add_argument(flag, type=f.type, metavar=metavar, **kind, **how)
    args = vars(parser.parse_args(argv))
    given = {f.name: args.pop(f.name) for f in fields(Config)}
    given = {key: value for key, value in given.items() if value is not MISSING}
    cfg = Config(**presets[args["preset"]] | given)
    check(cfg)
    if not cfg.name:
        model = cfg.model.rstrip("/").split("/")[-1] or "tiny"
        method = cfg.algo + ("-paw" if cfg.paw else "")
        cfg.name = f"{cfg.env}-{model}-{method}-seed{cfg.seed}"
    return cfg, argparse.Namespace(**args)


def differences(old: dict, cfg: Config) -> list[str]:
    """Settings in which a stored config differs, leaving out those that are free to change."""
    return [
        f"--{key.replace('_', '-')} {old.get(key)!r}"
        for key, value in asdict(cfg).items()
        if key not in FREE_TO_CHANGE and old.get(key) != value
    ]
