"""The numbers of metrics.jsonl that say how fast an update was."""

import pytest
import torch

from paw_min.config import Config
from paw_min.metrics import describe_speed
from paw_min.rows import flatten
from paw_min.update import prepare
from tests.helpers import BASE, EPISODES, make_policy, with_adapters

MEASURED = {"seconds_update": 2.0, "seconds_generate": 0.5, "tokens_generated": 30}
GPU = torch.device("cuda")


@pytest.mark.parametrize("lora, per_weight", [(False, 6), (True, 4)])
@pytest.mark.parametrize("card, peak", [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A10G", None),
])
def test_mfu_counts_the_tokens_that_are_trained(monkeypatch, lora, per_weight, card, peak):
    policy = make_policy()
    n = policy.model.num_parameters()
    if lora:
        n = with_adapters(policy).model.num_parameters()
    rows = prepare(Config(**BASE | dict(alpha=0.5)), policy, None, flatten(EPISODES))
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows.tokens)
    tokens += sum(len(row.obs_ids) for row, x in zip(rows.tokens, rows.row_weight) if x > 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    found = describe_speed(policy.model, rows, MEASURED, GPU)
    assert found["tokens_per_s_generate"] == 60 and found["tokens_per_s_update"] == tokens / 2
    if peak:
        assert found["mfu"] == pytest.approx(per_weight * n * tokens / 2 / peak)
    else:
        assert "mfu" not in found
    assert "mfu" not in describe_speed(policy.model, rows, MEASURED, torch.device("cpu"))
