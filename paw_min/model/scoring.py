"""Passes without gradient over the responses.

Legend: N rows, B rows of a micro-batch, T tokens of the longest response, S columns (batches.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paw_min import select
from paw_min.base import distributed
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow


@dataclass
class Scores:
    logp: Tensor  # (N, T) in nats, 0 after the end of a response
    entropy: Tensor  # (N,) H(a_t | h_t) of Eq. 4, in nats


@torch.no_grad()
def score_responses(policy: Policy, rows: list[TokenRow], micro_tokens: int) -> Scores:
    """One pass over h_t and a_t, split between the ranks; every rank gets all rows."""
    width = max(len(row.response_ids) for row in rows)  # T
    logp = torch.zeros(len(rows), width)  # (N, T)
    entropy = torch.zeros(len(rows))  # (N,)
    everything = list(range(len(rows)))
    no_obs = [False] * len(rows)
    for batch in micro_batches(policy, rows, everything, no_obs, micro_tokens):
        token_logp, token_entropy = policy(batch)  # (B, S), (B, S)
        mask = batch.response_mask
        # Added, not assigned: a rank that repeats another's row has an empty mask and adds zeros.
        logp[batch.index, : mask.shape[1]] += token_logp.masked_fill(~mask, 0.0).cpu()
        entropy[batch.index] += select.action_entropy(token_entropy, mask).cpu()
    distributed.all_reduce([logp, entropy])  # each row is 0 on all ranks but one
    return Scores(logp, entropy)


def response_mask(rows: list[TokenRow]) -> Tensor:
    """1 on the tokens of each response -> bool (N, T)."""
    lengths = torch.tensor([len(row.response_ids) for row in rows])[:, None]  # (N, 1)
    return torch.arange(int(lengths.max())) < lengths
