"""SmolLM2-135M-Instruct: what a real tokenizer, chat template and vocabulary could break.

The other tests use random models with a word-level tokenizer and 25 tokens. This one has byte-level
BPE, 49,152 tokens, digits that are tokens of their own, a system prompt, padding with the end
token, and 30 layers. The file takes about two minutes.
"""

import json
from collections import deque
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paw_min import train
from paw_min.envs.alfworld import prompts
from paw_min.model import lora
from paw_min.model.batches import micro_batches
from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.scoring import score_responses
from paw_min.model.vllm_sampler import VLLMSampler, isolated
from paw_min.rows import TokenRow
from paw_min.running import runs
from paw_min.toy import smollm2

pytestmark = pytest.mark.slow
ROOM = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly "
    "around you, you see a cabinet 10, and a drawer 2.\n\nYour task is to: put some mug on shelf."
)
OBSERVATIONS = [
    "You arrive at cabinet 10. On the cabinet 10, you see a mug 1, and a plate 12.",
    "You pick up the mug 1 from the cabinet 10.",
    "Nothing happens.",
    "The drawer 2 is closed.",
    '"Back to Search" "Page 1 (Total results: 50)" "$17.99"',
    "\n<information>Doc 1(Title: Zürich) 1 846–1 900, Łódź\n</information>\n",
]
RESPONSE = "<think>The mug may be in cabinet 10.</think><action>go to cabinet 10</action>"


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


# --- tokens


def test_encoding_loses_nothing(policy):
    for text in (RESPONSE, *OBSERVATIONS, prompts.INSTRUCTIONS, ROOM, "a  b\n\n\n12"):
        assert policy.decode(policy.encode(text)) == text
    # The published tokenizer splits digits before words: "\n\n" is one token here, too.
    assert policy.tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]


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
    hard = 1 - line["wm_clipped_tokens"]
    print(f"share of observation tokens with p <= rho: {hard:.2f}")
    assert 0.3 < hard < 0.95
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "r" / "checkpoint-000001" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [not torch.equal(w.float(), after[name].float()) for name, w in before.items()]
    assert all(moved) and all(w.isfinite().all() for w in after.values())


def test_what_lora_learns_arrives_in_vllm_in_bf16(folder):
    """Two updates move the adapters as far as ten at the rate of the presets.

    What they gain is lost in an engine whose weights are rounded to the nearest
    (research/bench/README.md).
    """
    from vllm import SamplingParams

    torch.set_num_threads(1)
    policy = load_policy(str(folder), precision="bf16")
    lora.attach(policy.model, 16, "bf16", 0, None)
    rows = []
    # Four rows: a CPU without bf16 instructions takes half a minute for a pass over them.
    for place in ("cabinet", "drawer"):
        for thing in ("mug", "plate"):
            prompt = f"On the {place} 1, you see a {thing} 2, and a lamp 1. What is next?"
            response = policy.encode_response(f"<action>take {thing} 2 from {place} 1</action>")
            rows.append(TokenRow(policy.encode_chat(prompt), response, []))

    def trainer_logp() -> torch.Tensor:
        return torch.tensor(sum(score_responses(policy, rows, 10**6).logp, []))

    def engine_logp(precision: str) -> torch.Tensor:
        sampler.precision = precision  # "bf16": rounded at random, "fp32": to the nearest
        prompts = [{"prompt_token_ids": row.prompt_ids + row.response_ids} for row in rows]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        with sampler.sync(policy), isolated():
            answers = sampler.llm.generate(prompts, params, use_tqdm=False)
        return torch.tensor([
            answer.prompt_logprobs[len(row.prompt_ids) + k][token].logprob
            for row, answer in zip(rows, answers, strict=True)
            for k, token in enumerate(row.response_ids)
        ])

    with closing(VLLMSampler(str(folder), 256, "bf16", 0.4, slots=4)) as sampler:
        before = {precision: engine_logp(precision) for precision in ("bf16", "fp32")}
        start = trainer_logp()
        trained = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=5e-5)
        for _ in range(2):
            for batch in micro_batches(policy, rows, [*range(4)], [False] * 4, 10**6):
                (-policy(batch).logp[batch.response_mask].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ours = trainer_logp()
        theirs = {precision: engine_logp(precision) for precision in before}
    torch.set_num_threads(1)  # vLLM has set it
    gain = (ours - start).mean().item()
    gains = {name: (theirs[name] - before[name]).mean().item() for name in theirs}
    assert gain > 0.1
    assert gains["bf16"] == pytest.approx(gain, rel=0.15) and gains["fp32"] < 0.5 * gain
    rounding = (start - before["bf16"]).abs().mean()
    assert (ours - theirs["bf16"]).abs().mean() < rounding + 0.01
    assert (ours - theirs["fp32"]).abs().mean() > 2 * rounding
