"""One update of PaW: lines 4-11 of Algorithm 1.

     1  for each RL update:                                               train.train
     2    sample tasks, collect rollout groups with pi_theta              train.collect
     3    form the pool P of their transitions                            rows.flatten
     4    select S_alpha from P (Eq. 4)                                   prepare
     5    for each group g:                                               optimize, by mini-batches
     6      S_alpha,g = the selected transitions of g                     prepare: row_weights
     7      compute the RL loss (Eq. 1)            prepare: row_advantages; optimize: loss_terms
     8      compute the world-model loss on S_alpha,g (Eq. 5-9)           optimize: loss_terms
     9      compute lambda_g (Eq. 10)                                     prepare
    10    end for
    11    optimize the joint objective (Eq. 11)                           optimize

    prepare   rows -> rows with advantages, old log-probs, selected transitions, lambda_g, weights
    optimize  rows -> gradient steps on the joint objective, metrics

PaW adds lines 4, 6, 8 and 9 to RL, and no training pass: the observation follows the response in a
pass that RL makes anyway. Eq. 4 needs entropies, which the pass for pi_old gives. Plain RL needs
this pass, too, unless an update is a single mini-batch; then Eq. 4 adds a pass. Without PaW every
row_weight is 0, and `optimize` is plain RL.

Differs from the paper, which averages both losses over groups: here a mini-batch is random rows of
all groups. So the RL loss is a mean over its tokens, in which long groups count more, and the
world-model loss is a weighted sum over its rows, scaled up to the whole update (losses.py).

The RL loss follows verl-agent, the code of GiGPO, on which the paper builds: PPO's clipped
surrogate on group-relative advantages, with dual clip, a k3 KL term to the start model, an entropy
bonus, random mini-batches, a gradient norm of at most 1 and one epoch per update. Not implemented:
several epochs, an adaptive KL coefficient, KL in the reward, other loss aggregations.

Legend: N rows of the update, B rows of a micro-batch, S columns (model/batches.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paw_min import advantages, balance, cmae, losses, select, targets
from paw_min.base import distributed
from paw_min.base.console import progress_bar
from paw_min.base.errors import UserError
from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.similar import similar_anchors
from paw_min.metrics import UpdateMetrics
from paw_min.model.batches import Batch, training_batches
from paw_min.model.policy import Policy, Scores
from paw_min.model.reference import reference_logp
from paw_min.model.scoring import score_responses
from paw_min.rows import Rows

GRAD_CLIP = 1.0  # maximum norm of an optimizer step's gradient; verl-agent
GAMMA = 0.95  # discount of GiGPO's step returns; A.1


def prepare(
    cfg: Config, policy: Policy, reference: Policy | None, rows: Rows, update: int = 0
) -> Rows:
    """Lines 4, 6 and 9, and the advantages of line 7: what optimize() needs of all rows.

    It is computed once per update. rows: those of rows.flatten, the same on every rank; not
    changed. reference: frozen policy of the KL term. update: its number; the placebo (targets.py)
    of each is another draw.
    """
    # One pass without gradient gives log pi_old(a_t), of the ratio, and H(a_t | h_t), of Eq. 4. It
    # comes before the first optimizer step, because both belong to the policy that sampled.
    old_logp = entropy = ref_logp = None
    if needs_old_policy(cfg, len(rows.tokens)):
        old = score_responses(policy, rows.tokens, cfg.micro_tokens)
        old_logp, entropy = old.logp, old.entropy
    if reference is not None:
        ref_logp = reference_logp(cfg, policy, reference, rows)

    # Only rows with an observation compete in Eq. 4.
    candidates = torch.tensor([len(row.obs_ids) > 0 for row in rows.tokens])  # (N,)
    # Selection and lambda_g need all rows of the update: Eq. 4 ranks them globally, Eq. 10 averages
    # whole groups. So they come before the rows are cut into mini-batches.
    if cfg.paw:
        selected = select.select_transitions(candidates, entropy, cfg.alpha)  # line 4, Eq. 4
        lambdas = group_lambdas(cfg, rows)  # line 9, Eq. 10
    else:
        # No row is selected, so every weight is 0 and no observation enters a pass.
        selected = torch.zeros_like(candidates)  # (N,)
        lambdas = dict.fromkeys(rows.group, 0.0)
    tokens = rows.tokens
    if cfg.wm_target == "shuffled":
        tokens = targets.shuffled(tokens, policy.positions, cfg.seed, update)
    return replace(
        rows,
        tokens=tokens,
        # A of Eq. 1. PPO's advantages come later, from its critic (ppo.with_critic).
        advantage=None if cfg.algo == "ppo" else row_advantages(cfg, rows),
        old_logp=old_logp,
        ref_logp=ref_logp,
        entropy=entropy,
        candidates=candidates,
        selected=selected,
        lambdas=lambdas,
        row_weight=losses.row_weights(rows.group, selected, lambdas),  # line 6, Eq. 9 and 11
    )


@dataclass
class ObservationLoss:
    """The world-model loss of B rows, and the tokens that it is made of."""

    per_row: Tensor  # (B,) mean over the tokens of o', before its weight; 0 of a row without o'
    # (B, S) bool: observation tokens with a gradient, for the metric wm_clipped_tokens alone.
    counted: Tensor


def observation_loss(cfg: Config, scores: Scores, batch: Batch) -> ObservationLoss:
    """Line 8, Eq. 5-8: the world-model loss of each row."""
    logp, mask = scores.logp, batch.obs_mask  # (B, S) each
    counted = mask
    if cfg.wm_loss == "ce":
        per_row = cmae.cross_entropy(logp, mask)  # Eq. 5
    elif cfg.wm_loss == "mae":
        per_row = cmae.mae(logp, mask)  # section 3.2
    elif cfg.wm_loss == "cmae":
        per_row = cmae.clipped_mae(logp, mask, cfg.rho)  # Eq. 8
        # Eq. 7 drops tokens that the policy knows. The divisor of Eq. 8, |o'|, still has them.
        counted = mask & cmae.hard_tokens(logp, cfg.rho).bool()
    else:
        raise ValueError(f"wm_loss={cfg.wm_loss!r} has no branch in observation_loss")
    return ObservationLoss(per_row, counted)


# A world-model loss: the one above, or that of a fork (examples/probable.py), from the scores of
# a batch. A fork that needs more of the rows, such as their rewards, gives them to its loss with
# functools.partial: row b of the batch has the entry batch.index[b] in each column of Rows.
WorldModelLoss = Callable[[Config, Scores, Batch], ObservationLoss]


def optimize(
    cfg: Config, policy: Policy, optimizer, rows: Rows, seed_key: tuple,
    world_model_loss: WorldModelLoss = observation_loss,
) -> dict[str, float]:
    """Lines 5, 7, 8 and 11: one gradient step per random mini-batch of the rows -> metrics.

    seed_key: determines the order of the rows. Every rank has all rows; the forward and backward
    passes are split between the ranks (micro_batches).
    """
    n_rows = len(rows.tokens)
    minis = mini_batches(n_rows, cfg.mini_batch, seed_key)
    metrics = UpdateMetrics(n_steps=len(minis))
    with progress_bar(n_rows, "optimize", "row") as bar:
        # One epoch: each row is used once, so the ratio pi / pi_old stays near 1.
        for mini in minis:  # line 5, over random rows of all groups
            optimizer.zero_grad()
            # Micro-batches only bound the memory; they change neither the loss nor its gradient.
            for batch in training_batches(policy, rows, mini, cfg.micro_tokens):
                # One pass over h_t, a_t and o_{t+1}. Columns of a_t go to the RL loss, those of
                # o_{t+1} to the world model's; attention is causal, so the former do not depend on
                # the latter.
                scores = policy(batch)
                parts = loss_terms(cfg, scores, batch, n_rows / len(mini), world_model_loss)
                loss = sum(parts.terms.values())  # line 11, Eq. 11: this micro-batch's part
                check_finite(loss, parts.terms)
                loss.backward()  # gradients of the micro-batches add up in place
                metrics.add_pass(parts, batch)
                bar.update(len(batch.index) * distributed.n_ranks())  # the ranks advance together
            norm = gradient_step(policy, optimizer)
            metrics.add_mean("grad_norm", norm.item(), weight=1)
    return metrics.result()


@dataclass
class LossTerms:
    """What one micro-batch contributes to the loss of its mini-batch, and to the metrics."""

    terms: dict[str, Tensor]  # summands of Eq. 11 by name, () each: their sum is the loss
    stats: dict[str, Tensor]  # means over the micro-batch's response tokens, () each
    # None: no row of the micro-batch has an observation.
    observations: ObservationLoss | None


def loss_terms(
    cfg: Config, scores: Scores, batch: Batch, scale: float,
    world_model_loss: WorldModelLoss = observation_loss,
) -> LossTerms:
    """Lines 7 and 8: the terms of Eq. 11 for one micro-batch.

    scale: the rows of the update / those of the mini-batch.
    """
    logp, mask = scores.logp, batch.response_mask  # (B, S) each
    # Where old_logp is None, this update is a single step: the policy is still pi_old. The ratio is
    # 1, and its gradient that of logp.
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp

    # Line 7, Eq. 1: the base RL loss on every response. Each term is a mean over the tokens of this
    # micro-batch. Times its share of the tokens, it is a part of the mean over the mini-batch, so
    # that the gradient does not depend on how rows are cut into micro-batches.
    surrogate, stats = losses.clipped_surrogate(logp, old_logp, batch.advantage, mask)
    stats["entropy"] = losses.masked_mean(scores.entropy, mask)
    terms = {"pg": batch.share * surrogate}
    # A bonus: it lowers the loss.
    terms["entropy"] = -cfg.entropy_coef * batch.share * stats["entropy"]
    if batch.ref_logp is not None:
        stats["ref_kl"] = losses.k3_kl(logp, batch.ref_logp, mask)
        terms["kl"] = cfg.kl_coef * batch.share * stats["ref_kl"]

    # Line 8, Eq. 5-9: the world-model loss of the selected transitions. row_weight has lambda_g and
    # the means of Eq. 9 and 11 (lines 4, 6, 9: see prepare). It refers to the whole update, so the
    # sum over a mini-batch is scaled up to estimate the full sum.
    observations = None
    if batch.obs_mask.any():
        observations = world_model_loss(cfg, scores, batch)
        check_per_row(observations, batch)
        weighted = (batch.row_weight * observations.per_row).sum()
        terms["wm"] = cfg.wm_scale * weighted * scale
    return LossTerms(terms, stats, observations)


def check_per_row(observations: ObservationLoss, batch: Batch) -> None:
    """UserError where the loss of a fork has a value per token: their sum would raise no error."""
    shape, expected = tuple(observations.per_row.shape), (len(batch.index),)
    if shape != expected:
        raise UserError(f"the world-model loss returns the shape {shape} instead of {expected}: "
                        "one value per row, such as the mean over its observation's tokens.")


def mini_batches(n_rows: int, size: int, seed_key: tuple) -> list[list[int]]:
    """Random parts of nearly equal size, each row once. size: at most; 0: all rows in one part."""
    # Shuffled, since neighbors are steps of one episode: a mini-batch of neighbors would be a task
    # or two, and its gradient theirs.
    order = list(range(n_rows))
    generator(seed_key).shuffle(order)
    # Rounded up, then cut evenly: a last mini-batch of a few rows would be a step full of noise.
    n = -(-n_rows // size) if size else 1
    return [order[k * n_rows // n : (k + 1) * n_rows // n] for k in range(n)]


def needs_old_policy(cfg: Config, n_rows: int) -> bool:
    """Is a pass of pi_old, the policy before the first optimizer step of the update, needed?

    With several mini-batches it is, because the later ones meet changed weights. With alpha < 1 it
    is, because Eq. 4 needs entropies before any step. Otherwise the training pass of the only step
    is a pass of pi_old.
    """
    selects = cfg.paw and cfg.alpha < 1
    several_steps = 0 < cfg.mini_batch < n_rows
    return several_steps or selects


def row_scores(rows: Rows, invalid_penalty: float) -> Tensor:
    """s_i = R(tau_i) minus the format penalty of the row's own response -> (N,)."""
    returns = torch.tensor(rows.episode_return)  # (N,)
    return advantages.penalized(returns, rows.valid, invalid_penalty)


