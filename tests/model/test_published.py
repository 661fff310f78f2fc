"""Kinds of published models, as small files with their settings: plan, load, save and export.

A kind is what decides about tokens and logits: the class that tokenizer_config.json names, the
steps of tokenizer.json, the chat template and its control tokens, the family and its settings.
Vocabularies are trained here, sizes are small, and weights are random. Like most published models,
they have more embeddings than tokens. Families that are refused: test_families.py.
"""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.published import rules
from paw_min.running import export, plan
from tests.helpers import (
    CHATML,
    HOSTILE_TEXT,
    TEXTS,
    change,
    make_policy,
    one_sentence,
    publish,
)
from tests.model_kinds import KINDS, write

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# It is what transformers puts in place of LLAMA_3 with fix_mistral_regex=True.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Sequence:
    bytes_ = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), "isolated"), bytes_])


WORDS_OF_BYTES = {  # pre-tokenizers of byte-level vocabularies
    "digits": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama3": split(LLAMA_3), "qwen": split(QWEN), "tekken": split(TEKKEN),
}


class Tokens(NamedTuple):
    """How a family's tokenizer is published."""

    class_name: str  # in tokenizer_config.json
    steps: str  # of tokenizer.json
    special: list[str]
    plain: list[str] = []  # added tokens with "special": false
    named: dict = {}  # in tokenizer_config.json, besides the first special token to pad and begin


CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML_TURN = "<|im_end|>\n<|im_start|>user\n"
THOUGHTS = ["<think>", "</think>"]
EOT = {"eos_token": "<|endoftext|>"}
QWEN_2 = Tokens("Qwen2Tokenizer", "qwen", CHATML_TOKENS, ["<tool_call>"], EOT)
LLAMA = Tokens(
    "PreTrainedTokenizerFast", "llama3",
    ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
     "<|eot_id|>"], [], {"eos_token": "<|end_of_text|>"})
LLAMA_TURN = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
DEEPSEEK = Tokens(
    "LlamaTokenizerFast", "qwen", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    ["<｜User｜>", "<｜Assistant｜>", *THOUGHTS], {"eos_token": "<｜end▁of▁sentence｜>"})
