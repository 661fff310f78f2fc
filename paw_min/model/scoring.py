"""Passes without gradient over the responses, and the check that sampler and trainer agree.

Legend: N rows, B rows of a micro-batch, T tokens of the longest response, S columns (batches.py),
G groups.
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


@dataclass
class Scores:
    logp: Tensor | None  # (N, T) in nats, 0 after the end of a response; None: not needed
    entropy: Tensor | None  # (N,) H(a_t | h_t) of Eq. 4; None: not needed


@torch.no_grad()
def score_responses(cfg: Config, policy: Policy, rows: list[TokenRow]) -> Scores:
    """One pass over h_t and a_t, split between the ranks; every rank gets all rows."""
    width = max(len(row.response_ids) for row in rows)  # T
    logp = torch.zeros(len(rows), width)  # (N, T)
    entropy = torch.zeros(len(rows))  # (N,)
    everything = list(range(len(rows)))
    no_obs = [False] * len(rows)
    for batch in micro_batches(policy, rows, everything, no_obs, cfg.micro_tokens):
        token_logp, token_entropy = policy(batch)  # (B, S), (B, S)
        if cfg.select_entropy == "sampled":
            token_entropy = select.sampled_entropy(token_logp)
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


def old_policy_scores(cfg: Config, policy: Policy, rows: Rows) -> Scores:
    """log pi_old(a_t) for the probability ratio, and H(a_t | h_t) for Eq. 4, in one pass at most.

    pi_old is the policy before the first optimizer step of the update:

        several mini-batches     a pass without gradient, since the later ones have other weights
        one mini-batch           the training pass itself starts at pi_old: no pass is needed for
                                 log pi_old, and logp is None unless one is made for the entropies
    """
    selects = cfg.paw and cfg.select_ratio < 1
    several_steps = 0 < cfg.mini_batch < len(rows.tokens)
    if several_steps or selects:
        return score_responses(cfg, policy, rows.tokens)
    return Scores(None, None)


# Mean |log pi - log mu| in nats per token that rounding can explain; mu is the sampler's policy.
# Measured: 1e-6 in fp32; in bf16 on a CPU 0.008 for the stand-in of ALFWorld, 0.033 for
# SmolLM2-135M; published: about 0.01. A failed sync gives 0.4 and more (tests/test_vllm.py).
MAX_GAP = {"fp32": 1e-3, "bf16": 0.1}


def check_sync(cfg: Config, policy: Policy, rows: Rows, update: int) -> float:
    """Mean |log pi - log mu| of some responses of an update, in nats per token.

    Raises UserError if it is larger than rounding explains: the sampler then has stale weights or
    another temperature. The first turn of one episode per group is compared. These prompts begin
    alike in every update, so that a prefix cache of old weights is noticed too.
    """
    first_turn = {}  # trajectory -> its first row
    for i, trajectory in enumerate(rows.trajectory):
        first_turn.setdefault(trajectory, i)
    one_per_group = {rows.group[i]: i for i in first_turn.values()}
    chosen = list(one_per_group.values())

    tokens = [rows.tokens[i] for i in chosen]
    mask = response_mask(tokens)  # (G, T)
    ours = score_responses(cfg, policy, tokens).logp  # (G, T)
    theirs = rows.sampler_logp[chosen][:, : mask.shape[1]]  # (G, T)
    gap = losses.masked_mean((ours - theirs).abs(), mask).item()
    if not gap <= MAX_GAP[policy.precision]:
        raise UserError(
            f"update {update}: the sampler's log-probabilities differ from the trainer's by "
            f"{gap:.4f} nats per token (rounding explains {MAX_GAP[policy.precision]}), so it did "
            "not generate with the current weights or temperature; nothing was trained on these "
            "episodes: rerun with --sampler transformers, or with the versions of vLLM and torch "
            "in requirements.txt and requirements-vllm.txt."
        )
    return gap
