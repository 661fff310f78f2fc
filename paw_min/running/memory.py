"""The memory and disk that a run needs in any case, checked before it starts.

    states       16 bytes per trained parameter: weight, gradient and both moments of AdamW, in
                 fp32. LoRA adds the frozen weights. PPO's critic is one more decoder, trained in
                 full. --shard divides all of this by the number of ranks
    reference    4 bytes per parameter, with a KL term and without LoRA; in bf16 passes, 2 bytes of
                 what they round
    vLLM         its fraction of the GPU; it sleeps without a copy of its weights
    checkpoint   12 bytes per trained parameter: weight and both moments. Rank 0 gathers it in CPU
                 memory. On the disk there are two of them while one is written

On a GPU, vLLM and the reference take turns, and each rollout frees the gradients; the reference
waits in CPU memory. Where a run lacks any of this, it is stopped. What a pass needs comes on top,
and is not estimated: activations and logits depend on --micro-tokens and on the kernels.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.published import empty_model, load_config, load_errors
from paw_min.model.reference import rounded_layers
from paw_min.running.runs import newest_checkpoint

PASS = "plus activations"
WORKER = 3e9  # bytes of a worker of ALFWorld at most: seen in an invented room


@dataclass
class Needs:
    """Bytes that one rank needs, by what needs them."""

    states: float
    gradients: float  # part of the states; none from a rollout to the next training pass
    reference: float
    weights: float  # of the model in fp32, which is loaded in CPU memory
    checkpoint: float


def needs(cfg: Config, model, ranks: int, precision: str) -> Needs:
    """The needs of one rank. model: without weights (empty_model). precision: of the passes."""
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
    reference = 0
    if cfg.kl_coef > 0 and not cfg.lora_rank:
        reference = 4 * total - (4 - number) * parameters(rounded_layers(model))
    return Needs(
        states=(frozen + 16 * trained) / share,
        gradients=4 * trained / share,
        reference=reference,
        weights=4 * total,
        checkpoint=12 * trained,
    )


def parameters(layers) -> int:
    return sum(weight.numel() for layer in layers for weight in layer.parameters())


def of_folder(cfg: Config, folder: str, precision: str) -> Needs:
    """The needs with the model in a folder or on the hub, of one of this run's ranks."""
    config = load_config(folder)
    with load_errors(folder):
        model = empty_model(config)
        return needs(cfg, model, distributed.torchrun_env("WORLD_SIZE", 1), precision)


def on_gpu(ours: Needs, vllm: float) -> float:
    """Bytes on the GPU of one rank. vllm: bytes of its fraction."""
    return ours.states + max(0, vllm - ours.gradients, ours.reference - ours.gradients)


def beside_gpus(ours: Needs, ranks: int) -> float:
    """In CPU memory of a machine with this many ranks, each with a GPU.

    Either all ranks load their models, or rank 0 gathers a checkpoint.
    """
    return max(ranks * ours.weights, ranks * ours.reference + ours.checkpoint)


@dataclass
class Place:
    """Bytes that a run needs somewhere, and those that are free there."""

    where: str
    needed: float
    parts: str
    free: float
    remedies: list[str]

    def __str__(self) -> str:
        return f"{gb(self.needed)} GB {self.where} ({self.parts}), {gb(self.free)} GB are free"


