"""Families of models, each as a tiny random one: which work, and which are refused.

RUNNING.md has the result as a table.
"""

import math
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from paw_min import train
from paw_min.config import Config
from paw_min.model.batches import collate
from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.published import load_config
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.shard import layers_of
from paw_min.model.vllm_sampler import VLLMSampler, check_model
from paw_min.rows import TokenRow
from paw_min.running import memory, plan, session
from tests.helpers import BASE, EPISODES, TOKEN_ROWS, change, one_sentence, update
from tests.model_kinds import KINDS, TOKENIZER, write

CHANGED = "changes its logits"
LENGTH = "gives a row other logits beside a longer one"
LAYER = "in a layer of the type"
LONGROPE = dict(
    original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.1] * 4, long_factor=[4.0] * 4))
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
IN_ONE_KIND_OF_LAYER = dict(
    layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
        sliding_attention=dict(rope_type="default", rope_theta=1e4), full_attention=DYNAMIC))
REFUSED = [  # as published, which for these is not the default of transformers
    ("cohere", {}, CHANGED), ("gemma2", {}, CHANGED), ("phi", {}, CHANGED),
    ("gptj", dict(rotary_dim=4), CHANGED), ("minicpm3", dict(num_key_value_heads=4), CHANGED),
    ("granite", dict(logits_scaling=8.0), CHANGED),
    ("phi3", LONGROPE, LENGTH), ("llama", dict(rope_parameters=DYNAMIC), LENGTH),
    ("gemma3_text", IN_ONE_KIND_OF_LAYER, LENGTH),
    ("gemma3_text", dict(use_bidirectional_attention=True), LENGTH),
    ("qwen3_moe", {}, f"model.layers.0.mlp.experts.gate_up_proj {LAYER} Qwen3MoeExperts"),
    ("mamba", dict(state_size=8), LAYER), ("gpt2", {}, f"attn.c_attn.weight {LAYER} Conv1D"),
]


@torch.no_grad()
def gap(policy, sampler) -> float:
    """Most |log pi - log mu| of a sampled token, in nats; prompts of two lengths."""
    requests = [Request(k, row.prompt_ids, seed=k) for k, row in enumerate(TOKEN_ROWS)]
    with sampler.sync(policy):
        parts = list(sampler.generate(deque(requests), 1.0, 6))
    responses = sorted((r for part in parts for r in part), key=lambda r: r.slot)
    rows = [TokenRow(q.prompt_ids, r.ids, []) for q, r in zip(requests, responses, strict=True)]
    logp, _ = policy(collate(rows, [False] * len(rows), policy.pad_id))
    theirs = torch.zeros_like(logp)
    for row, r in zip(theirs, responses):
        row[: len(r.logps)] = torch.tensor(r.logps)
    return (logp - theirs).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_a_family_is_loaded_sampled_trained_and_saved(family, tmp_path):
    policy = load_policy(write(family, tmp_path / "start", **KINDS[family]))
    assert gap(policy, HFSampler()) < 1e-3
    layers = layers_of(policy.model.get_decoder())
    assert len(layers) == policy.model.config.num_hidden_layers
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    batch = collate(TOKEN_ROWS, [True] * 3, policy.pad_id)
    before = policy(batch)[0].detach()
    metrics = update(Config(**BASE), policy, None, optimizer, EPISODES, (0, 0))
    after = policy(batch)[0].detach()
    assert math.isfinite(metrics["grad_norm"]) and (after - before).abs().mean() > 1e-3
    policy.save(tmp_path / "trained")
    torch.testing.assert_close(load_policy(str(tmp_path / "trained"))(batch)[0], after)


@pytest.mark.parametrize("family, settings, reason", REFUSED)
def test_a_plan_and_a_start_refuse_a_family_by_its_config(
    family, settings, reason, tmp_path, config
):
    """However small its logits are, and with positions beyond all rows of the test."""
    folder = write(family, tmp_path / "model", **settings)
    with one_sentence(reason) as planned:
        plan.dry_run(config(model=folder, max_prompt_tokens=200))
    with one_sentence(reason) as started:
        load_policy(folder)
    assert str(started.value) in str(planned.value)


@torch.no_grad()
def test_the_text_part_of_qwen3_5_is_a_model(tmp_path):
    """It is published with a part for pictures, and saved without."""
    write("qwen3_5_text", tmp_path / "text", **KINDS["qwen3_5_text"])
    text = load_config(str(tmp_path / "text")).to_dict()
    eyes = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32)
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=eyes)
    both = AutoModelForImageTextToText.from_config(config)
    both.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    ids = torch.tensor([TOKEN_ROWS[0].prompt_ids])
    expected = both.eval()(ids).logits
    policy.save(tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved")).model
    assert policy.model(ids).logits.equal(expected) and again(ids).logits.equal(expected)
    change(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    with one_sentence("quantized weights"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("family", ["mistral3", "gemma3"])
def test_a_model_that_also_sees_is_refused_by_its_config(family, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with one_sentence("does not only read text .*: use a model for text") as loaded:
        load_tokenizer(str(tmp_path))
    # A plan asks for its memory first, and prints equal sentences once.
    with one_sentence("does not only read text") as sized:
        memory.of_folder(Config(), str(tmp_path), "bf16")
    assert str(sized.value) == str(loaded.value)


def test_vllm_does_not_run_the_part_for_pictures(monkeypatch):
    """That of Qwen3.5 as published, which is not in vLLM's CPU build."""
    config = SimpleNamespace(is_multimodal_model=True)
    monkeypatch.setattr("vllm.EngineArgs.create_model_config", lambda _: config)
    with one_sentence("vLLM would run Qwen/Qwen3.5-4B with its part for pictures"):
        check_model("Qwen/Qwen3.5-4B")


@pytest.mark.slow
def test_vllm_has_the_trainers_log_probs(tmp_path):
    heads = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    folder = write("gemma3_text", tmp_path, **heads)
    sampler = VLLMSampler(folder, 64, "fp32", memory_share=0.2, slots=8)
    torch.set_num_threads(1)
    try:
        policy = load_policy(folder)
        assert gap(policy, sampler) < 1e-4
        assert gap(policy, HFSampler()) < 1e-4
    finally:
        sampler.close()


@pytest.mark.slow
def test_what_vllm_would_run_by_the_trainers_classes_is_refused_before_long_work(
    tmp_path, config, monkeypatch, capsys
):
    """Generating data takes minutes. vLLM would make these classes its own."""
    monkeypatch.setattr(session, "find_tasks", lambda *args: pytest.fail("too late"))
    folder = write("olmo2", tmp_path / "model")
    cfg = config(model=folder, max_prompt_tokens=128, sampler="vllm")
    for start in (train.train, plan.dry_run):
        with one_sentence("no code of its own for the family olmo2 .*: use --sampler transformers"):
            start(cfg)
        monkeypatch.undo()  # a plan has the data as well
    assert "training tasks" in capsys.readouterr().out
