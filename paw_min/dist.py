"""Several processes, one run: what the ranks say to each other. Plain torch.distributed.

    torchrun --nproc-per-node 4 run_alfworld.py ...

Each rank has a GPU (or a few CPU cores), environments and a sampler of its own, and plays whole
groups. Then every rank gets the rows of all, token ids and rewards, which are megabytes: group
statistics, the global top-alpha of Eq. 4 and lambda_g are computed everywhere from the same numbers
by the same code as on one GPU, and only the forward and backward passes are split, row by row.
Gradients are summed, never averaged: each row's weight already is its share of the whole.

Without torchrun there is one rank, and nothing here does anything.
"""

import os
import signal
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paw_min.config import UserError

# How long a rank waits for the others before it gives up: longer than the slowest rollout.
TIMEOUT = timedelta(hours=2)


def start(device: str) -> str:
    """Join the ranks of torchrun, if there are any -> this rank's device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_torchelastic_launched():
        return device
    _say_why_it_ends()
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # Objects and metrics travel by gloo, gradients on a GPU by NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    with _others():
        dist.init_process_group(backend, timeout=TIMEOUT)
    return device


@contextmanager
def together():
    """A block that the ranks leave together: who goes early breaks the call others are in."""
    yield
    with suppress(UserError):  # ... which here is no loss
        barrier()


def finish() -> None:
    if dist.is_initialized():  # a sampler of vLLM has done so when it ended
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def signed(message: str) -> str:
    """Who says it. What is wrong before the ranks have met is wrong for all: rank 0 says it."""
    if world() > 1:
        return f"rank {rank()}: {message}"
    return message if os.environ.get("RANK", "0") == "0" else ""


def barrier() -> None:
    gather([])


def gather(items: list) -> list:
    """The lists of all ranks, one after the other, on every rank."""
    if world() == 1:
        return items
    parts = [None] * world()
    with _others():
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def add_up(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the ranks; same shapes in the same order everywhere."""
    if world() > 1:
        with _others():
            for tensor in tensors:
                dist.all_reduce(tensor)


@contextmanager
def rank_0_first():
    """A block that rank 0 goes through before the others, who then find what it made."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def shard(policy) -> None:
    """Spread weights, gradients and optimizer state over the ranks (FSDP2), in place.

    Each layer is put together for as long as it computes; embedding, last norm and head, which may
    share weights, for the whole pass. What is stored stays fp32.
    """
    mesh = init_device_mesh(policy.device.type, (world(),))
    dtype = torch.bfloat16 if policy.precision == "bf16" else None
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    parts = [*policy.model.get_decoder().layers, policy]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    for part in parts:
        part.set_gradient_divide_factor(1.0)  # a sum, see above ...
        part.set_force_sum_reduction_for_comms(True)  # ... in the way that gloo knows, too


@contextmanager
def _others():
    """Around a collective call: a partner that is gone ends this rank, too, in one sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{GONE} ({reason})") from error


GONE = (
    "this rank lost the others: one of them ended, its own message says why; the same command goes "
    "on from the last checkpoint"
)


def _say_why_it_ends() -> None:
    """torchrun ends the ranks that a dead one leaves behind; they shall not go without a word.

    A thread waits for the signal, since a rank that is inside a collective call cannot handle it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        print(signed(f"error: {GONE}"), flush=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
