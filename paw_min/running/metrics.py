"""The numbers that describe episodes and updates; results/README.md explains each of them."""

import resource
from collections import defaultdict

import torch
from torch import Tensor

from paw_min import losses, targets
from paw_min.running import distributed


def mean(values: list) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def peak_memory(device: torch.device) -> float:
    """GB: the GPU allocator's peak since the last call, or the process's since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def describe_episodes(episodes: list) -> dict[str, float]:
    """Success, return, length and format of the episodes that were played to their end."""
    played = [e for e in episodes if not e.failed]
    rows = [t for e in played for t in e.transitions]
    returns = defaultdict(set)
    for e in played:
        returns[e.group].add(e.episode_return)
    scores = [e.score for e in played if e.score is not None]
    metrics = {"score": 100 * mean(scores)} if scores else {}
    return metrics | {
        "success": mean([e.won for e in played]),
        "return": mean([e.episode_return for e in played]),
        "length": mean([len(e.transitions) for e in played]),
        "valid": mean([t.valid for t in rows]),
        "no_variance": mean([len(values) == 1 for values in returns.values()]),
        "failed": len(episodes) - len(played),
        "rows": len(rows),
        "duplicates": mean([not first for first in targets.first_occurrences(rows)]),
    }


def describe_selection(rows) -> dict[str, float]:
    """lambda_g over the groups, and the fraction of selected transitions, of update.Rows."""
    lam = list(dict(zip(rows.group, rows.lam.tolist())).values())
    return {
        "lambda": mean(lam),
        "lambda_min": min(lam),
        "lambda_max": max(lam),
        "selected": rows.selected.float().mean().item(),
    }


class UpdateMetrics:
    """Weighted means and totals over the micro-batches of an update and over the ranks."""

    def __init__(self, n_steps: int):
        self.sums, self.weights, self.n_steps = defaultdict(float), defaultdict(float), n_steps

    def add_pass(self, terms: dict[str, Tensor], stats: dict[str, Tensor], batch) -> None:
        """terms: parts of the loss as they are summed. stats: means over the response tokens."""
        n_response, n_obs = int(batch.response_mask.sum()), int(batch.obs_mask.sum())
        self._add({f"loss_{name}": term / self.n_steps for name, term in terms.items()})
        self._add({"tokens_trained": n_response + n_obs, "tokens_forward": batch.ids.numel()})
        self._add(stats, n_response)

    def add_world_model(self, row_loss: Tensor, hard: Tensor, obs_mask: Tensor) -> None:
        """row_loss: (B,), before weights. hard: (B, S), the confidence mask of Eq. 7."""
        rows = obs_mask.any(-1)  # (B,)
        self._add({"wm_loss": row_loss[rows].mean()}, int(rows.sum()))
        easy = losses.masked_mean(1.0 - hard, obs_mask)
        self._add({"wm_clipped_tokens": easy}, int(obs_mask.sum()))

    def add_step(self, grad_norm: Tensor) -> None:
        self._add({"grad_norm": grad_norm}, 1)

    def _add(self, values: dict[str, Tensor | int], weight: int | None = None) -> None:
        for name, value in values.items():
            value = value.item() if isinstance(value, Tensor) else value
            self.sums[name] += value * (1 if weight is None else weight)
            self.weights[name] += weight or 0

    def result(self) -> dict[str, float]:
        sums, weights = defaultdict(float), defaultdict(float)
        for rank in distributed.all_gather([self]):
            for name, value in rank.sums.items():
                sums[name] += value
                weights[name] += rank.weights[name]
        return {name: value / (weights[name] or 1.0) for name, value in sums.items()}
