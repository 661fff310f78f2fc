"""Families of models, each as a tiny random one: load, sample, train, save, load again.

RUNNING.md has the result as a table. `build` sets the sizes that a configuration of transformers
has under usual names; FAMILIES names the others.
"""

import math
from collections import deque

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paw_min.base.distributed import layers_of
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model.batches import collate
from paw_min.model.policy import load_policy
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.vllm_sampler import VLLMSampler, as_trained
from paw_min.rows import TokenRow
from paw_min.toy import standins
from tests.helpers import BASE, EPISODES, SIZE, TEXTS, TOKEN_ROWS, update

TOKENIZER = standins.make_tokenizer(TEXTS)
USUAL = SIZE | dict(
    vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, pad_token_id=0,
    bos_token_id=None, head_dim=8, max_position_embeddings=256, num_experts=4, num_local_experts=4,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, shared_intermediate_size=32, n_shared_experts=1,
    n_group=1, topk_group=1, first_k_dense_replace=1,
)
DELTA = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
    linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16
)
FAMILIES = {
    "apertus": {}, "arcee": {}, "bamba": MAMBA | dict(attn_layer_indices=[1]), "bitnet": {},
    "bloom": {},
    "deepseek_v3": dict(
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    ),
    "dots1": {}, "ernie4_5": {}, "exaone4": {}, "falcon": {},
    "falcon_h1": MAMBA | dict(mamba_d_ssm=64),
    "falcon_mamba": dict(state_size=8), "gemma": {}, "gemma3_text": {}, "glm": {}, "glm4": {},
    "glm4_moe": {}, "gpt2": {}, "gpt_bigcode": {},
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]]), "gpt_neox": {},
    "gpt_oss": {}, "granite": {}, "granitemoe": {},
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"]), "helium": {},
    "hunyuan_v1_dense": {},
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]), "llama": {}, "mamba": dict(state_size=8),
    "mamba2": dict(num_heads=8, state_size=8, n_groups=1, chunk_size=16), "ministral3": {},
    "mistral": {}, "mixtral": {}, "nemotron": {},
    "nemotron_h": dict(
        layers_block_type=["mamba", "attention"], mamba_num_heads=8, mamba_head_dim=8,
        ssm_state_size=8, chunk_size=16,
    ),
    "olmo": {}, "olmo2": {}, "olmo3": {}, "olmoe": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32), "persimmon": {}, "phi3": {}, "phimoe": {},
    "qwen2": {}, "qwen2_moe": {}, "qwen3": {}, "qwen3_5_moe_text": DELTA, "qwen3_5_text": DELTA,
    "qwen3_moe": {}, "qwen3_next": DELTA, "seed_oss": {}, "smollm3": {}, "stablelm": {},
    "starcoder2": {},
}
REFUSED = {
    "codegen": "a head with a bias", "cohere2": "changes its logits", "gemma2": "changes its log",
    "gptj": "a head with a bias", "phi": "a head with a bias",
}


def write(family: str, folder, **options) -> str:
    """A random model of this family with its tokenizer."""
    config = AutoConfig.for_model(family)
    known = {*config.to_dict(), *config.attribute_map}
    sizes = {name: value for name, value in USUAL.items() if name in known}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**sizes | options))
    for name, p in model.named_parameters():
        if "norm" not in name and p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)  # sharper than the default: differences show
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


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
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_loaded_sampled_trained_and_saved(family, tmp_path):
    policy = load_policy(write(family, tmp_path / "start", **FAMILIES[family]))
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
def test_a_family_is_refused_in_a_sentence(family, tmp_path):
    with pytest.raises(UserError, match=REFUSED[family]):
        load_policy(write(family, tmp_path))


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
