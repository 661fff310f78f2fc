"""Supervised fine-tuning: mean cross entropy of the target tokens, by AdamW.

A row is a TokenRow, as in RL, so batches, head and LoRA are those of update.py. Its targets are its
response, its observation, or both, without its `context_positions`. A conversation is one row: the
first message is the prompt, the rest is the observation, in which the other side's messages are
context. For one process.

Legend: N rows, B rows of a micro-batch, S columns (model/batches.py).
"""

import torch

from paw_min.base.console import progress_bar, say
from paw_min.base.distributed import join
from paw_min.base.errors import UserError
from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.metrics import mean
from paw_min.model.batches import micro_batches
from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.running.session import forward_precision
from paw_min.update import GRAD_CLIP


def load(cfg: Config, model: str) -> Policy:
    """The policy in this folder, or of this hub name, without a sampler."""
    device = join()
    return load_policy(model, device=device, precision=forward_precision(cfg.precision, device))


def fit(
    policy: Policy, optimizer, rows: list[TokenRow], *,
    epochs: int, batch: int, warm_up: int, micro_tokens: int, seed_key: tuple, name: str = "fit",
) -> list[float]:
    """Train on all rows `epochs` times, in random order -> loss of each step, nats per token.

    batch: rows per optimizer step. warm_up: steps in which the learning rate rises linearly to the
    optimizer's; then it is constant. micro_tokens: tokens per forward pass, padding included.
    The policy's sampling temperature has no effect: labels are not sampled.
    """
    sampling_temperature = policy.temperature
    policy.temperature = 1.0
    peak = [group["lr"] for group in optimizer.param_groups]
    history = []
    per_epoch = -(-len(rows) // batch)
    with progress_bar(epochs * per_epoch, name, "step") as bar:
        for epoch in range(epochs):
            order = list(range(len(rows)))
            generator(seed_key, epoch).shuffle(order)
            for start in range(0, len(order), batch):
                step = len(history) + 1
                for group, rate in zip(optimizer.param_groups, peak, strict=True):
                    group["lr"] = rate * min(1.0, step / max(1, warm_up))
                mini = order[start : start + batch]
                history.append(fit_step(policy, optimizer, rows, mini, micro_tokens, step))
                bar.update(1)
            average = mean(history[-per_epoch:])
            say(f"{name}: epoch {epoch + 1} of {epochs}, {average:.4f} nats per token")
    policy.temperature = sampling_temperature
    return history


def fit_step(
    policy: Policy, optimizer, rows: list[TokenRow], mini: list[int], budget: int, step: int
) -> float:
    """One optimizer step on the rows `mini` -> their mean loss, nats per target token.

    step: its number from 1, for the error if the loss or its gradient is not finite.
    """
    policy.zero_grad()
    # A mean over the targets of the mini-batch, so that the gradient does not depend on how rows
    # are cut into micro-batches.
    n_targets = sum(n_target_tokens(rows[i]) for i in mini)
    total = torch.zeros(())
    for part in micro_batches(policy, rows, mini, [True] * len(rows), budget):
        logp, _ = policy(part)  # (B, S)
        mask = part.response_mask | part.obs_mask  # (B, S): neither padding nor context
        loss = -(logp * mask).sum() / n_targets
        loss.backward()
        total += loss.detach().cpu()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), GRAD_CLIP)
    # This check comes before the step, so that no NaN weights are saved.
    if not (torch.isfinite(total) and torch.isfinite(norm)):
        rate = optimizer.param_groups[0]["lr"]
        raise UserError(
            f"fine-tuning step {step}: the loss is {total.item():g} and the norm of its gradient "
            f"{norm.item():g} at a learning rate of {rate:g}: lower it (word2world: --lr; rwml: "
            "sft_lr in world_models/rwml/settings.py)."
        )
    optimizer.step()
    return total.item()


def n_target_tokens(row: TokenRow) -> int:
    return len(row.response_ids) + len(row.obs_ids) - len(row.context_positions)
