"""Tiny random models of the families that transformers has.

`write` sets the sizes that a configuration has under usual names; KINDS names the others.
"""

from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paw_min.model.policy import Policy, load_policy
from paw_min.toy import standins
from tests.helpers import SIZE, TEXTS

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
KINDS = {
    "apertus": {}, "arcee": {}, "bamba": MAMBA | dict(attn_layer_indices=[1]), "bitnet": {},
    "bloom": {},
    "deepseek_v3": dict(
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    ),
    "dots1": {}, "ernie4_5": {}, "exaone4": {}, "falcon": {},
    "falcon_mamba": dict(state_size=8), "gemma": {}, "gemma3_text": {}, "glm": {}, "glm4": {},
    "glm4_moe": {}, "gpt2": {}, "gpt_bigcode": {},
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]]), "gpt_neox": {},
    "gpt_oss": {}, "helium": {},
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


def write(kind: str, folder, **options) -> str:
    """A random model of this kind with its tokenizer."""
    config = AutoConfig.for_model(kind)
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


def make_kind(kind: str, **options) -> Policy:
    with TemporaryDirectory() as folder:
        return load_policy(write(kind, folder, **KINDS.get(kind, {}) | options))