def check(cfg: Config, folder: str, precision: str, device: str) -> list[Place]:
    """What the run needs where, and what is free; UserError where something cannot fit."""
    ours = of_folder(cfg, folder, precision)
    ranks = distributed.torchrun_env("LOCAL_WORLD_SIZE", 1)
    smaller = ["a smaller --model", "a smaller --lora-rank"]
    if not cfg.lora_rank:
        smaller = ["adapters (--preset 24gb, or --lora-rank 16 --lr 1e-5)", "a smaller --model"]
    parts = f"states {gb(ours.states)}, reference {gb(ours.reference)}"
    if device.startswith("cuda"):
        free, size = torch.cuda.mem_get_info(device)
        vllm = cfg.vllm_memory * size if cfg.sampler == "vllm" else 0
        parts += f", vLLM {gb(vllm)}"
        remedies = [*smaller, "a smaller --vllm-memory", "--shard on more GPUs"]
        gpu = Place(f"on {device}", on_gpu(ours, vllm), f"{parts}; {PASS}", free, remedies)
        parts = f"start, checkpoints{workers(cfg, ranks)}"
        host = beside_gpus(ours, ranks)
        places = [gpu, Place("of CPU memory", host, parts, free_cpu(), smaller)]
    else:
        parts += f"; {PASS}{workers(cfg, ranks)}"
        host = ranks * (ours.states + ours.reference)
        places = [Place("of CPU memory", host, parts, free_cpu(), smaller)]
    run = Path(cfg.out) / cfg.name
    n_new = 1 if newest_checkpoint(run) else 2  # one is kept until the next one is written
    disk = n_new * ours.checkpoint if cfg.updates else 0
    places.append(
        Place("of disk", disk, "checkpoints", free_disk(run), ["another --out", *smaller])
    )
    lacking = [f"the run needs {place}: use {', or '.join(place.remedies)}."
               for place in places if place.needed > place.free]
    if lacking:
        raise UserError(" ".join(lacking))
    return places


def workers(cfg: Config, ranks: int) -> str:
    """What the workers of all ranks of a machine add to its CPU memory, for the plan."""
    n = ranks * cfg.workers
    return f"; {n} workers on top, in ALFWorld up to {gb(n * WORKER)} GB" if n else ""


def on_another_machine(cfg: Config, folder: str) -> str:
    """What the run needs with a GPU, where this machine has none."""
    ours = of_folder(cfg, folder, "bf16" if cfg.precision == "auto" else cfg.precision)
    ranks = distributed.torchrun_env("LOCAL_WORLD_SIZE", 1)
    return (
        f"{gb(on_gpu(ours, vllm=0))} GB on a GPU (states {gb(ours.states)}, reference "
        f"{gb(ours.reference)}), or {gb(ours.states - ours.gradients)} GB and {cfg.vllm_memory} of "
        f"it for vLLM; {PASS}; {gb(beside_gpus(ours, ranks))} GB of CPU memory"
        f"{workers(cfg, ranks)}; {gb(2 * ours.checkpoint)} GB of disk. No GPU was found here (is "
        "the driver new enough for this torch's CUDA?)"
    )


def gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def free_cpu(system: Path = Path("/")) -> float:
    """Bytes of CPU memory that new processes can have: of the machine, and of the container."""
    meminfo = system / "proc/meminfo"
    if not meminfo.exists():  # not Linux: nothing to compare with
        return float("inf")
    lines = dict(line.split(":") for line in meminfo.read_text("utf-8").splitlines())
    free = sum(1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    return min(free, free_of_groups(system))


# What limits the memory of a container is its control group. By the name in /proc/self/cgroup, of
# versions 2 and 1: its files of the limit and of the use; the part of the use that can be freed.
GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_of_groups(system: Path) -> float:
    """Bytes that the control groups of this process have left; inf without a limit."""
    free = [float("inf")]
    groups = system / "proc/self/cgroup"
    for line in groups.read_text("utf-8").splitlines() if groups.exists() else []:
        _, name, path = line.split(":", 2)
        root = system / "sys/fs/cgroup" / name
        group = root / path.lstrip("/")
        # The limits of the groups above hold, too. The path may be that of the host: then the
        # container sees its own group as the root.
        for folder in (group, *group.parents):
            with suppress(KeyError, OSError, ValueError):  # not of memory; no file, or "max"
                limit, use, cache = GROUPS[name]
                most, used = (int((folder / file).read_text("utf-8")) for file in (limit, use))
                stat = (folder / "memory.stat").read_text("utf-8").split()  # names, numbers
                free.append(most - used + int(stat[stat.index(cache) + 1]))
    return min(free)


def free_disk(folder: Path) -> float:
    """Bytes that can be written to a folder, or to where it will be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
