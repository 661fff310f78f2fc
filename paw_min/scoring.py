"""Forward passes over the rows of an update: cut into micro-batches, split between the ranks.

Also what comes of one without gradient: old log-probs, the entropies of Eq. 4, and how far the
sampler's own log-probs are from the trainer's.

Legend: N rows, B rows of a micro-batch, T action tokens, S scored tokens.
"""

import torch
from torch import Tensor

from paw_min import batches, dist, losses, select
from paw_min.config import Config
from paw_min.policy import Policy


def micro_batches(cfg: Config, rows, mini: list[int], weight: Tensor) -> list[list[int]]:
    """This rank's part of a mini-batch, as many micro-batches as every rank has.

    Rows of like length share one, up to cfg.micro_tokens with padding: less padding, same gradient.
    weight: (N,); rows with a weight bring their observation along.
    """
    lengths = [
        len(rows[i].prompt_ids)
        + len(rows[i].response_ids)
        + (len(rows[i].obs_ids) if weight[i] > 0 else 0)
        for i in mini
    ]
    plan = batches.plan(lengths, cfg.micro_tokens, multiple=dist.world())
    plan += [[]] * (-len(plan) % dist.world())
    return [[mini[j] for j in micro] for micro in plan[dist.rank() :: dist.world()]]


def lay_out(policy: Policy, rows, with_obs: list[bool]) -> batches.Batch:
    return batches.collate(rows, with_obs, policy.pad_id, policy.device, policy.packed)


@torch.no_grad()
def score_actions(cfg: Config, policy: Policy, rows) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled action tokens, and Eq. 4's entropy of each row -> (N, T), (N,)."""
    logp = torch.zeros(len(rows), max(len(t.response_ids) for t in rows))  # (N, T)
    entropy = torch.zeros(len(rows))  # (N,)
    for micro in micro_batches(cfg, rows, list(range(len(rows))), torch.zeros(len(rows))):
        part = [rows[i] for i in micro or [0]]
        batch = lay_out(policy, part, [False] * len(part))
        token_logp, token_entropy = policy(batch)  # (B, S), (B, S)
        if not micro:  # another rank's row, see update
            continue
        logp[micro, : token_logp.shape[1]] = token_logp.cpu()
        if cfg.entropy == "sampled":
            token_entropy = select.sampled_entropy(token_logp)
        entropy[micro] = select.action_entropy(token_entropy, batch.action_mask).cpu()
    dist.add_up([logp, entropy])  # each row is 0 on all ranks but one
    return logp, entropy


def sampler_logps(rows) -> tuple[Tensor, Tensor]:
    """What the sampler said when it drew the actions, and where -> (N, T), bool (N, T)."""
    parts = [torch.tensor(t.response_logps) for t in rows]
    logp = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)  # (N, T)
    lengths = torch.tensor([len(part) for part in parts])
    return logp, torch.arange(logp.shape[1]) < lengths[:, None]


def sampler_gap(cfg: Config, policy: Policy, rows) -> float:
    """Mean |log pi - log mu| of rows just sampled, in nats per token: trainer against sampler."""
    theirs, mask = sampler_logps(rows)  # (N, T), (N, T)
    ours, _ = score_actions(cfg, policy, rows)  # (N, T)
    return losses.masked_mean((ours - theirs).abs(), mask).item()


def fit(stored: Tensor, logp: Tensor) -> Tensor:
    """Cut or pad stored action log-probs (B, T) to the columns of logp (B, S), on its device."""
    result = torch.zeros_like(logp)
    width = min(stored.shape[1], logp.shape[1])
    result[:, :width] = stored[:, :width].to(logp)
    return result
