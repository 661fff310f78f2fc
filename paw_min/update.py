"""One PaW update: lines 3 to 11 of Algorithm 1, from top to bottom (train.py is lines 1 and 2).

The algorithm and this file differ in one point: the paper loops over groups, here all groups go
through the same tensors and the group is a weight of the row (losses.row_weights), so that
mini-batches and micro-batches may cut anywhere.

Legend: N rows of the update, B rows of a micro-batch, T action tokens, S scored tokens.
"""

import random
import time
from collections import defaultdict

import torch
from torch import Tensor
from tqdm import tqdm

from paw_min import advantages, balance, cmae, dist, losses, select
from paw_min.config import Config
from paw_min.policy import Policy
from paw_min.scoring import fit, lay_out, micro_batches, sampler_logps, score_actions


def update(cfg: Config, policy: Policy, reference, optimizer, episodes, seed: tuple) -> dict:
    """Lines 3-11 of Algorithm 1 on the episodes of one rollout -> metrics.

    episodes: the same on every rank; forward and backward passes are split between the ranks.
    reference: frozen Policy of the KL term, or None. seed: ints that name the order of the rows.
    """
    start = time.perf_counter()
    rows = [t for e in episodes for t in e.transitions]  # line 3: the pool P, N rows
    advantage = row_advantages(cfg, episodes)  # (N,)
    n_mini = -(-len(rows) // cfg.mini_batch) if cfg.mini_batch else 1

    # Old log-probs and the entropies of Eq. 4 come from one pass without gradient. With a single
    # mini-batch the training pass itself starts at the old policy and has the log-probs.
    # The sampler's own log-probs save this pass (where Eq. 4 takes sampled entropies, too) and
    # correct for its rounding; the price is truncated weights, biased, in place of PPO's clip.
    from_sampler = cfg.old_logp == "sampler"
    selects = cfg.paw and cfg.select_ratio < 1
    old_logp = entropy = ref_logp = None
    if from_sampler:
        old_logp, mask = sampler_logps(rows)  # (N, T), (N, T)
        if cfg.entropy == "sampled":
            entropy = select.action_entropy(select.sampled_entropy(old_logp), mask)  # (N,)
    elif n_mini > 1:
        old_logp, entropy = score_actions(cfg, policy, rows)  # (N, T), (N,)
    if selects and entropy is None:
        own_logp, entropy = score_actions(cfg, policy, rows)  # (N, T), (N,)
        old_logp = old_logp if from_sampler else own_logp
    if reference is not None:
        reference.to(policy.device)
        ref_logp, _ = score_actions(cfg, reference, rows)  # (N, T)
        if cfg.ref_offload:
            reference.to("cpu")
    old_pass_end = time.perf_counter()

    # Lines 4, 6 and 9: which rows teach the world model, and with which weight; the others have 0.
    weight, pool_metrics = world_model_weights(cfg, episodes, entropy)  # (N,)

    # Lines 5-11. Mini-batches are random, so that each estimates Eq. 11 without bias.
    order = list(range(len(rows)))
    random.Random(repr(seed)).shuffle(order)
    log = Log()
    quiet = True if dist.rank() > 0 else None  # None: no bar where nobody looks
    with tqdm(total=len(rows), desc="update", unit="row", leave=False, disable=quiet) as bar:
        for k in range(n_mini):
            mini = order[k * len(rows) // n_mini : (k + 1) * len(rows) // n_mini]
            mini_tokens = sum(len(rows[i].response_ids) for i in mini)
            optimizer.zero_grad()
            for families in micro_batches(cfg, policy, rows, mini, weight):
                # Under FSDP all ranks must compute at the same time; one that has no row left
                # does so for a row of the others, with a loss of 0.
                idle, families = not families, families or [mini[:1]]
                micro = [i for family in families for i in family]  # B rows
                teaches = weight[micro] > 0  # (B,)
                batch = lay_out(policy, rows, families, teaches.tolist())
                n_tokens = 0 if idle else int(batch.action_mask.sum())
                share = n_tokens / mini_tokens  # a mean over micro-batches of a token mean
                logp, token_entropy = policy(batch)  # (B, S), (B, S)
                old = logp.detach() if old_logp is None else fit(old_logp[micro], logp)

                # Line 7: the base RL loss, on every action.
                surrogate, stats = policy_loss(cfg, logp, old, advantage[micro], batch.action_mask)
                mean_entropy = losses.masked_mean(token_entropy, batch.action_mask)
                terms = {"pg": share * surrogate}
                terms["entropy"] = -cfg.entropy_coef * share * mean_entropy
                if ref_logp is not None:
                    kl = losses.k3_kl(logp, fit(ref_logp[micro], logp), batch.action_mask)
                    terms["kl"] = cfg.kl_coef * share * kl
                    stats["ref_kl"] = kl

                # Line 8: the world-model loss on the selected rows, weighted by lambda_g.
                if teaches.any():
                    row_loss = observation_loss(cfg, logp, batch.obs_mask)  # (B,)
                    weighted = (weight[micro].to(logp) * row_loss).sum() * (not idle)
                    terms["wm"] = weighted * (len(rows) / len(mini))  # unbiased, see losses.py
                    easy = 1.0 - cmae.hard_tokens(logp, cfg.rho)
                    easy = losses.masked_mean(easy, batch.obs_mask)
                    if not idle:
                        log.mean("wm_loss", row_loss[teaches].mean(), int(teaches.sum()))
                        log.mean("wm_clipped_tokens", easy, int(batch.obs_mask.sum()))

                loss = sum(terms.values())  # Eq. 11, this micro-batch's part
                if not torch.isfinite(loss):
                    shown = ", ".join(f"{name} {scalar(value):g}" for name, value in terms.items())
                    part = [rows[i] for i in micro]
                    raise NonFinite(f"the loss became {scalar(loss)} ({shown})", part)
                loss.backward()

                for name, value in terms.items():
                    log.total(f"loss_{name}", value / n_mini)
                for name, value in (stats | {"entropy": mean_entropy}).items():
                    log.mean(name, value, n_tokens)
                log.total("tokens_trained", 0 if idle else len(batch.row))
                log.total("tokens_forward", batch.ids.numel())
                bar.update(len(micro) * dist.world())

            # Line 11. FSDP has added up the gradients of the ranks during the backward pass.
            if not cfg.shard:
                dist.add_up([p.grad for p in policy.parameters() if p.grad is not None])
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)
            norm = norm.full_tensor() if cfg.shard else norm
            if not torch.isfinite(norm):
                raise NonFinite(f"the gradient norm became {scalar(norm)}", [rows[i] for i in mini])
            optimizer.step()
            log.mean("grad_norm", norm, 1)

    seconds = {
        "seconds_old_pass": old_pass_end - start,
        "seconds_update": time.perf_counter() - old_pass_end,
    }
    return log.result() | pool_metrics | seconds


def row_advantages(cfg: Config, episodes) -> Tensor:
    """A_i of each row, from the environment's rewards and the format penalty -> (N,)."""
    rows = [t for e in episodes for t in e.transitions]
    valid = torch.tensor([t.valid for t in rows])
    scores = torch.tensor([e.episode_return for e in episodes for _ in e.transitions])
    scores = advantages.penalized(scores, valid, cfg.invalid_penalty)  # (N,)
    group, trajectory = [t.group for t in rows], [t.trajectory for t in rows]
    if cfg.algo == "grpo":
        return advantages.grpo(
            scores, group, trajectory, normalize=cfg.normalize, over=cfg.statistics
        )
    rewards = torch.tensor([t.reward for t in rows])
    returns = advantages.discounted_returns(rewards, trajectory, cfg.gamma)
    returns = advantages.penalized(returns, valid, cfg.invalid_penalty)
    return advantages.gigpo(
        scores,
        returns,
        group,
        [t.anchor for t in rows],
        normalize=cfg.normalize,
        weight=cfg.step_weight,
        similarity=cfg.similarity or None,
    )


def world_model_weights(cfg: Config, episodes, entropy: Tensor | None) -> tuple[Tensor, dict]:
    """Weight of each row's observation loss in Eq. 11, and its metrics -> ((N,), dict).

    entropy: (N,) of Eq. 4, or None where all rows are kept. Rows with an empty observation have
    nothing to teach: they neither compete nor count.
    """
    rows = [t for e in episodes for t in e.transitions]
    if not cfg.paw:
        return torch.zeros(len(rows)), {}
    candidates = torch.tensor([len(t.obs_ids) > 0 for t in rows])  # (N,)
    selected = candidates.clone()
    if entropy is not None:
        selected[candidates] = select.top_alpha(entropy[candidates], cfg.select_ratio)  # Eq. 4
    returns = balance.group_mean_return(
        [e.episode_return for e in episodes], [e.group for e in episodes]
    )
    lam = {g: float(balance.wm_weight(r, cfg.r_max)) for g, r in returns.items()}  # Eq. 10
    if cfg.wm_weight == "constant":
        lam = dict.fromkeys(lam, 1.0)
    metrics = {
        "lambda": sum(lam.values()) / len(lam),
        "lambda_min": min(lam.values()),
        "lambda_max": max(lam.values()),
        "selected": selected.float().mean().item(),
    }
    return losses.row_weights([t.group for t in rows], selected, lam), metrics


def observation_loss(cfg: Config, logp: Tensor, obs_mask: Tensor) -> Tensor:
    """The chosen world-model loss of each row: (B, S), (B, S) -> (B,)."""
    if cfg.wm_loss == "ce":
        return cmae.cross_entropy(logp, obs_mask)
    if cfg.wm_loss == "mae":
        return cmae.mae(logp, obs_mask)
    return cmae.clipped_mae(logp, obs_mask, cfg.rho)


def policy_loss(cfg: Config, logp, old, advantage, mask) -> tuple[Tensor, dict]:
    """The chosen policy-gradient loss: (B, S), (B, S), (B,), (B, S) -> (), metrics."""
    advantage = advantage.to(logp)
    if cfg.old_logp == "sampler":
        return losses.truncated_is(logp, old, advantage, mask, cfg.is_cap)
    return losses.clipped_surrogate(logp, old, advantage, mask, cfg.clip, cfg.dual_clip)


def scalar(value) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)


class NonFinite(RuntimeError):
    """A loss or gradient that is no number; `rows` are those it came from."""

    def __init__(self, message: str, rows: list):
        super().__init__(message)
        self.rows = rows


class Log:
    """Sums up the metrics of an update: weighted means and totals."""

    def __init__(self):
        self.sums, self.weights = defaultdict(float), {}

    def mean(self, name: str, value, weight: float) -> None:
        self.sums[name] += scalar(value) * weight
        self.weights[name] = self.weights.get(name, 0.0) + weight

    def total(self, name: str, value) -> None:
        self.sums[name] += scalar(value)

    def result(self) -> dict:
        """Means and totals over all ranks."""
        sums, weights = defaultdict(float), defaultdict(float)
        for log in dist.gather([self]):
            for name, value in log.sums.items():
                sums[name] += value
                weights[name] += log.weights.get(name, 0.0)
        return {name: value / (weights[name] or 1.0) for name, value in sums.items()}
