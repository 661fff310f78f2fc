"""Kinds of published models, as small files with their settings: plan, load, save and export.

A kind is what decides about tokens and logits: the class that tokenizer_config.json names, the
steps of tokenizer.json, the chat template and its control tokens, the family and its settings.
The settings are as remembered: no published file was there to compare with. Vocabularies are
trained here, sizes are small, and weights are random. Like most published models, they have more
embeddings than tokens.
"""

import json
from typing import NamedTuple

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from paw_min.base.errors import UserError
from paw_min.model.chat import ChatTokenizer
from paw_min.model.policy import load_policy, load_tokenizer
from paw_min.model.published import rules
from paw_min.running import export, plan
from tests.helpers import CHATML, HOSTILE_TEXT, TEXTS, make_policy, one_sentence, publish
from tests.model_kinds import KINDS, write

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def split(pattern: str) -> Split:
    return Split(Regex(pattern), "isolated")


BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
WORDS_OF_BYTES = {  # pre-tokenizers of byte-level vocabularies
    "digits": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama3": Sequence([split(LLAMA_3), BYTES]),
    "qwen": Sequence([split(QWEN), BYTES]),
}
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_3_TOKENS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
]
DEEPSEEK_TOKENS = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
]
PHI_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
SENTENCEPIECE = ["<unk>", "<s>", "</s>"]
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYERS = dict(layer_types=["sliding_attention", "full_attention"], rope_parameters=BY_LAYER)


class Kind(NamedTuple):
    name: str  # of a model of this kind
    family: str
    tokenizer_class: str
    steps: str  # of tokenizer.json
    tokens: list[str]  # control tokens
    end: str  # what ends a turn
    template: str  # Jinja, or the name of one that TRL ships
    settings: dict = {}
    refused: str = ""
    eos: str = ""  # the tokenizer's end token, where it is not `end`, as in a base model


# Printed by `python -m pytest tests/test_published.py -rA`.
PUBLISHED = [
    Kind("Qwen2.5", "qwen2", "Qwen2Tokenizer", "qwen", CHATML_TOKENS, "<|im_end|>", "qwen2_5",
         eos="<|endoftext|>"),
    Kind("Qwen3", "qwen3", "Qwen2Tokenizer", "qwen", CHATML_TOKENS, "<|im_end|>", "qwen3",
         eos="<|endoftext|>"),
    Kind("Llama-3.1", "llama", "PreTrainedTokenizerFast", "llama3", LLAMA_3_TOKENS, "<|eot_id|>",
         "llama3", dict(rope_parameters=dict(
             rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
             high_freq_factor=4.0, original_max_position_embeddings=64)), eos="<|end_of_text|>"),
    Kind("Llama-3.2", "llama", "PreTrainedTokenizerFast", "llama3", LLAMA_3_TOKENS, "<|eot_id|>",
         "llama3_2", dict(tie_word_embeddings=True), eos="<|end_of_text|>"),
    Kind("DeepSeek-R1-Distill-Llama", "llama", "LlamaTokenizerFast", "llama3", DEEPSEEK_TOKENS,
         DEEPSEEK_TOKENS[1], "deepseek_r1_distill"),
    Kind("DeepSeek-R1-Distill-Qwen", "qwen2", "LlamaTokenizerFast", "qwen", DEEPSEEK_TOKENS,
         DEEPSEEK_TOKENS[1], "deepseek_r1_distill"),
    Kind("Llama-2", "llama", "LlamaTokenizer", "llama2", SENTENCEPIECE, "</s>", INST),
    Kind("Phi-3.5", "phi3", "LlamaTokenizer", "llama2", [*SENTENCEPIECE, *PHI_TOKENS], "<|end|>",
         "phi3_5"),
    Kind("SmolLM2", "llama", "GPT2Tokenizer", "digits", CHATML_TOKENS, "<|im_end|>", CHATML,
         dict(tie_word_embeddings=True)),
    Kind("OLMo-2", "olmo2", "GPT2Tokenizer", "llama3", PHI_TOKENS, "<|endoftext|>",
         "{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == "
         "'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
    Kind("Gemma-3", "gemma3_text", "GemmaTokenizer", "gemma", GEMMA_TOKENS, "<end_of_turn>",
         "gemma3", LAYERS, eos="<eos>"),
    Kind("gpt-oss", "gpt_oss", "PreTrainedTokenizerFast", "llama3", CHATML_TOKENS, "<|im_end|>",
         CHATML, dict(quantization_config=dict(quant_method="mxfp4")), "quantized weights"),
]


def make_tokenizer(kind: Kind) -> Tokenizer:
    special = [AddedToken(token, special=True, normalized=False) for token in kind.tokens]
    if kind.steps in WORDS_OF_BYTES:
        made = Tokenizer(models.BPE(ignore_merges=kind.steps == "llama3"))
        made.normalizer = normalizers.NFC() if kind.steps == "qwen" else None
        made.pre_tokenizer = WORDS_OF_BYTES[kind.steps]
        made.decoder = decoders.ByteLevel()
        alphabet = ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(unk_token=kind.tokens[0], fuse_unk=True, byte_fallback=True))
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.normalizer = normalizers.Replace(" ", "▁")
        if kind.steps == "llama2":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), made.normalizer])
            fuse.append(decoders.Strip(" ", 1, 0))
        else:
            made.pre_tokenizer = Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence(fuse)
        alphabet = list("▁abcdefghijklmnopqrstuvwxyz")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 9, trainer)
    return made


