"""The numbers that describe episodes and updates; README.md explains each of them."""

from collections import defaultdict

from torch import Tensor

from paw_min import distributed, losses


def mean(values: list) -> float:
    return float(sum(values) / len(values)) if values else 0.0


def describe_episodes(episodes: list) -> dict[str, float]:
    """Success, return, length and format of the episodes that were played to their end.

    score: the benchmark's own, from 0 to 100, where it has one. no_variance: fraction of groups
    whose episodes all have the same return, so that only format penalties give them an advantage.
    """
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
    }


def describe_selection(rows) -> dict[str, float]:
    """lambda_g over the groups, and the fraction of transitions that Eq. 4 keeps.

    rows: update.Rows of an update with PaW.
    """
    lam = list(dict(zip(rows.group, rows.lam.tolist())).values())
    return {
        "lambda": mean(lam),
        "lambda_min": min(lam),
        "lambda_max": max(lam),
        "selected": rows.selected.float().mean().item(),
    }


class UpdateMetrics:
    """Weighted means and totals over the micro-batches of an update and over the ranks."""

    def __init__(self):
        self.sums, self.weights = defaultdict(float), defaultdict(float)
        self.steps = 0

    def add_micro_batch(self, terms: dict[str, Tensor], stats: dict[str, Tensor], batch) -> None:
        """terms: parts of the loss as they are summed. stats: means over the response tokens."""
        n_response = int(batch.response_mask.sum())
        for name, value in terms.items():
            self._total(f"loss_{name}", value)
        for name, value in stats.items():
            self._mean(name, value, n_response)
        self._total("tokens_trained", n_response + int(batch.obs_mask.sum()))
        self._total("tokens_forward", batch.ids.numel())

    def add_world_model(self, row_loss: Tensor, hard: Tensor, obs_mask: Tensor) -> None:
        """row_loss: (B,), before weights. hard: (B, S), the confidence mask of Eq. 7."""
        trained = obs_mask.any(-1)  # (B,)
        self._mean("wm_loss", row_loss[trained].mean(), int(trained.sum()))
        easy = losses.masked_mean(1.0 - hard, obs_mask)
        self._mean("wm_clipped_tokens", easy, int(obs_mask.sum()))

    def add_step(self, grad_norm: Tensor) -> None:
        self._mean("grad_norm", grad_norm, 1)
        self.steps += 1

    def _mean(self, name: str, value: Tensor, weight: float) -> None:
        self.sums[name] += value.item() * weight
        self.weights[name] += weight

    def _total(self, name: str, value: Tensor | int) -> None:
        self.sums[name] += value.item() if isinstance(value, Tensor) else value

    def result(self) -> dict[str, float]:
        """Means over the tokens, rows or steps of all ranks; loss terms: means over the steps."""
        sums, weights = defaultdict(float), defaultdict(float)
        for part in distributed.all_gather([self]):
            for name, value in part.sums.items():
                sums[name] += value / (self.steps if name.startswith("loss_") else 1)
                weights[name] += part.weights.get(name, 0.0)
        return {name: value / (weights[name] or 1.0) for name, value in sums.items()}
