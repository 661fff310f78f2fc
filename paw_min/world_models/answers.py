"""Predicted observations: how a model is asked for them, and how they are judged (RWML, 2.2).

The model answers in text, <think>...</think><next_state>...</next_state>, and a frozen sentence
encoder E compares: d = 1 - cos(E(prediction), E(truth)), reward 1 if d < tau_d, else 0.
"""

import math
from collections import deque

from paw_min.base.console import progress_bar
from paw_min.base.seeds import request_seed
from paw_min.metrics import mean
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response
from paw_min.retrieval.dense import Encoder


def predicted_state(response: str) -> str | None:
    """The text in the last <next_state> ... </next_state> of an answer; None if it is malformed.

    The last opening tag, since the thought may mention the tags. Nothing else is required.
    """
    _, opened, rest = response.rpartition("<next_state>")
    text, closed, _ = rest.partition("</next_state>")
    return text.strip() or None if opened and closed else None


def reward(distance: float, threshold: float) -> float:
    """r = 1 if d < tau_d, else 0 (2.2); malformed answers have d = inf."""
    return 1.0 if distance < threshold else 0.0


def distances(encoder: Encoder, predictions: list[str | None], truths: list[str]) -> list[float]:
    """d = 1 - cos(E(p), E(s)) of each pair (2.2); inf without a prediction."""
    texts = sorted({*truths, *(text for text in predictions if text is not None)})
    vectors = dict(zip(texts, encoder.passages(texts, len(texts))))  # of length 1
    found = []
    for prediction, truth in zip(predictions, truths, strict=True):
        d = math.inf
        if prediction is not None:
            d = 1.0 - float(vectors[prediction] @ vectors[truth])
        found.append(d)
    return found


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
    sampler, prompts: list[list[int]], tries: int, *,
    temperature: float, max_tokens: int, seed_key: tuple[int, ...],
) -> list[list[Response]]:  # fmt: skip
    """`tries` answers to each prompt, within sampler.sync(policy)."""
    total = len(prompts) * tries
    queue = deque()
    for i in range(total):
        queue.append(Request(i, prompts[i // tries], request_seed(*seed_key, i)))
    found = {}
    with progress_bar(total, "predict", "answer") as bar:
        for finished in sampler.generate(queue, temperature, max_tokens):
            found |= {response.slot: response for response in finished}
            bar.update(len(finished))
    flat = [found[i] for i in range(total)]
    return [flat[i : i + tries] for i in range(0, total, tries)]


def predictions(policy: Policy, answers: list[list[Response]]) -> list[str | None]:
    return [predicted_state(policy.decode(one.ids)) for group in answers for one in group]


def as_written(policy: Policy, text: str) -> str:
    """A text as this model would write it: a word-level tokenizer loses case and spaces."""
    return policy.decode(policy.encode(text)).strip()
