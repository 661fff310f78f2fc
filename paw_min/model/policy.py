"""How can one forward pass serve RL and the world model? The policy, a causal language model.

`Policy.forward` takes a batch of rows (h_t, a_t, o_{t+1}). It gives the log-probabilities of the
response's tokens, for RL, and of the next observation's tokens, for the world model, and the
entropies of the former; those of the latter only for a loss that asks for them. Attention is
causal: no token of the response attends to the observation behind it. So an observation changes no
log-probability of the response, to the last bit on a CPU (tests/test_policy.py). The model gets a
head of our own (head.py), which computes logits only where they are needed: all of a batch at once
would take more memory than the model.

The paper does not say what stands between a and o. Here it is what the chat template puts between a
response and the next user message (Policy.separator), because a chat model has seen an
environment's text only in such messages. Nor does it say at which temperature o is scored. Here it
is 1, because observations are not sampled: only the logits of responses are divided by the sampling
temperature.

The rest of the file is text to tokens and back, in which control tokens of a text become plain text
(chat.py), loading, and saving. Which models can be trained is checked in published.py.

Legend: B rows, L tokens of the longest, S columns (see batches.py), M scored tokens in all, D
hidden size.
"""

import re
import sys
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from paw_min.base.errors import UserError
from paw_min.model import chat, lora
from paw_min.model.batches import Batch
from paw_min.model.head import Head, token_scores
from paw_min.model.published import load_config, load_errors, load_tokenizer

MODEL = "model."  # prefix of the language model's weights in Policy.state_dict()


class Scores(NamedTuple):  # A tuple, because FSDP looks for tensors in what a pass returns.
    """What a pass says of the scored tokens of a batch: (B, S) each, fp32, in nats, 0 elsewhere."""

    logp: Tensor  # log-probability of the token
    entropy: Tensor  # of the full vocabulary before it; 0 on observation tokens, if not asked for


