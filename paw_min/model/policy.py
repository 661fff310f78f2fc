"""How can one forward pass serve RL and the world model? The policy, a causal language model.

A pass over (h_t, a_t, o_{t+1}) gives the log-probabilities of the response's tokens, for RL, and of
the next observation's tokens, for the world model. Attention is causal: no token of the response
attends to the observation behind it. So an observation changes no log-probability of the response,
to the last bit on a CPU (tests/test_policy.py).

The paper is silent on two points. What stands between a and o: here, what the chat template puts
between a response and the next user message (Policy.separator), because a chat model has seen the
environment's text only in such messages. The temperature at which o is scored: here 1. Only the
logits of responses are divided by the sampling temperature, because observations are not sampled.

Legend: B rows, L tokens of the longest, S columns (see batches.py), M scored tokens in all, D
hidden size.
"""

import json
import re
import sys
from contextlib import contextmanager, suppress
from datetime import date
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from paw_min.base.errors import UserError
from paw_min.base.files import reason_of
from paw_min.base.hub import look_on_hub
from paw_min.model import lora
from paw_min.model.batches import Batch
from paw_min.model.head import Head, token_scores

transformers_logging.disable_progress_bar()  # one per file would hide our own

THOUGHT = "<think>"
# Tags that prompts ask for or show. A supervised stage may have made them special tokens: they are
# text all the same, which decoding keeps and which ends no turn.
TAGS = {
    f"<{slash}{name}>"
    for name in ("think", "action", "search", "answer", "information", "prediction", "next_state")
    for slash in ("", "/")
}
MODEL = "model."  # prefix of the language model's weights in Policy.state_dict()


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
        self.positions = positions_of(model.config, sys.maxsize)
        self.eos_ids = end_tokens(model, tokenizer)
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

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats) of each scored token -> two (B, S) fp32 tensors.

        The entropy is that of the full vocabulary, and 0 on observation tokens.
        """
        head = self.model.get_output_embeddings()
        # The head only sees scored positions. Position t - 1 predicts token t.
        hidden = self._hidden(batch)[batch.at - 1]  # (M, D)
        # Logits are linear in the hidden states, so dividing these applies the temperature. Only
        # responses were sampled at it: the observation's rows keep 1.
        divisor = torch.ones_like(hidden[:, :1])  # (M, 1)
        divisor[: batch.n_response] = self.temperature
        head_type = torch.bfloat16 if self.precision == "bf16" else head.weight.dtype
        hidden = (hidden / divisor).to(head_type)
        target = batch.ids.flatten()[batch.at]  # (M,)
        token_logp, token_entropy = token_scores(
            hidden, head.weight, target, batch.n_response
        )  # (M,), (M,)

        # Give each transition a row again.
        place = (batch.row, batch.column)
        empty = torch.zeros(batch.response_mask.shape, device=hidden.device)  # (B, S)
        logp = empty.index_put(place, token_logp)
        entropy = empty.index_put(place, token_entropy)
        return logp, entropy

    def _hidden(self, batch: Batch) -> Tensor:
        """The last hidden states of all tokens -> (B * L, D)."""
        decoder = self.model.get_decoder()
        bf16 = self.precision == "bf16"
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
            out = decoder(input_ids=batch.ids, use_cache=False)
        return out.last_hidden_state.flatten(0, 1)

    def values(self, batch: Batch) -> Tensor:
        """The critic's values of response tokens -> (B, S); see ppo.py.

        Called through the policy, which is the root that FSDP shards (shard.py).
        """
        return self.critic(batch)

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of one user message in the model's chat format, up to the response."""
        return self.encode_rendered(self.render([{"role": "user", "content": message}]))

    def render(self, chat: list[dict[str, str]]) -> str:
        """Messages in the model's chat format, up to the next response.

        Qwen3 without its own thinking, as in verl-agent; templates that state today's date, such as
        Llama 3.2's, with a fixed one. Other templates ignore these two arguments. Only the template
        writes control tokens: those in a message become plain text.
        """
        texts = [self.without_control_tokens(message["content"]) for message in chat]
        plain = [message | {"content": text} for message, text in zip(chat, texts)]
        return render(self.tokenizer, plain)

    @cached_property
    def opened_thought(self) -> str:
        """"<think>" where the template itself opens the thought of a response, else nothing."""
        prompt = self.render([{"role": "user", "content": "a"}])
        return THOUGHT if prompt.rstrip().endswith(THOUGHT) else ""

    def without_control_tokens(self, text: str) -> str:
        """The text without control tokens: <|im_end|> becomes < |im_end|>.

        So no page, passage or command can end a turn or begin another. Other text stays as it is.
        """
        return self.control_starts.sub(r"\g<0> ", text)

    @cached_property
    def control_starts(self) -> re.Pattern:
        return control_starts(self.tokenizer)

    @cached_property
    def turn_ids(self) -> list[int]:
        return self.encode_rendered(turn_text(self.tokenizer))

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
        """Token ids of what the chat template has written, control tokens included."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def unknown_words(self, text: str) -> list[str]:
        """The words that become <unk>, with a word-level tokenizer. Others spell any word."""
        if not isinstance(self.tokenizer.backend_tokenizer.model, models.WordLevel):
            return []
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(found["input_ids"], found["offset_mapping"], strict=True)
        unknown = self.tokenizer.unk_token_id
        return [text[start:end] for token, (start, end) in spans if token == unknown]

    def decode(self, ids: list[int]) -> str:
        """The text of a response, without control tokens."""
        return self.tokenizer.decode([token for token in ids if token not in self.control_ids])

    @cached_property
    def control_ids(self) -> set[int]:
        return set(self.tokenizer.convert_tokens_to_ids(sorted(special_tokens(self.tokenizer))))

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


def load_config(folder: str):
    """config.json of a Hugging Face folder or hub name; UserError if there is none."""
    with load_errors(folder):
        if Path(folder).exists() and not (Path(folder) / "config.json").is_file():
            remedy = "give a Hugging Face model folder, or checkpoint-... of a run"
            if start := lora.base_model(folder):  # peft wrote it
                remedy = f"copy config.json and the tokenizer of {start} into this adapter's folder"
            raise UserError(f"{folder} has no config.json: {remedy}.")
        look_on_hub(folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def load_tokenizer(folder: str, positions: int = 0):
    """Tokenizer of a Hugging Face folder or hub name.

    UserError if it has no model, one that check_config refuses, one for fewer positions (tokens),
    end tokens that it has not, or no chat template that writes a user's message.
    """
    config = load_config(folder)
    with load_errors(folder):
        model = check_config(config, folder)
        tokenizer = published_tokenizer(folder)
        size = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > size:
            raise UserError(f"{folder}: {len(tokenizer)} tokens for {size} embeddings: use another")
        with suppress(OSError):  # not every model has this file
            model.generation_config = GenerationConfig.from_pretrained(folder)
        end_tokens(model, tokenizer)  # ValueError for one that is not a token
        if tokenizer.chat_template is None:
            raise UserError(f"{folder} has no chat template: use an instruct model")
        if "hello" not in render(tokenizer, [{"role": "user", "content": "hello"}]):
            raise UserError(f"{folder} has a chat template that leaves out the user's message: use "
                            "another model, or mend its chat_template.jinja.")
    limit = positions_of(config, positions)
    if limit < positions:
        flags = "--max-prompt-tokens and --max-response-tokens"
        raise UserError(f"{folder} has {limit} positions: lower {flags}, together {positions}.")
    return tokenizer


def published_tokenizer(folder: str):
    """The tokenizer that tokenizer.json describes, whatever class is named beside it.

    Some classes of transformers take the vocabulary alone from this file. Llama's, which is named
    for byte-level vocabularies too, then loses every space.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    path = cached_file(
        folder, "tokenizer.json", _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path and steps(tokenizer.backend_tokenizer) != steps(Tokenizer.from_file(path)):
        # A class may know an end token that no file names.
        named = {k: v for k, v in tokenizer.special_tokens_map.items() if k.endswith("_token")}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, trust_remote_code=False, **named
        )
    return tokenizer


