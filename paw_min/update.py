"""One PaW update: lines 3-11 of Algorithm 1 (train.py has lines 1 and 2).

    prepare   episodes -> rows: advantages, old log-probs, selected transitions, lambda_g
    learn     rows -> gradient steps on the joint objective

The paper loops over groups. Here all groups share one batch, and a row's group sets its weight
(losses.row_weights), so that batches may be cut anywhere. To train on other rows, build `Rows`.

Legend: N rows of the update, T tokens of the longest response, B rows of a micro-batch, S scored
tokens of its longest row.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from paw_min import advantages, balance, cmae, losses, select, targets
from paw_min.config import Config
from paw_min.model.batches import Batch, TokenRow, micro_batches
from paw_min.model.lora import adapters_off
from paw_min.model.policy import Policy
from paw_min.model.scoring import fit, old_policy_scores, score_responses
from paw_min.rollout import Episode, Transition
from paw_min.running import distributed
from paw_min.running.console import progress_bar
from paw_min.running.metrics import UpdateMetrics


@dataclass
class Rows:
    """The transition pool P of an update, one column per quantity."""

    tokens: list[TokenRow]  # N x (h_t, a_t, o_{t+1})
    group: list[int]  # N x g
    trajectory: list[int]  # N x tau
    advantage: Tensor  # (N,), one A per response, or (N, T), one per response token
    old_logp: Tensor | None  # (N, T) log pi_old(a_t); None: a single step, which starts at pi_old
    ref_logp: Tensor | None  # (N, T) log pi_ref(a_t); None: no KL term
    entropy: Tensor | None  # (N,) H(a_t | h_t), Eq. 4; None: the selection needs none
    selected: Tensor  # (N,) bool, Eq. 4; all False without PaW
    lam: Tensor  # (N,) lambda_g of the row's group, Eq. 10; 0 without PaW
    row_weight: Tensor  # (N,) weight of the world-model loss in Eq. 11: lambda_g / (G |S_g|) or 0


def prepare(cfg: Config, policy: Policy, reference: Policy | None, episodes: list[Episode]) -> Rows:
    """Lines 3, 4, 6 and 9: what learn() needs, computed once per update, from all episodes.

    episodes: the same on every rank. reference: frozen policy of the KL term.
    """
    rows = [t for e in episodes for t in e.transitions]  # line 3: the pool P
    one_step = not cfg.mini_batch or len(rows) <= cfg.mini_batch
    old = old_policy_scores(cfg, policy, rows, one_step)
    ref_logp = None
    if reference is not None:
        if cfg.ref_offload:
            reference.to(policy.device)
        with adapters_off(reference):  # with LoRA, the reference is the policy without adapters
            ref_logp = score_responses(cfg, reference, rows).logp
        if cfg.ref_offload:
            reference.to("cpu")
    group = [t.group for t in rows]
    lam = dict.fromkeys(group, 0.0)
    selected = torch.zeros(len(rows), dtype=torch.bool)  # (N,)
    if cfg.paw:
        selected = select_transitions(cfg, rows, old.entropy)  # line 4, Eq. 4
        lam = group_lambdas(cfg, episodes)  # line 9, Eq. 10
    return Rows(
        tokens=targets.world_model_targets(cfg, rows), group=group,
        trajectory=[t.trajectory for t in rows],
        advantage=row_advantages(cfg, episodes),  # of line 7, Eq. 1
        old_logp=old.logp, ref_logp=ref_logp, entropy=old.entropy,
        selected=selected, lam=torch.tensor([lam[g] for g in group]),
        row_weight=losses.row_weights(group, selected, lam),  # line 6, Eq. 9 and 11
    )  # fmt: skip


def learn(cfg: Config, policy: Policy, optimizer, rows: Rows, seed_key: tuple) -> dict[str, float]:
    """Lines 5, 7, 8 and 11: one gradient step per random mini-batch of the rows -> metrics.

    seed_key: determines the order of the rows. Every rank has all rows; the forward and backward
    passes are split between the ranks (micro_batches).
    """
    n_rows, minis = len(rows.tokens), mini_batches(cfg, len(rows.tokens), seed_key)
    with_obs = (rows.row_weight > 0).tolist()  # append o_{t+1} only where its loss counts
    metrics, bar = UpdateMetrics(len(minis)), progress_bar(n_rows, "update", "row")
    for mini in minis:  # line 5, over random rows of all groups
        optimizer.zero_grad()
        batches = list(micro_batches(policy, rows.tokens, mini, with_obs, cfg.micro_tokens))
        for batch in batches:
            terms = loss_terms(cfg, policy, rows, mini, batch, metrics)
            loss = sum(terms.values())  # line 11, Eq. 11: this micro-batch's part
            check_finite(loss, terms, rows, batch.index)
            with distributed.gradient_sums(policy, now=batch is batches[-1] and not cfg.shard):
                loss.backward()  # gradients of the micro-batches add up
            bar.update(len(batch.index) * distributed.world())  # the ranks advance together
        metrics.add_step(gradient_step(cfg, policy, optimizer, rows, mini))
    bar.close()
    return metrics.result()


def loss_terms(
    cfg: Config, policy: Policy, rows: Rows, mini: list[int], batch: Batch, metrics: UpdateMetrics
) -> dict[str, Tensor]:
    """Lines 7 and 8: the terms of Eq. 11 for one micro-batch, as parts of the mini-batch's."""
    i, mask = batch.index, batch.response_mask  # B indices of rows, (B, S)
    logp, token_entropy = policy(batch)  # (B, S) each: one pass over h_t, a_t and o_{t+1}
    old_logp = logp.detach() if rows.old_logp is None else fit(rows.old_logp[i], logp)

    # Line 7, Eq. 1: the base RL loss on every response. `share` turns the token mean of this
    # micro-batch into its part of the token mean of the mini-batch.
    share = int(mask.sum()) / sum(len(rows.tokens[k].response_ids) for k in mini)
    surrogate, stats = policy_loss(cfg, logp, old_logp, rows.advantage[i], mask)
    stats["entropy"] = losses.masked_mean(token_entropy, mask)
    terms = {"pg": share * surrogate}
    terms["entropy"] = -cfg.entropy_coef * share * stats["entropy"]
    if rows.ref_logp is not None:
        stats["ref_kl"] = losses.k3_kl(logp, fit(rows.ref_logp[i], logp), mask)
        terms["kl"] = cfg.kl_coef * share * stats["ref_kl"]

    # Line 8, Eq. 5-9: the world-model loss of the selected transitions. row_weight has lambda_g and
    # the means of Eq. 9 and 11 (lines 4, 6, 9: see prepare). It refers to the whole update, so the
    # sum over a mini-batch is scaled up to estimate the full sum.
    if batch.obs_mask.any():
        row_loss = observation_loss(cfg, logp, batch.obs_mask)  # (B,)
        weighted = (rows.row_weight[i].to(logp) * row_loss).sum()
        terms["wm"] = cfg.wm_scale * weighted * (len(rows.tokens) / len(mini))
        metrics.add_world_model(row_loss, cmae.hard_tokens(logp, cfg.rho), batch.obs_mask)
    metrics.add_pass(terms, stats, batch)
    return terms


