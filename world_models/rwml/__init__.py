"""Reinforcement World Model Learning (RWML, arXiv 2602.05842): before RL, predict what actions do.

    section                                                      function
    3.1, B.1  triplets of own rollouts, N = 3 per task           stages.make_triplets
    A4, A5    prompts of RWML and of WM-SFT, labels of WM-SFT     triplets.prompt_text, sft_row
    2.2       the prediction in an answer                        predicted_state
    2.2       d = 1 - cos(E(prediction), E(truth))               distances
    2.2       r = 1 if d < tau_d, else 0                         reward
    2.2, E1   which triplets are too easy; K = 10 tries          tries, too_easy
    A2        tau_d of the filter, and of training               calibrated_threshold,
                                                                 training_threshold
    2.2       GRPO with KL, G answers per triplet                answer_rows, update
    B.1       epochs over batches of B = 32 triplets             batch_of_update
    B.2       then RL                                            stages.policy_rl

The model answers in text, <think>...</think><next_state>...</next_state>, and a frozen sentence
encoder E judges it. No task reward is used. The gradient step is the one of RL, update.prepare and
update.optimize, without PaW: an answer is a row, and the answers to one triplet are a group.

What the paper leaves open is in this folder's README.md. The stages of the
command are in stages.py, its flags in settings.py.

Legend: B triplets of an update, G answers per triplet, K tries of the filter.
"""

import math
import random
from collections import deque

from paw_min.base.console import progress_bar
from paw_min.base.seeds import generator, request_seed
from paw_min.config import Config
from paw_min.metrics import mean
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response
from paw_min.model.scoring import check_sync
from paw_min.retrieval.dense import Encoder
from paw_min.rows import Episode, Rows, Transition, flatten
from paw_min.running.session import Session
from paw_min.update import optimize, prepare
from world_models.rwml.triplets import Triplet, prompt_text

KEEP = 0.1  # probability that an easy triplet survives, B.1
MARGIN = 0.15  # training's tau_d minus the filter's, Table A2 ...
STEP = 0.2  # ... which is rounded to a multiple of this
THRESHOLDS = (0.01, 0.5)  # range of the filter's tau_d: above, generic answers pass (Table A2)


# ---- answers and their reward (2.2) ----


def predicted_state(response: str) -> str | None:
    """The text in the last <next_state> ... </next_state> of an answer; None if it is malformed.

    The last opening tag, since the thought may mention the tags. Nothing else is required.
    """
    _, opened, rest = response.rpartition("<next_state>")
    text, closed, _ = rest.partition("</next_state>")
    if not (opened and closed):
        return None
    return text.strip() or None


def distances(encoder: Encoder, predictions: list[str | None], truths: list[str]) -> list[float]:
    """d = 1 - cos(E(p), E(s)) of each pair (2.2).

    It is inf without a prediction, and for one that E does not read to its end: whatever that end
    is, the vector would be the same. fitting() leaves out such truths.
    """
    texts = sorted({*truths, *(text for text in predictions if text is not None)})
    vectors = dict(zip(texts, encoder.passages(texts)))  # The vectors have length 1.
    whole = dict(zip(texts, encoder.reads(texts)))
    found = []
    for prediction, truth in zip(predictions, truths, strict=True):
        d = math.inf
        if prediction is not None and whole[prediction]:
            d = 1.0 - float(vectors[prediction] @ vectors[truth])
        found.append(d)
    return found


def reward(distance: float, threshold: float) -> float:
    """r = 1 if d < tau_d, else 0 (2.2); malformed answers have d = inf."""
    return 1.0 if distance < threshold else 0.0


def quality(
    predictions: list[str | None], truths: list[str], d: list[float], threshold: float
) -> dict[str, float]:
    """Means over the predictions, given their distances; a malformed one has the cosine 0."""
    cosines = [0.0 if one == math.inf else 1.0 - one for one in d]
    return {
        "reward": mean([reward(one, threshold) for one in d]),
        "exact": mean([p == truth for p, truth in zip(predictions, truths, strict=True)]),
        "cosine": mean(cosines),
        "well_formed": mean([p is not None for p in predictions]),
    }


