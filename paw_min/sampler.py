"""Generation: token ids in, token ids out.

    with sampler.sync(policy):                      the trainer's present weights, in this block
        queue.append(Request(...))
        for finished in sampler.generate(queue, temperature, max_tokens):
            ...                                     may append to the queue

`generate` advances all sequences it has by one piece of work at a time and takes new requests in
between, so that nobody waits for the slowest of a batch. Behind `sync` a sampler with weights of
its own (vllm_sampler.py) takes over the trainer's, and gives its memory back where the block ends.

Randomness belongs to the request, not to the process: each has a seed, and here its tokens are
drawn by the Gumbel-max rule, argmax(logits / temperature + Gumbel noise), from its own generator. A
run therefore replays, two equal prompts of a group differ, and the company a prompt is batched with
does not change its draw.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from paw_min.policy import Policy


@dataclass
class Request:
    key: int  # the caller's name for it, e.g. the slot of an environment
    prompt: list[int]
    seed: int


@dataclass
class Response:
    key: int
    ids: list[int]  # as sampled, up to and including the first end token
    logps: list[float]  # log-probability of each, in nats, at the sampling temperature


class GumbelNoise(LogitsProcessor):
    """Turns greedy search into exact sampling, one generator per row; temperature 0 adds nothing.

    logps: after each token, the log-probabilities (B,) of what the search is going to choose.
    """

    def __init__(self, seeds: list[int], temperature: float):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.temperature = temperature
        self.logps = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, L), (B, V) -> (B, V)
        noisy = scores = scores / (self.temperature or 1.0)
        if self.temperature > 0:
            draws = torch.empty(scores.shape)
            for row, generator in zip(draws, self.generators):
                row.exponential_(generator=generator)
            noisy = scores - draws.log().to(scores.device)  # -log Exp(1) is Gumbel
        chosen = noisy.argmax(-1, keepdim=True)  # (B, 1)
        self.logps.append(scores.float().log_softmax(-1).gather(-1, chosen)[:, 0].tolist())
        return noisy


class HFSampler:
    """Batched generation by transformers, on the trainer's own model and device.

    The model of transformers has no continuous batching here: a piece of work is one whole batch of
    what is waiting, batch_size at most.
    """

    def __init__(self, batch_size: int = 64):
        self.batch_size = batch_size

    @contextmanager
    def sync(self, policy: Policy):
        """The model is the trainer's own: always in step."""
        self.policy = policy
        yield

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Answer the requests of the queue, and those that come in between; ends with the last.

        temperature 0 is greedy. max_tokens: per response.
        """
        while queue:
            batch = [queue.popleft() for _ in range(min(len(queue), self.batch_size))]
            yield self._generate(batch, temperature, max_tokens)

    def close(self) -> None:
        """Nothing runs here that would have to end."""

    @torch.no_grad()
    def _generate(self, batch: list[Request], temperature, max_tokens) -> list[Response]:
        policy = self.policy
        width = max(len(r.prompt) for r in batch)
        ids = torch.full((len(batch), width), policy.pad_id)  # (B, L), padded on the left
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, width - len(request.prompt) :] = 1
        was_training = policy.model.training
        policy.model.eval()
        noise = GumbelNoise([r.seed for r in batch], temperature)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=policy.eos_ids,
            pad_token_id=policy.pad_id,
        )
        bf16 = policy.precision == "bf16"  # as the trainer computes
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=bf16):
            out = policy.model.generate(
                ids.to(policy.device),
                attention_mask=mask.to(policy.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([noise]),
            )
        policy.model.train(was_training)
        logps = zip(*noise.logps)  # rows of B, n tokens each
        return [
            self._until_end(request.key, ids, list(row))
            for request, ids, row in zip(batch, out[:, width:].tolist(), logps, strict=True)
        ]

    def _until_end(self, key: int, ids: list[int], logps: list[float]) -> Response:
        ends = [n for n, token in enumerate(ids, start=1) if token in self.policy.eos_ids]
        length = ends[0] if ends else len(ids)
        return Response(key, ids[:length], logps[:length])
