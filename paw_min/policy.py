"""The policy: a causal language model, and the log-probabilities of what it did and saw.

One forward pass over (h_t, a_t, o_{t+1}) scores the action tokens (RL) and the tokens of the
next observation (world model). Causal attention keeps the two apart: an action token never sees
the observation behind it, so appending one changes no action log-probability.

Logits are computed at scored positions only, never over the prompt, and turned into
log-probabilities in fp32. Rows are padded on the right: padding then stands behind every real
token, where causal attention hides it and position numbers need no care.

Paper: nothing is said about what stands between a and o, nor about observation temperature.
Here: o follows the last response token directly (its end-of-turn token, if it was sampled), and
only action logits are divided by the sampling temperature, since nobody samples observations.

Legend: B rows, L tokens of the longest row, S scored tokens of the longest row, M scored tokens
in all, V vocabulary.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from paw_min.config import UserError
from paw_min.select import full_entropy

transformers_logging.disable_progress_bar()  # a bar per saved or loaded file hides our own


@dataclass
class Batch:
    """Rows laid out for one forward pass. Row i scores its a tokens, then its o tokens."""

    ids: Tensor  # (B, L) prompt, response, observation, padding
    row: Tensor  # (M,) row of each scored token
    col: Tensor  # (M,) its column in ids
    slot: Tensor  # (M,) its column in the (B, S) results
    action_mask: Tensor  # (B, S) bool
    obs_mask: Tensor  # (B, S) bool


def collate(rows: list, with_obs: list[bool], pad_id: int, device: str = "cpu") -> Batch:
    """Batch of transition rows; row i brings its observation along where with_obs[i].

    rows: objects with prompt_ids, response_ids and obs_ids, lists of token ids.
    """
    tails = [r.response_ids + (r.obs_ids if keep else []) for r, keep in zip(rows, with_obs)]
    length = max(len(r.prompt_ids) + len(tail) for r, tail in zip(rows, tails))
    scored = max(len(tail) for tail in tails)
    ids = torch.full((len(rows), length), pad_id)  # (B, L)
    action_mask = torch.zeros(len(rows), scored, dtype=torch.bool)  # (B, S)
    obs_mask = torch.zeros(len(rows), scored, dtype=torch.bool)  # (B, S)
    row, col, slot = [], [], []
    for i, (r, tail) in enumerate(zip(rows, tails)):
        start, n_action = len(r.prompt_ids), len(r.response_ids)
        ids[i, : start + len(tail)] = torch.tensor(r.prompt_ids + tail)
        action_mask[i, :n_action] = True
        obs_mask[i, n_action : len(tail)] = True
        row += [i] * len(tail)
        col += range(start, start + len(tail))
        slot += range(len(tail))
    tensors = [ids, *map(torch.tensor, (row, col, slot)), action_mask, obs_mask]
    return Batch(*[t.to(device) for t in tensors])


class Policy:
    """A causal language model of transformers with its tokenizer and sampling temperature."""

    def __init__(self, model, tokenizer, temperature: float = 1.0):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.pad_id = tokenizer.pad_token_id
        if self.pad_id is None:
            self.pad_id = tokenizer.eos_token_id
        eos = model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self.eos_ids = eos if isinstance(eos, list) else [eos]
        # Published defaults (top-p, repetition penalty) would bend the sampled distribution away
        # from the one whose log-probabilities are trained.
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=self.pad_id)
        self._check_head()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.no_grad()
    def _check_head(self) -> None:
        """Models that scale or cap their logits after the head would be scored wrongly."""
        ids = torch.tensor([[self.pad_id, self.eos_ids[0]]], device=self.device)
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        ours, theirs = self.model.get_output_embeddings()(hidden), self.model(ids).logits
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
            name = type(self.model).__name__
            raise UserError(f"{name} changes its logits after the head, which is not supported")

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats) of each scored token -> two (B, S) fp32 tensors.

        Entropy is that of the full vocabulary; it is computed for action tokens only.
        """
        hidden = self.model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
        hidden = hidden[batch.row, batch.col - 1]  # (M, D): position t - 1 predicts token t
        is_action = batch.action_mask[batch.row, batch.slot]  # (M,)
        logits = self.model.get_output_embeddings()(hidden).float()  # (M, V)
        logits = logits / torch.where(is_action, self.temperature, 1.0)[:, None]
        target = batch.ids[batch.row, batch.col]  # (M,)
        token_logp = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]  # (M,)
        empty = torch.zeros(batch.action_mask.shape, device=batch.ids.device)  # (B, S)
        logp = empty.index_put((batch.row, batch.slot), token_logp)
        action = is_action.nonzero()[:, 0]
        token_entropy = full_entropy(logits[action])
        entropy = empty.index_put((batch.row[action], batch.slot[action]), token_entropy)
        return logp, entropy

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of one user message in the model's chat format, ready for a response."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, an observation, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: model, tokenizer, chat template."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def load_tokenizer(folder: str):
    """Tokenizer of a local Hugging Face folder or a hub name; reads the model's config, too.

    Raises UserError, in one sentence, for a folder without model, tokenizer or chat template.
    """
    if Path(folder).exists() and not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json: give a Hugging Face model folder")
    with _one_sentence(folder):
        AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {folder} has no chat template: use an instruct model")
    return tokenizer


def load_policy(folder: str, temperature: float = 1.0, device: str = "cpu") -> Policy:
    """Policy from a local Hugging Face folder or hub name, weights in fp32; see load_tokenizer."""
    tokenizer = load_tokenizer(folder)
    with _one_sentence(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Policy(model.to(device), tokenizer, temperature)


@contextmanager
def _one_sentence(folder: str):
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"the model {folder} cannot be loaded ({reason})") from error
