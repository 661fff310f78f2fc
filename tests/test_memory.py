"""What a run needs on a device, and runs that cannot fit.

It is compared with published shapes and with real models.
"""

import json
import re
import sys
from dataclasses import astuple, replace

import pytest
import torch
from huggingface_hub import constants
from transformers import OPTConfig, Qwen2Config

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config, parse_args
from paw_min.envs.benchmarks import NAMES, presets_of
from paw_min.metrics import peak_memory
from paw_min.model import lora
from paw_min.model.policy import load_policy
from paw_min.model.published import empty_model
from paw_min.model.reference import make_reference
from paw_min.model.sampler import HFSampler, rows_that_fit
from paw_min.model.scoring import score_responses
from paw_min.running import memory, session
from paw_min.running.memory import SHAPE, SHAPES, Estimate, estimate
from tests.helpers import FAMILIES, ROOT, TOKEN_ROWS, make_policy
from tests.model_kinds import KINDS, write

SMALL = "Qwen/Qwen2.5-1.5B-Instruct"
QWEN = Qwen2Config(**dict(zip(SHAPE, SHAPES[SMALL], strict=True)))
N = 1_543_714_304
BASE = Config(micro_tokens=1000, kl_coef=0.1)


def of(*, ranks=1, precision="bf16", gpu_bytes=80e9, **settings) -> Estimate:
    model = empty_model(QWEN, SMALL)
    return memory.estimate(replace(BASE, **settings), model, ranks, precision, gpu_bytes)


def test_states_of_ppo_and_of_shards():
    assert (of().states, of().gradients) == (16 * N, 4 * N)
    # The head is tied, so the critic, one more decoder, has all parameters.
    assert (of(algo="ppo").states, of(algo="ppo").gradients) == (32 * N, 8 * N)
    assert of(algo="ppo", lora_rank=8).states == of(lora_rank=8).states + 16 * N
    sharded = of(shard=True, ranks=4)
    assert (sharded.states, sharded.gradients) == (4 * N, N)
    assert sharded.reference == of().reference  # whole
    assert of(ranks=4).states == 16 * N
    assert of(kl_coef=0.0).reference == of(lora_rank=8).reference == 0
    assert make_reference(Config(kl_coef=0.0), make_policy(), "nowhere", "cpu") is None


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_those_of_the_real_model(family, rank, precision):
    policy = make_policy(family, precision=precision)
    if rank:
        lora.attach(policy.model, rank, precision, 0, None)
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    model = empty_model(policy.model.config, family)
    ours = estimate(replace(BASE, lora_rank=rank), model, 1, precision, gpu_bytes=0)
    assert ours.states == weights + 12 * trained and ours.gradients == 4 * trained


def test_vllm_and_the_peak():
    ours = of(kl_coef=0.0)
    assert ours.vllm == 0 and ours.needed == 16 * N and ours.peak == 16 * N + ours.one_pass
    # On a CPU the reference stays, and vLLM has no share.
    on_cpu = of(sampler="vllm", gpu_bytes=0)
    assert on_cpu.vllm == 0 and on_cpu.needed == 16 * N + on_cpu.reference
    assert on_cpu.peak == on_cpu.needed + on_cpu.one_pass
    shared = of(sampler="vllm", vllm_memory=0.3)
    assert shared.vllm == 24e9 and shared.peak == shared.needed == 12 * N + 24e9  # no gradients
    few = of(sampler="vllm", vllm_memory=0.01)
    assert few.needed == 16 * N and few.peak == 16 * N + few.one_pass
    # The reference's own pass, before there are gradients.
    few = of(precision="fp32", grad_checkpointing=True, micro_tokens=10, shard=True, ranks=4)
    assert few.peak == few.needed == (4 - 1) * N + 4 * N


def test_the_error_on_a_page_is_the_one_that_was_measured():
    paths = (ROOT / "research/bench/results/gpu").glob("update-*.json")
    found = [json.loads(path.read_text()) for path in paths]
    most = max(one["estimate_gb"] / one["peak_gb"] for one in found)
    assert memory.ERROR.endswith(f" to +{100 * (most - 1):.0f} %")
    assert "errors from -5.4 to" in (ROOT / "research/bench/README.md").read_text()


# ---- presets ----


@pytest.mark.parametrize("env", NAMES)
@pytest.mark.parametrize(
    "preset, gpu_bytes, least", [("24gb", 24e9, 0.6), ("80gb", 80e9, 0.6), ("paper", 80e9, 0.5)]
)
def test_presets_fit_their_gpu_with_a_margin(env, preset, gpu_bytes, least, monkeypatch):
    """One GPU each, as README.md and RUNNING.md promise, with the row of RUNNING.md's table."""
    monkeypatch.setattr(memory, "load_config", lambda folder: pytest.fail("a download"))
    cfg, _ = parse_args(env, presets_of(env), "", ["--preset", preset, "--data", "d"])
    ours = memory.of_folder(cfg, cfg.model, "bf16", gpu_bytes)
    assert least * gpu_bytes < ours.peak < 0.85 * gpu_bytes
    sizes = " | ".join(f"{part / 1e9:.1f}" for part in astuple(ours))
    row = f"| `{preset}`, {cfg.model.split('-')[1]} | {gpu_bytes / 1e9:.0f} | {sizes} |"
    assert row in (ROOT / "RUNNING.md").read_text(), row


