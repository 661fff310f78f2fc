"""The folder of an exported policy. LoRA: tests/test_lora.py."""

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
    said = capsys.readouterr().out
    assert f"plain: the policy of {finished}/checkpoint-000001, for transformers 5." in said
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # others may read the weights, too
    ours = load_file(out / "model.safetensors")
    for name, weight in load_file(finished / "checkpoint-000001/model.safetensors").items():
        assert torch.equal(ours[name], weight.bfloat16()) and weight.dtype == torch.float32


def test_a_folder_with_files_stays_as_it_is(finished, tmp_path):
    before = content(finished)
    with pytest.raises(UserError, match="is not empty: give a new folder"):
        export.main([str(finished), "--out", str(finished)])
    assert content(finished) == before
    with pytest.raises(UserError, match="has no checkpoint: give the folder of a run, runs/NAME"):
        export.main([str(tmp_path / "nothing"), "--out", "nowhere"])