def mini_batches(cfg: Config, n_rows: int, seed_key: tuple) -> list[list[int]]:
    """Random parts of nearly equal size; no row is repeated or dropped."""
    order = list(range(n_rows))
    random.Random(repr(seed_key)).shuffle(order)
    n = -(-n_rows // cfg.mini_batch) if cfg.mini_batch else 1
    return [order[k * n_rows // n : (k + 1) * n_rows // n] for k in range(n)]


def row_advantages(cfg: Config, episodes: list[Episode]) -> Tensor:
    """A of each row, from the environment's rewards and the format penalty -> (N,)."""
    rows = [t for e in episodes for t in e.transitions]
    valid = torch.tensor([t.valid for t in rows])
    scores = torch.tensor([e.episode_return for e in episodes for _ in e.transitions])
    scores = advantages.penalized(scores, valid, cfg.invalid_penalty)  # (N,)
    group, trajectory = [t.group for t in rows], [t.trajectory for t in rows]
    if cfg.algo == "ppo":
        return scores  # critic.py replaces them by estimates per token
    if cfg.algo == "rloo":
        return advantages.rloo(scores, group, trajectory, over=cfg.statistics)
    if cfg.algo == "grpo":
        return advantages.grpo(
            scores, group, trajectory, normalize=cfg.normalize, over=cfg.statistics
        )
    rewards = torch.tensor([t.reward for t in rows])
    returns = advantages.discounted_returns(rewards, trajectory, cfg.gamma)
    returns = advantages.penalized(returns, valid, cfg.invalid_penalty)
    return advantages.gigpo(
        scores, returns, group, [t.anchor for t in rows],
        normalize=cfg.normalize, weight=cfg.step_weight, similarity=cfg.similarity or None,
    )  # fmt: skip


def select_transitions(cfg: Config, rows: list[Transition], entropy: Tensor | None) -> Tensor:
    """Eq. 4 over all rows that have an observation -> bool (N,). entropy: (N,); None: keep all."""
    selected = torch.tensor([len(t.obs_ids) > 0 for t in rows])  # (N,)
    if cfg.dedup:
        selected &= torch.tensor(targets.first_occurrences(rows))
    if entropy is not None:
        selected[selected.clone()] = select.top_alpha(entropy[selected], cfg.select_ratio)
    return selected


def group_lambdas(cfg: Config, episodes: list[Episode]) -> dict[int, float]:
    """Eq. 10: {group: lambda_g}, from the mean return of its episodes."""
    returns = balance.group_mean_return(
        [e.episode_return for e in episodes], [e.group for e in episodes]
    )
    if cfg.wm_weight == "constant":
        return dict.fromkeys(returns, 1.0)
    return {g: float(balance.wm_weight(r, cfg.r_max)) for g, r in returns.items()}


def observation_loss(cfg: Config, logp: Tensor, obs_mask: Tensor) -> Tensor:
    """The world-model loss of each row: (B, S), (B, S) -> (B,)."""
    if cfg.wm_loss == "ce":
        return cmae.cross_entropy(logp, obs_mask)  # Eq. 5
    if cfg.wm_loss == "mae":
        return cmae.mae(logp, obs_mask)  # Eq. 6
    return cmae.clipped_mae(logp, obs_mask, cfg.rho)  # Eq. 7-8


def policy_loss(cfg: Config, logp, old_logp, advantage, mask) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy-gradient loss: (B, S), (B, S), (B,) or (B, T), (B, S) -> (), metrics."""
    advantage = advantage.to(logp) if advantage.ndim == 1 else fit(advantage, logp)
    if cfg.old_logp == "sampler":
        return losses.truncated_is(logp, old_logp, advantage, mask, cfg.is_cap)
    return losses.clipped_surrogate(logp, old_logp, advantage, mask, cfg.clip, cfg.dual_clip)


def gradient_step(cfg: Config, policy: Policy, optimizer, rows: Rows, mini: list[int]) -> Tensor:
    """Clip the gradients, summed over the ranks, and step -> their norm before clipping, ()."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
    norm = distributed.whole(norm)
    if not torch.isfinite(norm):
        raise NonFinite(f"the gradient norm became {norm.item()}", [rows.tokens[i] for i in mini])
    optimizer.step()
    return norm


class NonFinite(RuntimeError):
    """A NaN or infinite loss or gradient; `rows` are the rows that it came from."""

    def __init__(self, message: str, rows: list[TokenRow]):
        super().__init__(message)
        self.rows = rows


def check_finite(loss: Tensor, terms: dict[str, Tensor], rows: Rows, index: list[int]) -> None:
    if not torch.isfinite(loss):
        shown = ", ".join(f"{name} {value.item():g}" for name, value in terms.items())
        part = [rows.tokens[i] for i in index]
        raise NonFinite(f"the loss became {loss.item()} ({shown})", part)
