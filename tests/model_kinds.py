"""Small random models of many families, and with the files of published ones.

A published kind is what decides about tokens and logits: the class that tokenizer_config.json
names, the steps of tokenizer.json, the chat template and its control tokens, the family and its
settings. Vocabularies are trained here and sizes are small. Like most published models, they have
more embeddings than tokens.
"""

import json
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoConfig, AutoModelForCausalLM

from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.toy import standins
from tests.helpers import CHATML, SIZE, TEXTS, make_policy, publish

TOKENIZER = standins.make_tokenizer(TEXTS)
USUAL = SIZE | dict(
    vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, pad_token_id=0,
    bos_token_id=None, head_dim=8, max_position_embeddings=256, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32,
)
# Dense transformers whose code differs: embeddings that are scaled, parallel branches, norms behind
# layers, learned positions, fused matrices, layers without rotary positions, linear attention. All
# are in PUBLISHED, too.
KINDS = {
    "gemma3_text": {}, "gpt_neox": {}, "mistral": {}, "olmo2": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32), "phi3": {}, "smollm3": {},
    "qwen3_5_text": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
}


def write(kind: str, folder, **options) -> str:
    """A random model of this kind with its tokenizer."""
    config = AutoConfig.for_model(kind)
    known = {*config.to_dict(), *config.attribute_map}
    sizes = {name: value for name, value in USUAL.items() if name in known}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**sizes | options))
    for name, p in model.named_parameters():
        if "norm" not in name and p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)  # sharper than the default: differences show
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def make_kind(kind: str, **options) -> Policy:
    with TemporaryDirectory() as folder:
        return load_policy(write(kind, folder, **KINDS.get(kind, {}) | options))


# ---- published ----

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
SMOLLM_2 = Tokens("GPT2Tokenizer", "digits", CHATML_TOKENS, named={"eos_token": "<|im_end|>"})
OLMO = Tokens("GPT2Tokenizer", "llama3", ["<|pad|>", "<|endoftext|>"], named=EOT)
GEMMA = Tokens("GemmaTokenizer", "gemma", ["<pad>", "<eos>", "<bos>"],
               ["<start_of_turn>", "<end_of_turn>"],
               {"eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<pad>"})
NEMO = Tokens("PreTrainedTokenizerFast", "tekken", ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
              named=PIECES.named)
GLM = Tokens("PreTrainedTokenizerFast", "llama3",
             ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"],
             named=EOT)
NEMOTRON = PIECES._replace(special=[*PIECES.special, "<extra_id_0>", "<extra_id_1>"])
GLM_CHAT = (  # The token of the next role ends a turn.
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NEMOTRON_CHAT = (
    "<extra_id_0>System\n\n{% for m in messages %}<extra_id_1>{{ m.role | capitalize }}\n"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<extra_id_1>Assistant\n{% endif %}"
)
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


PUBLISHED = {  # `python -m pytest tests/model/test_models.py -rA` prints the names
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
    "SmolLM2": Kind("llama", SMOLLM_2, CHATML_TURN, CHATML, dict(tie_word_embeddings=True)),
    "SmolLM3": Kind("smollm3", LLAMA._replace(special=CHATML_TOKENS, named={}), CHATML_TURN,
                    CHATML),
    "OLMo-2": Kind("olmo2", OLMO, "<|endoftext|>\n<|user|>\n", OLMO_CHAT),
    "Gemma-3": Kind("gemma3_text", GEMMA, "<end_of_turn>\n<start_of_turn>user\n", "gemma3",
                    dict(layer_types=LAYERS, rope_parameters=BY_LAYER)),
    "GLM-4": Kind("qwen2", GLM, "<|user|>\n", GLM_CHAT),
    "Nemotron-Mini": Kind("llama", NEMOTRON, "\n<extra_id_1>User\n", NEMOTRON_CHAT),
    # Families whose published models have no chat template.
    "GPT-NeoX": Kind("gpt_neox", SMOLLM_2, CHATML_TURN, CHATML),
    "OPT": Kind("opt", SMOLLM_2, CHATML_TURN, CHATML),
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
