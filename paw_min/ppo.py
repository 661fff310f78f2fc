"""PPO (arXiv 1707.06347): any method here, with a critic around it.

Before each token of a response, the critic predicts the score s_i that the row will get: the return
of the whole episode minus the row's penalty. The advantage is by how much the score is higher.

    V_k           value before token k, from h_t and a_t[<k]: a second copy of the start model with
                  a linear head of one output
    A_k           advantages.gae over the tokens of each response, whitened over the update
    G_k           A_k + V_k before whitening: what the critic learns
    value loss    max((V - G)^2, (clip(V, V_old +- 0.5) - G)^2), token mean; verl-agent has half
                  of it, which AdamW undoes, but not the clip of the gradient

As in verl-agent, GAE treats each row as its own trajectory: its last token is rewarded with s_i,
and nothing is bootstrapped from the next step of the environment. With gamma = lambda = 1,
A_k = s_i - V_k and G_k = s_i.

PPO differs from GRPO in its advantages only. So it is a function around a method (with_critic): it
gives the rows their advantages, trains the critic, and calls the method. What it needs of a session
is `policy.critic`, which checkpoints, resuming and FSDP hold with the policy.

The critic (model/critic.py) shares the policy's AdamW, with a learning rate of its own. Its
optimizer steps are separate from the policy's: AdamW skips parameters without a gradient, so a step
of one leaves the other alone.

Legend: N rows, T_i tokens of the response of row i, M tokens of all responses, one after another, B
rows of a micro-batch, S columns (model/batches.py).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from paw_min import advantages, losses
from paw_min.base import distributed
from paw_min.config import Config
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.model.scoring import TokenSums, response_batches
from paw_min.rows import PerToken, Rows
from paw_min.update import gradient_step, mini_batches, row_scores

VALUE_CLIP = 0.5  # verl-agent
GAE_LAMBDA = 1.0  # verl-agent
ROUNDING = 1e-6  # some roundings of fp32, relative to the numbers that were added


def with_critic(method: Callable) -> Callable:
    """A method (train.Method) that lets the critic judge the rows and be trained on them first."""

    def method_with_critic(cfg: Config, s, rows: Rows, k: int) -> dict[str, float]:
        judged = learn_values(cfg, s.policy, s.optimizer, rows, seed_key=(cfg.seed, k))
        return judged.metrics | method(cfg, s, judged.rows, k)

    return method_with_critic


class Judged(NamedTuple):
    rows: Rows  # with advantages from the critic's values before it was trained
    metrics: dict[str, float]


def learn_values(
    cfg: Config, policy: Policy, optimizer, rows: Rows, seed_key: tuple
) -> Judged:
    """Judge the rows, then fit the critic to their returns."""
    old = token_values(cfg, policy, rows)  # N x T_i
    lengths = [len(row) for row in old]
    value = torch.tensor(list(chain(*old)))  # (M,)
    # The score is the reward of the last token, all others get 0.
    reward = torch.zeros_like(value)  # (M,)
    last = torch.tensor(lengths).cumsum(0) - 1  # (N,)
    reward[last] = row_scores(rows, cfg.invalid_penalty).to(value)
    row_of_token = [i for i, length in enumerate(lengths) for _ in range(length)]
    estimate = advantages.gae(reward, value, row_of_token, gamma=1.0, lam=GAE_LAMBDA)  # (M,)
    returns = estimate + value  # G, (M,)

    def by_row(flat: Tensor) -> PerToken:
        return [row.tolist() for row in flat.split(lengths)]

    loss = fit_critic(cfg, policy, optimizer, rows, old, by_row(returns), seed_key)
    metrics = {
        "loss_value": loss,
        "value": value.mean().item(),
        "explained_variance": explained_variance(returns, value),
    }
    return Judged(replace(rows, advantage=by_row(whiten(estimate))), metrics)


def fit_critic(
    cfg: Config, policy: Policy, optimizer, rows: Rows, old: PerToken, returns: PerToken,
    seed_key: tuple,
) -> float:
    """One gradient step per mini-batch of optimize() -> the mean value loss."""
    minis = mini_batches(len(rows.tokens), cfg.mini_batch, seed_key)
    no_obs = [False] * len(rows.tokens)
    total = 0.0
    for mini in minis:
        optimizer.zero_grad()
        for batch in micro_batches(policy, rows.tokens, mini, no_obs, cfg.micro_tokens):
            value = policy.values(batch)  # (B, S)
            per_token = value_loss(value, batch.in_columns(old), batch.in_columns(returns))
            # This is a part of the token mean over the mini-batch, as in update.loss_terms.
            loss = batch.share * losses.masked_mean(per_token, batch.response_mask)
            loss.backward()
            total += loss.item() / len(minis)
        gradient_step(policy, optimizer)
    return sum(distributed.all_gather([total]))


def value_loss(value: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """The larger of the plain and the clipped squared error: (B, S) each -> (B, S)."""
    clipped = value.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
    return torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)


def explained_variance(returns: Tensor, value: Tensor) -> float:
    """1 - Var(G - V) / Var(G): (M,), (M,) -> 1 for a perfect critic; 0 where all G are equal.

    G is (s - V) + V, so equal scores give returns that differ in their last bits.
    """
    rounding = ROUNDING * torch.cat([returns, value]).abs().max()
    if len(returns) < 2 or returns.std() <= rounding:
        return 0.0
    return (1 - (returns - value).var() / returns.var()).item()


def whiten(values: Tensor) -> Tensor:
    """(value - mean) / sqrt(var + 1e-8), with the unbiased var: (M,) -> (M,)."""
    exact = values.double()  # exact enough where all values are equal
    variance = exact.var() if len(exact) > 1 else torch.zeros(())
    return ((exact - exact.mean()) / (variance + 1e-8).sqrt()).to(values)


@torch.no_grad()
def token_values(cfg: Config, policy: Policy, rows: Rows) -> PerToken:
    """V of all response tokens, in one pass that is split between the ranks."""
    result = TokenSums(rows.tokens)
    for batch in response_batches(policy, rows.tokens, cfg.micro_tokens):
        result.add(policy.values(batch), batch)
    return result.over_ranks()