def row_advantages(cfg: Config, rows: Rows) -> Tensor:
    """A of each row, by the group-relative estimators -> (N,).

    A branch of a fork may end in a `return` of its own, with a value per token (rows.PerToken).
    """
    score = row_scores(rows, cfg.invalid_penalty)  # (N,)
    if cfg.algo == "rloo":
        advantage = advantages.rloo(score, rows.group, rows.trajectory, over=cfg.statistics)
    elif cfg.algo == "grpo":
        advantage = advantages.grpo(score, rows.group, rows.trajectory, over=cfg.statistics)
    elif cfg.algo == "gigpo":
        # GiGPO's second return, of the step: the discounted sum of the rewards from here on.
        rewards = torch.tensor(rows.reward)  # (N,)
        returns = advantages.discounted_returns(rewards, rows.trajectory, GAMMA)
        returns = advantages.penalized(returns, rows.valid, cfg.invalid_penalty)
        state = [t.observation for t in rows.transitions]  # N x o_t, GiGPO's anchors
        similarity = BENCHMARKS[cfg.env].similarity
        if similarity is not None:
            state = similar_anchors(rows.group, state, similarity)
        advantage = advantages.gigpo(score, returns, rows.group, state)
    else:
        raise ValueError(f"algo={cfg.algo!r} has no branch in row_advantages")
    return advantages.compared(advantage, rows.group, rows.trajectory)


