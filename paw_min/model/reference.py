"""The reference of the KL term: the start model, frozen.

    full training   a second copy of it, loaded once. It waits on the CPU. In bf16 passes, its
                    weights that they round are stored in bf16
    LoRA            the policy itself, with its adapters off

The reference never changes, so one pass per update gives log pi_ref for all mini-batches.
"""

from contextlib import contextmanager

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
    with copied_to(reference, policy.device):
        return score_responses(reference, rows.tokens, cfg.micro_tokens).logp


@contextmanager
def copied_to(module: torch.nn.Module, device: torch.device):
    """In this block, the module is on the device. The copies are dropped, not copied back."""
    places = [  # parameters and buffers, each as often as modules share it
        (tensors, name, tensor)
        for part in module.modules()
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items() if tensor is not None
    ]
    here = {}  # id of a tensor -> another of its type with the same numbers
    for _, _, tensor in places:
        same = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            same = torch.nn.Parameter(same, tensor.requires_grad)
        here.setdefault(id(tensor), same)
    module.to(device)
    try:
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = here[id(tensor)]
