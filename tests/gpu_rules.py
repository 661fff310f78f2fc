"""What a GPU refuses, and a model in fp16, for fake_gpu.py: test_device.py runs it there."""

import pytest
import torch

from world_models.rwml import settings


def rules() -> None:
    gpu = torch.arange(3.0, device="cuda")
    cpu = torch.arange(3.0)
    number = torch.tensor(2.0)
    index = torch.tensor([0, 2])
    refused = {
        "sum": lambda: gpu + cpu,
        "where": lambda: torch.where(gpu > 0, gpu, cpu),
        "product": lambda: torch.nn.Linear(3, 1)(gpu),
        "indices of a CPU tensor": lambda: cpu[index.cuda()],
        "a number of the CPU as the sum": lambda: number.add_(gpu[0]),
        "a CPU generator": lambda: gpu.exponential_(generator=torch.Generator()),
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
    # The sentence encoder of RWML and of the retrieval server, which is fp16 on a GPU.
    vectors = [settings.load_encoder("minilm", device).passages(["a mug", "go"])
               for device in ("cpu", "cuda")]
    assert 0 < abs(vectors[0] - vectors[1]).max() < 0.01


if __name__ == "__main__":
    rules()
