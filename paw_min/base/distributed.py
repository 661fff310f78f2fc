"""One run on several processes: the collective calls, and what happens when a rank dies.

    torchrun --nproc-per-node 4 run_alfworld.py ...

Each rank has environments and a sampler of its own and plays whole groups. Then every rank gets
the rows of all ranks (up to about 100 MB), so that group statistics, Eq. 4 and lambda_g come from
the same numbers everywhere. Only forward and backward passes are split, by rows.

Why the number of ranks changes nothing but rounding:

1. Episodes are numbered over all ranks, and a request's random numbers depend on the numbers of
   its episode and step, not on the rank that plays it (rollout.py, seeds.py).
2. `all_gather` gives every rank the rows of all ranks, so advantages, Eq. 4 and lambda_g are those
   of one process (update.py: prepare).
3. A mini-batch is the same set of rows on any number of ranks; each rank trains a part of it
   (model/batches.py).
4. A row's weight in the loss is its share of the whole mini-batch's tokens and rows
   (update.py: loss_terms).
5. So gradients are summed, not averaged, and clipped after the sum (update.py: gradient_step).

Without torchrun there is one rank.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paw_min.base.errors import UserError

TIMEOUT = timedelta(hours=2)  # A collective call waits so long: longer than the slowest rollout.

LOST = (
    "another rank exited (its own message says why), so this one cannot continue; rerun the same "
    "command to resume"
)


def limit_threads() -> None:
    """One CPU thread per process, or $OMP_NUM_THREADS.

    On cores that have anything else to do, two threads are 10 to 30 times slower than one.
    """
    # Torch has read the variable if it is set.
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


def default_device() -> str:
    """A GPU if torch sees one; CUDA_VISIBLE_DEVICES chooses it, or none.

    Without cuDNN's attention, for the rest of this process. On an H100, H200 or B200, torch 2.13
    would take it first (sdp_utils.cpp: check_prefer_cudnn_attention), and it makes a plan for every
    new shape, in tens of milliseconds (cudnn/MHA.cpp: MHAParams). Rows have many lengths, and a
    sampler's keys one more with every token. vLLM switches it off, too (vllm/platforms/cuda.py).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    return "cuda" if torch.cuda.is_available() else "cpu"


def join() -> str:
    """Join the process group if torchrun launched this process -> the device of this rank."""
    limit_threads()
    device = default_device()
    if not dist.is_torchelastic_launched():
        return device
    if device.startswith("cuda"):
        ranks, gpus = torchrun_env("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
        if ranks > gpus:
            raise UserError(f"torchrun started {ranks} processes on this machine, which has {gpus} "
                            f"GPU{'s' * (gpus > 1)}: use --nproc-per-node {gpus}.")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    _report_sigterm()
    # Python objects and CPU tensors go through gloo, gradients on GPUs through NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    with _lost_ranks():
        dist.init_process_group(backend, timeout=TIMEOUT)
    return device


def torchrun_env(name: str, default: int) -> int:
    """A number that torchrun gave this process, such as RANK; without torchrun: `default`.

    A cluster may set the same names for its own purposes, so they do not count alone.
    """
    return int(os.environ[name]) if dist.is_torchelastic_launched() else default


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


def n_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def with_rank(message: str) -> str:
    """Name the rank. Before the ranks have met, an error is the same on all: rank 0 reports it."""
    if n_ranks() > 1:
        return f"rank {rank()}: {message}"
    return "" if torchrun_env("RANK", 0) else message


def all_gather(items: list) -> list:
    """The lists of all ranks, concatenated, on every rank."""
    if n_ranks() == 1:
        return items
    parts = [None] * n_ranks()
    with _lost_ranks():
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the ranks; same shapes in the same order on all ranks."""
    if n_ranks() > 1:
        with _lost_ranks():
            for tensor in tensors:
                dist.all_reduce(tensor)


def sum_gradients(module: torch.nn.Module) -> None:
    """Sum the gradients over the ranks. FSDP has done so in every pass."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    all_reduce([grad for grad in grads if not isinstance(grad, DTensor)])


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


@contextmanager
def _lost_ranks():
    """Report a failed collective call as a UserError."""
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
