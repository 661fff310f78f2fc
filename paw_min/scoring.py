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


def micro_batches(
    cfg: Config, policy: Policy, rows, mini: list[int], weight: Tensor
) -> list[list[list[int]]]:
    """This rank's part of a mini-batch: micro-batches, each a list of families of rows.

    Rows with equal prompts are a family, families of like length share a micro-batch, up to
    cfg.micro_tokens with padding: less to compute, same gradient. Every rank has as many
    micro-batches. weight: (N,); rows with a weight bring their observation along.
    """
    tails = [
        len(rows[i].response_ids) + (len(rows[i].obs_ids) if weight[i] > 0 else 0) for i in mini
    ]
    families = [[j] for j in range(len(mini))]
    if not policy.packed:  # there, no mask tells the members of a family apart
        prompts = [rows[i].prompt_ids for i in mini]
        families = batches.find_families(prompts, tails, cfg.micro_tokens)
    lengths = [len(rows[mini[f[0]]].prompt_ids) + sum(tails[j] for j in f) for f in families]
    plan = batches.plan(lengths, cfg.micro_tokens, multiple=dist.world())
    plan += [[]] * (-len(plan) % dist.world())
    mine = plan[dist.rank() :: dist.world()]
    return [[[mini[j] for j in families[k]] for k in micro] for micro in mine]


def lay_out(policy: Policy, rows, families: list[list[int]], with_obs: list[bool]):
    """The batch of these families, their rows one after the other; with_obs: one for each row."""
    part = [rows[i] for family in families for i in family]
    counter = iter(range(len(part)))
    local = [[next(counter) for _ in family] for family in families]
    return batches.collate(part, with_obs, policy.pad_id, policy.device, policy.packed, local)


@torch.no_grad()
def score_actions(cfg: Config, policy: Policy, rows) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled action tokens, and Eq. 4's entropy of each row -> (N, T), (N,)."""
    logp = torch.zeros(len(rows), max(len(t.response_ids) for t in rows))  # (N, T)
    entropy = torch.zeros(len(rows))  # (N,)
    everything = list(range(len(rows)))
    for families in micro_batches(cfg, policy, rows, everything, torch.zeros(len(rows))):
        micro = [i for family in families for i in family]
        batch = lay_out(policy, rows, families or [[0]], [False] * (len(micro) or 1))
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
