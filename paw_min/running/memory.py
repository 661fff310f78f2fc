"""The memory of a run on one device, before it starts: what each part takes, and whether it fits.

For N parameters, R of them trained (LoRA: those of the adapters; F of the others are in frozen
matrices), w bytes of a number in a pass (4; bf16: 2) and T tokens of the largest micro-batch:

    weights      4 N; with LoRA w F + 4 (N - F) + 4 R
    gradients    4 R; those of head and embedding once more until the backward pass ends
    optimizer    8 R, the two moments of AdamW. Full training thus takes 16 N in all
    reference    4 N; none without a KL term, and with LoRA
    activations  what the backward pass needs of T tokens; bf16 copies of fp32 matrices
    layer        what the backward pass through one layer adds
    logits       hidden states at the head, and tiles of the vocabulary
    vllm         its fraction of the GPU; on a CPU, its weights and 1 GiB

PPO's critic has the first three of a decoder; policy and critic are stepped in turn, so the larger
gradient counts. FSDP divides the first three by the ranks, and gathers the head and two layers.

Not counted: the parts of a row over --micro-tokens, the cache of the transformers sampler, CUDA
itself, fragmentation. bench/memory.py compares with measured peaks.
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paw_min.config import Config, flag
from paw_min.model.head import TILE
from paw_min.running import console, distributed
from paw_min.running.errors import UserError

ERROR = 0.1  # a run is stopped only if the plan exceeds the free memory by more than this


@dataclass
class Plan:
    """Bytes on one device."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    layer: float
    logits: float
    vllm: float
    offload: bool  # keep the reference on the CPU outside of its own pass

    def peak(self) -> float:
        """Of the phases of an update. The gradients stay until the next ones are computed."""
        held = self.weights + self.gradients + self.optimizer
        resident, work = self.reference * (not self.offload), max(self.layer, self.logits)
        rollout, scoring = resident + self.vllm, self.reference + work
        step = resident + self.optimizer / 2  # AdamW on a GPU: one more number per parameter
        return held + max(rollout, scoring, resident + self.activations + work, step)


def plan(cfg: Config, model: PretrainedConfig, ranks: int, bf16: bool, gpu: float) -> Plan:
    """The plan for a model of transformers. gpu: bytes of the whole GPU; 0: a CPU."""
    with torch.device("meta"):  # shapes only
        whole = AutoModelForCausalLM.from_config(model)
    decoder, head = whole.get_decoder(), whole.get_output_embeddings().weight.numel()
    linear = [x for x in decoder.modules() if isinstance(x, torch.nn.Linear)]
    n, in_matrices = whole.num_parameters(), sum(p.numel() for x in linear for p in x.parameters())
    w, full = 2 if bf16 else 4, not cfg.lora_rank
    critic = decoder.num_parameters() if cfg.algo == "ppo" else 0
    trained = n if full else sum(cfg.lora_rank * (x.in_features + x.out_features) for x in linear)
    stored = 4 * n if full else 4 * (n + trained) + (w - 4) * in_matrices
    shards = ranks if cfg.shard else 1
    d, layers = model.hidden_size, model.num_hidden_layers
    f = model.intermediate_size
    width = getattr(model, "head_dim", None) or d // model.num_attention_heads
    heads = width * (model.num_attention_heads + model.num_key_value_heads)
    tokens = min(cfg.micro_tokens, row_tokens(cfg) * cfg.groups * cfg.group_size * cfg.max_turns)
    # Two norms with their results, attention, and four tensors in the MLP; then its gradients.
    kept = tokens * ((24 if full else 16) * d + w * (2 * heads + 4 * f))
    work = tokens * w * 3 * f
    copies = 2 * in_matrices if bf16 and full else 0  # by autocast
    if cfg.shard:  # gathered in the type of the pass
        copies = w * (n - in_matrices * (1 - 2 / layers))
    again = cfg.grad_checkpointing  # keep a layer's input only
    return Plan(
        weights=(stored + 4 * critic) / shards,
        gradients=4 * max(trained, critic) / shards + (8 * head if full else 0),
        optimizer=8 * (trained + critic) / shards,
        reference=4 * n if cfg.kl_coef and full else 0,
        activations=copies + layers * (tokens * 4 * d if again else kept),
        layer=kept + work if again else work,
        logits=tokens * 16 * d + 3 * 4 * TILE,
        vllm=cfg.sampler == "vllm" and (cfg.vllm_memory * gpu or w * n + 2**30),
        offload=cfg.ref_offload,
    )  # fmt: skip


def row_tokens(cfg: Config) -> int:
    """Most tokens of one row: prompt, response and, with PaW, the next observations."""
    length = cfg.max_prompt_tokens + cfg.max_response_tokens
    if cfg.paw:  # --wm-steps: with the responses between the observations
        length += cfg.wm_steps * cfg.max_obs_tokens + (cfg.wm_steps - 1) * cfg.max_response_tokens
    return length


def announce(cfg: Config, folder: str, device: str) -> None:
    """Stop a run that cannot fit; on a GPU, say in one line what it takes. Only rank 0 looks."""
    if distributed.rank() == 0:
        text = table(cfg, folder, device)
        if device.startswith("cuda"):
            console.say(" ".join(text.split()))


def table(cfg: Config, folder: str, device: str) -> str:
    """The plan as text; UserError for a run that cannot fit into the memory that is free now."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and device.startswith("cuda")
    model, ranks = AutoConfig.from_pretrained(folder), int(os.environ.get("WORLD_SIZE", 1))
    free, gpu = free_bytes(device)

    def planned(**changes) -> Plan:
        return plan(replace(cfg, **changes), model, ranks, bf16, gpu)

    ours = planned()
    total = f"{ours.peak() / 1e9:.2f} GB at the peak, {free / 1e9:.2f} GB free on {device}"
    if (1 - ERROR) * ours.peak() > free:
        tries = remedies(cfg, ours)
        enough = (x for x in tries if (1 - ERROR) * planned(**x).peak() <= free)
        flags = [f"{flag(k)} {v}".removesuffix(" True") for k, v in next(enough, {}).items() if v]
        remedy = " ".join(flags) or "a smaller --model, or --shard on more GPUs"
        raise UserError(f"the run needs {total}: use {remedy}.")
    sizes = {name: size for name, size in asdict(ours).items() if name != "offload" and size}
    parts = "".join(f"\n{'':10}{name:12}{size / 1e9:8.2f} GB" for name, size in sizes.items())
    return f"memory    {total}{parts}"


def remedies(cfg: Config, ours: Plan) -> list[dict]:
    """Settings that save memory, those without other effects first, and all of them together."""
    tries = [dict(grad_checkpointing=True), dict(micro_tokens=-(-cfg.micro_tokens // 4))]
    tries += [dict(ref_offload=True)] if ours.reference else []
    tries += [dict(vllm_memory=round(cfg.vllm_memory / 2, 2))] if ours.vllm else []
    tries += [] if cfg.lora_rank else [dict(lora_rank=16, ref_offload=False)]
    return [*tries, {key: value for change in tries for key, value in change.items()}]


def free_bytes(device: str) -> tuple[float, float]:
    """Free memory for this process, and that of the whole GPU, or 0."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: nothing to compare with
        return float("inf"), 0
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = sum(1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 0