class Policy(torch.nn.Module):
    """A causal language model of transformers with its tokenizer and sampling temperature.

    Everything that is trained belongs in this module: it is sharded, saved and restored as a whole
    (session.make_optimizer lists what is optimized). `critic` is there with PPO only.

    precision: of the forward pass, "fp32" or "bf16"; the weights keep their type.
    """

    def __init__(self, model, tokenizer, temperature: float = 1.0, precision: str = "fp32"):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.precision = precision
        self.critic = None
        self.pad_id = tokenizer.pad_token_id
        if self.pad_id is None:
            self.pad_id = tokenizer.eos_token_id
        # The largest number of tokens in a sequence; a model may have no limit.
        self.positions = getattr(model.config, "max_position_embeddings", sys.maxsize)
        self.eos_ids = chat.end_tokens(model, tokenizer)
        # Published generation defaults (top-p, repetition penalty) would make the sampled
        # distribution differ from the one whose log-probabilities are trained.
        model.generation_config = GenerationConfig(
            eos_token_id=self.eos_ids, pad_token_id=self.pad_id
        )
        self._check_weights()
        model.set_output_embeddings(Head(model.get_output_embeddings().weight))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.no_grad()
    def _check_weights(self) -> None:
        """UserError for logits that are not numbers."""
        ids = torch.tensor([[self.pad_id, self.eos_ids[0]]], device=self.device)
        if not self.model(ids, use_cache=False).logits.isfinite().all():
            name = type(self.model).__name__
            raise UserError(f"{name} has weights that are NaN or infinite: use another model")

    def forward(self, batch: Batch, obs_entropy: bool = False) -> Scores:
        """Score the response and observation tokens of a batch.

        obs_entropy: also give the entropies of observation tokens, which PaW does not need.
        """
        head = self.model.get_output_embeddings()
        # The head only sees scored positions. Position t - 1 predicts token t.
        hidden = last_hidden(self.model.get_decoder(), batch, self.precision)  # (B * L, D)
        hidden = hidden[batch.at - 1]  # (M, D)
        # Logits are linear in the hidden states, so dividing these applies the temperature. Only
        # responses were sampled at it: the observation's rows keep 1.
        divisor = torch.ones(len(hidden), 1, device=hidden.device)  # (M, 1) fp32
        divisor[: batch.n_response] = self.temperature
        head_type = torch.bfloat16 if self.precision == "bf16" else head.weight.dtype
        hidden = (hidden / divisor).to(head_type)
        target = batch.ids.flatten()[batch.at]  # (M,)
        n_entropy = len(target) if obs_entropy else batch.n_response
        logp, entropy = token_scores(hidden, head.weight, target, n_entropy)  # (M,), (M,)

        # Give each transition a row again.
        place = (batch.row, batch.column)
        empty = torch.zeros(batch.response_mask.shape, device=hidden.device)  # (B, S)
        return Scores(empty.index_put(place, logp), empty.index_put(place, entropy))

    def values(self, batch: Batch) -> Tensor:
        """The critic's values of response tokens -> (B, S); see ppo.py.

        Called through the policy, which is the root that FSDP shards (shard.py).
        """
        return self.critic(batch)

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of one user message in the model's chat format, up to the response."""
        return self.encode_rendered(self.render([{"role": "user", "content": message}]))

    def render(self, messages: list[dict[str, str]]) -> str:
        """Messages in the model's chat format, up to the next response.

        Only the template writes control tokens: those in a message become plain text.
        """
        plain = [
            message | {"content": self.without_control_tokens(message["content"])}
            for message in messages
        ]
        return chat.render(self.tokenizer, plain)

    @cached_property
    def opened_thought(self) -> str:
        """"<think>" where the template itself opens the thought of a response, else nothing."""
        prompt = self.render([{"role": "user", "content": "a"}])
        return chat.THOUGHT if prompt.rstrip().endswith(chat.THOUGHT) else ""

    def without_control_tokens(self, text: str) -> str:
        """The text without control tokens: <|im_end|> becomes < |im_end|>.

        So no page, passage or command can end a turn or begin another. Other text stays as it is.
        """
        return self.control_starts.sub(r"\g<0> ", text)

    @cached_property
    def control_starts(self) -> re.Pattern:
        return chat.control_starts(self.tokenizer)

    @cached_property
    def turn_ids(self) -> list[int]:
        return self.encode_rendered(chat.turn_text(self.tokenizer))

    def separator(self, response_ids: list[int]) -> list[int]:
        """The tokens between this response and the next user message.

        In Qwen's format: <|im_end|>, a newline, <|im_start|>, user, a newline. The end token is
        left out if the response has it. A response that reached the token limit has not.
        """
        between = self.turn_ids
        ends = [place for place, token in enumerate(between) if token in self.eos_ids]
        if ends and response_ids[-1] in self.eos_ids:
            return between[ends[0] + 1 :]  # Llama 2 writes a space before it
        return between

    def encode(self, text: str) -> list[int]:
        """Token ids of a text from anywhere: no control token is among them."""
        return self.encode_rendered(self.without_control_tokens(text))

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response to learn from, with its end token and no second <think>."""
        return [*self.encode(text.removeprefix(self.opened_thought)), self.eos_ids[0]]

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what the chat template has written, control tokens included.

        UserError for a word that the model of a small world does not have (standins.py).
        """
        try:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers has no class for it, and does not name the word
            known = self.tokenizer.get_vocab()
            words = re.findall(r"\w+|[^\w\s]+", text.lower())
            word = next((word for word in words if word not in known), text)
            raise UserError(f"the model has no token for {word!r}: if its world has changed, "
                            "delete the model's folder, so that it is made again.") from error

    def decode(self, ids: list[int]) -> str:
        """The text of a response, without control tokens."""
        return self.tokenizer.decode([token for token in ids if token not in self.control_ids])

    @cached_property
    def control_ids(self) -> set[int]:
        tokens = sorted(chat.special_tokens(self.tokenizer))
        return set(self.tokenizer.convert_tokens_to_ids(tokens))

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write the language model as a Hugging Face folder. LoRA: only the adapter.

        weights: the unsharded state_dict(), where this module is sharded.
        """
        if weights is None:
            weights = self.state_dict()
        ours = {
            name.removeprefix(MODEL): weight
            for name, weight in weights.items()
            if name.startswith(MODEL)
        }
        self.model.save_pretrained(folder, state_dict=ours)
        self.model.config.save_pretrained(folder)  # left out beside an adapter
        self.tokenizer.save_pretrained(folder)
        # safetensors writes weights that only their owner can read.
        usual = (Path(folder) / "config.json").stat().st_mode
        for path in Path(folder).glob("*.safetensors"):
            path.chmod(usual)

    def besides_the_model(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of these weights that `save` does not write, such as PPO's critic."""
        return {name: weight for name, weight in weights.items() if not name.startswith(MODEL)}


def last_hidden(decoder, batch: Batch, precision: str) -> Tensor:
    """The last hidden states of all tokens -> (B * L, D)."""
    bf16 = precision == "bf16"
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
        out = decoder(input_ids=batch.ids, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)


def load_policy(
    folder: str, temperature: float = 1.0, device: str = "cpu", precision: str = "fp32"
) -> Policy:
    """Policy from a Hugging Face folder or hub name, with fp32 weights; see load_tokenizer.

    The folder of an adapter (lora.py) gives its start model with the adapter merged. Dropout is
    off: trained log-probabilities would differ from the sampled ones.
    """
    tokenizer = load_tokenizer(folder)
    with load_errors(folder):
        start_folder = lora.base_model(folder)
        if start_folder:
            start = load_policy(start_folder, device=device).model
            merged = lora.merge(start, folder)
            return Policy(merged, tokenizer, temperature, precision)
        config = load_config(folder)
        switch_dropout_off(config)
        # attn_implementation=None lets transformers choose, whatever config.json names: torch's
        # attention, or else the model's own.
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation=None,
            output_loading_info=True, trust_remote_code=False,
        )
        # transformers would draw missing weights at random.
        if info["missing_keys"]:
            raise UserError(f"{folder} has no weights for {min(info['missing_keys'])}: use another")
        # It also drops weights that config.json has no place for. Weights that a family always
        # drops, such as layers that predict further tokens, are not among these keys.
        if info["unexpected_keys"]:
            raise UserError(f"{folder} has weights for {min(info['unexpected_keys'])}, which its "
                            "config.json does not: restore config.json, or use another")
        return Policy(model.to(device), tokenizer, temperature, precision)


def switch_dropout_off(config) -> None:
    """Set all rates of dropout to 0: attention_dropout, resid_pdrop, ..."""
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
