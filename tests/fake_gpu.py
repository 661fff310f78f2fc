"""Run commands of this package on a GPU that is not there, so that device errors show on a CPU.

    python tests/fake_gpu.py COMMANDS.json [LIBRARY]

COMMANDS: {name: words after "python"}, run one after another, in this process and in the current
folder. NAME.error has the error of a command that fails. With LIBRARY (see `build`), torch sees one
GPU; without, the same commands run on the CPU.

A tensor on "cuda" is a `Remote`: its numbers are in a CPU tensor. PyTorch treats it as it treats a
tensor of a GPU (autocast, backward passes, `.to`, `.cpu`), but each operation runs on the CPU, so
its result is the CPU's to the last digit. (Attention is not fused, here and on the CPU: PyTorch
chooses that kernel by device.) An operation raises where a GPU's would:

    - a tensor on the GPU meets one on the CPU, except in copies, for indices on the CPU, and for
      CPU tensors without dimensions, which elementwise kernels take as numbers
    - it writes to a CPU tensor, or is drawn by a generator of the CPU

A generator of the GPU draws the CPU's numbers here.

Not reached: kernels, memory and speed of a GPU; NCCL and several GPUs; vLLM's engine and its sleep
mode; streams; torch.compile; TRL's trainer. Tested with PyTorch's CPU build.
"""

import ctypes
import json
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = None
if __name__ == "__main__" and len(sys.argv) > 2:
    LIBRARY = ctypes.CDLL(sys.argv[2])  # before torch, which asks for the hooks once

import torch  # noqa: E402
from torch import library  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

KERNELS = library.Library("aten", "IMPL")
COPIES = ("copy_", "_to_copy")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
TAKE_NUMBERS = (*INDEXING, "fill_")  # besides elementwise operations


