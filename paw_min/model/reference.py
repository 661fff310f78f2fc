"""The reference of the KL term: the start model, frozen.

    full training   a second copy of it, loaded once. It waits on the CPU. In bf16 passes, its
                    weights that they round are stored in bf16
    LoRA            the policy itself, with its adapters off

The reference never changes, so one pass per update gives log pi_ref for all mini-batches.
"""

import torch

from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.model.scoring import score_responses
from paw_min.rows import PerToken, Rows


def make_reference(cfg: Config, policy: Policy, folder: str) -> Policy | None:
    """The reference of this policy; None without a KL term. folder: the start model."""
    if cfg.kl_coef == 0:
        return None
    if cfg.lora_rank:
        return policy
    reference = load_policy(folder, cfg.temperature, "cpu", policy.precision)
    if policy.precision == "bf16":
        # No log-probability changes, and they take half the memory.
        for layer in rounded_layers(reference.model):
            layer.to(torch.bfloat16)
    return reference.requires_grad_(False)


def rounded_layers(model) -> list[torch.nn.Module]:
    """Layers whose weights a bf16 pass rounds to bf16, in whatever type they are stored.

    A tied head is not one of them, since its embeddings are not rounded.
    """
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    return [*lora.linear_layers(model).values(), *([] if tied else [head])]


def reference_logp(cfg: Config, policy: Policy, reference: Policy, rows: Rows) -> PerToken:
    """log pi_ref(a_t)."""
    if reference is policy:  # LoRA
        with lora.adapters_off(policy):
            return score_responses(policy, rows.tokens, cfg.micro_tokens).logp
    reference.to(policy.device)
    logp = score_responses(reference, rows.tokens, cfg.micro_tokens).logp
    reference.to("cpu")  # It is not needed on the GPU until the next update.
    return logp