def steps(tokenizer: Tokenizer) -> dict:
    """What decides about ids and texts, but for added tokens."""
    parts = json.loads(tokenizer.to_str())
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model", "decoder")}


def check_config(config, folder: str):
    """The model without weights; UserError unless it is a dense transformer for text, as it is.

    Quantized weights would be trained as floats and quantized again when saved. Other layers (a
    mixture of experts, Mamba, linear attention) read their weights past LoRA's adapters, add noise,
    or differ in vLLM. And `forward` needs logits that are the hidden states times the head's
    weight: some models have a bias there, or scale or cap their logits. So the model's code,
    without weights, is given known hidden states and known logits, as large as any in training.
    """
    if getattr(config, "quantization_config", None):
        raise UserError(f"{folder} has quantized weights (quantization_config in config.json), "
                        "which cannot be saved as trained: use a model in bf16.")
    if config.get_text_config() is not config:
        raise UserError(f"{folder} does not only read text (config.json has a part for its text "
                        "model), which is not supported: use a model for text.")
    if config.model_type in ("mistral", "ministral", "ministral3"):
        raise UserError(f"{folder} is a Mistral model, many of which were published with a wrong "
                        "tokenizer.json: use another model.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    name = type(model).__name__
    if other := other_weights(model):
        raise UserError(f"{name} is not a dense transformer ({other[0]} is not the weight of a "
                        "linear layer or an embedding), which is not supported: use another model")
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise UserError(f"{name} has a head with a bias, which is not supported: use another model")
    hidden = torch.ones(1, 2, head.in_features)  # (B, L, D)
    logits = torch.linspace(-100, 100, 2 * head.out_features).view(1, 2, -1)  # (B, L, V)
    given = []
    for part in (model.base_model, model.get_decoder()):
        part.forward = lambda *_, **__: Hidden(last_hidden_state=hidden)
    head.forward = lambda x: given.append(x) or logits
    changed = model(torch.ones(1, 2, dtype=torch.long), use_cache=False).logits
    if not (given[0].equal(hidden) and changed.equal(logits)):
        raise UserError(f"{name} changes its logits after the head, or what enters it, as its "
                        "config.json says, which is not supported: use another model")
    return model


def other_weights(model) -> list[str]:
    """Names of the matrices that belong neither to a plain linear layer nor to an embedding."""
    return [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if type(module) is not torch.nn.Linear and not isinstance(module, torch.nn.Embedding)
        for weight, p in module.named_parameters(recurse=False)
        if p.ndim > 1
    ]


class Hidden(BaseModelOutputWithPast):
    """The output of any family's decoder: what it does not have is None."""

    def __getattr__(self, name: str) -> None:
        return None


def positions_of(config, default: int) -> int:
    """Most tokens of a sequence; `default` where the model has no limit."""
    return getattr(config, "max_position_embeddings", default)


def render(tokenizer, chat: list[dict[str, str]]) -> str:
    """See Policy.render."""
    return tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False,
        strftime_now=date(2024, 7, 26).strftime,
    )


