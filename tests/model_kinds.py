"""Tiny random models of kinds that LoRA can or cannot adapt."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paw_min.model.policy import Policy, switch_noise_off
from paw_min.toy import standins
from tests.helpers import SIZE, TEXTS

EXPERTS = dict(
    head_dim=8, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, n_routed_experts=4,
)
MAMBA = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1)
KINDS = {
    # Mixtures of experts: fused, and beside dense layers or shared experts.
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS | dict(first_k_dense_replace=1, n_shared_experts=1, n_group=1,
                               topk_group=1),
    "qwen3_next": EXPERTS | dict(
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=16, num_hidden_layers=4,
    ),
    "phimoe": EXPERTS,  # its router is a subclass of nn.Linear
    "jetmoe": EXPERTS | dict(kv_channels=8),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    "jamba": EXPERTS | dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=64),
}


def make_kind(kind: str) -> Policy:
    tokenizer = standins.make_tokenizer(TEXTS)
    torch.manual_seed(0)
    settings = dict(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=None,
                    eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    config = AutoConfig.for_model(kind, **SIZE | settings | KINDS[kind])
    switch_noise_off(config)
    model = AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if p.dim() > 1 and not any(part in name for part in ("norm", "A_log", "conv")):
            torch.nn.init.normal_(p, std=0.1 if "experts" in name else 0.3)
    return Policy(model, tokenizer)
