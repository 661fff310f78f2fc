"""Does a run fit on a device? Asked before it starts.

    states      16 bytes per trained parameter: weight, gradient and both moments of AdamW, in fp32.
                LoRA adds the frozen weights. PPO's critic is one more decoder, trained in full.
                --shard divides all of this by the number of ranks
    reference   4 bytes per parameter, with a KL term and without LoRA; in bf16 passes, 2 bytes of
                what they round
    vLLM        its fraction of the GPU
    one pass    activations of --micro-tokens tokens, forward and backward: estimated

On a GPU, a pass, vLLM and the reference take turns, and each rollout frees the gradients. So a run
needs the states and the larger of vLLM and reference, minus the gradients. This is exact, and a run
that lacks it is stopped. With a pass, it is the peak: an estimate (research/bench/README.md has
what it leaves out). On a CPU, the reference stays in memory, and on a GPU with room for it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config

from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.head import TILE
from paw_min.model.published import empty_model, load_config, load_errors
from paw_min.model.reference import rounded_layers

ERROR = "-5 to +23 %"  # the measured error of the estimated peak (research/bench/README.md)
ROOM = 1.2  # the reference stays on a GPU that has this times the estimate
CARDS = (24, 48, 80)  # GB of usual GPUs, for machines without one
NO_GPU = "no GPU was found (is the driver new enough for this torch's CUDA?)"

# The models of the presets, so that a plan needs no download.
SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings",
)
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 11_008, 36, 16, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18_944, 28, 28, 4, 152_064, False),
}


@dataclass
class Estimate:
    """Bytes on one device."""

    states: float
    gradients: float  # part of the states; none from a rollout to the next training pass
    reference: float
    vllm: float
    needed: float  # what these take at once: exact
    one_pass: float
    peak: float


def estimate(
    cfg: Config, model, ranks: int, precision: str, gpu_bytes: float
) -> Estimate:
    """What a run needs on one device.

    model: without weights (empty_model). precision: of the passes. gpu_bytes: of the whole GPU; 0:
    a CPU.
    """
    number = 2 if precision == "bf16" else 4  # bytes of a number in a pass
    total = trained = model.num_parameters()
    frozen = 0  # bytes
    if cfg.lora_rank:
        adapted = lora.linear_layers(model).values()
        trained = sum(cfg.lora_rank * (part.in_features + part.out_features) for part in adapted)
        # Frozen weights under adapters are stored in the type of the passes.
        frozen = 4 * total - (4 - number) * parameters(adapted)
    if cfg.algo == "ppo":
        trained += model.get_decoder().num_parameters()
    share = ranks if cfg.shard else 1
    states = (frozen + 16 * trained) / share
    gradients = 4 * trained / share
    reference = 0
    if cfg.kl_coef > 0 and not cfg.lora_rank:
        reference = 4 * total - (4 - number) * parameters(rounded_layers(model))
    vllm = cfg.vllm_memory * gpu_bytes if cfg.sampler == "vllm" else 0

    one_pass = activations(cfg, model, number)
    if gpu_bytes:
        needed = states + max(0, vllm - gradients, reference - gradients)
        peak = max(needed, states + one_pass)
    else:
        needed = states + reference
        peak = needed + one_pass
    return Estimate(states, gradients, reference, vllm, needed, one_pass, peak)


def parameters(layers) -> int:
    return sum(weight.numel() for layer in layers for weight in layer.parameters())


def activations(cfg: Config, model, number: int) -> float:
    """Bytes of a training pass, estimated. number: bytes of one number in it."""
    config = model.config
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None)
    if not isinstance(inner, int):  # a family that has another name for it, or one per layer
        inner = 4 * width
    # Per token, a layer saves two norms in fp32, four tensors of the MLP, and the queries, keys,
    # values and results of the attention: with few key heads, about three times the width.
    # A norm's result is saved for the gradient of its weight, which LoRA does not train.
    layer = (16 if cfg.lora_rank else 24) * width + number * (3 * width + 4 * inner)
    layer_backward = 3 * number * inner
    saved = config.num_hidden_layers * layer
    if cfg.grad_checkpointing:
        # Each layer saves its input only. The backward pass computes one layer again at a time.
        saved = config.num_hidden_layers * 4 * width
        layer_backward += layer
    # The head is done before the backward pass of the layers starts: the larger of the two counts.
    # It takes about 15 bytes per logit of a tile: measured.
    head = cfg.micro_tokens * 16 * width + 15 * TILE
    one_pass = cfg.micro_tokens * saved + max(cfg.micro_tokens * layer_backward, head)
    if number == 2 and not cfg.lora_rank:  # autocast keeps copies of the weights
        parts = model.get_decoder().modules()
        one_pass += 2 * parameters(part for part in parts if isinstance(part, torch.nn.Linear))
    return one_pass


def of_folder(cfg: Config, folder: str, precision: str, gpu_bytes: float) -> Estimate:
    """The estimate for the model in a folder or on the hub, and for the ranks of this run."""
    if folder in SHAPES:
        config = Qwen2Config(**dict(zip(SHAPE, SHAPES[folder], strict=True)))
    else:
        config = load_config(folder)
    with load_errors(folder):
        model = empty_model(config, folder)
        return estimate(cfg, model, distributed.of_torchrun("WORLD_SIZE", 1), precision, gpu_bytes)


def reference_device(cfg: Config, folder: str, precision: str, device: str) -> str:
    """Where the reference is between its passes. Asked before anything is loaded."""
    free, gpu_bytes = free_bytes(device)
    ours = of_folder(cfg, folder, precision, gpu_bytes)
    beside = ours.states + max(ours.one_pass, ours.vllm - ours.gradients)
    return device if ROOM * (beside + ours.reference) < free else "cpu"


def check(cfg: Config, folder: str, precision: str, device: str) -> str:
    """What the run needs, in one line; UserError if it cannot fit."""
    free, gpu_bytes = free_bytes(device)
    ours = of_folder(cfg, folder, precision, gpu_bytes)
    parts = f"states {gb(ours.states)}, reference {gb(ours.reference)}, vLLM {gb(ours.vllm)}"
    available = f"{gb(free)} GB free on {device}"
    if cfg.sampler == "vllm" and device == "cpu":
        available += f"; {NO_GPU}"
    if ours.needed > free:
        # The settings that lower this and are not in use yet.
        remedies = ["a smaller --vllm-memory"] * (ours.vllm > 0)
        remedies += ["--lora-rank"] * (not cfg.lora_rank)
        remedies += ["more GPUs" if cfg.shard else "--shard on more GPUs", "or a smaller --model"]
        raise UserError(
            f"the run needs {gb(ours.needed)} GB ({parts}), {available}: use {', '.join(remedies)}."
        )
    if ours.peak > free:
        available += "; it may not fit"
    peak = f"estimated peak {gb(ours.peak)} (error {ERROR})"
    return f"{gb(ours.needed)} GB ({parts}), {peak}, {available}"


def on_cards(cfg: Config, folder: str, precision: str) -> str:
    """The same in short, for a machine without a GPU. vLLM takes a fraction of each card."""
    sizes = []
    for card in CARDS:
        ours = of_folder(cfg, folder, precision, 1e9 * card)
        fits = "fits" if ours.peak < 1e9 * card else "may not fit"
        if ours.needed > 1e9 * card:
            fits = "does not fit"
        sizes.append(f"{ours.peak / 1e9:.1f} of {card} GB, {fits}")
    return f"estimated peak on one GPU (error {ERROR}): {'; '.join(sizes)}; {NO_GPU}"


def gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def free_bytes(device: str) -> tuple[float, float]:
    """Free memory for this process, and that of the whole GPU; 0 on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: nothing to compare with
        return float("inf"), 0
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = sum(1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    return free / distributed.of_torchrun("LOCAL_WORLD_SIZE", 1), 0
