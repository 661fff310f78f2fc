"""Memory before the start: the plan against shapes and real models, and runs that cannot fit.

    python -m pytest tests/test_memory.py

bench/memory.py compares the plan with measured peaks of updates.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen2Config

from paw_min import train
from paw_min.config import Config, check, parse_args
from paw_min.model import lora
from paw_min.model.head import TILE
from paw_min.running import memory, session
from paw_min.running.errors import UserError
from paw_min.running.memory import plan
from tests.helpers import SCRIPTS, make_policy

# The published shapes of Qwen2.5-1.5B and 7B.
SMALL = dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
             num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
LARGE = dict(vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
             num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)  # fmt: skip
QWEN = Qwen2Config(**SMALL)
N, HEAD = 1_543_714_304, 151_936 * 1536
MATRICES = 28 * (2 * 1536**2 + 1536 + 2 * (1536 * 256 + 256) + 3 * 1536 * 8960)  # with biases
ADAPTERS = 28 * 8 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))  # of rank 8
BASE = Config(groups=100, mini_batch=0, micro_tokens=1000, kl_coef=0.1)


def of(cfg: Config = BASE, *, ranks=1, bf16=True, gpu=80e9, **changes) -> memory.Plan:
    return plan(replace(cfg, **changes), QWEN, ranks, bf16, gpu)


def test_full_training_takes_16_bytes_per_parameter_and_4_for_the_reference():
    ours = of()
    assert (ours.weights, ours.optimizer, ours.reference) == (4 * N, 8 * N, 4 * N)
    assert ours.gradients == 4 * N + 8 * HEAD  # head and embedding once more
    assert of(kl_coef=0.0).reference == 0
    assert replace(of(bf16=False), activations=0, layer=0) == replace(ours, activations=0, layer=0)


def test_lora_takes_the_frozen_matrices_in_the_type_of_the_passes():
    ours = of(lora_rank=8)
    assert ours.weights == 2 * MATRICES + 4 * (N - MATRICES) + 4 * ADAPTERS
    assert of(lora_rank=8, bf16=False).weights == 4 * N + 4 * ADAPTERS
    assert (ours.gradients, ours.optimizer) == (4 * ADAPTERS, 8 * ADAPTERS)
    assert ours.reference == 0
    assert of(lora_rank=16).optimizer == 2 * ours.optimizer


@pytest.mark.parametrize("settings", [{}, dict(lora_rank=4)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_those_of_the_real_model(family, settings, precision):
    policy = make_policy(family, precision=precision)
    if settings:
        lora.attach(policy.model, 4, precision, 0, None)
    config = policy.model.config
    ours = plan(replace(BASE, **settings), config, 1, precision == "bf16", 0)
    assert ours.weights == sum(p.numel() * p.element_size() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert ours.optimizer == 8 * trained


def test_activations():
    """Per token and layer: two norms, attention and MLP; or only the input, and one layer again."""
    heads, d, f, tokens = 14 * 128, 1536, 8960, 1000
    for w, bf16 in ((2, True), (4, False)):
        kept = tokens * (24 * d + w * (2 * heads + 4 * f))
        copies = 2 * MATRICES if bf16 else 0  # autocast's
        ours, again = of(bf16=bf16), of(bf16=bf16, grad_checkpointing=True)
        assert (ours.activations, ours.layer) == (28 * kept + copies, tokens * w * 3 * f)
        assert again.activations == 28 * tokens * 4 * d + copies
        assert again.layer == kept + ours.layer
        frozen = of(bf16=bf16, lora_rank=8).activations
        assert frozen == 28 * (kept - tokens * 8 * d)
    assert of().logits == tokens * 16 * d + 12 * TILE
    wide = of(micro_tokens=2000)
    assert wide.layer == 2 * of().layer and wide.logits - 12 * TILE == 2 * (of().logits - 12 * TILE)
    # An update of a few short rows never fills a pass.
    few = of(groups=1, group_size=1, max_turns=1, max_prompt_tokens=300, max_response_tokens=50,
             max_obs_tokens=50)  # fmt: skip
    assert few.layer == 0.4 * of().layer


def test_a_critic_has_weights_and_moments_and_takes_turns():
    ours, plain = of(algo="ppo"), of()
    assert ours.weights == plain.weights + 4 * N and ours.optimizer == 2 * plain.optimizer
    assert ours.gradients == plain.gradients
    adapters = of(algo="ppo", lora_rank=8)
    assert adapters.gradients == 4 * N and adapters.optimizer == 8 * (N + ADAPTERS)


def test_sharding_divides_what_is_trained_and_gathers_for_a_pass():
    ours, plain = of(ranks=4, shard=True, sampler="vllm"), of(ranks=4)
    assert (ours.weights, ours.optimizer) == (plain.weights / 4, plain.optimizer / 4)
    assert ours.gradients == N + 8 * HEAD and ours.reference == plain.reference
    gathered = 2 * (N - MATRICES + MATRICES / 14)  # head, embedding, two of 28 layers, in bf16
    assert ours.activations - (plain.activations - 2 * MATRICES) == pytest.approx(gathered)


def test_vllm_and_the_phases():
    assert of().vllm == 0 and of(sampler="vllm", vllm_memory=0.3).vllm == 24e9
    assert of(sampler="vllm", gpu=0, bf16=False).vllm == 4 * N + 2**30
    ours = memory.Plan(8, 4, 16, 6, activations=3, layer=2, logits=1, vllm=0, offload=False)
    assert ours.peak() == 28 + 6 + 8  # AdamW's temporary numbers
    assert replace(ours, offload=True).peak() == 28 + 8
    assert replace(ours, activations=9).peak() == 28 + 6 + 9 + 2
    assert replace(ours, activations=9, logits=5).peak() == 28 + 6 + 9 + 5
    assert replace(ours, vllm=20).peak() == 28 + 6 + 20
    assert replace(ours, layer=5, offload=True).peak() == 28 + 6 + 5  # the reference's own pass


# ---- presets ----


def published(env: str, preset: str, gpu: float) -> memory.Plan:
    cfg, _ = parse_args(env, SCRIPTS[env].PRESETS, "", ["--preset", preset])
    sizes = {"Qwen/Qwen2.5-1.5B-Instruct": SMALL, "Qwen/Qwen2.5-7B-Instruct": LARGE}
    return plan(cfg, Qwen2Config(**sizes[cfg.model]), 1, True, gpu)


@pytest.mark.parametrize("env", SCRIPTS)
@pytest.mark.parametrize("preset, gpu", [("24gb", 24e9), ("80gb", 80e9)])
def test_presets_fit_their_gpu_with_a_margin(env, preset, gpu):
    ours = published(env, preset, gpu)
    assert 0.6 * gpu < ours.peak() < 0.85 * gpu
    readme = (Path(__file__).parent.parent / "RUNNING.md").read_text()
    held = ours.weights + ours.gradients + ours.optimizer
    passes = ours.activations + max(ours.layer, ours.logits)
    sizes = (held, passes, ours.vllm, ours.peak())
    row = f"| {' | '.join(f'{size / 1e9:.1f}' for size in sizes)} |"
    assert re.search(rf"^\| `{preset}` \|.*{re.escape(row)}$", readme, re.M), row


@pytest.mark.parametrize("env", SCRIPTS)
def test_presets_are_the_papers_but_for_lora(env):
    presets = SCRIPTS[env].PRESETS
    for name, size, share in (("24gb", "1.5B", 0.6), ("80gb", "7B", 0.5)):
        model = f"Qwen/Qwen2.5-{size}-Instruct"
        other = dict(model=model, lora_rank=16, lr=1e-5, vllm_memory=share)
        assert presets[name] == presets["paper"] | other
        cfg, _ = parse_args(env, presets, "", ["--preset", name])
        check(cfg)
        assert cfg.name == f"{env}-Qwen2.5-{size}-Instruct-{name}-grpo-paw-seed0"


# ---- a run ----


@pytest.mark.slow
def test_the_dry_run_prints_the_table_without_weights(config, model, tmp_path, capsys):
    folder = tmp_path / "published"
    folder.mkdir()
    for file in Path(model).iterdir():
        if "token" in file.name or "template" in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(QWEN.to_dict()))
    flags = dict(model=str(folder), lora_rank=16, precision="bf16", micro_tokens=500)
    session.dry_run(config(**flags))
    out = capsys.readouterr().out
    ours = plan(config(**flags), AutoConfig.from_pretrained(folder), 1, True, 0)
    assert f"memory    {ours.peak() / 1e9:.2f} GB at the peak, " in out and " GB free on cpu" in out
    rows = dict(re.findall(r"^ {10}(\w+) +([\d.]+) GB$", out, re.M))
    assert list(rows) == ["weights", "gradients", "optimizer", "activations", "layer", "logits"]
    assert rows["weights"] == f"{ours.weights / 1e9:.2f}" == "3.63"


@pytest.mark.parametrize(
    "gb, settings, remedy",
    [
        (60, dict(micro_tokens=16384), "--grad-checkpointing"),
        (45, dict(micro_tokens=60_000, grad_checkpointing=True), "--micro-tokens 15000"),
        (35, dict(micro_tokens=500, grad_checkpointing=True), "--ref-offload"),
        (60, dict(sampler="vllm", vllm_memory=0.8), "--vllm-memory 0.4"),
        (18, dict(micro_tokens=500, grad_checkpointing=True), "--lora-rank 16"),
        (10, dict(micro_tokens=16384), "--grad-checkpointing --micro-tokens 4096 --lora-rank 16"),
        (2, {}, "a smaller --model, or --shard on more GPUs"),
    ],
)
def test_a_run_that_cannot_fit_names_the_setting(tmp_path, monkeypatch, gb, settings, remedy):
    (tmp_path / "config.json").write_text(json.dumps(QWEN.to_dict()))
    gpu = 80e9 if "sampler" in settings else 0
    monkeypatch.setattr(memory, "free_bytes", lambda device: (gb * 1e9, gpu))
    cfg = replace(BASE, precision="bf16", **settings)
    message = rf"needs [\d.]+ GB .*, {gb}.00 GB free on cpu: use "
    with pytest.raises(UserError, match=message) as error:
        memory.table(cfg, str(tmp_path), "cpu")
    assert str(error.value).endswith(f": use {remedy}.") and "\n" not in str(error.value)
    ours = plan(cfg, QWEN, 1, True, gpu)
    assert ours.peak() > gb * 1e9
    monkeypatch.setattr(memory, "free_bytes", lambda device: (0.91 * ours.peak(), gpu))
    memory.table(cfg, str(tmp_path), "cpu")  # within the error of the formula: not refused


def test_a_run_stops_before_the_data_are_loaded(config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1e6, 0))
    monkeypatch.setattr(session, "find_tasks", lambda cfg: pytest.fail("too late"))
    with pytest.raises(UserError, match="the run needs .* 0.00 GB free on cpu: use "):
        train.train(config())


def test_evaluation_is_not_refused(config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (0.0, 0))
    train.train(config(), eval_only=True)


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch):
    free, gpu = memory.free_bytes("cpu")
    assert 1e8 < free < 1e14 and gpu == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_bytes("cpu")[0] == pytest.approx(free / 4, rel=0.2)


def test_on_a_gpu_a_run_says_what_it_takes_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN.to_dict()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79e9, 80e9))
    memory.announce(replace(BASE, sampler="vllm", vllm_memory=0.25), str(tmp_path), "cuda:0")
    (line,) = capsys.readouterr().out.splitlines()
    assert " GB at the peak, 79.00 GB free on cuda:0 weights 6.17 GB" in line
    assert line.endswith("vllm 20.00 GB") and "activations" in line
    memory.announce(replace(BASE, lora_rank=16, micro_tokens=10), str(tmp_path), "cpu")
    assert not capsys.readouterr().out
