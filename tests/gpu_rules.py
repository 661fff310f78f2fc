"""What a GPU refuses, rounds and is spared, for fake_gpu.py: test_device.py runs it there."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from paw_min.config import Config
from paw_min.model.head import Head, product
from paw_min.model.policy import load_policy
from paw_min.model.reference import make_reference, reference_logp
from paw_min.model.sampler import HFSampler, Request
from paw_min.toy import default_model
from tests.fake_gpu import WORK
from tests.helpers import TOKEN_ROWS
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
    layer = torch.nn.Linear(3, 2).cuda()
    # The head rounds its factors only, as on a CPU.
    factors = gpu[None].bfloat16(), layer.weight.bfloat16().T
    with torch.autocast("cuda", torch.bfloat16):
        logits = Head(layer.weight)(gpu[None])
    assert torch.equal(logits, product(*factors))
    assert torch.equal(logits.cpu(), product(*(factor.cpu() for factor in factors)))
    # The sentence encoder of RWML and of the retrieval server, which is fp16 on a GPU.
    vectors = [settings.load_encoder("minilm", device).passages(["a mug", "go"])
               for device in ("cpu", "cuda")]
    assert 0 < abs(vectors[0] - vectors[1]).max() < 0.01


def sampling() -> None:
    """A token of the sampler costs the CPU nothing that grows with the vocabulary."""
    policy = load_policy(default_model("alfworld"), device="cuda")
    policy.eos_ids = [0]  # all responses are cut
    sampler = HFSampler()
    spent = []
    for tokens in (4, 8):
        WORK.clear()
        with sampler.sync(policy):
            queue = deque(Request(i, policy.encode_chat("go"), seed=i) for i in range(100))
            (responses,) = sampler.generate(queue, 1.0, tokens)  # in one batch
        assert all(len(r.ids) == tokens for r in responses)
        spent.append(WORK.total())
    per_token = (spent[1] - spent[0]) / 4 / len(responses)
    assert per_token < 50, f"{per_token} bytes"


def reference() -> None:
    """Its weights go to the GPU and back once per update, in bf16 where the passes round them."""
    folder = default_model("alfworld")
    rows = SimpleNamespace(tokens=TOKEN_ROWS)
    cfg = Config(kl_coef=0.1)
    found = {}
    for precision in ("fp32", "bf16"):
        policy = load_policy(folder, device="cuda", precision=precision)
        frozen = make_reference(cfg, policy, folder)
        WORK.clear()
        reference_logp(cfg, policy, frozen, rows)
        assert frozen.device.type == "cpu"
        found[precision] = WORK["copied"]
    assert found["fp32"] > 2 * 4 * policy.model.num_parameters()
    assert found["bf16"] < 0.7 * found["fp32"]


if __name__ == "__main__":
    rules()
    sampling()
    reference()
