"""Families of models, each as a tiny random one: load, sample, train, save, load again.

RUNNING.md has the result as a table.
"""

import math
from collections import deque

import pytest
import torch
from transformers import AutoConfig

from paw_min.config import Config
from paw_min.model.batches import collate
from paw_min.model.policy import load_policy
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.shard import layers_of
from paw_min.model.vllm_sampler import VLLMSampler, as_trained
from paw_min.rows import TokenRow
from paw_min.running import session
from tests.helpers import BASE, EPISODES, TOKEN_ROWS, one_sentence, update
from tests.model_kinds import KINDS, MAMBA, write

BIAS = "a head with a bias"
CHANGED = "changes its logits"
REFUSED = {  # as published, which for these is not the default of transformers
    "codegen": ({}, BIAS), "cohere": ({}, CHANGED), "cohere2": ({}, CHANGED),
    "falcon_h1": (MAMBA | dict(mamba_d_ssm=64, lm_head_multiplier=0.0390625), CHANGED),
    "gemma2": ({}, CHANGED), "gemma4_text": (dict(final_logit_softcapping=30.0), CHANGED),
    "gptj": ({}, BIAS), "granite": (dict(logits_scaling=8.0), CHANGED),
    "granitemoe": (dict(logits_scaling=6.0), CHANGED),
    "granitemoehybrid": (
        MAMBA | dict(layer_types=["mamba", "attention"], logits_scaling=8.0), CHANGED
    ),
    "minicpm3": ({}, CHANGED), "nanochat": ({}, CHANGED), "phi": ({}, BIAS),
}


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
    assert len(layers) == policy.model.config.get_text_config().num_hidden_layers
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    batch = collate(TOKEN_ROWS, [True] * 3, policy.pad_id)
    before = policy(batch)[0].detach()
    metrics = update(Config(**BASE), policy, None, optimizer, EPISODES, (0, 0))
    after = policy(batch)[0].detach()
    assert math.isfinite(metrics["grad_norm"]) and (after - before).abs().mean() > 1e-3
    policy.save(tmp_path / "trained")
    torch.testing.assert_close(load_policy(str(tmp_path / "trained"))(batch)[0], after)


@pytest.mark.parametrize("family", REFUSED)
def test_a_plan_and_a_start_refuse_a_family_by_its_config(family, tmp_path, config):
    """However small its logits are: a cap at 30 leaves them nearly as they were."""
    settings, reason = REFUSED[family]
    folder = write(family, tmp_path / "model", **settings)
    with one_sentence(reason) as planned:
        session.dry_run(config(model=folder, max_prompt_tokens=200))
    with one_sentence(reason) as started:
        load_policy(folder)
    assert str(started.value) in str(planned.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "olmo2"])
def test_vllm_has_the_trainers_log_probs(family, tmp_path):
    """The second runs by the code of transformers, whose classes the trainer uses as well."""
    heads = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    folder = write(family, tmp_path, **heads)
    sampler = VLLMSampler(folder, 64, "fp32", memory_share=0.2, seed=0)
    torch.set_num_threads(1)
    try:
        policy = load_policy(folder)
        assert gap(policy, sampler) < 1e-4
        assert gap(policy, HFSampler()) < 1e-4
    finally:
        sampler.close()


def test_vllm_loads_the_trainers_class():
    """Of Qwen3.5, which also sees, the part for text: the published class has other names."""
    config = AutoConfig.for_model("qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"])
    assert as_trained(config).architectures == ["Qwen3_5ForCausalLM"]
    assert config.get_text_config().head_dtype == "float32"
