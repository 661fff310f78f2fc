"""The estimate of a run's memory, and runs that cannot fit.

It is compared with published shapes and with real models.
"""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, Qwen2Config

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config, parse_args
from paw_min.envs.benchmarks import NAMES, presets_of
from paw_min.metrics import peak_memory
from paw_min.model import lora
from paw_min.model.policy import load_policy
from paw_min.model.sampler import HFSampler, rows_that_fit
from paw_min.model.scoring import score_responses
from paw_min.running import memory, session
from paw_min.running.memory import Estimate, estimate
from tests.helpers import FAMILIES, TOKEN_ROWS, make_policy
from tests.model_kinds import KINDS, write

# The published shapes of Qwen2.5-1.5B, 7B and 3B.
SMALL = dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
             num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True)
LARGE = dict(vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
             num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)
QWEN = Qwen2Config(**SMALL)
MIDDLE = dict(vocab_size=151_936, hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36,
              num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True)
N = 1_543_714_304
MATRICES = 28 * (2 * 1536**2 + 1536 + 2 * (1536 * 256 + 256) + 3 * 1536 * 8960)  # with biases
ADAPTERS = 28 * 8 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))  # of rank 8
BASE = Config(micro_tokens=1000, kl_coef=0.1)


def of(*, ranks=1, bf16=True, gpu_bytes=80e9, **settings) -> Estimate:
    return estimate(replace(BASE, **settings), QWEN, ranks, bf16, gpu_bytes)


def test_states_and_reference():
    assert (of().states, of().reference) == (16 * N, 2 * MATRICES + 4 * (N - MATRICES))
    assert of(bf16=False).reference == 4 * N
    assert of(kl_coef=0.0).reference == 0 and of().gradients == 4 * N
    adapters = of(lora_rank=8)
    assert adapters.states == 2 * MATRICES + 4 * (N - MATRICES) + 16 * ADAPTERS
    assert adapters.reference == 0 and adapters.gradients == 4 * ADAPTERS
    assert of(lora_rank=8, bf16=False).states == 4 * N + 16 * ADAPTERS
    # PPO: the head is tied, so a decoder has all parameters.
    assert (of(algo="ppo").states, of(algo="ppo").gradients) == (32 * N, 8 * N)
    assert of(algo="ppo", lora_rank=8).states == adapters.states + 16 * N
    sharded = of(shard=True, ranks=4)
    assert (sharded.states, sharded.gradients) == (4 * N, N)
    assert sharded.reference == of().reference  # whole
    assert of(ranks=4).states == 16 * N


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_those_of_the_real_model(family, rank, precision):
    policy = make_policy(family, precision=precision)
    if rank:
        lora.attach(policy.model, rank, precision, 0, None)
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    cfg = replace(BASE, lora_rank=rank)
    config = policy.model.config
    ours = estimate(cfg, config, ranks=1, bf16=precision == "bf16", gpu_bytes=0)
    assert ours.states == weights + 12 * trained


def test_vllm_and_the_peak():
    ours = of()
    assert ours.vllm == 0 and ours.peak == ours.states + ours.one_pass
    on_cpu = of(sampler="vllm", gpu_bytes=0)
    assert on_cpu.vllm == 0 and on_cpu.peak == ours.peak + on_cpu.reference
    shared = of(sampler="vllm", vllm_memory=0.3)
    assert shared.vllm == 24e9 and shared.peak == 12 * N + 24e9  # no gradients
    assert of(sampler="vllm", vllm_memory=0.01).peak == ours.peak
    few = of(grad_checkpointing=True, micro_tokens=10, shard=True, ranks=4)
    assert few.peak == 4 * N + few.one_pass
    # The reference's own pass, before there are gradients.
    few = of(bf16=False, grad_checkpointing=True, micro_tokens=10, shard=True, ranks=4)
    assert few.peak == (4 - 1) * N + 4 * N


# ---- presets ----