def turn_text(tokenizer) -> str:
    """What the chat template writes between an assistant's message and the next user's.

    UserError for a template that refuses such a conversation, or that changes its messages.
    """
    words = ("first", "second", "third")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    remedy = "use --wm-separator none"
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever the template raises
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the chat template refuses a second turn ({reason}): {remedy}") from error
    start = text.rfind(words[1])
    end = text.rfind(words[2])
    if not 0 <= start < end:
        raise UserError(f"the chat template leaves out messages of a second turn: {remedy}")
    return text[start + len(words[1]) : end]


def end_tokens(model, tokenizer) -> list[int]:
    """The tokens that end a response: the template's, generation_config's and the tokenizer's.

    A model may list one of them only. The first is what training targets end with.
    """
    published = model.generation_config.eos_token_id
    if not isinstance(published, list):
        published = [published]
    ends = dict.fromkeys([turn_end(tokenizer), *published, tokenizer.eos_token_id])
    ends.pop(None, None)
    size = model.get_input_embeddings().num_embeddings
    if not ends or not all(0 <= token < size for token in ends):
        raise ValueError(f"it has the end tokens {list(ends)}: one or more of 0 to {size - 1}")
    return list(ends)


def turn_end(tokenizer) -> int | None:
    """The special token with which the chat template ends an assistant's turn; None without one.

    This token follows an earlier message and the last one, maybe after a space. A token that
    follows only one of them begins the next turn.
    """
    chat = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
    try:
        between = turn_text(tokenizer)
        last = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("second")[2]
    except Exception:  # a template for one turn, whatever it raises
        return None
    ends = [
        tokenizer(text.lstrip(" "), add_special_tokens=False)["input_ids"][:1]
        for text in (between, last)
    ]
    if ends[0] != ends[1] or not ends[0]:
        return None
    (token,) = ends[0]
    return token if tokenizer.convert_ids_to_tokens(token) in special_tokens(tokenizer) else None


