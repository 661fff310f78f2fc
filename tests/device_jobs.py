"""What tests/test_device.py runs by fake_gpu.py, besides the commands of the package.

    tests/device_jobs.py rules               what a GPU allows and refuses
    tests/device_jobs.py ERROR flags         run_search.py with one of PLANTED, errors of this kind
    tests/device_jobs.py rwml flags          rwml.py in seconds
"""

import sys

import pytest
import torch

import run_search
from paw_min import train, update
from paw_min.config import parse_args
from paw_min.model import batches
from paw_min.model.critic import Critic
from paw_min.world_models import rwml_options, rwml_stages


def rules() -> None:
    """Expressions, each with what it does on a GPU."""
    gpu = torch.arange(3.0, device="cuda")
    cpu = torch.arange(3.0)
    number = torch.tensor(2.0)
    index = torch.tensor([0, 2])
    assert gpu.device == torch.tensor([1], device="cuda").device == torch.device("cuda:0")
    assert torch.zeros_like(gpu).is_cuda and not gpu.cpu().is_cuda and cpu.to(gpu).is_cuda
    assert (gpu * number + number).tolist() == [2.0, 4.0, 6.0]
    assert gpu[index].tolist() == gpu[index.cuda()].tolist() == [0.0, 2.0]
    gpu[index] = number
    cpu.copy_(gpu)
    assert cpu.tolist() == gpu.tolist() == [2.0, 1.0, 2.0]
    refused = {
        "sum": lambda: gpu + cpu,
        "where": lambda: torch.where(gpu > 0, gpu, cpu),
        "concatenation": lambda: torch.cat([gpu, cpu]),
        "stack of numbers": lambda: torch.stack([gpu[0], number]),
        "product": lambda: torch.nn.Linear(3, 1)(gpu),
        "indices of a CPU tensor": lambda: cpu[index.cuda()],
        "values on the CPU": lambda: gpu.index_put((index,), cpu[:2]),
        "a number of the CPU as the sum": lambda: number.add_(gpu[0]),
        "a CPU generator": lambda: gpu.exponential_(generator=torch.Generator()),
        "comparison": lambda: torch.equal(gpu, cpu),
    }
    for name, expression in refused.items():
        try:
            expression()
        except RuntimeError as error:
            assert "cpu" in str(error).lower(), name
        else:
            raise AssertionError(f"not refused: {name}")
    with pytest.raises((RuntimeError, TypeError)):
        gpu.numpy()
    layer = torch.nn.Linear(3, 2).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(gpu)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.is_cuda and layer.weight.grad.tolist() == [[2.0, 1.0, 2.0]] * 2
    # The sentence encoder of rwml.py and of the retrieval server, which is fp16 on a GPU.
    vectors = [rwml_options.load_encoder("minilm", device).passages(["a mug", "go"], 2)
               for device in ("cpu", "cuda")]
    assert 0 < abs(vectors[0] - vectors[1]).max() < 0.01


def head_on_the_cpu(patch) -> None:
    """The error of the first PPO: load_critic moved the decoder only."""
    start = Critic.__init__

    def create(self, *args):
        start(self, *args)
        self.head.cpu()

    patch.setattr(Critic, "__init__", create)


def batch_on_the_cpu(patch) -> None:
    collate = batches.collate
    patch.setattr(batches, "collate", lambda *args: collate(*args[:3], "cpu"))


def stored_values_on_the_cpu(patch) -> None:
    def to_columns(stored, like):
        missing = like.shape[1] - stored.shape[1]
        return torch.nn.functional.pad(stored, (0, missing))

    patch.setattr(update, "to_columns", to_columns)


def small_rwml(flags: list[str]) -> None:
    """rwml.py with shorter answers and episodes, and fewer tries of the filter."""
    smaller = dict(tries=2, max_turns=8, warm_epochs=2, answer_tokens=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rwml_options, "TINY", rwml_options.TINY | smaller)
        rwml_stages.main(flags)


PLANTED = (head_on_the_cpu, batch_on_the_cpu, stored_values_on_the_cpu)

if __name__ == "__main__":
    name, *flags = sys.argv[1:]
    if name == "rules":
        rules()
    elif name == "rwml":
        small_rwml(flags)
    else:
        with pytest.MonkeyPatch.context() as patch:
            globals()[name](patch)
            cfg, _ = parse_args("search", run_search.PRESETS, "", flags)
            train.train(cfg)
