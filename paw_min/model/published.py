"""Can this published model be trained here? The door for foreign models and tokenizers.

Everything is checked before long work, without the weights: a model that is refused here is refused
by --dry-run, too.
"""

import json
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from tokenizers import Tokenizer
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
from paw_min.model import chat, lora

transformers_logging.disable_progress_bar()  # one per file would hide our own


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

    UserError if it has no model, one that empty_model refuses, one for fewer positions (tokens),
    end tokens that it has not, or no chat template that writes a user's message.
    """
    config = load_config(folder)
    with load_errors(folder):
        model = empty_model(config, folder)
        tokenizer = published_tokenizer(folder)
        size = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > size:
            raise UserError(f"{folder}: {len(tokenizer)} tokens for {size} embeddings: use another")
        with suppress(OSError):  # not every model has this file
            model.generation_config = GenerationConfig.from_pretrained(folder)
        chat.end_tokens(model, tokenizer)  # ValueError for one that is not a token
        if tokenizer.chat_template is None:
            raise UserError(f"{folder} has no chat template: use an instruct model")
        if "hello" not in chat.render(tokenizer, [{"role": "user", "content": "hello"}]):
            raise UserError(f"{folder} has a chat template that leaves out the user's message: use "
                            "another model, or mend its chat_template.jinja.")
    limit = getattr(config, "max_position_embeddings", positions)
    if limit < positions:
        flags = "--max-prompt-tokens and --max-response-tokens"
        raise UserError(f"{folder} has {limit} positions: lower {flags}, together {positions}.")
    return tokenizer


def published_tokenizer(folder: str):
    """The tokenizer that tokenizer.json describes, whatever class is named beside it.

    Some classes of transformers take only the vocabulary from this file. For example, some folders
    name Llama's class for a byte-level vocabulary, and it then loses every space.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    path = cached_file(
        folder, "tokenizer.json", _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path and rules(tokenizer.backend_tokenizer) != rules(Tokenizer.from_file(path)):
        # A class may know an end token that no file names.
        named = {k: v for k, v in tokenizer.special_tokens_map.items() if k.endswith("_token")}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, trust_remote_code=False, **named
        )
    return tokenizer


def rules(tokenizer: Tokenizer) -> dict:
    """The parts of a tokenizer that map text to ids and back, without added tokens."""
    parts = json.loads(tokenizer.to_str())
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model", "decoder")}


def empty_model(config, folder: str):
    """The model without weights; UserError unless it is a dense transformer for text.

    Quantized weights would be trained as floats and quantized again when saved. Other layers (a
    mixture of experts, Mamba, linear attention) read their weights past LoRA's adapters, add noise,
    or differ in vLLM. And Policy.forward needs logits that are the hidden states times the head's
    weight: some models have a bias there, or scale or cap their logits. So we feed the model's code
    known hidden states and logits, as large as any in training, and compare what comes out.
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


@contextmanager
def load_errors(folder: str):
    """Report a model that cannot be used as a UserError. folder: it may be a hub name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # foreign files: each library has errors of its own
        raise UserError(f"the model {folder} cannot be loaded ({reason_of(error)})") from error
