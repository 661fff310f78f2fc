"""One run on several processes: the collective calls, FSDP2, and what happens when a rank dies.

    torchrun --nproc-per-node 4 run_alfworld.py ...

Each rank has environments and a sampler of its own and plays whole groups. Then every rank gets
the rows of all ranks (a few megabytes), so that group statistics, Eq. 4 and lambda_g come from the
same numbers everywhere. Only forward and backward passes are split, by rows. Gradients are summed,
not averaged: a row's weight is its part of the whole. The last backward pass of an optimizer step
does it (with FSDP every pass: no rank stores a whole gradient). Without torchrun: one rank.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paw_min.running.errors import UserError

TIMEOUT = timedelta(hours=2)  # of a collective call; longer than the slowest rollout
BUCKET = 2**23  # numbers: gradients are summed in parts of this size or more

LOST = (
    "this rank lost the others: one of them ended (its own message says why); rerun the same "
    "command to resume"
)


def start(device: str) -> str:
    """Join the process group if torchrun launched this process -> the device of this rank."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_torchelastic_launched():
        return device
    _report_sigterm()
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # Python objects and CPU tensors go through gloo, gradients on GPUs through NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    with _lost_ranks():
        dist.init_process_group(backend, timeout=TIMEOUT)
    return device


def finish() -> None:
    """The end of this rank's process; returns where there is one rank only.

    Without Python's own shutdown: there, a thread of gloo that still waits for the interpreter
    aborts the process now and then (one of 70 ranks on busy cores), after the work is done.
    """
    if dist.is_torchelastic_launched():
        if dist.is_initialized():  # vLLM's shutdown destroys the group as well
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered, or any other as it is. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def with_rank(message: str) -> str:
    """Name the rank. Before the ranks have met, an error is the same on all: rank 0 reports it."""
    if world() > 1:
        return f"rank {rank()}: {message}"
    return message if os.environ.get("RANK", "0") == "0" else ""


def all_gather(items: list) -> list:
    """The lists of all ranks, concatenated, on every rank."""
    if world() == 1:
        return items
    parts = [None] * world()
    with _lost_ranks():
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the ranks; same shapes in the same order on all ranks."""
    if world() > 1:
        with _lost_ranks():
            for tensor in tensors:
                dist.all_reduce(tensor)


@contextmanager
def gradient_sums(module, now: bool):
    """If now, sum the module's gradients over the ranks during the backward pass in this block.

    The pass completes them in the same order on all ranks. The sum of a bucket runs while the pass
    computes the next one.
    """
    bucket, sums = [], []

    def add(p) -> None:
        bucket.append(p.grad)
        if sum(grad.numel() for grad in bucket) >= BUCKET:
            start()

    def start() -> None:
        flat = parameters_to_vector(bucket)
        vector_to_parameters(flat, bucket)  # the gradients are parts of `flat` from now on
        bucket.clear()
        with _lost_ranks():
            sums.append(dist.all_reduce(flat, async_op=True))

    trained = [p for p in module.parameters() if p.requires_grad and now and world() > 1]
    hooks = [p.register_post_accumulate_grad_hook(add) for p in trained]
    yield
    for hook in hooks:
        hook.remove()
    if bucket:
        start()
    with _lost_ranks():
        for one in sums:
            one.wait()


@contextmanager
def rank_0_first():
    """A block that rank 0 runs before the others, which then find what it has made."""
    if rank() > 0:
        all_gather([])  # a barrier
    yield
    if rank() == 0:
        all_gather([])


@contextmanager
def leave_together():
    """A block that all ranks leave together: an early exit would break the others' last call."""
    yield
    with suppress(UserError):  # a lost rank no longer matters here
        all_gather([])


def shard(policy) -> None:
    """Shard weights, gradients and optimizer state across the ranks (FSDP2), in place.

    A layer is gathered while it computes, the rest for the whole pass. Stored weights stay fp32.
    """
    mesh = init_device_mesh(policy.device.type, (world(),))
    dtype = torch.bfloat16 if policy.precision == "bf16" else None
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    parts = [*policy.model.get_decoder().layers, policy]
    if policy.critic:  # FSDP needs the first pass to be the policy's: that of check_sync
        parts[-1:-1] = [*policy.critic.decoder.layers, policy.critic]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    for part in parts:
        part.set_gradient_divide_factor(1.0)  # sum the gradients, as without FSDP ...
        part.set_force_sum_reduction_for_comms(True)  # ... by the one reduction that gloo supports


@contextmanager
def _lost_ranks():  # turn a failed collective call into one sentence
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{LOST} ({reason})") from error


def _report_sigterm() -> None:
    """Explain why torchrun terminates this rank: another one died.

    A thread waits for the signal, since a rank inside a collective call cannot handle it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        print(with_rank(f"error: {LOST}"), flush=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
