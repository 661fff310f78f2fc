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
different responses. Except for rounding, a response does not depend on its batch. The noise is
drawn where the logits are: a GPU has other random numbers than a CPU.

Legend: B rows, L tokens of the longest prompt, V tokens of the vocabulary, T tokens of the longest
response.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from paw_min.model.policy import Policy, autocast

CPU_ROWS = 64  # rows of a batch on a CPU; another number would change the rounding


@dataclass
class Request:
    slot: int  # the pool's; returned with the response
    prompt_ids: list[int]
    seed: int


@dataclass
class Response:
    slot: int
    ids: list[int]  # the sampled ones, up to and including the first end token
    logps: list[float]  # log-probability of each token, in nats, at the sampling temperature
    cut: bool = False  # stopped by the limit of tokens, before an end token


class Sampler(Protocol):
    """HFSampler below, or VLLMSampler."""

    remedy: str  # what to do where its log-probabilities are not the trainer's
    released: int  # bytes that it has released on the GPU, but that torch counts as allocated
    kept: int  # bytes of the GPU that it keeps outside of `sync`

    def sync(self, policy: Policy) -> AbstractContextManager: ...

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]: ...

    def close(self) -> None: ...


class GumbelNoise(LogitsProcessor):
    """Makes greedy search sample exactly, with a generator per row; none at temperature 0.

    logps: one tensor per generated token, the log-probabilities (B,) of the chosen tokens.
    """

    def __init__(self, seeds: list[int], temperature: float, device: torch.device):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature
        self.logps = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, L), (B, V) -> (B, V)
        scores = scores / (self.temperature or 1.0)
        noisy = scores
        if self.temperature > 0:
            draws = torch.empty(scores.shape, device=scores.device)  # (B, V)
            for row, generator in zip(draws, self.generators):
                row.exponential_(generator=generator)
            noisy = scores - draws.log()  # -log Exp(1) is Gumbel
        # Greedy search takes the argmax of what this returns: the log-probability of that token,
        # without the noise, is the sampler's mu.
        chosen = noisy.argmax(-1, keepdim=True)  # (B, 1)
        logp = scores.float().log_softmax(-1).gather(-1, chosen)[:, 0]  # (B,)
        self.logps.append(logp)
        return noisy


class HFSampler:
    """Generation by transformers, with the trainer's own model: batch after batch of requests.

    A batch has CPU_ROWS rows, or those that fit on the GPU (rows_that_fit).
    """

    remedy = "this model generates otherwise than it trains: use another --model, or --sampler vllm"

    def __init__(self):
        self.free = 0  # bytes of the GPU in this `sync`
        self.released = 0
        self.kept = 0

    @contextmanager
    def sync(self, policy: Policy):
        """Nothing to copy: the model is the trainer's own."""
        # Gradients of the last step: 4 bytes per trained parameter. Neither a rollout nor the
        # reference's pass after it needs them.
        policy.zero_grad()
        self.policy = policy
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()  # return what the trainer freed but its allocator cached
            self.free, _ = torch.cuda.mem_get_info(policy.device)
        yield

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """Yield finished responses until the queue is empty. temperature: 0 is greedy."""
        while queue:
            size = CPU_ROWS
            if self.free:
                longest = max(len(request.prompt_ids) for request in queue)
                size = rows_that_fit(self.policy, self.free, longest, max_tokens)
            batch = [queue.popleft() for _ in range(min(len(queue), size))]
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

        # Gradient checkpointing in training mode would switch the cache of keys and values off.
        was_training = policy.model.training
        policy.model.eval()
        seeds = [request.seed for request in batch]
        noise = GumbelNoise(seeds, temperature, policy.device)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens,
            eos_token_id=policy.eos_ids, pad_token_id=policy.pad_id,
        )
        with autocast(policy.device, policy.precision):  # as in the trainer's passes
            out = policy.model.generate(
                ids.to(policy.device), attention_mask=mask.to(policy.device),
                generation_config=config, logits_processor=LogitsProcessorList([noise]),
            )
        policy.model.train(was_training)

        # A row that has ended is padded until the longest one ends: keep up to its end token.
        responses = []
        generated = out[:, width:].tolist()  # B rows, one token per step
        logps = torch.stack(noise.logps, dim=1).tolist()  # the same; one copy from the GPU in all
        for request, row_ids, row_logps in zip(batch, generated, logps, strict=True):
            ends = [n for n, token in enumerate(row_ids, start=1) if token in policy.eos_ids]
            length = ends[0] if ends else len(row_ids)
            responses.append(
                Response(request.slot, row_ids[:length], row_logps[:length], cut=not ends)
            )
        return responses


def rows_that_fit(policy: Policy, free: int, prompt_tokens: int, new_tokens: int) -> int:
    """Rows of a batch that need half of the GPU's `free` bytes, at least one.

    A row has the keys and values of all its tokens, seven copies of its logits in fp32, and, while
    its prompt is read, a layer's hidden states. Left out: what attention copies. The other half is
    for this.
    """
    config = policy.model.config
    width = config.hidden_size
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or width // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * width
    number = 2 if policy.precision == "bf16" else 4  # bytes of a number in a pass

    cache = 2 * config.num_hidden_layers * key_heads * head_width * number  # bytes of a token
    # The residual stream and its norm in fp32; queries, keys, values, results; gate, up, product.
    layer = 4 * 3 * width + number * (4 * width + 3 * inner)  # bytes of a token
    logits = 7 * 4 * config.vocab_size  # bytes of a row
    row = (prompt_tokens + new_tokens) * cache + prompt_tokens * layer + logits
    return max(1, int(free / 2 / row))
