"""Saved folders in programs built on transformers 4, which cannot be installed beside 5.

    python -m pytest tests/test_portable.py

These tests compare files with what transformers 4 reads. That it reads the same model was verified
with 4.57.6 in an environment of its own (pip install "transformers==4.57.6" torch numpy): its
save_pretrained wrote tiny models of 18 families with rope_theta 1e6 and, in 15 of the 27 folders,
other rotary settings; load_policy(folder).save(other) here; then both versions computed the
log-probabilities of 200 tokens and the tokens of a text. They were equal, difference 0.0, but for
OLMo 3 with YaRN, whose published folder the two read differently, too (0.05 nats).
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from paw_min.model.batches import collate
from paw_min.model.policy import load_policy
from paw_min.model.portable import with_old_names
from tests.helpers import TOKEN_ROWS, chatml_tokenizer, make_policy

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLD = {  # of transformers 4, as read at the top of config.json
    "qwen2": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": YARN},
    "llama": {"rope_theta": 1e6, "rope_scaling": LLAMA3},
}


def read(folder, name="config.json") -> dict:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("writer", [4, 5])
@pytest.mark.parametrize("family", OLD)
def test_an_older_program_reads_the_same_model(tmp_path, family, writer):
    start = tmp_path / "start"
    saved = tmp_path / "saved"
    old = OLD[family]
    rope = {"rope_type": "default"} | (old["rope_scaling"] or {}) | {"rope_theta": 1e6}
    policy = make_policy(family, tokenizer=chatml_tokenizer(), rope_parameters=rope)
    policy.model.save_pretrained(start)
    policy.tokenizer.save_pretrained(start)
    config = read(start)
    assert config["rope_parameters"] == rope and "rope_theta" not in config
    if writer == 4:
        del config["rope_parameters"], config["dtype"]
        config |= old | {"torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "code.C"}, "x": 1}
        (start / "config.json").write_text(json.dumps(config))

    load_policy(str(start)).save(saved)
    written = read(saved)
    assert old.items() <= written.items() and "auto_map" not in written
    if writer == 4:
        assert written["x"] == 1 and written["dtype"] == "bfloat16" and "torch_dtype" not in written
    names = read(saved, "tokenizer_config.json")
    assert names["tokenizer_class"] == "PreTrainedTokenizerFast" and "is_local" not in names
    assert names["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert "extra_special_tokens" not in names

    # To transformers 5 and to vLLM, which reads through it, nothing has changed.
    ours, theirs = (AutoConfig.from_pretrained(folder) for folder in (saved, start))
    assert ours.rope_parameters == theirs.rope_parameters == rope
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (saved, start)]
    texts = [t.backend_tokenizer.to_str() for t in tokenizers]
    assert texts[0] == texts[1]
    assert tokenizers[0].all_special_tokens == tokenizers[1].all_special_tokens
    again = load_policy(str(saved))
    batch = collate(TOKEN_ROWS, [True] * 3, policy.pad_id)
    assert torch.equal(again(batch)[0], policy(batch)[0])
    assert again.model.dtype == torch.float32


def test_a_copy_of_a_copy_keeps_them(tmp_path):
    policy = make_policy("qwen3")
    policy.published = {"model_type": "qwen3", "dtype": "bfloat16", "num_experts": 4}
    policy.save(tmp_path / "1")
    load_policy(str(tmp_path / "1")).save(tmp_path / "2")
    assert read(tmp_path / "1") == read(tmp_path / "2")
    assert read(tmp_path / "2")["num_experts"] == 4


def test_models_that_also_see_keep_the_names_of_both_parts():
    saved = {"model_type": "a", "text_config": {"rope_parameters": {"full": {"rope_theta": 2.0}}}}
    published = {"model_type": "a", "x": 1, "text_config": {"rope_theta": 2.0}}
    published |= {"quantization_config": {}, "torch_dtype": "bfloat16", "_name_or_path": "/home/me"}
    expected = saved | {"x": 1, "text_config": saved["text_config"] | {"rope_theta": 2.0}}
    assert with_old_names(saved, published) == expected
