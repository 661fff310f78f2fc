"""Generation: token ids in, token ids out.

`generate()` samples responses, `sync()` gives the sampler the trainer's present weights. The
transformers sampler below shares the trainer's own model, so its sync has nothing to do.

Randomness belongs to the request, not to the process: each has a seed, and its tokens are drawn
by the Gumbel-max rule, argmax(logits / temperature + Gumbel noise), from its own generator. A run
therefore replays, two equal prompts of a group differ, and the company a prompt is batched with
does not change its draw.
"""

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from paw_min.policy import Policy


class GumbelNoise(LogitsProcessor):
    """Turns greedy search into exact sampling, one generator per row."""

    def __init__(self, seeds: list[int], temperature: float):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, L), (B, V) -> (B, V)
        draws = torch.empty(scores.shape)
        for row, generator in zip(draws, self.generators):
            row.exponential_(generator=generator)
        return scores / self.temperature - draws.log().to(scores.device)  # -log Exp(1) is Gumbel


class HFSampler:
    """Batched generation by transformers, on the trainer's model and device."""

    def __init__(self, policy: Policy, batch_size: int = 64):
        self.policy, self.batch_size = policy, batch_size

    def sync(self) -> None:
        """The model is the trainer's own: always in step."""

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], seeds: list[int], temperature: float, max_tokens: int
    ) -> list[list[int]]:
        """Response ids of each prompt, up to and including the first end token.

        seeds: one per prompt. temperature 0 is greedy. max_tokens: per response.
        """
        responses = []
        for i in range(0, len(prompts), self.batch_size):
            j = i + self.batch_size
            responses += self._generate(prompts[i:j], seeds[i:j], temperature, max_tokens)
        return responses

    def _generate(self, prompts, seeds, temperature, max_tokens) -> list[list[int]]:
        policy = self.policy
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), policy.pad_id)  # (B, L), padded on the left
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        was_training = policy.model.training
        policy.model.eval()
        noise = [GumbelNoise(seeds, temperature)] if temperature > 0 else []
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=policy.eos_ids,
            pad_token_id=policy.pad_id,
        )
        out = policy.model.generate(
            ids.to(policy.device),
            attention_mask=mask.to(policy.device),
            generation_config=config,
            logits_processor=LogitsProcessorList(noise),
        )
        policy.model.train(was_training)
        return [self._until_end(row) for row in out[:, width:].tolist()]

    def _until_end(self, ids: list[int]) -> list[int]:
        for n, token in enumerate(ids, start=1):
            if token in self.policy.eos_ids:
                return ids[:n]
        return ids
