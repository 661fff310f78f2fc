"""Sharding of the policy across ranks (FSDP2), for --shard."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from paw_min.base import distributed
from paw_min.model.policy import Policy


def shard_policy(policy: Policy) -> None:
    """Shard weights, gradients and optimizer state across the ranks (FSDP2), in place.

    A layer is gathered while it computes; embeddings and head stay gathered for the whole pass.
    Stored weights stay fp32.
    """
    mesh = init_device_mesh(policy.device.type, (distributed.n_ranks(),))
    # NCCL makes its communicator at the first call. Made later, while vLLM is awake, its memory
    # would count as vLLM's (VLLMSampler.kept).
    distributed.all_reduce([torch.zeros(1, device=policy.device)])
    dtype = torch.bfloat16 if policy.precision == "bf16" else None
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Inner modules first; the policy, which holds all of them, is the root.
    parts = layers_of(policy.model.get_decoder())
    if policy.critic:
        parts += [*layers_of(policy.critic.decoder), policy.critic]
    parts.append(policy)
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    for part in parts:
        part.set_gradient_divide_factor(1.0)  # sum the gradients, as without FSDP ...
        part.set_force_sum_reduction_for_comms(True)  # ... by the one reduction that gloo supports
    # The critic is called through the policy, so that FSDP knows its root whichever pass is first.
    register_fsdp_forward_method(policy, "values")


def layers_of(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    """Its longest list of modules, which families name differently: layers, h, blocks."""
    lists = [part for part in decoder.children() if isinstance(part, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