PIECES = Tokens("LlamaTokenizer", "llama2", ["<unk>", "<s>", "</s>"],
                named={"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})
PHI = PIECES._replace(special=[*PIECES.special, "<|endoftext|>", "<|end|>"],
                      plain=["<|system|>", "<|user|>", "<|assistant|>"], named=PIECES.named | EOT)
OLMO = Tokens("GPT2Tokenizer", "llama3", ["<|pad|>", "<|endoftext|>"], named=EOT)
GEMMA = Tokens("GemmaTokenizer", "gemma", ["<pad>", "<eos>", "<bos>"],
               ["<start_of_turn>", "<end_of_turn>"],
               {"eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<pad>"})
NEMO = Tokens("PreTrainedTokenizerFast", "tekken", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
              named=PIECES.named)
OLMO_CHAT = (
    "{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == "
    "'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NEMO_TURN = "</s>[INST]"
NEMO_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
SCALED = dict(  # Llama 3.1 and 3.2
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128)
BY_LAYER = {  # Gemma 3
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYERS = ["sliding_attention", "full_attention"]


class Kind(NamedTuple):
    family: str
    tokens: Tokens
    between: str  # what the template writes between two turns; it begins with what ends one
    template: str  # Jinja, or the name of one that TRL ships
    settings: dict = {}

    @property
    def end(self) -> str:
        """The control token that ends a turn."""
        tokens = [*self.tokens.special, *self.tokens.plain]
        return next(token for token in tokens if self.between.strip().startswith(token))


PUBLISHED = {  # `python -m pytest tests/model/test_published.py -rA` prints the names
    "Qwen2.5": Kind("qwen2", QWEN_2, CHATML_TURN, "qwen2_5", dict(tie_word_embeddings=True)),
    "Qwen2.5 with YaRN": Kind(
        "qwen2", QWEN_2, CHATML_TURN, "qwen2_5", dict(rope_parameters=YARN)),
    "Qwen3": Kind("qwen3", QWEN_2._replace(plain=THOUGHTS), CHATML_TURN, "qwen3"),
    "Qwen3.5": Kind("qwen3_5_text", QWEN_2._replace(plain=THOUGHTS), CHATML_TURN,
                    "qwen3_5_nothink"),
    "Llama-3.2": Kind("llama", LLAMA, LLAMA_TURN, "llama3_2",
                      dict(rope_parameters=SCALED, tie_word_embeddings=True)),
    "DeepSeek-R1-Distill-Qwen": Kind(
        "qwen2", DEEPSEEK, "<｜end▁of▁sentence｜><｜User｜>", "deepseek_r1_distill"),
    "Llama-2": Kind("llama", PIECES, " </s>[INST] ", LLAMA_2_CHAT),
    "Mistral-7B-v0.3": Kind("mistral", PIECES._replace(special=NEMO.special), NEMO_TURN, NEMO_CHAT),
    "Mistral-Nemo": Kind("mistral", NEMO, NEMO_TURN, NEMO_CHAT),
    "Ministral-8B": Kind("ministral", NEMO, NEMO_TURN, NEMO_CHAT,
                         dict(layer_types=LAYERS, sliding_window=16)),
    "Mistral with another tokenizer": Kind("mistral", LLAMA, LLAMA_TURN, "llama3"),
    "Phi-3-mini-4k": Kind("phi3", PHI, "<|end|>\n<|user|>\n", "phi3", dict(sliding_window=16)),
    "Phi-4": Kind("phi3", QWEN_2._replace(class_name="GPT2Tokenizer", steps="llama3"),
                  CHATML_TURN, CHATML),
    "SmolLM2": Kind("llama", Tokens("GPT2Tokenizer", "digits", CHATML_TOKENS,
                                    named={"eos_token": "<|im_end|>"}),
                    CHATML_TURN, CHATML, dict(tie_word_embeddings=True)),
    "SmolLM3": Kind("smollm3", LLAMA._replace(special=CHATML_TOKENS, named={}), CHATML_TURN,
                    CHATML),
    "OLMo-2": Kind("olmo2", OLMO, "<|endoftext|>\n<|user|>\n", OLMO_CHAT),
    "Gemma-3": Kind("gemma3_text", GEMMA, "<end_of_turn>\n<start_of_turn>user\n", "gemma3",
                    dict(layer_types=LAYERS, rope_parameters=BY_LAYER)),
}


def make_tokenizer(tokens: Tokens) -> Tokenizer:
    special = [AddedToken(token, special=True, normalized=False) for token in tokens.special]
    if tokens.steps in WORDS_OF_BYTES:
        made = Tokenizer(models.BPE(ignore_merges=tokens.steps == "llama3"))
        made.normalizer = normalizers.NFC() if tokens.steps == "qwen" else None
        made.pre_tokenizer = WORDS_OF_BYTES[tokens.steps]
        made.decoder = decoders.ByteLevel()
        alphabet = ByteLevel.alphabet()
    else:
        unknown = tokens.special[0]
        made = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=True))
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.normalizer = normalizers.Replace(" ", "▁")
        if tokens.steps == "llama2":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), made.normalizer])
            fuse.append(decoders.Strip(" ", 1, 0))
        else:
            made.pre_tokenizer = Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence(fuse)
        alphabet = list("▁abcdefghijklmnopqrstuvwxyz")
    behind = special if tokens.steps in ("llama3", "qwen") else []  # the vocabulary, as published
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[] if behind else special, initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 9, trainer)
    made.add_special_tokens(behind)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens.plain])
    return made


