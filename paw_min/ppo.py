"""How does PPO (arXiv 1707.06347) train? As any other method here, with a critic around it.

Before each token of a response, the critic predicts the score s_i that the row will get: the return
of the whole episode minus the row's penalty. The advantage is by how much the score is higher.

    V_k           value before token k, from h_t and a_t[<k]: a second copy of the start model with
                  a linear head of one output
    A_k           advantages.gae over the tokens of each response, whitened over the update
    G_k           A_k + V_k before whitening: what the critic learns
    value loss    max((V - G)^2, (clip(V, V_old +- 0.5) - G)^2), token mean

As in verl-agent, GAE treats each row as its own trajectory: its last token is rewarded with s_i,
and nothing is bootstrapped from the next step of the environment. With gamma = lambda = 1,
A_k = s_i - V_k and G_k = s_i.

PPO differs from GRPO in its advantages only. So it is a function around a method (with_critic): it
gives the rows their advantages, trains the critic, and calls the method. What it needs of a session
is `policy.critic`, which checkpoints, resuming and FSDP hold with the policy.

The critic shares the policy's AdamW, with a learning rate of its own. Its optimizer steps are
separate from the policy's: AdamW skips parameters without a gradient, so a step of one leaves the
other alone. Its head starts at zero, verl-agent's at random.

Legend: N rows, T tokens of the longest response, B rows of a micro-batch, S columns (see
model/batches.py), M response tokens, D hidden size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paw_min import advantages, losses
from paw_min.base import distributed
from paw_min.config import Config
from paw_min.model.batches import Batch, micro_batches, to_columns
from paw_min.model.policy import Policy, last_hidden, load_policy
from paw_min.model.scoring import response_mask
from paw_min.rows import Rows
from paw_min.update import gradient_step, mini_batches, row_scores

VALUE_CLIP = 0.5  # verl-agent
GAE_LAMBDA = 1.0  # verl-agent
LR_FACTOR = 10  # The critic's rate is so many times the policy's; A.1: 1e-5 and 1e-6.


def with_critic(method: Callable) -> Callable:
    """A method (train.Method) that lets the critic judge the rows and be trained on them first."""

    def method_with_critic(cfg: Config, s, rows: Rows, k: int) -> dict[str, float]:
        rows, metrics = learn_values(cfg, s.policy, s.optimizer, rows, seed_key=(cfg.seed, k))
        return metrics | method(cfg, s, rows, k)

    return method_with_critic


def learn_values(
    cfg: Config, policy: Policy, optimizer, rows: Rows, seed_key: tuple
) -> tuple[Rows, dict[str, float]]:
    """Fit the critic to the returns -> rows with advantages from its values before, metrics."""
    mask = response_mask(rows.tokens)  # (N, T)
    old = token_values(cfg, policy, rows)  # (N, T)
    # The score is the reward of the last token, all others get 0.
    reward = torch.zeros_like(old)  # (N, T)
    row = torch.arange(len(mask))  # (N,)
    last = mask.sum(-1) - 1  # (N,)
    reward[row, last] = row_scores(rows, cfg.invalid_penalty).to(old)
    # gae() takes a flat list of tokens, with the row of each as its trajectory.
    label = row[:, None].expand_as(mask)[mask]  # (M,)
    estimate = torch.zeros_like(old)  # (N, T)
    estimate[mask] = advantages.gae(reward[mask], old[mask], label, gamma=1.0, lam=GAE_LAMBDA)
    returns = estimate + old  # G, (N, T)

    loss = fit_critic(cfg, policy, optimizer, rows, old, returns, seed_key)
    error = (returns - old)[mask].var()
    spread = returns[mask].var()
    metrics = {
        "loss_value": loss,
        "value": old[mask].mean().item(),
        "explained_variance": (1 - error / spread).item() if spread > 0 else 0.0,
    }
    return replace(rows, advantage=whiten(estimate, mask)), metrics


def fit_critic(
    cfg: Config, policy: Policy, optimizer, rows: Rows, old: Tensor, returns: Tensor,
    seed_key: tuple,
) -> float:
    """One gradient step per mini-batch of optimize() -> mean value loss. old, returns: (N, T)."""
    minis = mini_batches(len(rows.tokens), cfg.mini_batch, seed_key)
    no_obs = [False] * len(rows.tokens)
    total = 0.0
    for mini in minis:
        n_tokens = sum(len(rows.tokens[i].response_ids) for i in mini)
        optimizer.zero_grad()
        for batch in micro_batches(policy, rows.tokens, mini, no_obs, cfg.micro_tokens):
            value = policy.values(batch)  # (B, S)
            old_value = to_columns(old[batch.index], value)  # (B, S)
            target = to_columns(returns[batch.index], value)  # (B, S)
            per_token = value_loss(value, old_value, target)
            # This is a part of the token mean over the mini-batch, as in update.loss_parts.
            share = int(batch.response_mask.sum()) / n_tokens
            loss = share * losses.masked_mean(per_token, batch.response_mask)
            loss.backward()
            total += loss.item() / len(minis)
        gradient_step(policy, optimizer)
    return sum(distributed.all_gather([total]))


def value_loss(value: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """The larger of the plain and the clipped squared error, elementwise."""
    clipped = value.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
    return torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(value - mean) / sqrt(var + 1e-8) where mask is 1, with the unbiased var; 0 elsewhere."""
    inside = values[mask].double()  # (M,), exact enough where all values are equal
    variance = inside.var() if len(inside) > 1 else torch.zeros(())
    whitened = (values.double() - inside.mean()) / (variance + 1e-8).sqrt()
    return whitened.masked_fill(~mask, 0.0).to(values)


@torch.no_grad()
def token_values(cfg: Config, policy: Policy, rows: Rows) -> Tensor:
    """V of all response tokens, in one pass that is split between the ranks -> (N, T)."""
    result = torch.zeros(response_mask(rows.tokens).shape)  # (N, T)
    everything = list(range(len(rows.tokens)))
    no_obs = [False] * len(rows.tokens)
    for batch in micro_batches(policy, rows.tokens, everything, no_obs, cfg.micro_tokens):
        value = policy.values(batch)  # (B, S)
        mask = batch.response_mask
        # Added, not assigned: a rank that repeats another's row has an empty mask and adds zeros.
        result[batch.index, : mask.shape[1]] += value.masked_fill(~mask, 0.0).cpu()
    distributed.all_reduce([result])  # each row is 0 on all ranks but one
    return result


class Critic(torch.nn.Module):
    """Values of response tokens: a decoder and a linear head."""

    def __init__(self, decoder: torch.nn.Module, precision: str = "fp32"):
        super().__init__()
        self.decoder = decoder
        self.precision = precision
        width = decoder.config.hidden_size
        self.head = torch.nn.Linear(width, 1, device=decoder.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """V of the state before each response token -> (B, S) fp32, 0 elsewhere."""
        hidden = last_hidden(self.decoder, batch, self.precision)  # (B * L, D)
        # The state before a token is at the token that precedes it.
        n = batch.n_response
        hidden = hidden[batch.at[:n] - 1]  # (M, D)
        value = self.head(hidden.to(self.head.weight.dtype))[:, 0].float()  # (M,)
        empty = torch.zeros(batch.response_mask.shape, device=value.device)  # (B, S)
        return empty.index_put((batch.row[:n], batch.column[:n]), value)


def load_critic(folder: str, policy: Policy) -> Critic:
    """A critic that starts from the language model in `folder`."""
    model = load_policy(folder, device=str(policy.device)).model
    return Critic(model.get_decoder(), policy.precision)
