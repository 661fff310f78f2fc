"""RWML's filter: which triplets are worth training on (E1, B.1, Table A2).

A copy of the start model learns from the 10 % and answers each of the others K times. A triplet
with one hit is easy, and stays with probability 0.1. The filter's threshold makes a given share of
the triplets easy; that of training follows from it.
"""

import json
import math
import random
from dataclasses import asdict, dataclass

from paw_min.base.errors import UserError
from paw_min.base.files import replace_text
from paw_min.base.seeds import generator
from paw_min.metrics import mean
from paw_min.model import lora
from paw_min.running.untrusted import exact
from paw_min.world_models.answers import as_written, distances, predict, predictions, reward
from paw_min.world_models.job import Job
from paw_min.world_models.start import sft_optimizer, supervise
from paw_min.world_models.triplets import Triplet, loaded_for_answers, prompt_text, sft_row

KEEP = 0.1  # probability that an easy triplet survives, B.1
MARGIN = 0.15  # from the filter's tau_d to that of training, Table A2 ...
STEP = 0.2  # ... which is rounded to a multiple of this
THRESHOLDS = (0.01, 0.5)  # range of the filter's tau_d: above, generic answers pass (Table A2)


def too_easy(hits_per_triplet: list[int], rng: random.Random) -> list[int]:
    """E1: positions of the kept triplets. One hit in K tries is easy; those stay with p = 0.1."""
    # As printed, E1 compares the mean with tau_easy = 0 by ">=", and all would be easy.
    return [i for i, hits in enumerate(hits_per_triplet) if not hits or rng.random() < KEEP]


def calibrated_threshold(nearest: list[float], easy_share: float) -> float:
    """Table A2: the filter's tau_d for which this share of the triplets is easy.

    nearest: the smallest distance among the K tries of each triplet. A triplet is easy if it is
    below tau_d, so tau_d is the smallest distance that is not to count. Exact predictions, d = 0,
    are easy at any tau_d; the share is then larger.
    """
    in_order = sorted(nearest)
    count = round(easy_share * len(in_order))
    low, high = THRESHOLDS
    return min(max(in_order[min(count, len(in_order) - 1)], low), high)


def training_threshold(filter_threshold: float) -> float:
    """Table A2: tau_d of training, the filter's + 0.15, to the nearest 0.2; halves round up."""
    steps = round((filter_threshold + MARGIN) / STEP, 9)  # 0.3 / 0.2 is 1.4999999999999998
    return round(STEP * math.floor(steps + 0.5), 9)


@exact
@dataclass
class Filtered:
    threshold: float  # the filter's tau_d
    easy: float  # share of the triplets that the filter predicts at least once
    kept: list[int]  # positions among the training triplets


def fits(filtered: Filtered, n_triplets: int) -> bool:
    """Whether this is a possible result for n_triplets triplets."""
    low, high = THRESHOLDS
    kept = filtered.kept
    in_order = kept == sorted(set(kept)) and all(0 <= i < n_triplets for i in kept)
    return bool(kept) and in_order and low <= filtered.threshold <= high


def filter_triplets(job: Job, validation: list[Triplet], others: list[Triplet]) -> Filtered:
    """E1: which triplets are worth training on -> filter.json."""
    settings = job.settings
    pieces = job.pieces("filter")
    start = str(job.folder / "start")
    with loaded_for_answers(job.cfg, start, settings.answer_tokens) as (policy, sampler):
        if job.cfg.lora_rank:
            lora.attach(policy.model, job.cfg.lora_rank, policy.precision, job.cfg.seed, None)
        if job.cfg.grad_checkpointing:
            policy.model.gradient_checkpointing_enable()
        # 1. A separate copy learns the task from the 10 %.
        rows = [sft_row(job.cfg, policy, triplet) for triplet in validation]
        optimizer = sft_optimizer(job, policy)
        supervise(job, pieces, policy, optimizer, rows, settings.sft_epochs, "filter")
        # 2. It answers each of the others K times.
        prompts = [policy.encode_chat(prompt_text(job.cfg, t, reason=False)) for t in others]
        sampler = pieces.sampler(sampler)
        with sampler.sync(policy):
            answers = predict(
                sampler, prompts, settings.tries,
                temperature=1.0, max_tokens=settings.answer_tokens, seed_key=(job.cfg.seed, 0),
            )  # fmt: skip
        truths = []
        for triplet in others:
            truths += settings.tries * [as_written(policy, triplet.next_observation)]
        d = distances(job.encoder, predictions(policy, answers), truths)
    # 3. Hits at the filter's own threshold, which is stricter than that of training.
    # For each triplet, the distances of its K tries.
    tries = [d[i : i + settings.tries] for i in range(0, len(d), settings.tries)]
    threshold = calibrated_threshold([min(one) for one in tries], settings.easy_share)
    hits = [int(sum(reward(x, threshold) for x in one)) for one in tries]
    # 4., 5. The easy ones stay with p = 0.1.
    result = Filtered(
        threshold=threshold,
        easy=mean([count > 0 for count in hits]),
        kept=too_easy(hits, generator("too easy", job.cfg.seed)),
    )
    if not result.kept:
        raise UserError(f"all {len(others)} triplets are easy, and none is drawn to stay: use more "
                        "--tasks.")  # fmt: skip
    replace_text(job.folder / "filter.json", json.dumps(asdict(result)) + "\n")
    pieces.remove()
    return result
