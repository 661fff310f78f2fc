"""The numbers of metrics.jsonl that say how fast an update was."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from paw_min import metrics, train
from paw_min.base import console
from paw_min.config import Config
from paw_min.metrics import describe_speed
from paw_min.rows import flatten
from paw_min.running import runs
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


def test_every_tick_of_a_run_is_in_one_part(config, monkeypatch, capsys):
    """Each function takes another time on this clock, and everything else takes none."""
    now = [0]
    monkeypatch.setattr(metrics, "time", Mock(perf_counter=lambda: now[0]))
    monkeypatch.setattr(train, "describe_speed", lambda *args: {})  # generation takes no time here

    def takes(ticks: int, place, name: str) -> None:
        plain = getattr(place, name)

        def slow(*args, **kwargs):
            now[0] += ticks
            return plain(*args, **kwargs)

        monkeypatch.setattr(place, name, slow)

    def method(cfg, s, rows, k):
        now[0] += 1000
        return train.paw(cfg, s, rows, k)

    takes(1, train, "collect")
    takes(10, train, "check_sync")
    takes(100, train, "prepare")
    takes(10_000, train, "evaluate")
    takes(100_000, runs.Run, "save")
    takes(1_000_000, train, "stored_episodes")  # and what else belongs to no part:
    takes(10_000_000, train, "draw")
    takes(100_000_000, runs.Run, "track")
    cfg = config(updates=3, eval_every=2, save_every=1)
    train.train(cfg, method=method)
    lines = runs.read_metrics(Path(cfg.out) / cfg.name)
    trained = {"seconds_rollout": 1, "seconds_old_pass": 110, "seconds_update": 1000}
    evaluated = {"seconds_evaluate": 10_000}
    saved = {"seconds_save": 100_000}  # after the line before
    assert [{part: line[part] for part in console.PARTS if line.get(part)} for line in lines] == [
        evaluated,
        trained | {"seconds_other": 101_000_000},
        trained | evaluated | saved | {"seconds_other": 101_000_000},
        trained | evaluated | saved | {"seconds_other": 111_000_000},
    ]
    # The last checkpoint, its track and the last curves are in no line.
    assert sum(map(console.wall_time, lines)) == now[0] - 100_000 - 100_000_000 - 10_000_000
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in lines[1:]:
        assert any(f"{console.wall_time(line):.0f}" in cells for cells in shown)
