"""Generation: token ids in, token ids out.

    with sampler.sync(policy):                      use the trainer's current weights in this block
        queue.append(Request(...))
        for finished in sampler.generate(queue, temperature, max_tokens):
            ...                                     may append to the queue

`generate` works in small units and accepts new requests in between, so that no request waits for
the slowest one of a batch. In `sync`, a sampler with weights of its own (vllm_sampler.py) loads the
trainer's, and frees its memory at the end.

Each request has a seed and a generator of its own. Tokens are drawn by the Gumbel-max rule,
argmax(logits / temperature + Gumbel noise). So runs replay, and equal prompts of a group get
different responses. Except for rounding, a response does not depend on its batch.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from paw_min.model.policy import Policy


@dataclass
class Request:
    slot: int  # of the pool; returned with the response
    prompt_ids: list[int]
    seed: int


@dataclass
class Response:
    slot: int
    ids: list[int]  # as sampled, up to and including the first end token
    logps: list[float]  # log-probability of each token, in nats, at the sampling temperature
    cut: bool = False  # stopped by the limit of tokens, before an end token


class GumbelNoise(LogitsProcessor):
    """Makes greedy search sample exactly, with a generator per row; none at temperature 0.

    logps: one list per generated token, the log-probabilities (B,) of the chosen tokens.
    """

    def __init__(self, seeds: list[int], temperature: float):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.temperature = temperature
        self.logps = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, L), (B, V) -> (B, V)
        scores = scores / (self.temperature or 1.0)
        noisy = scores
        if self.temperature > 0:
            draws = torch.empty(scores.shape)  # (B, V)
            for row, generator in zip(draws, self.generators):
                row.exponential_(generator=generator)
            noisy = scores - draws.log().to(scores.device)  # -log Exp(1) is Gumbel
        # Greedy search takes the argmax of what this returns: the log-probability of that token,
        # without the noise, is the sampler's mu.
        chosen = noisy.argmax(-1, keepdim=True)  # (B, 1)
        logp = scores.float().log_softmax(-1).gather(-1, chosen)[:, 0]  # (B,)
        self.logps.append(logp.tolist())
        return noisy


class HFSampler:
    """Generation by transformers, with the trainer's own model: batch after batch of requests."""

    def __init__(self, batch_size: int = 64):
        self.batch_size = batch_size

    @contextmanager
    def sync(self, policy: Policy):
        """Nothing to copy: the model is the trainer's own."""
        # Gradients of the last step: 4 bytes per trained parameter. Neither a rollout nor the
        # reference's pass after it needs them.
        policy.zero_grad()
        self.policy = policy
        yield

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Yield finished responses until the queue is empty. temperature: 0 is greedy."""
        while queue:
            size = min(len(queue), self.batch_size)
            batch = [queue.popleft() for _ in range(size)]
            yield self._generate(batch, temperature, max_tokens)

    def close(self) -> None:
        """Nothing to shut down."""

    @torch.no_grad()
    def _generate(self, batch: list[Request], temperature, max_tokens) -> list[Response]:
        policy = self.policy
        # Padded on the left, so that all responses start in the same column.
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), width), policy.pad_id)  # (B, L)
        mask = torch.zeros_like(ids)  # (B, L)
        for i, request in enumerate(batch):
            start = width - len(request.prompt_ids)
            ids[i, start:] = torch.tensor(request.prompt_ids)
            mask[i, start:] = 1

        # In training mode, gradient checkpointing would switch the cache of keys and values off.
        was_training = policy.model.training
        policy.model.eval()
        noise = GumbelNoise([request.seed for request in batch], temperature)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens,
            eos_token_id=policy.eos_ids, pad_token_id=policy.pad_id,
        )
        bf16 = policy.precision == "bf16"  # as in the trainer's passes
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=bf16):
            out = policy.model.generate(
                ids.to(policy.device), attention_mask=mask.to(policy.device),
                generation_config=config, logits_processor=LogitsProcessorList([noise]),
            )
        policy.model.train(was_training)

        # A row that has ended is padded until the longest one ends: keep up to its end token.
        responses = []
        generated = out[:, width:].tolist()  # B rows, one token per step
        logps = zip(*noise.logps)  # B rows, one value per step
        for request, row_ids, row_logps in zip(batch, generated, logps, strict=True):
            ends = [n for n, token in enumerate(row_ids, start=1) if token in policy.eos_ids]
            length = ends[0] if ends else len(row_ids)
            logps_of_row = list(row_logps[:length])
            responses.append(Response(request.slot, row_ids[:length], logps_of_row, cut=not ends))
        return responses
