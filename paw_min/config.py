"""Every setting of a run, and which values it may have.

The defaults are the paper's for ALFWorld (A.1) and, where it is silent, those of verl-agent, the
code that it builds on. A run script has presets, dictionaries that override the defaults: `paper`
adds model, schedule and hardware, and the paper's settings for its benchmark. Without --preset, a
run has the script's first preset, `tiny`. The command line overrides both. Numbers that no setting
changes are constants beside their use: update.py, ppo.py, losses.py, running/session.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paw_min.base.errors import UserError, masked
from paw_min.base.files import is_url
from paw_min.base.flags import check_bounds, sections


@dataclass
class Config:
    env: str = "alfworld"  # the benchmark; set by the run script
    method: str = "paw"  # name of what an update does with its rows; set by train

    # ---- run ----
    name: str = ""  # run name; default: from the settings that differ from the preset
    out: str = "runs"  # folder of the run folders
    seed: int = 0  # of training: tasks, sampling, row order
    updates: int = 150  # RL updates, the outer loop of Alg. 1; 0: only evaluate
    eval_every: int = 5  # updates between evaluations; 0: only first and last
    eval_repeats: int = 1  # episodes per task in an evaluation
    save_every: int = 1  # updates between checkpoints; only the latest is kept
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of passes; auto: bf16 on a GPU
    track: Literal["none", "tensorboard", "wandb"] = "none"  # also log the metrics to a tracker
    shard: bool = False  # shard weights and optimizer across ranks (FSDP2); needs vLLM

    # ---- environment ----
    data: str = ""  # data folder; default: small data; ALFWorld's paper: $ALFWORLD_DATA
    eval_split: str = "valid_seen"  # held-out split
    eval_tasks: int = 128  # tasks of the fixed evaluation panel; 0: whole split
    human_goals: bool = False  # WebShop: use instructions written by people
    n_products: int = 0  # WebShop: take the first N products; 0: all
    retriever: str = ""  # search: server URL or corpus; default: corpus.jsonl in the data folder
    max_turns: int = 50  # environment steps per episode, A.1
    workers: int = 0  # processes that run environments; 0: this process

    # ---- policy and prompt ----
    model: str = ""  # Hugging Face folder or name; default: the stand-in model
    prompt: str = "paper"  # the benchmark's: the paper's, or compact, a short one
    max_prompt_tokens: int = 2048  # prompt limit in tokens, A.1
    max_response_tokens: int = 512  # response limit in tokens, A.1
    max_obs_tokens: int = 4096  # tokens of one next observation in the loss
    grad_checkpointing: bool = False  # recompute activations in the backward pass
    lora_rank: int = 0  # rank of LoRA adapters; 0: full training

    # ---- rollout ----
    groups: int = 16  # tasks per update, A.1
    group_size: int = 8  # episodes per task, A.1
    sampler: Literal["transformers", "vllm"] = "transformers"  # generates the responses
    vllm_memory: float = 0.4  # vLLM's fraction of the GPU memory
    temperature: float = 1.0  # sampling in training, A.1
    eval_temperature: float = 0.4  # sampling in evaluation, A.1; 0: greedy

    # ---- reinforcement learning ----
    # A.1 has PPO with 128 tasks that are each played once: so do the presets of the paper.
    algo: Literal["grpo", "gigpo", "rloo", "ppo"] = "grpo"  # advantage estimator
    statistics: Literal["rows", "trajectories"] = "rows"  # GRPO, RLOO: units of group statistics
    lr: float = 1e-6  # learning rate of AdamW, constant, A.1
    mini_batch: int = 256  # rows per optimizer step, A.1; 0: all rows
    micro_tokens: int = 16384  # tokens per forward pass, padding included
    kl_coef: float = 0.01  # k3 KL to the start model; 0: without; verl-agent

    # ---- PaW ----
    paw: bool = True  # world-model co-training; off: the RL baseline
    wm_loss: Literal["cmae", "mae", "ce"] = "cmae"  # observation loss: Eq. 8, MAE, Eq. 5
    rho: float = 0.2  # confidence threshold of clipped MAE, Eq. 7
    alpha: float = 0.75  # alpha, Eq. 4: selected fraction
    lambda_g: Literal["adaptive", "constant"] = "adaptive"  # lambda_g: Eq. 10, or 1
    wm_scale: float = 1.0  # factor of the world-model loss
    wm_target: Literal["next", "shuffled"] = "next"  # the next observation; another row's (placebo)
    wm_separator: Literal["turn", "none"] = "turn"  # what precedes it: text of the chat template

    # ---- without a flag ----
    # A preset has them, of a benchmark or of a world in examples/.
    history_length: int = 2  # earlier steps in the prompt, A.1
    topk: int = 3  # search: passages per query
    invalid_penalty: float = 0.1  # subtracted for a malformed response, A.1
    entropy_coef: float = 0.001  # entropy bonus; verl-agent
    beta2: float = 0.999  # decay of AdamW's second moment; 0.95 in ECHO's text

    @property
    def context_length(self) -> int:
        """The most tokens that the sampler sees: a prompt and its response."""
        return self.max_prompt_tokens + self.max_response_tokens


FLAGS = [name for names in sections(Config).values() for name in names]
OF_PAW = set(sections(Config)["PaW"])
BOUNDS = {
    "[0, inf)": ("eval_every", "eval_tasks", "n_products", "workers", "mini_batch", "kl_coef"),
    "[1, inf)": ("save_every", "max_turns", "max_prompt_tokens", "max_response_tokens",
                 "max_obs_tokens", "micro_tokens"),
    "(0, inf)": ("wm_scale",),
    "(0, 1]": ("vllm_memory", "lr", "rho", "alpha"),
    "[0.01, 100]": ("temperature",),
    "[0, 100]": ("eval_temperature",),
    "[1, 1000]": ("eval_repeats",),
    "[0, 4096]": ("lora_rank",),
    "[1, 10000]": ("group_size",),
    "[1, 100000]": ("groups",),
    "[0, 999999]": ("updates",),  # the names of checkpoints have six digits
    "[0, 4294967295]": ("seed",),  # what vLLM takes
}

# A preset of a method is combined with one of a size: --preset paper echo.
METHOD_PRESETS = {
    # ECHO (arXiv 2605.24517): cross entropy on all observation tokens, constant weight 0.05.
    "echo": dict(wm_loss="ce", alpha=1.0, lambda_g="constant", wm_scale=0.05),
}

# These may differ on resume: settings of run length, speed, memory and evaluation, and the limit of
# prompts. A higher limit changes no past update, since a run stops at the first prompt over it.
# Where prompts are cut instead, the limit is not free (config_json.differences). Settings that
# change the data or the loss are not free, the response limit and --lr included.
FREE_TO_CHANGE = (
    "out", "updates", "eval_every", "eval_repeats", "save_every", "workers", "track", "shard",
    "grad_checkpointing", "vllm_memory", "micro_tokens", "eval_temperature", "sampler",
    "max_prompt_tokens",
)


def check(cfg: Config) -> None:
    """Raise UserError for settings that cannot work: the value, the reason and the remedy."""
    check_bounds(cfg, BOUNDS)
    if cfg.group_size == 1 and cfg.algo != "ppo":
        raise UserError("--group-size 1 leaves nothing to compare an episode with: use 2 or more.")
    if cfg.algo in ("gigpo", "ppo") and cfg.statistics == "trajectories":
        raise UserError(f"--statistics trajectories is not for --algo {cfg.algo}: use rows.")
    is_plain = Path(cfg.name).name == cfg.name != ".." and cfg.name.isprintable()
    if cfg.name and not is_plain:
        raise UserError(f"--name {cfg.name!a:.80} cannot be a folder in --out: use a plain name.")
    if is_url(cfg.model):
        raise UserError(f"--model {masked(cfg.model)} is a URL: give a folder, or the name of a "
                        "model on the Hugging Face hub.")
    if cfg.workers and cfg.env == "search":
        raise UserError(f"--workers {cfg.workers}: search needs none, it searches in a thread; "
                        "omit it.")
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
