"""SmolLM2-135M-Instruct: what a real tokenizer, chat template and vocabulary could break.

The other tests use random models with a word-level tokenizer and 25 tokens. This one has byte-level
BPE, 49,152 tokens, digits that are tokens of their own, a system prompt, padding with the end
token, and 30 layers.
"""

import json
from collections import deque
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paw_min import train
from paw_min.model.policy import Policy, load_policy
from paw_min.model.sampler import HFSampler, Request
from paw_min.running import runs
from paw_min.toy import smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Made once, as a user would, after an earlier attempt that was killed."""
    out = tmp_path_factory.mktemp("real") / smollm2.NAME
    left = out.with_name(out.name + ".partial") / "left.safetensors"
    left.parent.mkdir()
    left.write_text("half of it")
    smollm2.write(out)
    return out


@pytest.fixture(scope="session")
def policy(folder) -> Policy:
    policy = load_policy(str(folder))
    policy.requires_grad_(False)
    return policy


# --- the folder


def test_the_model_answers(policy):
    question = policy.encode_chat("What is the capital of France?")
    sampler = HFSampler()
    with sampler.sync(policy):
        ((response,),) = sampler.generate(deque([Request(0, question, seed=0)]), 0.0, 24)
    assert "Paris" in policy.decode(response.ids) and response.ids[-1] in policy.eos_ids


def test_the_folder_is_plain_and_complete(folder, policy):
    names = sorted(path.name for path in folder.parent.iterdir())
    assert names == [folder.name, f"{folder.name}.lock"]  # nothing partial
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # others may read it, too
    config = json.loads((folder / "config.json").read_text())
    assert not {"quantization_config", "auto_map"} & set(config)
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert sum(w.numel() for w in weights.values()) == 134_515_008
    tokenizer = policy.tokenizer
    assert tokenizer.convert_ids_to_tokens(policy.eos_ids) == ["<|im_end|>"]
    assert len(tokenizer) == policy.model.get_input_embeddings().num_embeddings == 49_152


# --- training


def test_an_update_of_alfworld_with_paw(config, folder, tmp_path):
    """A whole run: both evaluations, the rollout, Eq. 4, one optimizer step, the checkpoint."""
    cfg = config(
        model=str(folder), updates=1, groups=2, group_size=2, max_turns=2, eval_tasks=1,
        max_response_tokens=8, prompt="compact", max_prompt_tokens=800, lr=1e-5, kl_coef=0.0,
        mini_batch=0, micro_tokens=1024, precision="fp32",
    )
    train.train(cfg)
    _, line = runs.read_metrics(tmp_path / "r")
    assert line["rows"] == 8 and line["lambda"] == 1.0 and line["sampler_gap"] < 1e-4
    assert 0 < line["wm_loss"] < 1 and 0 < line["grad_norm"] < 1e4
    assert 0.05 < line["wm_clipped_tokens"] < 0.7
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "r" / "checkpoint-000001" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [not torch.equal(w.float(), after[name].float()) for name, w in before.items()]
    assert all(moved) and all(w.isfinite().all() for w in after.values())
