"""The critic of PPO (arXiv 1707.06347): token values, advantages, and the value loss.

    V(h_t, a_t[<k])    a second copy of the start model with a linear head of one output
    A_k                advantages.gae over the tokens of each response, whitened over the update
    value loss         max((V - G)^2, (clip(V, V_old +- 0.5) - G)^2), token mean

In verl-agent's multi-turn form, each row is an episode of its own: its last token is rewarded
with the row's score s_i (return of the whole trajectory, minus the row's penalty), and nothing is
bootstrapped from the next step of the environment. With gamma = lambda = 1, A_k = s_i - V_k.

The critic is `policy.critic`, so checkpoints, resuming and FSDP hold it. It shares the policy's
AdamW, with a learning rate of its own, but is stepped alone: AdamW skips parameters without a
gradient. Its head starts at zero, verl-agent's at random.

Legend: N rows, T tokens of the longest response, B rows of a micro-batch, S scored tokens, D hidden
size, M response tokens.
"""

import torch
from torch import Tensor

from paw_min import advantages, losses
from paw_min.config import Config
from paw_min.model.batches import Batch, micro_batches
from paw_min.model.policy import Policy, load_policy
from paw_min.model.scoring import fit
from paw_min.running import distributed
from paw_min.update import Rows, gradient_step, mini_batches

VALUE_CLIP = 0.5


class Critic(torch.nn.Module):
    """Values of response tokens: a decoder and a linear head."""

    def __init__(self, decoder: torch.nn.Module, precision: str = "fp32"):
        super().__init__()
        self.decoder, self.precision = decoder, precision
        self.head = torch.nn.Linear(decoder.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """V of the state before each response token -> (B, S) fp32, 0 elsewhere."""
        bf16 = self.precision == "bf16"
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
            out = self.decoder(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
        n = batch.n_response
        hidden = out.last_hidden_state.flatten(0, 1)[batch.before[:n]]  # (M, D)
        value = self.head(hidden.to(self.head.weight.dtype))[:, 0].float()  # (M,)
        empty = torch.zeros(batch.response_mask.shape, device=value.device)  # (B, S)
        return empty.index_put((batch.row[:n], batch.column[:n]), value)


def load_critic(folder: str, policy: Policy, attention: str) -> Critic:
    """A critic that starts from the language model in `folder`."""
    model = load_policy(folder, device=str(policy.device), attention=attention).model
    return Critic(model.get_decoder(), policy.precision)


def learn_values(
    cfg: Config, policy: Policy, optimizer, rows: Rows, seed_key: tuple
) -> dict[str, float]:
    """Set rows.advantage from the critic's values, then fit the critic to the returns -> metrics.

    rows.advantage: on entry (N,), the scores s_i.
    """
    mask = _response_mask(rows)  # (N, T)
    old = token_values(cfg, policy, rows)  # (N, T)
    reward = torch.zeros_like(old)
    last = mask.sum(-1) - 1  # (N,)
    reward[torch.arange(len(last)), last] = rows.advantage.to(old)
    label = torch.arange(len(mask))[:, None].expand_as(mask)[mask]  # (M,) the row of each token
    estimate = torch.zeros_like(old)
    estimate[mask] = advantages.gae(reward[mask], old[mask], label, gamma=1.0, lam=cfg.gae_lambda)
    returns = estimate + old  # G, (N, T)
    rows.advantage = whiten(estimate, mask)
    loss = _fit(cfg, policy, optimizer, rows, old, returns, seed_key)
    error, spread = (returns - old)[mask].var(), returns[mask].var()
    explained = (1 - error / spread).item() if spread > 0 else 0.0
    return {"loss_value": loss, "value": old[mask].mean().item(), "explained_variance": explained}


def _fit(cfg: Config, policy: Policy, optimizer, rows: Rows, old, returns, seed_key) -> float:
    """One gradient step per mini-batch of learn() -> the mean value loss."""
    minis, total = mini_batches(cfg, len(rows.tokens), seed_key), 0.0
    no_obs = [False] * len(rows.tokens)
    for mini in minis:
        n_tokens = sum(len(rows.tokens[i].response_ids) for i in mini)
        optimizer.zero_grad()
        batches = list(micro_batches(policy, rows.tokens, mini, no_obs, cfg.micro_tokens))
        for batch in batches:
            value, i = policy.critic(batch), batch.index  # (B, S)
            per_token = value_loss(value, fit(old[i], value), fit(returns[i], value))
            share = int(batch.response_mask.sum()) / n_tokens
            loss = share * losses.masked_mean(per_token, batch.response_mask)
            with distributed.gradient_sums(policy, now=batch is batches[-1] and not cfg.shard):
                loss.backward()
            total += loss.item() / len(minis)
        gradient_step(cfg, policy, optimizer, rows, mini)
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
    result = torch.zeros(_response_mask(rows).shape)  # (N, T)
    everything, no_obs = list(range(len(rows.tokens))), [False] * len(rows.tokens)
    for batch in micro_batches(policy, rows.tokens, everything, no_obs, cfg.micro_tokens):
        value, mask = policy.critic(batch), batch.response_mask  # (B, S), (B, S)
        result[batch.index, : mask.shape[1]] += value.masked_fill(~mask, 0.0).cpu()
    distributed.all_reduce([result])  # each row is 0 on all ranks but one
    return result


def _response_mask(rows: Rows) -> Tensor:
    lengths = torch.tensor([len(row.response_ids) for row in rows.tokens])[:, None]  # (N, 1)
    return torch.arange(int(lengths.max())) < lengths  # (N, T)