@pytest.mark.parametrize("env", NAMES)
@pytest.mark.parametrize(
    "preset, gpu_bytes, least", [("24gb", 24e9, 0.6), ("80gb", 80e9, 0.6), ("paper", 80e9, 0.5)]
)
def test_presets_fit_their_gpu_with_a_margin(env, preset, gpu_bytes, least):
    """One GPU each, as README.md and RUNNING.md promise, with the row of RUNNING.md's table."""
    cfg, _ = parse_args(env, presets_of(env), "", ["--preset", preset, "--data", "d"])
    shapes = {"1.5B": SMALL, "3B": MIDDLE, "7B": LARGE}
    size = cfg.model.split("-")[1]
    ours = estimate(cfg, Qwen2Config(**shapes[size]), 1, True, gpu_bytes)
    assert least * gpu_bytes < ours.peak < 0.85 * gpu_bytes
    readme = (Path(__file__).parents[1] / "RUNNING.md").read_text()
    sizes = " | ".join(f"{part / 1e9:.1f}" for part in asdict(ours).values())
    row = f"| `{preset}`, {size} | {gpu_bytes / 1e9:.0f} | {sizes} |"
    assert row in readme, row


# ---- the reference ----


# gpt2 has nothing to store otherwise. The other kinds of KINDS were compared once.
@pytest.mark.parametrize("kind", ["phi3", "mamba", "qwen3_moe", "bamba", "gpt2"])
def test_a_reference_in_the_type_of_its_passes_is_the_same_to_the_last_bit(kind, tmp_path):
    folder = write(kind, tmp_path, **KINDS[kind])
    plain = load_policy(folder, precision="bf16")
    frozen = session.make_reference(BASE, plain, folder, "bf16", "cpu")
    both = [score_responses(policy, TOKEN_ROWS, 1000).logp for policy in (plain, frozen)]
    assert torch.equal(*both)
    assert (stored(frozen) < stored(plain)) == (kind != "gpt2")