def write_published(kind: Kind, folder) -> str:
    """The files of a published model."""
    made = make_tokenizer(kind.tokens)
    first = kind.tokens.special[0]
    named = {"pad_token": first, "bos_token": first, "tokenizer_class": kind.tokens.class_name}
    named |= kind.tokens.named
    eos = made.token_to_id(named.get("eos_token", kind.end))
    size = dict(
        vocab_size=64 * (made.get_vocab_size() // 64 + 1), max_position_embeddings=512,
        eos_token_id=eos, pad_token_id=None,
    )
    write(kind.family, folder, **size | KINDS.get(kind.family, {}) | kind.settings)
    for path in [*folder.glob("*token*"), *folder.glob("*.jinja")]:
        path.unlink()
    made.save(str(folder / "tokenizer.json"))
    template = kind.template
    if "{" not in template:
        template = publish(make_policy().tokenizer, template).chat_template
    named["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def check_tokens(policy, made: Tokenizer, kind: Kind) -> None:
    """Its ids are those of tokenizer.json, o' follows one end token, and has no control token.

    Whether tokenizer.json calls what the template writes "special" or not.
    """
    chat = policy.render([{"role": "user", "content": "go to desk 1\n\n a's 12345  日本"}])
    for text in (chat, *TEXTS, HOSTILE_TEXT):
        ids = policy.encode_rendered(text)
        assert ids == made.encode(text, add_special_tokens=False).ids
        assert policy.tokenizer.decode(ids) == made.decode(ids, skip_special_tokens=False)
    assert "go to shelf 1" in policy.decode(policy.encode("go to shelf 1"))
    end = made.token_to_id(kind.end)
    assert policy.eos_ids[0] == end
    between = made.encode(kind.between, add_special_tokens=False).ids
    response = [*policy.encode("look"), end]
    assert policy.separator(response[:-1]) == between
    assert policy.separator(response) == between[between.index(end) + 1 :]
    words = {*kind.tokens.special, *kind.tokens.plain} - {*THOUGHTS, "<tool_call>"}
    control = {made.token_to_id(word) for word in words}
    text = f"a {' '.join(words)}{''.join(words)} b"
    assert not control & set(policy.encode(text))
    forged, honest = policy.encode_chat(text), policy.encode_chat("a b")
    assert [t for t in forged if t in control] == [t for t in honest if t in control]
    assert policy.decode(response) == policy.decode(response[:-1])


@pytest.mark.parametrize("kind", PUBLISHED.values(), ids=PUBLISHED)
@torch.no_grad()
def test_a_published_model_is_planned_loaded_saved_and_exported(kind, tmp_path, config):
    folder = write_published(kind, tmp_path / "published")
    cfg = config(model=folder, max_prompt_tokens=200)
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


@pytest.mark.parametrize("special, pad", [(True, None), (False, None), (True, "<unused63>")])
def test_only_control_tokens_that_nothing_writes_need_no_embedding(special, pad, tmp_path):
    """Gemma 3 has a token for pictures, and its models for text no embedding for it."""
    folder = write_published(PUBLISHED["Gemma-3"], tmp_path)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    more = [AddedToken(f"<unused{n}>", special=special, normalized=False) for n in range(64)]
    (made.add_special_tokens if special else made.add_tokens)(more)
    made.save(f"{folder}/tokenizer.json")
    if pad:
        change(tmp_path / "tokenizer_config.json", pad_token=pad)
    if pad or not special:
        with one_sentence("tokens for .* embeddings"):
            load_tokenizer(folder)
        return
    policy = load_policy(folder)
    size = policy.model.config.vocab_size
    assert made.token_to_id("<unused63>") >= size
    assert max(policy.encode_chat("a <unused63> b")) < size


def test_an_end_token_that_only_the_class_names(tmp_path):
    """Llama's class has </s>, and would lose the spaces of this byte-level vocabulary."""
    tokens = PIECES._replace(steps="digits", named={"unk_token": "<unk>"})
    tokenizer = load_tokenizer(write_published(Kind("llama", tokens, "</s>", CHATML), tmp_path))
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.decode(tokenizer("go on").input_ids) == "go on"


@pytest.mark.parametrize("family", ["mistral", "ministral", "ministral3"])
def test_mistrals_published_with_the_word_pattern_of_another_family(family, tmp_path):
    tokens = NEMO._replace(steps="llama3")
    folder = write_published(Kind(family, tokens, NEMO_TURN, NEMO_CHAT), tmp_path)
    for load in (load_tokenizer, load_policy):
        with one_sentence("has a wrong tokenizer.json, as many Mistral models"):
            load(folder)
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.pre_tokenizer = WORDS_OF_BYTES["tekken"]  # transformers: if there are 100,000 words
    made.save(f"{folder}/tokenizer.json")
    assert load_policy(folder).encode("goOn 12") == made.encode("goOn 12").ids


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_config_json_names_is_not_needed(key, tmp_path):
    folder = write_published(PUBLISHED["Qwen2.5"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "flash_attention_2"}))
    assert load_policy(folder).model.config._attn_implementation == "sdpa"


# ---- the folder of an exported policy. LoRA: test_lora.py ----


def test_an_exported_folder(finished, tmp_path, capsys):
    out = tmp_path / "plain"
    export.main([str(finished), "--out", str(out)])
    said = capsys.readouterr().out
    assert f"plain: the policy of {finished}/checkpoint-000001, for transformers 5." in said
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # others may read the weights, too
    ours = load_file(out / "model.safetensors")
    for name, weight in load_file(finished / "checkpoint-000001/model.safetensors").items():
        assert torch.equal(ours[name], weight.bfloat16()) and weight.dtype == torch.float32


def test_a_folder_with_files_stays_as_it_is(finished, tmp_path):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with one_sentence("is not empty: give a new folder"):
        export.main([str(finished), "--out", str(finished)])
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with one_sentence("has no checkpoint: give the folder of a run, runs/NAME"):
        export.main([str(tmp_path / "nothing"), "--out", "nowhere"])