def special_tokens(tokenizer) -> set[str]:
    """The control tokens, as text; not the tags of the prompts, special or not."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return (added | set(tokenizer.all_special_tokens)) - TAGS


def control_starts(tokenizer) -> re.Pattern:
    """Matches each character at which the text of a control token begins.

    Overlapping tokens have a match each, so a space behind the character breaks both.
    """
    words = [re.escape(word) for word in sorted(special_tokens(tokenizer)) if len(word) > 1]
    return re.compile(f"(?=(?:{'|'.join(words)})).", re.DOTALL) if words else re.compile("(?!)")


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
        # attn_implementation: whatever config.json names, torch's attention, or else the model's.
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation=None,
            output_loading_info=True, trust_remote_code=False,
        )
        # transformers would draw missing weights at random.
        if info["missing_keys"]:
            raise UserError(f"{folder} has no weights for {min(info['missing_keys'])}: use another")
        # It leaves out, in silence, weights that config.json has no place for; not counted here are
        # those that a family always leaves out, such as layers that predict further tokens.
        if info["unexpected_keys"]:
            raise UserError(f"{folder} has weights for {min(info['unexpected_keys'])}, which its "
                            "config.json does not: restore config.json, or use another")
        return Policy(model.to(device), tokenizer, temperature, precision)


def freeze(policy: Policy) -> Policy:
    """A policy that is not trained, in place.

    What bf16 passes round is stored in bf16: no log-probability changes, and with half of the bytes
    it fits beside a trained policy more often, or moves faster.
    """
    if policy.precision == "bf16":
        for layer in rounded_layers(policy.model):
            layer.to(torch.bfloat16)
    return policy.requires_grad_(False)


def rounded_layers(model) -> list[torch.nn.Module]:
    """Layers whose weights a bf16 pass rounds to bf16, in whatever type they are stored.

    A tied head is not one of them, since its embeddings are not rounded.
    """
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    return [*lora.linear_layers(model).values(), *([] if tied else [head])]


def switch_dropout_off(config) -> None:
    """Set all rates of dropout to 0: attention_dropout, resid_pdrop, ..."""
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)


@contextmanager
def load_errors(folder: str):
    """Report a model that cannot be used as a UserError. folder: it may be a hub name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # foreign files: each library has errors of its own
        raise UserError(f"the model {folder} cannot be loaded ({reason_of(error)})") from error