def build(folder: Path) -> Path:
    """Compile fake_gpu.cpp, in 3 s -> the library."""
    library = folder / "fake_gpu.so"
    torch_folder = Path(find_spec("torch").origin).parent
    lib = torch_folder / "lib"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    command += [str(ROOT / "tests/fake_gpu.cpp"), "-o", str(library)]
    command += [f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    subprocess.run(command, check=True)
    return library


class Remote(torch.Tensor):
    """A tensor on "cuda:0" whose numbers are in the CPU tensor `local`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, local: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, local.shape, strides=local.stride(), storage_offset=local.storage_offset(),
            dtype=local.dtype, device="cuda:0",
        )

    def __init__(self, local: torch.Tensor):
        self.local = local

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: "Remote"):
        torch.Tensor.data.__set__(self, new)
        self.local = new.local

    def tolist(self):  # torch has it for its own classes only
        return self.cpu().tolist()

    def untyped_storage(self):  # transformers asks which weights share one
        return self.local.untyped_storage()


class Generator(torch.Generator):
    """On "cuda", a generator of the CPU whose address is noted: operations see no subclass."""

    on_gpu = {}  # address -> generator, which keeps the address its own

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        if torch.device(device).type == "cuda":
            cls.on_gpu[made._cdata] = made
        return made


class Machine(TorchDispatchMode):
    """In this block, factories and copies with device="cuda" return Remotes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return execute(func, args, kwargs or {})


def execute(func, args: tuple, kwargs: dict):
    """An operation of PyTorch on the CPU; the result is where its operands are."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    local_of = {id(x): x.local for x in tensors if isinstance(x, Remote)}
    name = func.overloadpacket.__name__
    on_gpu = bool(local_of)
    if kwargs.get("device") is not None:  # of a factory or a copy
        on_gpu = torch.device(kwargs["device"]).type == "cuda"
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif name == "copy_":
        on_gpu = isinstance(args[0], Remote)
    if on_gpu:
        check(func, name, args, kwargs, tensors)

    args, kwargs = tree_map(lambda x: local_of.get(id(x), x), (args, kwargs))
    result = func(*args, **kwargs)
    if not on_gpu:
        return result
    # An operation in place returns its operand.
    operand = {id(x.local): x for x in tensors if isinstance(x, Remote)}

    def remote(x):
        if not isinstance(x, torch.Tensor):
            return x
        return operand[id(x)] if id(x) in operand else Remote(x)

    return tree_map(remote, result)


def check(func, name: str, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> None:
    """RuntimeError where a GPU and the CPU must not meet."""
    generator = kwargs.get("generator")
    if generator is not None and generator._cdata not in Generator.on_gpu:
        raise RuntimeError(f"{func} on cuda:0 cannot draw with a generator of the CPU")
    if name in COPIES:
        return
    if name in INDEXING and isinstance(args[0], Remote):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]  # without the indices
    # Only a number may be read from a CPU tensor, and nothing may be written to one.
    takes_numbers = torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS
    written = [
        id(x)
        for argument, x in zip(func._schema.arguments, args)
        if argument.alias_info and argument.alias_info.is_write
    ]
    for x in tensors:
        is_number = x.ndim == 0 and takes_numbers and id(x) not in written
        if not isinstance(x, Remote) and not is_number:
            shape = tuple(x.shape)
            raise RuntimeError(f"{func}: expected all tensors on cuda:0, but {shape} is on cpu")


def pretend() -> None:
    """Make this process believe that it has a GPU of 80 GB."""
    LIBRARY.install_guard()  # after torch, whose builds with CUDA have one of their own
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.Generator = Generator
    torch.cuda.device_count = lambda: 1
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.mem_get_info = lambda device=None: (80 * 10**9, 80 * 10**9)
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_device_name = lambda device=None: "a GPU"
    torch.cuda.max_memory_allocated = lambda device=None: 0
    torch.cuda.reset_peak_memory_stats = lambda device=None: None
    # A CPU parameter cannot become a Remote in place: modules get new ones.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = swap_tensors
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") shows its copy
    # PyTorch writes this operation as several others on a device that has no kernel for it.
    KERNELS.impl("silu_backward", torch.ops.aten.silu_backward, "CUDA")
    # An operation of GPUs alone: fp32 results of bf16 factors.
    KERNELS.impl("mm.dtype", lambda a, b, kind: a.to(kind) @ b.to(kind), "CPU")
    torch.inference_mode = inference_mode
    # Its fused kernel rounds otherwise than the loop that a CPU run takes.
    torch.optim.AdamW = lambda groups, fused=None, made=torch.optim.AdamW, **options: made(
        groups, **options
    )


def swap_tensors(parameter, moved, swap=torch.utils.swap_tensors) -> None:
    """A move to a real GPU keeps transformers' mark of a parameter that it has loaded."""
    is_loaded = hasattr(parameter, "_is_hf_initialized")
    swap(parameter, moved)
    if is_loaded:
        parameter._is_hf_initialized = True


def inference_mode(mode=True):
    """Without inference tensors, which cannot be views of a Remote. mode: or a function."""
    if callable(mode):
        return torch.no_grad(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def run(words: list[str]) -> None:
    """["run_search.py", "--seed", "1"] or ["-m", "paw_min.page", ...], as the main program."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(ROOT / words[0]), *words[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    sys.path[0] = str(ROOT)
    sys.modules["tests.fake_gpu"] = sys.modules["__main__"]  # of commands that import it
    commands = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # of all devices
    if LIBRARY:
        pretend()
        Machine().__enter__()  # to the end of the process
    from paw_min import train

    train.draw = lambda folders: None  # a picture takes 2 s
    for name, command in commands.items():
        try:
            run(shlex.split(command))
        except SystemExit as end:
            if end.code not in (0, None):
                Path(f"{name}.error").write_text(str(end.code))
        except Exception:
            Path(f"{name}.error").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(0)  # without torch's shutdown, in which its thread of the GPU aborts


if __name__ == "__main__":
    main()
