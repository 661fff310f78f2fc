"""Passes without gradient over the responses.

    score_responses    log pi of every response token, and the entropies of Eq. 4
    check_sync         is the policy that sampled the one that is trained?

`check_sync` runs in every update, before anything is learned from it. It compares the sampler's
log-probabilities of its own tokens, log mu, with the trainer's log pi. Old weights, another
temperature, wrong padding, adapters that did not arrive and a distribution that is cut off differ
by more than rounding explains.

Legend: N rows, B rows of a micro-batch, T tokens of the longest response, S columns (batches.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paw_min import losses, select
from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.rows import Rows, TokenRow

# Mean |log pi - log mu| in nats per token that rounding can explain; mu is the sampler's policy.
# Measured: 1e-6 in fp32; in bf16 on a CPU 0.008 for the stand-in of ALFWorld, 0.033 for
# SmolLM2-135M; published: about 0.01. A failed sync gives 0.4 and more (tests/test_vllm.py).
MAX_GAP = {"fp32": 1e-3, "bf16": 0.1}
REMEDY = {
    "transformers": "this model generates otherwise than it trains: use another --model, or "
    "--sampler vllm",
    "vllm": "vLLM's weights, temperature or architecture are not the trainer's: use --sampler "
    "transformers, or the versions of vLLM and torch in requirements.txt and "
    "requirements-vllm.txt",
}


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


def check_sync(cfg: Config, policy: Policy, rows: Rows, when: str) -> float:
    """Mean |log pi - log mu| of some responses, in nats per token.

    The first turn of one episode per group is compared. These prompts begin alike in every update,
    so that a prefix cache of old weights is noticed too. when: the part of the run, for the
    UserError if the difference is larger than rounding explains.
    """
    first_turn = {}  # trajectory -> its first row
    for i, trajectory in enumerate(rows.trajectory):
        first_turn.setdefault(trajectory, i)
    one_per_group = {rows.group[i]: i for i in first_turn.values()}
    chosen = list(one_per_group.values())
    tokens = [rows.tokens[i] for i in chosen]
    mask = response_mask(tokens)  # (N, T)
    ours = score_responses(policy, tokens, cfg.micro_tokens).logp  # (N, T)
    theirs = rows.sampler_logp[chosen, : mask.shape[1]]  # (N, T)
    gap = losses.masked_mean((ours - theirs).abs(), mask).item()
    limit = max_gap(policy)
    if not gap <= limit:  # a NaN, too
        raise UserError(
            f"{when}: the sampler's log-probabilities differ from the trainer's by {gap:.4f} nats "
            f"per token (rounding explains {limit:.3g}): {REMEDY[cfg.sampler]}."
        )
    return gap


def max_gap(policy: Policy) -> float:
    """Nats per token that rounding can explain at the policy's temperature.

    A temperature below 1 enlarges rounding where two logits are close, and faults more. Responses
    of SmolLM2-135M to short prompts, in bf16 at 1, 0.4, 0.1, 0.05 and 0.01:

        24 attempts with vLLM, at most               0.05  0.11  0.11  0.17  0.96
        12 with weights off by 5 %, at least         0.39  0.33  1.09  1.49  4.48
        the limit                                    0.10  0.18  0.46  0.74  2.15

    With transformers, 24 attempts gave at most 0.03 to 0.18. A temperature that is 10 % off shows
    at 1 only, with 0.12 and more.
    """
    return MAX_GAP[policy.precision] / min(1.0, policy.temperature) ** (2 / 3)
