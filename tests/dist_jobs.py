"""What each rank of tests/running/test_dist.py does: `torchrun ... -m tests.dist_jobs JOB FOLDER`.

JOB: `policy` or `ppo`. Each also makes one more update of the run in FOLDER, sharded. In one
process, without torchrun, the same functions give the numbers to compare with.
"""

import sys
from collections.abc import Callable
from unittest.mock import patch

import torch

from paw_min.base import distributed
from paw_min.config import Config
from paw_min.model.loading import load_policy
from paw_min.model.lora import full_weights
from paw_min.model.shard import shard_policy
from paw_min.ppo import learn_values
from paw_min.rows import flatten
from paw_min.running.runs import Run, updates_done
from paw_min.update import optimize, prepare
from tests.helpers import (
    BASE,
    PPO,
    make_critic,
    make_episodes,
    make_policy,
    optimizer_of,
    update,
    with_adapters,
)

EPISODES = make_episodes(n_groups=4, size=3)
CASES = {
    "mini-batches": dict(mini_batch=7, kl_coef=0.1, entropy_coef=0.01),
    "one batch": dict(mini_batch=0, alpha=0.3, algo="gigpo"),
    "accumulation": dict(mini_batch=0, micro_tokens=40),
    "fewer rows than ranks": dict(mini_batch=2, micro_tokens=20),
    "baseline": dict(mini_batch=9, paw=False),
    "LoRA": dict(mini_batch=7, kl_coef=0.1, lora_rank=4),
    "bf16": dict(mini_batch=0, paw=False, precision="bf16"),
    "LoRA in bf16": dict(mini_batch=0, paw=False, precision="bf16", lora_rank=4),
}


PPO_CASES = {
    "old pass first": {},
    "critic first": dict(mini_batch=0, alpha=1.0),  # no pass of the policy before its own
}
UNCLIPPED = patch("paw_min.update.GRAD_CLIP", 1e9)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def updated(settings: dict, shard: bool = False) -> dict:
    """Metrics, gradients of the last mini-batch and weights after one update of fixed rows."""
    cfg = Config(**BASE | dict(lr=1e-3, precision="fp32") | settings)
    policy = make_policy()  # Qwen2 with a tied head
    policy.precision = cfg.precision
    reference = make_policy() if cfg.kl_coef else None
    if cfg.lora_rank:
        with_adapters(policy, cfg.precision)
        reference = policy if reference else None
    if shard:
        cfg.shard = True
        shard_policy(policy)
    trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=cfg.lr, eps=1e-6)
    metrics = update(cfg, policy, reference, optimizer, EPISODES, (0, 0))
    return {
        "metrics": {k: v for k, v in metrics.items() if not k.startswith("seconds")},
        "gradients": {n: whole(p.grad) for n, p in trained.items()},
        "weights": {n: whole(p).detach() for n, p in policy.named_parameters()},
        "merged": dict(full_weights(policy.model)),
    }


RESUME = BASE | dict(mini_batch=7, precision="fp32", name="r")


@UNCLIPPED
def uninterrupted(updates: int) -> dict[str, torch.Tensor]:
    """Weights after so many updates, without a checkpoint."""
    cfg, policy = Config(**RESUME), make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, eps=1e-6)
    for k in range(updates):
        update(cfg, policy, None, optimizer, EPISODES, (0, k))
    return dict(policy.named_parameters())


@UNCLIPPED
def resume(folder: str, shard: bool = False) -> None:
    """One more update of the run in `folder`, from its checkpoint to the next."""
    cfg = Config(**RESUME | dict(shard=shard, out=folder))
    with distributed.rank_0_first():
        run = Run(cfg)
    checkpoint = run.checkpoint()
    policy = load_policy(str(checkpoint)) if checkpoint else make_policy()
    if shard:
        shard_policy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, eps=1e-6)
    run.load(policy, optimizer)
    done = updates_done(checkpoint) if checkpoint else 0
    update(cfg, policy, None, optimizer, EPISODES, (0, done))
    run.save(policy, optimizer, done + 1)


@UNCLIPPED
def ppo_updated(settings: dict, shard: bool = False) -> dict:
    """Metrics and weights after one update of policy and critic with PaW."""
    cfg = Config(**PPO | dict(lr=1e-3, shard=shard) | settings)
    policy = make_critic(make_policy())
    if shard:
        shard_policy(policy)
    optimizer = optimizer_of(policy, cfg, lr_factor=1)
    rows = prepare(cfg, policy, None, flatten(EPISODES))
    rows, metrics = learn_values(cfg, policy, optimizer, rows, (0, 0))
    metrics |= optimize(cfg, policy, optimizer, rows, (0, 0))
    timeless = {k: v for k, v in metrics.items() if k != "tokens_forward"}
    weights = {n: whole(p).detach() for n, p in policy.named_parameters()}
    return {"metrics": timeless, "weights": weights}


JOBS: dict[str, tuple[dict, Callable]] = {
    "policy": (CASES, updated), "ppo": (PPO_CASES, ppo_updated),
}


def main() -> None:
    torch.set_num_threads(1)
    distributed.join()
    job, folder = sys.argv[1:]
    cases, update_of = JOBS[job]
    results = {
        how: {name: update_of(case, shard) for name, case in cases.items()}
        for how, shard in (("replicated", False), ("sharded", True))
    }
    resume(folder, shard=True)
    if distributed.rank() == 0:
        torch.save(results, f"{folder}/{job}.pt")
    distributed.finish()


if __name__ == "__main__":
    main()
