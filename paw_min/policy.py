"""The policy: a causal language model, and the log-probabilities of what it did and saw.

One forward pass over (h_t, a_t, o_{t+1}) scores the action tokens (RL) and the tokens of the
next observation (world model). Causal attention keeps the two apart: an action token never sees
the observation behind it, so appending one changes no action log-probability.

Logits are computed at scored positions only, never over the prompt, and turned into
log-probabilities in fp32 (head.py). How rows are laid out for a pass: batches.py.

Paper: nothing is said about what stands between a and o, nor about observation temperature.
Here: o follows the last response token directly (its end-of-turn token, if it was sampled), and
only action logits are divided by the sampling temperature, since nobody samples observations.

It is one torch module, so that what is hooked to modules (FSDP2) sees the whole of a scoring.

Legend: B rows, S scored tokens of the longest row, M scored tokens in all, D hidden size.
"""

from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from paw_min.batches import Batch
from paw_min.config import UserError
from paw_min.head import token_scores

transformers_logging.disable_progress_bar()  # a bar per saved or loaded file hides our own


class Policy(torch.nn.Module):
    """A causal language model of transformers with its tokenizer and sampling temperature.

    precision: of the forward pass, "fp32" or "bf16"; the weights stay what they are. packed: does
    the attention want its rows end to end (batches.collate)?
    """

    def __init__(self, model, tokenizer, temperature: float = 1.0, precision: str = "fp32"):
        super().__init__()
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.precision = precision
        self.packed = model.config._attn_implementation == "flash_attention_2"
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
        """Models that do more to their logits than a product would be scored wrongly."""
        name, head = type(self.model).__name__, self.model.get_output_embeddings()
        if head.bias is not None:
            raise UserError(f"{name} has a head with a bias, which is not supported: use another")
        ids = torch.tensor([[self.pad_id, self.eos_ids[0]]], device=self.device)
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        ours, theirs = head(hidden), self.model(ids).logits
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2, rtol=1e-2):
            raise UserError(f"{name} changes its logits after the head, which is not supported")

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats) of each scored token -> two (B, S) fp32 tensors.

        Entropy is that of the full vocabulary; it is computed for action tokens only.
        """
        bf16 = self.precision == "bf16"
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
            hidden = decoder(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                position_ids=batch.positions,
                use_cache=False,
            ).last_hidden_state
        hidden = hidden.flatten(0, 1)[batch.before]  # (M, D): position t - 1 predicts token t
        divisor = torch.ones_like(hidden[:, :1])  # (M, 1)
        divisor[: batch.n_action] = self.temperature
        hidden = hidden / divisor  # the logits are linear in it
        hidden = hidden.to(torch.bfloat16 if bf16 else head.weight.dtype)
        target = batch.ids.flatten()[batch.at]  # (M,)
        scores = token_scores(hidden, head.weight, target, batch.n_action)  # (M,), (M,)
        empty = torch.zeros(batch.action_mask.shape, device=hidden.device)  # (B, S)
        logp, entropy = [empty.index_put((batch.row, batch.slot), x) for x in scores]
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

    def save(self, folder: Path, weights: dict | None = None) -> None:
        """Write a Hugging Face folder: model, tokenizer, chat template.

        weights: the whole state dict of the model where it is spread over ranks.
        """
        self.model.save_pretrained(folder, state_dict=weights)
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


def load_policy(
    folder: str,
    temperature: float = 1.0,
    device: str = "cpu",
    precision: str = "fp32",
    attention: str = "sdpa",
) -> Policy:
    """Policy from a local Hugging Face folder or hub name, weights in fp32; see load_tokenizer.

    attention: transformers' name of it; "flash_attention_2" packs rows, and needs bf16.
    """
    tokenizer = load_tokenizer(folder)
    with _one_sentence(folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
    return Policy(model.to(device), tokenizer, temperature, precision)


@contextmanager
def _one_sentence(folder: str):
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"the model {folder} cannot be loaded ({reason})") from error
