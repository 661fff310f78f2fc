"""Passes without gradient over the responses.

    score_responses    log pi of every response token, and the entropies of Eq. 4
    check_sync         is the policy that sampled the one that is trained?

`check_sync` runs in every update, before anything is learned from it. It compares the sampler's
log-probabilities of its own tokens, log mu, with the trainer's log pi. Old weights, another
temperature, wrong padding, adapters that did not arrive and a distribution that is cut off differ
by more than rounding explains.

Legend: N rows, T_i tokens of the response of row i, B rows of a batch, S columns (batches.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paw_min import select
from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model.batches import Batch, micro_batches
from paw_min.model.policy import Policy
from paw_min.model.sampler import Sampler
from paw_min.rows import PerToken, Rows, TokenRow

# Mean |log pi - log mu| in nats per token that rounding can explain; mu is the sampler's policy.
# Measured: 1e-6 in fp32; in bf16 on a CPU 0.008 for the stand-in of ALFWorld, 0.033 for
# SmolLM2-135M; published: about 0.01. A failed sync gives 0.4 and more (tests/model/test_vllm.py).
MAX_GAP = {"fp32": 1e-3, "bf16": 0.1}


@dataclass
class ResponseScores:
    """Scores of N responses by the policy."""

    logp: PerToken  # N x T_i, in nats
    entropy: Tensor  # (N,) H(a_t | h_t) of Eq. 4, in nats


@torch.no_grad()
def score_responses(policy: Policy, rows: list[TokenRow], micro_tokens: int) -> ResponseScores:
    """One pass over h_t and a_t, split between the ranks; every rank gets all rows."""
    logp = TokenSums(rows)
    entropy = torch.zeros(len(rows))  # (N,)
    for batch in response_batches(policy, rows, micro_tokens):
        scores = policy(batch)
        logp.add(scores.logp, batch)
        entropy[batch.index] += select.action_entropy(scores.entropy, batch.response_mask).cpu()
    distributed.all_reduce([entropy])  # each row is 0 on all ranks but one
    return ResponseScores(logp.over_ranks(), entropy)


def response_batches(policy: Policy, rows: list[TokenRow], budget: int) -> Iterator[Batch]:
    """This rank's batches of all rows, without their observations."""
    n = len(rows)
    return micro_batches(policy, rows, list(range(n)), [False] * n, budget)


class TokenSums:
    """A number per response token of N rows, collected batch by batch on several ranks."""

    def __init__(self, rows: list[TokenRow]):
        self.lengths = [len(row.response_ids) for row in rows]
        self.starts = list(accumulate(self.lengths, initial=0))
        self.flat = torch.zeros(self.starts[-1])  # the tokens of all responses, row after row

    def add(self, values: Tensor, batch: Batch) -> None:
        """Add the values (B, S) of a batch."""
        # Added, not assigned: a rank that repeats another's row has an empty mask and adds zeros.
        own = values.masked_fill(~batch.response_mask, 0.0).cpu()
        for i, row in zip(batch.index, own):
            self.flat[self.starts[i] : self.starts[i + 1]] += row[: self.lengths[i]]

    def over_ranks(self) -> PerToken:
        """The numbers of all ranks, on every rank."""
        distributed.all_reduce([self.flat])  # each token is 0 on all ranks but one
        return [row.tolist() for row in self.flat.split(self.lengths)]


def check_sync(cfg: Config, policy: Policy, sampler: Sampler, rows: Rows, when: str) -> float:
    """Mean |log pi - log mu| of some responses, in nats per token.

    The first turn of one episode per group is compared. These prompts begin with the same tokens in
    every update, so that a prefix cache of old weights is noticed, too. when: the part of the run,
    for the UserError if the difference is larger than rounding explains.
    """
    first_turn = {}  # trajectory -> its first row
    for i, trajectory in enumerate(rows.trajectory):
        first_turn.setdefault(trajectory, i)
    one_per_group = {rows.group[i]: i for i in first_turn.values()}
    chosen = list(one_per_group.values())
    tokens = [rows.tokens[i] for i in chosen]
    ours = padded(score_responses(policy, tokens, cfg.micro_tokens).logp)  # (N, T)
    theirs = padded([rows.transitions[i].sampler_logp for i in chosen])  # (N, T)
    n_tokens = sum(len(row.response_ids) for row in tokens)
    gap = ((ours - theirs).abs().sum() / n_tokens).item()
    limit = max_gap(policy)
    if not gap <= limit:  # a NaN, too
        raise UserError(
            f"{when}: the sampler's log-probabilities differ from the trainer's by {gap:.4f} nats "
            f"per token (rounding explains {limit:.3g}): {sampler.remedy}."
        )
    return gap


def max_gap(policy: Policy) -> float:
    """Nats per token that rounding can explain at the policy's temperature.

    A temperature below 1 enlarges rounding where two logits are close, and faults more
    (tests/model/test_scoring.py has what was measured).
    """
    return MAX_GAP[policy.precision] / min(1.0, policy.temperature) ** (2 / 3)


def padded(logps: PerToken) -> Tensor:
    """(N, T), with T tokens of the longest response; 0 after the end of the others."""
    return pad_sequence([torch.tensor(row) for row in logps], batch_first=True)
