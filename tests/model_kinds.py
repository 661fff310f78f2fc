"""Tiny random models of families other than those of helpers.FAMILIES.

`write` sets the sizes that a configuration has under usual names; KINDS names the others.
"""

from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.toy import standins
from tests.helpers import SIZE, TEXTS

TOKENIZER = standins.make_tokenizer(TEXTS)
USUAL = SIZE | dict(
    vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, pad_token_id=0,
    bos_token_id=None, head_dim=8, max_position_embeddings=256, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32,
)
# Dense transformers whose code differs: embeddings that are scaled, parallel branches, norms behind
# layers, learned positions, fused matrices, layers without rotary positions, linear attention.
KINDS = {
    "gemma3_text": {}, "gpt_neox": {}, "mistral": {}, "olmo2": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32), "phi3": {}, "smollm3": {},
    "qwen3_5_text": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
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
