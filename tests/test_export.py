"""The folder of an exported policy. LoRA: tests/test_lora.py."""

import json

import pytest
import torch
from safetensors.torch import load_file

from paw_min.base.errors import UserError
from paw_min.running import export


def content(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder(finished, tmp_path, capsys):
    out = tmp_path / "plain"
    export.main([str(finished), "--out", str(out)])
    assert f"plain: the policy of {finished}/checkpoint-000001\n" in capsys.readouterr().out
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # others may read the weights, too
    ours = load_file(out / "model.safetensors")
    for name, weight in load_file(finished / "checkpoint-000001/model.safetensors").items():
        assert torch.equal(ours[name], weight.bfloat16()) and weight.dtype == torch.float32
    config = json.loads((out / "config.json").read_text())
    # A program built on transformers 4 reads these two.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"] is None


def test_a_folder_with_files_stays_as_it_is(finished, tmp_path):
    before = content(finished)
    with pytest.raises(UserError, match="is not empty: give a new folder"):
        export.main([str(finished), "--out", str(finished)])
    assert content(finished) == before
    with pytest.raises(UserError, match="has no checkpoint: give the folder of a run, runs/NAME"):
        export.main([str(tmp_path / "nothing"), "--out", "nowhere"])


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("parameters, old", [
    (LLAMA_3 | {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": LLAMA_3}),
    (
        {"full_attention": LINEAR | {"rope_theta": 1e6},
         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_theta": 1e6, "rope_scaling": LINEAR, "rope_local_base_freq": 1e4},
    ),
], ids=["all layers", "some layers"])
def test_scaled_rotary_embeddings_have_their_old_names(tmp_path, parameters, old):
    """Gemma 3 and OLMo 3 scale them in some layers only.

    Read by transformers 4.57.3, the logits of both were equal, once.
    """
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"rope_parameters": parameters}))
    export.add_old_names(path)
    assert json.loads(path.read_text()) == old | {"rope_parameters": parameters}
