"""Saved model folders that programs built on transformers 4 read as transformers 5 does.

transformers 5 reads the names of transformers 4, but writes its own: rope_parameters in place of
rope_theta, num_local_experts in place of num_experts, and a tokenizer class, TokenizersBackend. An
older program takes its default for a name that is missing, in silence: a base of 10,000 for the
rotary embeddings. So a saved folder keeps the published names beside the new ones.

Verified with transformers 4.57.6 (tests/test_portable.py names the commands): the log-probabilities
and tokens of 27 tiny models of 18 families, saved here, are those of transformers 5. Not repaired
is what a start model has lost already, when transformers 5 wrote it: of its old names, those of one
rotary embedding for all layers come back, others (two of them, experts) do not.
"""

import json
from pathlib import Path

from transformers import PreTrainedConfig

# Published values that do not hold for the saved files, whose type is `dtype`, whose weights are
# numbers, and beside which no code lies.
NOT_KEPT = ("torch_dtype", "quantization_config", "auto_map", "_name_or_path")


def published_config(folder: str) -> dict:
    """config.json of a folder or hub name as it was written, with its type as `dtype`."""
    config, _ = PreTrainedConfig.get_config_dict(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return config | ({"dtype": dtype} if dtype else {})


def make_portable(folder: Path, published: dict) -> None:
    """Complete the files that transformers 5 has written. published: see published_config; or {}.

    config.json names the published type, which programs load, also where the weights are fp32.
    """
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    if published.get("model_type") != saved["model_type"]:
        # Of a model that also sees, the language model alone may have been loaded.
        published = published.get("text_config", {}) | {"dtype": published.get("dtype")}
    config = with_old_names(saved, published)
    config["dtype"] = published.get("dtype") or saved["dtype"]
    write_json(path, config)

    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    # The class without behavior of its own: tokenizer.json has all of it.
    if (folder / "tokenizer.json").exists():
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "extra_special_tokens" in tokenizer:  # transformers 4 wants a dictionary of this name
        tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    # Of this load, not of the tokenizer.
    for name in ("auto_map", "is_local", "local_files_only", "fix_mistral_regex"):
        tokenizer.pop(name, None)
    write_json(path, tokenizer)


def with_old_names(saved: dict, published: dict) -> dict:
    """A configuration with the names that only the published one has."""
    kept = {name: value for name, value in published.items() if name not in NOT_KEPT}
    config = old_rope(saved) | kept | saved
    config.pop("auto_map", None)
    if "text_config" in saved:
        config["text_config"] = with_old_names(
            saved["text_config"], published.get("text_config", {})
        )
    return config


def old_rope(saved: dict) -> dict:
    """The rotary embedding in the names of transformers 4, if all layers have the same."""
    rope = dict(saved.get("rope_parameters") or {})
    if "rope_theta" not in rope:  # no rotary embedding, or one per type of layer
        return {}
    old = {"rope_theta": rope.pop("rope_theta")}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return old


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