def group_lambdas(cfg: Config, rows: Rows) -> dict[int, float]:
    """{group: lambda_g}, by Eq. 10 or constant."""
    if cfg.lambda_g == "constant":
        return dict.fromkeys(rows.group, 1.0)
    r_max = BENCHMARKS[cfg.env].r_max
    return balance.lambdas_from_rows(rows.episode_return, rows.trajectory, rows.group, r_max)


def gradient_step(policy: Policy, optimizer) -> Tensor:
    """Sum the gradients over the ranks, clip them, step -> their norm before clipping, ()."""
    distributed.sum_gradients(policy)
    # The clip comes after the sum of both losses: a large world-model gradient shrinks RL's part.
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), GRAD_CLIP)
    norm = distributed.whole(norm)
    if not torch.isfinite(norm):
        # The step has not been made: the weights are still those of the last finite one.
        raise NonFinite(f"the gradient norm became {norm.item()}")
    optimizer.step()
    return norm


class NonFinite(RuntimeError):
    """A NaN or infinite loss or gradient."""


def check_finite(loss: Tensor, terms: dict[str, Tensor]) -> None:
    if not torch.isfinite(loss):
        shown = ", ".join(f"{name} {value.item():g}" for name, value in terms.items())
        raise NonFinite(f"the loss became {loss.item()} ({shown})")
