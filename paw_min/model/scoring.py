"""Passes without gradient over the responses, and the check that sampler and trainer agree.

Legend: N rows, B rows of a micro-batch, T tokens of the longest response, S scored tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paw_min import losses, select
from paw_min.config import Config
from paw_min.model.batches import TokenRow, micro_batches
from paw_min.model.policy import Policy
from paw_min.running import distributed
from paw_min.running.errors import UserError


@dataclass
class Scores:
    logp: Tensor | None  # (N, T) in nats, 0 after the end of a response; None: not needed
    entropy: Tensor | None  # (N,) H(a_t | h_t) of Eq. 4


@torch.no_grad()
def score_responses(cfg: Config, policy: Policy, rows: list[TokenRow]) -> Scores:
    """One pass over h_t and a_t, split between the ranks; every rank gets all rows."""
    logp = torch.zeros(len(rows), max(len(r.response_ids) for r in rows))  # (N, T)
    entropy = torch.zeros(len(rows))  # (N,)
    everything, no_obs = list(range(len(rows))), [False] * len(rows)
    for batch in micro_batches(policy, rows, everything, no_obs, cfg.micro_tokens):
        token_logp, token_entropy = policy(batch)  # (B, S), (B, S)
        if cfg.entropy == "sampled":
            token_entropy = select.sampled_entropy(token_logp)
        mask = batch.response_mask
        # Added, not assigned: a rank that repeats another's row has an empty mask and adds zeros.
        logp[batch.index, : mask.shape[1]] += token_logp.masked_fill(~mask, 0.0).cpu()
        entropy[batch.index] += select.action_entropy(token_entropy, mask).cpu()
    distributed.all_reduce([logp, entropy])  # each row is 0 on all ranks but one
    return Scores(logp, entropy)


def sampler_logps(rows: list) -> tuple[Tensor, Tensor]:
    """The sampler's log-probabilities of the responses that it drew -> (N, T), bool mask (N, T)."""
    parts = [torch.tensor(t.response_logps) for t in rows]
    logp = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)  # (N, T)
    lengths = torch.tensor([len(part) for part in parts])
    return logp, torch.arange(logp.shape[1]) < lengths[:, None]


def old_policy_scores(cfg: Config, policy: Policy, rows: list, one_step: bool) -> Scores:
    """Log-probabilities under pi_old and entropies for Eq. 4, in at most one pass.

    rows: transitions. one_step: the update is a single optimizer step. The training pass then
    starts at pi_old and has the log-probabilities itself.

    --old-logp sampler takes those of the sampler instead, which saves the pass if Eq. 4 uses
    sampled entropies too (see losses.truncated_is).
    """
    scores = Scores(None, None)
    from_sampler = cfg.old_logp == "sampler"
    if from_sampler:
        scores.logp, mask = sampler_logps(rows)
        if cfg.entropy == "sampled":
            scores.entropy = select.action_entropy(select.sampled_entropy(scores.logp), mask)
    needs_logp = not from_sampler and not one_step
    needs_entropy = cfg.paw and cfg.select_ratio < 1 and scores.entropy is None
    if needs_logp or needs_entropy:
        recomputed = score_responses(cfg, policy, rows)
        scores.logp = scores.logp if from_sampler else recomputed.logp
        scores.entropy = recomputed.entropy
    return scores


# Mean |log pi - log mu| in nats per token that rounding can explain. Measured: 1e-6 in fp32;
# published for bf16: about 0.01. A failed sync gives 0.4 and more (tests/test_vllm.py).
MAX_GAP = {"fp32": 1e-3, "bf16": 0.1}


def check_sync(cfg: Config, policy: Policy, episodes: list, update: int) -> float:
    """Mean |log pi - log mu| of the first responses of an update, in nats per token.

    Raises UserError if it is larger than rounding explains: the sampler then has stale weights or
    another temperature. The batch has the first turn of one episode per group. These prompts begin
    alike in every update, so that a prefix cache of old weights is noticed too.
    """
    rows = list({e.group: e.transitions[0] for e in episodes}.values())
    theirs, mask = sampler_logps(rows)  # (N, T), (N, T)
    ours = score_responses(cfg, policy, rows).logp  # (N, T)
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


def fit(stored: Tensor, logp: Tensor) -> Tensor:
    """Cut or pad stored per-token values (B, T) to the columns of logp (B, S), on its device."""
    width = logp.shape[1]
    return torch.nn.functional.pad(stored[:, :width], (0, max(0, width - stored.shape[1]))).to(logp)