def write_published(kind: Kind, folder) -> str:
    """The files of a published model."""
    made = make_tokenizer(kind)
    eos = kind.eos or kind.end
    ends = {"eos_token_id": made.token_to_id(eos), "pad_token_id": None}
    size = dict(vocab_size=64 * (made.get_vocab_size() // 64 + 1), max_position_embeddings=512)
    write(kind.family, folder, **size | ends | KINDS.get(kind.family, {}) | kind.settings)
    for path in folder.glob("*token*"):
        path.unlink()
    made.save(str(folder / "tokenizer.json"))
    template = kind.template
    if "{" not in template:
        template = publish(make_policy().tokenizer, template).chat_template
    named = {"tokenizer_class": kind.tokenizer_class, "chat_template": template}
    named |= {"eos_token": eos, "bos_token": kind.tokens[0], "pad_token": kind.tokens[0]}
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def check_tokens(policy, made: Tokenizer, kind: Kind) -> None:
    """Its ids are those of tokenizer.json, and o' follows one end token."""
    chat = policy.render([{"role": "user", "content": "go to desk 1\n\n a's 12345  日本"}])
    for text in (chat, *TEXTS, HOSTILE_TEXT):
        ids = policy.encode_rendered(text)
        assert ids == made.encode(text, add_special_tokens=False).ids
        assert policy.tokenizer.decode(ids) == made.decode(ids, skip_special_tokens=False)
    assert "go to shelf 1" in policy.decode(policy.encode("go to shelf 1"))
    end = made.token_to_id(kind.end)
    assert policy.eos_ids[0] == end
    response = [*policy.encode("look"), end]
    assert end not in policy.separator(response)
    assert policy.separator(response[:-1]).count(end) == 1


@pytest.mark.parametrize("kind", PUBLISHED, ids=[kind.name for kind in PUBLISHED])
@torch.no_grad()
def test_a_published_model_is_planned_loaded_saved_and_exported(kind, tmp_path, config):
    folder = write_published(kind, tmp_path / "published")
    cfg = config(model=folder, max_prompt_tokens=200)
    if kind.refused:
        for use in (lambda: plan.dry_run(cfg), lambda: load_policy(folder)):
            with one_sentence(kind.refused):
                use()
        return
    plan.dry_run(cfg)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    policy = load_policy(folder)
    check_tokens(policy, made, kind)
    ids = torch.tensor([policy.encode_chat("go to shelf 1")])
    policy.save(tmp_path / "run" / "checkpoint-000001")
    export.main([str(tmp_path / "run"), "--out", str(tmp_path / "exported")])
    for saved in ("run/checkpoint-000001", "exported"):
        again = load_policy(str(tmp_path / saved))
        check_tokens(again, made, kind)
        stored = Tokenizer.from_file(str(tmp_path / saved / "tokenizer.json"))
        assert rules(stored) == rules(again.tokenizer.backend_tokenizer)
        assert rules(stored)["pre_tokenizer"] == rules(made)["pre_tokenizer"]
        if saved == "exported":
            for weight in policy.model.parameters():
                weight.copy_(weight.bfloat16())
        assert torch.equal(again.model(ids).logits, policy.model(ids).logits)


def test_a_model_needs_as_many_positions_as_its_longest_row_and_no_more(tmp_path):
    folder = write_published(PUBLISHED[0], tmp_path)
    load_tokenizer(folder, positions=512)
    with pytest.raises(UserError, match=f"^{folder} has 512 positions: .* together 513"):
        load_tokenizer(folder, positions=513)


def test_an_end_token_that_only_the_class_names(tmp_path):
    """Llama's class has </s>, and would lose the spaces of this byte-level vocabulary."""
    kind = Kind("base", "llama", "LlamaTokenizer", "digits", SENTENCEPIECE, "</s>", CHATML)
    folder = write_published(kind, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = json.loads(path.read_text())
    del named["eos_token"]
    path.write_text(json.dumps(named))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.decode(tokenizer("go on").input_ids) == "go on"


@pytest.mark.parametrize("family", ["mistral", "ministral", "ministral3"])
def test_mistrals_published_with_the_word_pattern_of_another_family(family, tmp_path):
    """Their own ends words where the case changes, and at each digit."""
    kind = Kind(family, family, "PreTrainedTokenizerFast", "llama3", [*SENTENCEPIECE, "[INST]"],
                "</s>", INST)
    folder = write_published(kind, tmp_path)
    with pytest.raises(UserError, match="has a wrong tokenizer.json, as many Mistral models"):
        load_tokenizer(folder)
    own = Tokenizer.from_file(f"{folder}/tokenizer.json")
    own.pre_tokenizer = Sequence([split(r"\p{Lu}+|\p{Ll}+|\p{N}|[^\p{L}\p{N}]+"), BYTES])
    own.save(f"{folder}/tokenizer.json")
    load_tokenizer(folder)


def test_a_control_token_of_one_letter_is_text():
    tokenizer = make_policy().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["o", "<|turn|>"]})
    chat = ChatTokenizer(tokenizer)
    assert chat.without_control_tokens("go to <|turn|>") == "go to < |turn|>"