def predict(
    sampler, prompts: list[list[int]], n_answers: int, *,
    temperature: float, max_tokens: int, seed_key: tuple[int, ...],
) -> list[list[Response]]:
    """`n_answers` answers to each prompt, within sampler.sync(policy)."""
    total = len(prompts) * n_answers
    queue = deque(
        Request(i, prompts[i // n_answers], request_seed(*seed_key, i)) for i in range(total)
    )
    found = {}
    with progress_bar(total, "predict", "answer") as bar:
        for finished in sampler.generate(queue, temperature, max_tokens):
            found |= {response.slot: response for response in finished}
            bar.update(len(finished))
    flat = [found[i] for i in range(total)]
    return [flat[i : i + n_answers] for i in range(0, total, n_answers)]


def predictions_of(policy: Policy, answers: list[list[Response]]) -> list[str | None]:
    return [predicted_state(policy.decode(one.ids)) for of_one in answers for one in of_one]


def truths_of(policy: Policy, triplets: list[Triplet]) -> list[str]:
    """The next observations as this model would write them: some tokenizers lose case or spaces."""
    return [policy.decode(policy.encode(t.next_observation)).strip() for t in triplets]


# ---- the filter (E1, B.1, Table A2) ----


def tries(
    cfg: Config, policy: Policy, sampler, encoder: Encoder, triplets: list[Triplet], k: int,
    max_tokens: int,
) -> list[float]:
    """K answers to each triplet -> the smallest distance.

    policy: a copy of the model that has learned the task from the other 10 % of the triplets, with
    labels without a thought, and is asked in the same way.
    """
    prompts = [policy.encode_chat(prompt_text(cfg, t, reason=False)) for t in triplets]
    with sampler.sync(policy):
        answers = predict(
            sampler, prompts, k, temperature=1.0, max_tokens=max_tokens, seed_key=(cfg.seed, 0)
        )
    truths = [truth for truth in truths_of(policy, triplets) for _ in range(k)]
    d = distances(encoder, predictions_of(policy, answers), truths)
    return [min(d[i : i + k]) for i in range(0, len(d), k)]


def too_easy(hits: list[int], rng: random.Random) -> list[int]:
    """E1: positions of the kept triplets. One hit in K tries is easy; those stay with p = 0.1."""
    # E1 as printed compares the mean with tau_easy = 0 by ">=", and all would be easy.
    return [i for i, n_hits in enumerate(hits) if not n_hits or rng.random() < KEEP]


def calibrated_threshold(nearest: list[float], easy_share: float) -> float:
    """Table A2: the filter's tau_d for which this share of the triplets is easy.

    A triplet is easy if its smallest distance is below tau_d, so tau_d is the smallest one that is
    not to count. Exact predictions, d = 0, are easy at any tau_d; the share is then larger.
    """
    in_order = sorted(nearest)
    count = round(easy_share * len(in_order))
    low, high = THRESHOLDS
    return min(max(in_order[min(count, len(in_order) - 1)], low), high)


def training_threshold(filter_threshold: float) -> float:
    """Table A2: tau_d of training, the filter's + 0.15, to the nearest 0.2; halves round up."""
    steps = round((filter_threshold + MARGIN) / STEP, 9)  # 0.3 / 0.2 is 1.4999999999999998
    return round(STEP * math.floor(steps + 0.5), 9)


# ---- GRPO on answers (2.2) ----


def batch_of_update(k: int, n_triplets: int, batch: int, seed: int) -> list[int]:
    """Positions of the triplets of update k, from 1. Each epoch has an order of its own."""
    per_epoch = -(-n_triplets // batch)
    epoch, position = divmod(k - 1, per_epoch)
    order = generator("rwml", seed, epoch).sample(range(n_triplets), n_triplets)
    return order[position * batch : (position + 1) * batch]


def update(
    cfg: Config, s: Session, k: int, encoder: Encoder, prompts: list[list[int]],
    truths: list[str], threshold: float,
) -> dict[str, float]:
    """Update k, from 1: G answers to each of these B prompts, and a GRPO step -> metrics.

    NonFinite if the loss or its gradient is.
    """
    size = cfg.group_size
    key = (cfg.seed, k)
    with s.sampler.sync(s.policy):
        answers = predict(
            s.sampler, prompts, size,
            temperature=cfg.temperature, max_tokens=cfg.max_response_tokens, seed_key=key,
        )
    predictions = predictions_of(s.policy, answers)
    repeated = [truth for truth in truths for _ in range(size)]  # B * G
    d = distances(encoder, predictions, repeated)
    rewards = [reward(one, threshold) for one in d]
    rows = answer_rows(prompts, answers, rewards)
    gap = check_sync(cfg, s.policy, s.sampler, rows, f"update {k}")
    rows = prepare(cfg, s.policy, s.reference, rows)
    metrics = optimize(cfg, s.policy, s.optimizer, rows, seed_key=key)
    # The share of groups in which some answers are rewarded and others not: only they teach.
    spread = [len(set(rewards[i : i + size])) > 1 for i in range(0, len(rewards), size)]
    measured = quality(predictions, repeated, d, threshold)
    return {"spread": mean(spread), "sampler_gap": gap} | measured | metrics


def answer_rows(
    prompts: list[list[int]], answers: list[list[Response]], rewards: list[float]
) -> Rows:
    """B prompts with G answers each as rows for update.prepare: a group per prompt."""
    episodes = []
    for g, (prompt, of_prompt) in enumerate(zip(prompts, answers, strict=True)):
        for response in of_prompt:
            n = len(episodes)
            answer = Transition(
                prompt, response.ids, [], response.logps, rewards[n],
                valid=True,  # its format is part of the reward
                observation="", group=g, trajectory=n,
            )
            episodes.append(Episode("", g, n, [answer]))  # an episode of one step
    return flatten(episodes)