def stored(policy) -> int:
    return sum(p.nbytes for p in policy.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_reference_is_estimated_as_it_is_stored(family, precision, tmp_path):
    policy = make_policy(family)
    policy.save(tmp_path)
    frozen = session.make_reference(BASE, policy, str(tmp_path), precision, "cpu")
    ours = estimate(BASE, policy.model.config, ranks=1, bf16=precision == "bf16", gpu_bytes=0)
    assert ours.reference == stored(frozen)


@pytest.mark.parametrize("gigabytes, device", [(141, "cuda"), (80, "cuda"), (48, "cpu")])
def test_the_reference_stays_on_a_gpu_with_room(gigabytes, device, tmp_path, monkeypatch):
    """Qwen2.5-1.5B with vLLM on 0.4 of the GPU."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN.to_dict()))
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1e9 * gigabytes, 1e9 * gigabytes))
    cfg = replace(BASE, sampler="vllm", vllm_memory=0.4)
    assert memory.reference_device(cfg, str(tmp_path), True, "cuda") == device


# ---- a run ----


@pytest.mark.parametrize(
    "env, shape, sizes",
    [("alfworld", SMALL, "37.7 of 48 GB, fits; 50.5 of 80 GB, fits"),
     ("search", MIDDLE, "63.3 of 48 GB, does not fit; 63.3 of 80 GB, fits")],
)
def test_a_dry_run_without_gpu_and_vllm(env, shape, sizes, tmp_path, monkeypatch, capsys):
    """It says first what the run needs, and then what this machine lacks."""
    make_policy(max_position_embeddings=8192).save(tmp_path)
    config = Qwen2Config(**shape, max_position_embeddings=8192)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setitem(sys.modules, "vllm", None)
    argv = ["--preset", "paper", "--data", "no/data", "--model", str(tmp_path)]
    cfg, _ = parse_args(env, presets_of(env), "", argv)
    with pytest.raises(UserError) as error:
        session.dry_run(cfg)
    printed = capsys.readouterr().out
    assert re.search(rf"^memory    estimated on one GPU: .* 24 GB, .*; {sizes}$", printed, re.M)
    # One reason per line, as if each were printed alone.
    lines = f"error: {error.value}".splitlines()
    assert all(line.startswith("error: ") and line.endswith(".") for line in lines)
    (of_vllm,) = [line for line in lines if "--sampler vllm needs vllm" in line]
    (of_data,) = [line for line in lines if "no/data" in line]
    assert of_vllm != of_data


def test_remedies_for_memory_are_those_that_are_not_in_use():
    everything = memory.remedies(BASE)
    for setting, remedy in [
        (dict(grad_checkpointing=True), "--grad-checkpointing"), (dict(lora_rank=8), "--lora-rank"),
        (dict(shard=True), "--shard"),
    ]:
        assert remedy in everything
        assert remedy not in memory.remedies(replace(BASE, **setting))
    assert "--vllm-memory" not in everything
    assert "--vllm-memory" in memory.remedies(replace(BASE, sampler="vllm"))


def test_a_family_of_other_sizes_costs_the_estimate_not_the_run(tmp_path):
    OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    for line in (memory.check(BASE, str(tmp_path), "cpu"), memory.on_cards(BASE, str(tmp_path))):
        assert line.startswith("not estimated for opt (") and "intermediate_size" in line


def test_a_run_that_cannot_fit_names_sizes_and_settings(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN.to_dict()))
    cfg = replace(BASE, precision="bf16")
    folder = str(tmp_path)
    peak = estimate(cfg, QWEN, 1, True, 0).peak
    monkeypatch.setattr(memory, "free_bytes", lambda device: (peak / 1.11, 0))
    sentence = rf"needs about {peak / 1e9:.2f} GB .*states 24.70 .*, {peak / 1.11e9:.2f} GB free on"
    with pytest.raises(UserError, match=f"{sentence} cpu: use --grad-checkpointing, "):
        memory.check(cfg, folder, "cpu")
    # Within the error of the estimate: not refused.
    monkeypatch.setattr(memory, "free_bytes", lambda device: (peak / 1.09, 0))
    assert memory.check(cfg, folder, "cpu").endswith(" GB free on cpu; it may not fit")
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1.11 * peak, 0))
    assert memory.check(cfg, folder, "cpu").endswith(" GB free on cpu")
    vllm = replace(cfg, sampler="vllm")  # a GPU was meant
    assert "GB free on cpu; no GPU was found " in memory.check(vllm, folder, "cpu")


def test_memory_gb_leaves_vllm_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 10**9)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert peak_memory(torch.device("cuda"), asleep=2 * 10**9) == 3.0
    assert 0.01 < peak_memory(torch.device("cpu"), asleep=0) < 1000


def test_a_run_stops_before_the_data_are_loaded(config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1e6, 0))
    monkeypatch.setattr(session, "find_tasks", lambda cfg: pytest.fail("too late"))
    with pytest.raises(UserError, match="the run needs .* 0.00 GB free on cpu: use "):
        train.train(config())


def test_evaluation_is_not_refused(config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (0.0, 0))
    train.train(config(), eval_only=True)


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch):
    free, gpu_bytes = memory.free_bytes("cpu")
    assert 1e8 < free < 1e14 and gpu_bytes == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_bytes("cpu")[0] == pytest.approx(free / 4, rel=0.2)


def test_no_gradient_is_stored_in_a_rollout():
    """The estimate counts none then."""
    policy = make_policy()
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    with HFSampler().sync(policy):
        assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_on_a_gpu_takes_half_of_the_free_memory(family, precision):
    """Beside the cache that transformers fills, in the type of the passes."""
    policy = make_policy(family, precision=precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        cache = policy.model(torch.full((1, 50), 3), use_cache=True).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    rows = rows_that_fit(policy, 10**9, prompt_tokens=30, new_tokens=20)
    counted = rows * (stored + 7 * 4 * policy.model.config.vocab_size)
    assert 0.1 * 10**9 < counted < 0.5 * 10**9
    assert rows_that_fit(policy, 1, 30, 20) == 1


def test_a_batch_of_the_preset_paper():
    policy = make_policy(precision="bf16")
    policy.model.config = QWEN
    assert 128 < rows_that_fit(policy, 10**11, prompt_tokens=2048, new_tokens=512) < 256
