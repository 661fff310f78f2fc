"""The numbers that describe episodes, updates and speed; paw_min/README.md explains each of them.

train.run_update merges them with those of the rollout. Each entry of `stats` and `terms` in
update.loss_terms is a metric of an update.
"""

import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paw_min import losses
from paw_min.base import distributed
from paw_min.model.batches import Batch
from paw_min.rows import Episode, Rows

# Products of bf16 matrices per second, without sparsity, from the data sheets. The first of these
# words that a card's name has counts.
PEAK = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12,
}


def mean(values: list) -> float:
    return float(sum(values) / len(values)) if values else 0.0


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of this block to seconds[name]."""
    began = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


class Stopwatch:
    """Wall time in parts that do not overlap: each moment belongs to the part that is open.

    Where none is, it is "seconds_other". base/console.py lists the parts.
    """

    def __init__(self):
        self.seconds = Counter()  # seconds of each part, since `take`
        self.open = "seconds_other"
        self.last = time.perf_counter()

    def turn_to(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self.open] += now - self.last
        self.open, self.last = name, now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.turn_to(name)
        yield
        self.turn_to("seconds_other")

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self.turn_to(self.open)
        taken, self.seconds = dict(self.seconds), Counter()
        return taken


def peak_memory(device: torch.device, released: int) -> float:
    """GB: the GPU allocator's peak since the last call, or the process's since its start.

    released: bytes of vLLM, which are not counted on a GPU.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return (peak - released) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def describe_speed(
    model, rows: Rows, measured: dict[str, float], device: torch.device
) -> dict[str, float]:
    """Tokens per second of generation and of the gradient steps, and the MFU of these.

    MFU, model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B, without attention):

        6 n T / (seconds * GPUs * peak)     4 n T with LoRA: frozen weights have no gradient

    n parameters, T tokens of the rows without padding. What gradient checkpointing computes again
    does not count. On a CPU, and on a GPU that is not in PEAK, there is no MFU.
    """
    n_tokens = 0
    for row, weight in zip(rows.tokens, rows.row_weight):
        n_tokens += len(row.prompt_ids) + len(row.response_ids)
        if weight != 0:
            n_tokens += len(row.separator_ids) + len(row.obs_ids)
    per_second = n_tokens / measured["seconds_update"]
    metrics = {
        "tokens_per_s_generate": measured["tokens_generated"] / measured["seconds_generate"],
        "tokens_per_s_update": per_second,
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = [peak for card, peak in PEAK.items() if card in name]
    if peaks:
        trained = all(p.requires_grad for p in model.parameters())
        operations = (6 if trained else 4) * model.num_parameters() * per_second
        metrics["mfu"] = operations / (distributed.n_ranks() * peaks[0])
    return metrics


def describe_episodes(episodes: list[Episode]) -> dict[str, float]:
    """Success, return, length and format of the episodes that did not fail."""
    played = [e for e in episodes if not e.failed]
    rows = [t for e in played for t in e.transitions]
    returns = defaultdict(set)
    for e in played:
        returns[e.group].add(e.episode_return)
    metrics = {
        "success": mean([e.won for e in played]),
        "return": mean([e.episode_return for e in played]),
        "length": mean([len(e.transitions) for e in played]),
        "valid": mean([row.valid for row in rows]),
        "no_variance": mean([len(values) == 1 for values in returns.values()]),
        "failed": len(episodes) - len(played),
        "rows": len(rows),
    }
    scores = [e.score for e in played if e.score is not None]
    if scores:
        metrics["score"] = 100 * mean(scores)
    return metrics


def describe_selection(rows: Rows) -> dict[str, float]:
    """lambda_g over the groups, and the fraction of selected transitions."""
    lambdas = list(rows.lambdas.values())
    return {
        "lambda": mean(lambdas),
        "lambda_min": min(lambdas),
        "lambda_max": max(lambdas),
        "selected": rows.selected.float().mean().item(),
    }


class UpdateMetrics:
    """Means and totals over the micro-batches of an update and over the ranks."""

    def __init__(self, n_steps: int):
        self.n_steps = n_steps  # optimizer steps of the update
        self.totals = Counter()
        self.sums = Counter()  # sums of value * weight
        self.weights = Counter()

    def add_pass(self, parts, batch: Batch) -> None:
        """One micro-batch: update.LossTerms, and its Batch."""
        # A term is its micro-batch's part of the loss of a step: the parts of a step add up, and
        # the metric is the mean over the steps.
        for name, term in parts.terms.items():
            self.add_total(f"loss_{name}", (term / self.n_steps).item())
        n_response = int(batch.response_mask.sum())
        n_obs = int(batch.obs_mask.sum())
        self.add_total("tokens_trained", n_response + n_obs)
        self.add_total("tokens_forward", batch.ids.numel())
        for name, value in parts.stats.items():
            self.add_mean(name, value.item(), weight=n_response)
        if parts.observations is not None:
            scored = batch.obs_mask.any(-1)  # (B,) rows with an observation
            row_loss = parts.observations.per_row[scored].mean()  # no weights
            self.add_mean("wm_loss", row_loss.item(), weight=int(scored.sum()))
            dropped = (~parts.observations.counted).float()  # (B, S)
            fraction = losses.masked_mean(dropped, batch.obs_mask)
            self.add_mean("wm_clipped_tokens", fraction.item(), weight=n_obs)

    def add_total(self, name: str, value: float) -> None:
        self.totals[name] += value

    def add_mean(self, name: str, value: float, weight: int) -> None:
        self.sums[name] += value * weight
        self.weights[name] += weight

    def result(self) -> dict[str, float]:
        """The metrics over all ranks; a mean without any weight is 0."""
        totals, sums, weights = Counter(), Counter(), Counter()
        for rank in distributed.all_gather([self]):
            totals.update(rank.totals)  # adds, name by name
            sums.update(rank.sums)
            weights.update(rank.weights)
        means = {name: value / (weights[name] or 1) for name, value in sums.items()}
        return dict(totals) | means
