"""An estimate of the memory of a run on one device, before it starts.

    states      16 bytes per trained parameter: weight, gradient and both moments of AdamW, in fp32.
                LoRA adds the frozen weights. PPO's critic is one more decoder, trained in full.
                --shard divides all of this by the number of ranks
    reference   4 bytes per parameter, with a KL term and without LoRA; in bf16 passes 2 of what
                they round
    one pass    activations of --micro-tokens tokens, forward and backward
    vLLM        its fraction of the GPU

A pass, vLLM and the reference take turns, and the gradients are freed before each rollout. So the
peak has states and the largest of one pass, vLLM minus gradients, and reference minus gradients. On
a CPU, the reference stays in memory, and on a GPU where a fifth more than all of this fits.

Left out: rows longer than --micro-tokens, the weights that --shard gathers, temporary gradients and
temporary numbers of AdamW, the cache of the transformers sampler, vLLM on a CPU, CUDA itself,
fragmentation, states of linear attention. A part for images counts as trained, which it is not. A
pass of PPO is too high by 4 bytes per parameter: the gradients of policy and critic take turns too.

Measured on a CPU, without PPO, --shard and vLLM (research/bench/README.md): the estimates
of a pass and of the peak were within 10 %. So a run is stopped if its estimated peak exceeds the
free memory by more than 10 %. In the 10 % below and above the free memory, the estimate cannot
tell: the run says so. On one GPU, in bf16, the peaks of two models were 18 and 19 % lower.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paw_min.base import console, distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.head import TILE
from paw_min.model.policy import load_errors, rounded_layers

MARGIN = 1.1  # error of the estimate: a run is stopped above the free memory times this
ROOM = 1.2  # the reference stays on a GPU that has this times the estimate
CARDS = (24, 48, 80)  # GB of usual GPUs, for machines without one


@dataclass
class Estimate:
    """Bytes on one device."""

    states: float
    gradients: float  # part of the states; none from a rollout to the next training pass
    reference: float
    one_pass: float
    vllm: float
    peak: float


def estimate(
    cfg: Config, model_config: PretrainedConfig, ranks: int, bf16: bool, gpu_bytes: float
) -> Estimate:
    """The parts and their peak. bf16: type of the passes. gpu_bytes: of the whole GPU; 0: a CPU."""
    with torch.device("meta"):  # shapes only
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
    decoder = model.get_decoder()
    linear = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    # In numbers of parameters.
    total = model.num_parameters()
    in_linear = sum(weight.numel() for module in linear for weight in module.parameters())
    number = 2 if bf16 else 4  # bytes of a number in a pass

    trained = total
    frozen = 0  # bytes
    if cfg.lora_rank:
        adapted = lora.targets(model).values()
        trained = sum(cfg.lora_rank * (part.in_features + part.out_features) for part in adapted)
        # Frozen weights under adapters are stored in the type of the passes.
        narrow = sum(weight.numel() for part in adapted for weight in part.parameters())
        frozen = 4 * total - (4 - number) * narrow
    if cfg.algo == "ppo":
        trained += decoder.num_parameters()
    states = frozen + 16 * trained
    gradients = 4 * trained
    if cfg.shard:
        states /= ranks
        gradients /= ranks
    reference = 0
    if cfg.kl_coef > 0 and not cfg.lora_rank:
        rounded = sum(p.numel() for part in rounded_layers(model) for p in part.parameters())
        reference = 4 * total - (4 - number) * rounded

    # Per token, a layer saves two norms in fp32, four tensors of the MLP, and the queries, keys,
    # values and results of the attention: with few key heads, about three times the width.
    # A norm's result is saved for the gradient of its weight, which LoRA does not train.
    text_config = model_config.get_text_config()  # of models that also see, its part for text
    width = text_config.hidden_size
    inner = text_config.intermediate_size
    layer = (16 if cfg.lora_rank else 24) * width + number * (3 * width + 4 * inner)
    layer_backward = 3 * number * inner
    saved = text_config.num_hidden_layers * layer
    if cfg.grad_checkpointing:
        # Each layer saves its input only. The backward pass computes one layer again at a time.
        saved = text_config.num_hidden_layers * 4 * width
        layer_backward += layer
    # The head is done before the backward pass of the layers starts: the larger of the two counts.
    # It takes about 15 bytes per logit of a tile: measured.
    head = cfg.micro_tokens * 16 * width + 15 * TILE
    one_pass = cfg.micro_tokens * saved + max(cfg.micro_tokens * layer_backward, head)
    if bf16 and not cfg.lora_rank:
        one_pass += 2 * in_linear  # autocast keeps copies of the weights

    vllm = cfg.vllm_memory * gpu_bytes if cfg.sampler == "vllm" else 0
    peak = states + max(one_pass, vllm - gradients, reference - gradients)
    if not gpu_bytes:
        peak = states + reference + one_pass
    return Estimate(states, gradients, reference, one_pass, vllm, peak)


def row_tokens(cfg: Config) -> int:
    """Most tokens of one row: prompt, response and, with PaW, the next observation."""
    observation = cfg.max_obs_tokens if cfg.paw else 0
    return cfg.max_prompt_tokens + cfg.max_response_tokens + observation


def announce(cfg: Config, folder: str, device: str) -> None:
    """Stop a run that cannot fit; on a GPU, print the estimate. Rank 0 only."""
    if distributed.rank() == 0:
        sizes = check(cfg, folder, device)
        if device.startswith("cuda"):
            console.say(f"memory    {sizes}")


class NotEstimated(Exception):
    """Why there is no estimate for this family of models."""


def of_folder(cfg: Config, folder: str, bf16: bool, gpu_bytes: float) -> Estimate:
    """The estimate for the model in a folder or on the hub, and for the ranks of this run.

    NotEstimated where the family has other sizes, as a mixture of experts, or one per layer.
    """
    with load_errors(folder):
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    try:
        return estimate(cfg, model_config, ranks, bf16, gpu_bytes)
    except Exception as error:  # whatever is missing, or of another type
        reason = " ".join(str(error).split())[:200]
        raise NotEstimated(f"not estimated for {model_config.model_type} ({reason})") from error


def reference_device(cfg: Config, folder: str, bf16: bool, device: str) -> str:
    """Where the reference is between its passes. Asked before anything is loaded."""
    free, gpu_bytes = free_bytes(device)
    try:
        ours = of_folder(cfg, folder, bf16, gpu_bytes)
    except NotEstimated:
        return "cpu"
    beside = ours.states + max(ours.one_pass, ours.vllm - ours.gradients)
    return device if ROOM * (beside + ours.reference) < free else "cpu"


def on_cards(cfg: Config, folder: str) -> str:
    """The peak on GPUs that need not be in this machine. vLLM takes a fraction of each."""
    sizes = []
    for card in CARDS:
        try:
            peak = of_folder(cfg, folder, cfg.precision != "fp32", 1e9 * card).peak / 1e9
        except NotEstimated as error:
            return str(error)
        fits = "fits" if peak < card / MARGIN else "may not fit"
        if peak > card * MARGIN:
            fits = "does not fit"
        sizes.append(f"{peak:.1f} of {card} GB, {fits}")
    return f"estimated on one GPU: {'; '.join(sizes)}"


def check(cfg: Config, folder: str, device: str) -> str:
    """The estimate in one line; UserError if it clearly exceeds the free memory."""
    bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and device.startswith("cuda")
    free, gpu_bytes = free_bytes(device)
    try:
        ours = of_folder(cfg, folder, bf16, gpu_bytes)
    except NotEstimated as error:
        return str(error)
    sizes = (
        f"{ours.peak / 1e9:.2f} GB (states {ours.states / 1e9:.2f} with gradients "
        f"{ours.gradients / 1e9:.2f}, reference {ours.reference / 1e9:.2f}, one pass "
        f"{ours.one_pass / 1e9:.2f}, vLLM {ours.vllm / 1e9:.2f}), {free / 1e9:.2f} GB free on "
        f"{device}"
    )
    if cfg.sampler == "vllm" and device == "cpu":
        sizes += "; no GPU was found (is the driver new enough for this torch's CUDA?)"
    if ours.peak > MARGIN * free:
        raise UserError(f"the run needs about {sizes}: use {remedies(cfg)}.")
    if ours.peak > free / MARGIN:
        sizes += "; it may not fit"
    return sizes


def remedies(cfg: Config) -> str:
    """The settings that lower the peak and are not in use yet."""
    is_open = {
        "--grad-checkpointing": not cfg.grad_checkpointing,
        "a smaller --micro-tokens": True,
        "a smaller --vllm-memory": cfg.sampler == "vllm",
        "--lora-rank": not cfg.lora_rank,
        "--shard on more GPUs": not cfg.shard,
        "more GPUs": cfg.shard,
    }
    return ", ".join(name for name in is_open if is_open[name]) + ", or a smaller --model"


def free_bytes(device: str) -> tuple[float, float]:
    """Free memory for this process, and that of the whole GPU; 0 on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: nothing to compare with
        return float("inf"), 0
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = sum(1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 0