# ---- the reference ----


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox"])
def test_a_reference_in_the_type_of_its_passes_is_the_same_to_the_last_bit(kind, tmp_path):
    folder = write(kind, tmp_path, **KINDS[kind])
    plain = load_policy(folder, precision="bf16")
    frozen = make_reference(BASE, plain, folder, "cpu")
    both = [score_responses(policy, TOKEN_ROWS, 1000).logp for policy in (plain, frozen)]
    assert torch.equal(*both)
    assert stored(frozen) < stored(plain)


def stored(policy) -> int:
    return sum(p.nbytes for p in policy.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_reference_is_estimated_as_it_is_stored(family, precision, tmp_path):
    policy = make_policy(family)
    policy.precision = precision
    policy.save(tmp_path)
    frozen = make_reference(BASE, policy, str(tmp_path), "cpu")
    model = empty_model(policy.model.config, family)
    ours = estimate(BASE, model, 1, precision, gpu_bytes=0)
    assert ours.reference == stored(frozen)


@pytest.mark.parametrize("gigabytes, device", [(141, "cuda"), (80, "cuda"), (48, "cpu")])
def test_the_reference_stays_on_a_gpu_with_room(gigabytes, device, monkeypatch):
    """Qwen2.5-1.5B with vLLM on 0.4 of the GPU."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1e9 * gigabytes, 1e9 * gigabytes))
    cfg = replace(BASE, sampler="vllm", vllm_memory=0.4)
    assert memory.reference_device(cfg, SMALL, "bf16", "cuda") == device


# ---- a run ----


@pytest.mark.parametrize("env, sizes", [
    ("alfworld", "32.9 of 24 GB, does not fit; 37.7 of 48 GB, fits; 50.5 of 80 GB, fits"),
    ("search", "63.3 of 24 GB, .*; 63.3 of 48 GB, does not fit; 63.3 of 80 GB, fits"),
])
def test_a_plan_sizes_gpus_without_one_and_without_a_network(env, sizes, monkeypatch, capsys):
    """It says first what the run needs, and then what this machine lacks."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    cfg, _ = parse_args(env, presets_of(env), "", ["--preset", "paper", "--data", "no/data"])
    with pytest.raises(UserError) as error:
        session.dry_run(cfg)
    printed = capsys.readouterr().out
    assert re.search(rf"^memory    estimated peak .*: {sizes}; no GPU was found", printed, re.M)
    # One reason per line, as if each were printed alone.
    lines = f"error: {error.value}".splitlines()
    assert all(line.startswith("error: ") and line.endswith(".") for line in lines)
    (of_vllm,) = [line for line in lines if "--sampler vllm needs vllm" in line]
    (of_data,) = [line for line in lines if "no/data" in line]
    (of_model,) = [line for line in lines if f"{cfg.model} cannot be loaded" in line]
    assert len({of_vllm, of_data, of_model}) == len(lines) == 3


@pytest.mark.parametrize("env", NAMES)
def test_a_plan_generates_no_data(env, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session.dry_run(parse_args(env, presets_of(env), "", [])[0])
    assert f"data/{env}: not there, the run generates it" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


def test_a_family_with_other_names_for_its_sizes_is_estimated():
    config = OPTConfig(hidden_size=32, word_embed_proj_dim=32, num_attention_heads=2, ffn_dim=64)
    ours = estimate(BASE, empty_model(config, "OPT"), 1, "fp32", gpu_bytes=0)
    assert 0 < ours.needed < ours.peak


def test_only_a_run_that_cannot_fit_is_stopped(monkeypatch):
    """It names sizes and the settings that would lower them and are not in use."""

    def found(free: float, device="cpu", **settings) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda _: (free, 80e9 * (device == "cuda")))
        return memory.check(replace(BASE, **settings), SMALL, "bf16", device)

    ours = of(gpu_bytes=0)
    enough = f"{ours.needed / 1e9:.2f} GB (states 24.70, reference 3.55, vLLM 0.00), estimated peak"
    assert found(ours.needed).startswith(enough)
    assert found(ours.needed).endswith(" GB free on cpu; it may not fit")
    assert found(1.01 * ours.peak).endswith(" GB free on cpu")
    lowered = "the run needs 28.25 GB .*, 28.23 GB free on cpu: use {}, or a smaller --model."
    for settings, remedies in [
        ({}, "--lora-rank, --shard on more GPUs"), (dict(shard=True), "--lora-rank, more GPUs"),
    ]:
        with pytest.raises(UserError, match=lowered.format(remedies)):
            found(0.999 * ours.needed, **settings)
    with pytest.raises(UserError, match="on cuda: use a smaller --vllm-memory, --shard on more"):
        found(20e9, "cuda", sampler="vllm", lora_rank=8)
    assert "GB free on cpu; no GPU was found " in found(1e12, sampler="vllm")


def test_memory_gb_leaves_vllm_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 10**9)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert peak_memory(torch.device("cuda"), asleep=2 * 10**9) == 3.0
    assert 0.01 < peak_memory(torch.device("cpu"), asleep=0) < 1000


def test_a_run_stops_before_the_data_are_loaded(config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (0.0, 0))
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
    assert memory.free_bytes("cpu")[0] == pytest.approx(free, rel=0.2)  # a cluster's, not torchrun's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
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
    # A row of two tokens is nearly all logits.
    assert 90 < rows_that_fit(policy, 2 * 100 * 7 * 4 * QWEN.vocab_size, 1, 1) < 100


@pytest.mark.parametrize("updates, every, times", [(0, 0, 1), (0, 5, 1), (2, 0, 2), (12, 5, 4)])
def test_a_plan_counts_the_evaluations(updates, every, times, config, capsys):
    session.dry_run(config(updates=updates, eval_every=every))
    assert f"\nevaluate  {times} times" in capsys.readouterr().out
