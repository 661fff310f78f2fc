"""The files of foreign models and tokenizers: what of them is loaded, and what is refused.

Everything is checked before long work, without the weights: a model that is refused here is refused
by --dry-run, too. What the files do not tell, a pass of a small model shows (loading.check_by_use).
"""

import copy
import json
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from paw_min.base.errors import UserError
from paw_min.base.files import read_dict, reason_of
from paw_min.base.hub import look_on_hub
from paw_min.model import lora
from paw_min.model.chat import ChatTokenizer, render

transformers_logging.disable_progress_bar()  # one per file would hide our own

MESSAGES = ("Go to shelf 1,\n\n then <b>look</b>.", "What's in \"it\" & 2 mugs?")


def load_config(folder: str):
    """config.json of a Hugging Face folder or hub name, the part for text of Qwen3.5's.

    UserError if there is none, and for quantized weights, which would be trained as floats and
    quantized again when saved.
    """
    with load_errors(folder):
        if Path(folder).exists() and not (Path(folder) / "config.json").is_file():
            remedy = "give a Hugging Face model folder, or checkpoint-... of a run"
            if start := lora.base_model(folder):  # peft wrote it
                remedy = f"copy config.json and the tokenizer of {start} into this adapter's folder"
            raise UserError(f"{folder} has no config.json: {remedy}.")
        path = Path(folder) / "config.json"
        if path.is_file() and "save_every" in read_dict(path, "restore it"):
            newest = max(Path(folder).glob("checkpoint-*"), default=f"{folder}/checkpoint-...")
            raise UserError(f"{folder} is a run, not a model: give its checkpoint, {newest}.")
        look_on_hub(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise UserError(f"{folder} has quantized weights (quantization_config in config.json), "
                            "which cannot be saved as trained: use a model in bf16.")
        text = config.get_text_config()
        family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if text is not config and getattr(family, "config_class", None) is not type(text):
            raise UserError(f"{folder} does not only read text (config.json has a part for its "
                            "text model), which is not supported: use a model for text.")
        # Torch's attention, or else the model's own, whatever config.json names.
        text._attn_implementation = None
        # Nor has a pass another result than the last hidden states.
        text.output_attentions = text.output_hidden_states = text.is_encoder_decoder = False
        text.return_dict = True
        with TemporaryDirectory() as checkpoint:  # Else no checkpoint could be written.
            copy.deepcopy(text).save_pretrained(checkpoint)
        return text


def checked_tokenizer(folder: str, config):
    """The tokenizer of this model.

    UserError if it has more tokens than the model, end tokens that the model has not, or no chat
    template that writes a user's message as it is.
    """
    size = empty_model(config).get_input_embeddings().num_embeddings
    tokenizer = published_tokenizer(folder, config)
    if tokenizer.chat_template is None:
        raise UserError(f"{folder} has no chat template: use an instruct model")
    generation = GenerationConfig.from_model_config(config)
    with suppress(OSError):  # not every model has this file
        generation = GenerationConfig.from_pretrained(folder)
    chat = ChatTokenizer(tokenizer, end_tokens(generation))
    if not chat.eos_ids or not all(0 <= token < size for token in chat.eos_ids):
        raise UserError(f"{folder} has the end tokens {chat.eos_ids}: one or more of 0 to "
                        f"{size - 1} must be in its generation_config.json")
    if beyond := {token for token in tokenizer.get_vocab().values() if token >= size}:
        # A control token that nothing writes needs no embedding, as Gemma 3's for pictures.
        written = {chat.pad_id, *chat.encode_chat(MESSAGES[0])}
        if beyond - chat.control_ids or beyond & written:
            raise UserError(f"{folder} has {len(tokenizer)} tokens for {size} embeddings: use "
                            "another model")
    for message in MESSAGES:
        if message not in render(tokenizer, [{"role": "user", "content": message}]):
            raise UserError(f"{folder} has a chat template that leaves out the user's message or "
                            "changes it: use another model, or mend its chat_template.jinja.")
        check_ids(folder, chat, message)
    return tokenizer


def check_ids(folder: str, chat: ChatTokenizer, message: str) -> None:
    """UserError unless this message has the same ids in each call, and its control tokens."""
    try:
        text, ids = chat.render([{"role": "user", "content": message}]), chat.encode_chat(message)
    except UserError:
        return  # The vocabulary of a small world does not have these words (standins.py).
    if any(chat.encode_chat(message) != ids for _ in range(9)):
        raise UserError(f"{folder} has a tokenizer or a chat template that draws at random: switch "
                        "this off in its files.")
    words = {chat.tokenizer.convert_ids_to_tokens(token): token for token in chat.control_ids}
    for word in sorted(words, key=len, reverse=True):  # A longer one may contain a shorter one.
        if word in text and words[word] not in ids:
            raise UserError(f"{folder} has a tokenizer that reads {word!r}, which its chat "
                            "template writes, as text: mend this in its tokenizer.json.")
        text = text.replace(word, " ")


def end_tokens(generation: GenerationConfig) -> list[int | None]:
    """The tokens that generation ends at."""
    ends = generation.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def published_tokenizer(folder: str, config):
    """The tokenizer that tokenizer.json describes, whatever class is named beside it.

    Some classes of transformers take only the vocabulary from this file. For example, some folders
    name Llama's class for a byte-level vocabulary, and it then loses every space.
    """
    path = cached_file(
        folder, "tokenizer.json", _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        raise UserError(f"{folder} has no tokenizer.json: copy the files of the tokenizer that "
                        "belongs to this model into its folder.")
    published = Tokenizer.from_file(path)
    if "istral" in config.model_type and splits_otherwise(published):
        raise UserError(f"{folder} has a wrong tokenizer.json, as many Mistral models have: load "
                        "it with AutoTokenizer.from_pretrained(..., fix_mistral_regex=True), and "
                        "save it in the model's folder.")
    # mistral_format: with mistral-common, a tekken.json would be read instead of tokenizer.json.
    options = dict(trust_remote_code=False, split_special_tokens=False, mistral_format=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # SentencePiece's classes have none
    if backend is None or rules(backend) != rules(published):
        del options["mistral_format"]
        # A class may know an end token that no file names.
        named = {k: v for k, v in tokenizer.special_tokens_map.items() if k.endswith("_token")}
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **options | named)
    # A response is read as it was written.
    tokenizer.clean_up_tokenization_spaces = False
    if hasattr(tokenizer.backend_tokenizer.model, "dropout"):  # BPE would draw the pieces of words
        tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer


def splits_otherwise(tokenizer: Tokenizer) -> bool:
    """Is this Mistral's byte-level vocabulary with the word pattern of another tokenizer?

    Its own pattern ends words where the case changes, and at each digit. Mistral's older
    vocabularies are not byte-level, and have no pattern.
    """
    if not isinstance(tokenizer.decoder, decoders.ByteLevel) or not tokenizer.token_to_id("[INST]"):
        return False
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("aB12")
    return [piece for piece, _ in pieces] != ["a", "B", "1", "2"]


def rules(tokenizer: Tokenizer) -> dict:
    """The parts of a tokenizer that map text to ids and back, without added tokens."""
    parts = json.loads(tokenizer.to_str())
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model", "decoder")}


def empty_model(config):
    """The model without weights; UserError for matrices outside of linear layers and embeddings.

    Others (a mixture of experts, Mamba, GPT-2's Conv1D) have no adapters (lora.py) or read their
    weights past them, and some add noise or differ in vLLM. Qwen3.5's linear attention has a
    convolution of its own; its matrices are linear layers.
    """
    usual = [torch.nn.Linear] + [torch.nn.Conv1d] * (config.model_type == "qwen3_5_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for name, module in model.named_modules():
        if type(module) in usual or isinstance(module, torch.nn.Embedding):
            continue
        for weight, p in module.named_parameters(recurse=False):
            if p.ndim > 1:
                raise UserError(f"{type(model).__name__} has the matrix {name}.{weight} in a layer "
                                f"of the type {type(module).__name__}, neither linear nor an "
                                "embedding, which is not supported: use another model")
    return model


def small_model(config):
    """A model of this family with random weights, and few: loading.check_by_use tries it.

    Rows of more than 8 tokens exceed the positions of its rotary embeddings, which in some families
    depend on that. Weights are so large that logits reach 100.
    """
    small = copy.deepcopy(config)
    # One layer of each kind. Settings of single layers are lists with an entry for each.
    each = {name: value for name, value in config.to_dict().items()
            if isinstance(value, list) and len(value) == config.num_hidden_layers}
    kinds = list(zip(*each.values(), strict=True)) or [()]
    kept = sorted({kinds.index(kind) for kind in kinds})
    for name, value in each.items():
        setattr(small, name, [value[layer] for layer in kept])
    small.num_hidden_layers = len(kept)
    small.vocab_size = 8
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, 0)
    if isinstance(getattr(small, "intermediate_size", None), int):
        small.intermediate_size = 64
    if rope := getattr(small, "rope_parameters", None):
        small.max_position_embeddings = 8
        # Phi-3 has the number beside them, too. Others have parameters for each kind of layer.
        for part in (vars(small), rope, *rope.values()):
            if isinstance(part, dict) and "original_max_position_embeddings" in part:
                part["original_max_position_embeddings"] = 8
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, trust_remote_code=False
        ).eval()
        for name, p in model.named_parameters():
            if p.ndim > 1 or name.endswith("bias"):
                p.normal_(std=p[0].numel() ** -0.5)
        # A parameter of its own, where the head is tied to the embedding.
        weight = torch.randn_like(model.get_output_embeddings().weight)  # (V, D)
        weight *= 30 / weight.shape[1] ** 0.5
        model.get_output_embeddings().weight = torch.nn.Parameter(weight)
    return model


@contextmanager
def load_errors(folder: str):
    """Report a model that cannot be used as a UserError. folder: it may be a hub name."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # foreign files: each library has errors of its own
        raise UserError(f"the model {folder} cannot be loaded ({reason_of(error)})") from error
