"""The real vLLM beside a trainer: the same log-probabilities, in step after every sync.

The engine's numbers are compared with those of transformers, not with Policy: |log-prob by the
model - log-prob by the sampler| per sampled token, in nats. In fp32 rounding makes that 3e-6; the
trainer stops a run at 1e-3; what is lost by a broken sync is here always over 5e-2.
"""

import atexit
import gc
import json
import os
import random
import sys
import weakref
from collections import deque
from contextlib import closing
from itertools import islice
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist

from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.vllm_sampler import VLLMSampler
from tests import helpers
from tests.helpers import one_sentence, with_adapters

pytestmark = pytest.mark.slow
ROUNDING = 1e-4
BROKEN = 5e-2  # the limit of the trainer lies between
LONGEST = 640
SLOTS = 24  # fewer than some tests have requests


def small_policy() -> Policy:
    """With heads of 32 numbers: vLLM's CPU kernels know none smaller. Its head is tied.

    test_models.py has heads of their own.
    """
    return helpers.make_policy(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


def start(folder, precision: str) -> tuple[Policy, VLLMSampler]:
    policy = small_policy()
    policy.save(folder)
    published = {"top_k": 1, "repetition_penalty": 5.0, "eos_token_id": [3, 4, 5, 6]}
    (folder / "generation_config.json").write_text(json.dumps(published))  # all to be ignored
    state = torch.get_rng_state()
    sampler = VLLMSampler(str(folder), LONGEST, precision, memory_share=0.4, slots=SLOTS)
    assert torch.equal(state, torch.get_rng_state())  # vLLM seeds it
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1  # vLLM replaces the function
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    return policy, sampler


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """precision -> (policy, sampler). They end together: one ends what both share.

    That in fp32 schedules asynchronously, as on a GPU; vLLM's CPU build would not.
    """
    made = {"bf16": start(tmp_path_factory.mktemp("bf16"), "bf16")}
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def as_on_a_gpu(_, config) -> None:
        usual(config)
        config.scheduler_config.async_scheduling = True

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(as_on_a_gpu)):
        made["fp32"] = start(tmp_path_factory.mktemp("fp32"), "fp32")
    assert made["fp32"][1].llm.llm_engine.engine_core.engine_core.batch_queue is not None
    yield made
    for _, sampler in made.values():
        sampler.close()
    assert not dist.is_initialized()  # vLLM made a process group, of one rank


@pytest.fixture
def fp32(engines) -> tuple[Policy, VLLMSampler]:
    """The policy with the weights that it began with, and its engine."""
    policy, sampler = engines["fp32"]
    policy.model.load_state_dict(small_policy().model.state_dict())
    return policy, sampler


def requests(n: int, length: int = 40, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    return [Request(i, [draw.randrange(3, 20) for _ in range(length)], 100 + i) for i in range(n)]


def answer(policy, sampler, asked, temperature=1.0, max_tokens=30) -> dict:
    with sampler.sync(policy):
        parts = list(sampler.generate(deque(asked), temperature, max_tokens))
    return {response.slot: response for part in parts for response in part}


@torch.no_grad()
def gap(policy, asked, answers, temperature=1.0) -> float:
    """Mean |log-prob by transformers - log-prob by the sampler| over all sampled tokens."""
    total = []
    for r in asked:
        ids = answers[r.slot].ids
        n = len(r.prompt_ids)
        logits = policy.model(torch.tensor([r.prompt_ids + ids])).logits[0, n - 1 : -1]  # (T, V)
        logp = (logits / temperature).log_softmax(-1)[range(len(ids)), ids]  # (T,)
        total += (logp - torch.tensor(answers[r.slot].logps)).abs().tolist()
    return sum(total) / len(total)


def learn(policy, step: int) -> None:
    """Move the weights somewhere else, as an optimizer would."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1 + 0.2 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_trainers_after_every_sync(fp32, temperature):
    policy, sampler = fp32
    for k in range(2):
        asked = requests(12, length=200)  # over one block of 128 tokens: the prefix cache is in use
        answers = answer(policy, sampler, asked, temperature)
        assert len(answers) == 12
        assert gap(policy, asked, answers, temperature) < ROUNDING
        learn(policy, k)
        assert gap(policy, asked, answers, temperature) > BROKEN


def without_layers(policy):
    """The layers add nothing, embeddings are bf16 numbers, logits small: no token has p near 1."""
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            adds = "o_proj" in name or "down_proj" in name
            p.copy_(torch.zeros_like(p) if adds else p.bfloat16())
        policy.model.model.norm.weight.fill_(0.25)
    return policy


def test_torch_keeps_its_threads(fp32):
    """vLLM's CPU build replaces the function by one that sets nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_bf16_engine_takes_fp32_weights(engines):
    policy, sampler = engines["bf16"]
    learn(policy, 3)
    answers = answer(policy, sampler, requests(8))
    assert ROUNDING < gap(policy, requests(8), answers) < 0.1  # the trainer's limit for bf16
    learn(policy, 4)
    assert gap(policy, requests(8), answers) > 0.3
    # Where layers add nothing, only the logits of the heads could be rounded in another way.
    answers = answer(without_layers(policy), sampler, requests(8))
    with torch.autocast("cpu", torch.bfloat16):
        assert gap(policy, requests(8), answers) < 1e-5


@pytest.mark.parametrize("precision, most", [("fp32", ROUNDING), ("bf16", 0.1)])
def test_adapters_arrive_merged(engines, precision, most):
    """The trainer has W and A, B apart, the engine their sum; its names have no adapters."""
    policy = with_adapters(small_policy(), precision)
    _, sampler = engines[precision]
    asked = requests(8)
    learn(policy, 5)
    answers = answer(policy, sampler, asked)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert gap(policy, asked, answers) < most


def test_samples_follow_the_whole_distribution(fp32):
    policy, sampler = fp32
    prompt = requests(1)[0].prompt_ids
    n = 3000
    answers = answer(policy, sampler, [Request(i, prompt, i) for i in range(n)], 2.0, 1)
    drawn = torch.tensor([answers[i].ids[0] for i in range(n)])
    share = torch.bincount(drawn, minlength=len(policy.tokenizer)) / n
    with torch.no_grad():
        p = (policy.model(torch.tensor([prompt])).logits[0, -1] / 2.0).softmax(-1)
    assert ((share - p).abs() < 4.5 * (p * (1 - p) / n).sqrt() + 1 / n).all()
    assert (p > 0.02).sum() > 5  # there is something to choose


def test_equal_prompts_differ_and_seeds_replay(fp32):
    policy, sampler = fp32
    group = [Request(i, requests(1)[0].prompt_ids, seed=i) for i in range(8)]
    first = answer(policy, sampler, group, 2.0)
    assert len({tuple(r.ids) for r in first.values()}) == 8
    state = torch.get_rng_state()
    other = requests(20, length=30)[8:] + group[::-1]
    again = answer(policy, sampler, other, 2.0)
    assert all(again[i].ids == first[i].ids for i in range(8))
    assert torch.equal(torch.get_rng_state(), state)  # the trainer's generator is left alone


def test_responses_end_with_the_first_end_token(fp32):
    policy, sampler = fp32
    answers = answer(policy, sampler, requests(40), max_tokens=20)
    ended = [r.ids for r in answers.values() if r.ids[-1] in policy.eos_ids]
    cut = [r.ids for r in answers.values() if r.ids[-1] not in policy.eos_ids]
    assert ended and cut
    assert all(len(ids) == 20 for ids in cut)
    assert all(r.cut == (r.ids in cut) for r in answers.values())
    assert not any(token in policy.eos_ids for ids in cut + ended for token in ids[:-1])
    assert {3, 4, 5, 6} & {token for ids in cut for token in ids}  # eos of the file, not of policy


def test_greedy_at_temperature_0(fp32):
    policy, sampler = fp32
    theirs, ours = (answer(policy, s, requests(8), 0.0) for s in (sampler, HFSampler()))
    assert [theirs[i].ids for i in range(8)] == [ours[i].ids for i in range(8)]
    assert gap(policy, requests(8), theirs) < ROUNDING


def test_late_requests_are_answered_while_others_run(fp32):
    policy, sampler = fp32
    answers = answer(policy, sampler, requests(40), max_tokens=200)
    by_length = sorted(requests(40), key=lambda r: len(answers[r.slot].ids))
    early = by_length[-1]
    late = by_length[0]
    steps = len(answers[late.slot].ids)
    assert len(answers[early.slot].ids) > steps + 10
    with sampler.sync(policy):
        queue = deque([early])
        run = sampler.generate(queue, 1.0, 200)
        assert not any(islice(run, 5))
        queue.append(late)
        # Scheduling is a token ahead: another one has begun when this request joins.
        finished = [r.slot for part in islice(run, steps + 1) for r in part]
        assert finished == [late.slot]
        assert [r for part in run for r in part] == [answers[early.slot]]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_block_after_an_interrupted_one_is_right(engines, precision):
    policy, sampler = engines[precision]
    with pytest.raises(KeyboardInterrupt), sampler.sync(policy):
        next(sampler.generate(deque(requests(30)), 1.0, 20))
        assert sampler.running
        raise KeyboardInterrupt
    answers = answer(policy, sampler, requests(30))
    assert len(answers) == 30
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert gap(policy, requests(30), answers) < (ROUNDING if precision == "fp32" else 0.1)


# ---- on a GPU, which is not there ----

FULL = RuntimeError("CUDA Error: out of memory at /csrc/cumem_allocator.cpp:62")


@pytest.fixture
def on_gpu(monkeypatch):
    """A sampler whose engine only notes its calls; `free`: what the GPU has left, call by call."""
    sampler = VLLMSampler.__new__(VLLMSampler)
    sampler.gpu, sampler.llm, sampler.precision = True, Mock(), "bf16"
    sampler.kept, sampler.running = 10**9, {}
    sampler.llm.llm_engine.engine_core.engine_core.batch_queue = None
    sampler.free = []
    monkeypatch.setattr(torch.cuda, "empty_cache", Mock())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (sampler.free.pop(0), 80 * 10**9))
    return sampler


class Pool:
    """One of vLLM's, or its allocator: something that must not end before the process."""


@pytest.fixture
def pools(monkeypatch):
    """Weak references to a sleeping engine's pools, which end with it."""
    from vllm.device_allocator.cumem import CuMemAllocator

    parts = [Pool() for _ in range(4)]
    of_engine = Mock(allocator_and_pools={"weights": [parts[:2]], "kv_cache": [parts[2:]]})
    monkeypatch.setattr(CuMemAllocator, "get_instance", lambda: of_engine)
    return of_engine.allocator_and_pools, [weakref.ref(part) for part in parts]


def test_nothing_is_woken_in_order_to_end(on_gpu, pools):
    """There may be no room; and what is asleep is not released a second time."""
    held, references = pools
    on_gpu.llm.llm_engine.engine_core.shutdown.side_effect = held.clear
    on_gpu.close()
    assert on_gpu.llm.mock_calls == [call.llm_engine.engine_core.shutdown()]
    gc.collect()
    assert not held and all(reference() for reference in references)


def test_a_rank_that_fails_does_not_wait_for_the_others(on_gpu, pools, monkeypatch):
    """It would, in NCCL, at the end of the process group; without one, its error has no rank."""
    at_the_end = Mock()
    monkeypatch.setattr(atexit, "register", at_the_end)
    monkeypatch.setattr(distributed, "n_ranks", lambda: 4)
    with one_sentence("a prompt is too long"), closing(on_gpu):
        raise UserError("a prompt is too long")
    assert not on_gpu.llm.mock_calls
    assert at_the_end.mock_calls == [call(os._exit, 1)]
    on_gpu.close()  # without an error
    assert call.llm_engine.engine_core.shutdown() in on_gpu.llm.mock_calls


def test_an_engine_sleeps_after_each_block(on_gpu):
    """Its weights are those of the next sync, and need no copy. Merged ones arrive rounded."""
    on_gpu.free = [60 * 10**9, 59 * 10**9]
    with on_gpu.sync(with_adapters(small_policy(), "bf16")):
        on_gpu.llm.generate()
    calls = [one for one in on_gpu.llm.mock_calls if not one[0].startswith("llm_engine")]
    assert [name for name, _, _ in calls] == [
        "wake_up", "collective_rpc", "wake_up", "reset_prefix_cache", "generate", "sleep",
    ]
    assert calls[0] == call.wake_up(tags=["weights"]) and calls[-1] == call.sleep(level=2)
    arrived = dict(calls[1].kwargs["kwargs"]["weights_iterator"])
    assert all(arrived[name].dtype == torch.bfloat16 for name in arrived if "proj.weight" in name)
    assert on_gpu.kept == 2 * 10**9


def test_an_engine_whose_start_or_block_fails_sleeps(on_gpu):
    on_gpu.free = 4 * [60 * 10**9]
    for error in (FULL, ValueError("of the environment")):
        if error is FULL:
            on_gpu.llm.wake_up.side_effect = [None, FULL]  # no room for keys and values
        else:
            on_gpu.llm.wake_up.side_effect = None
        on_gpu.running["3"] = Request(0, [1], 0)
        with pytest.raises(type(error), match=str(error)[:12]), on_gpu.sync(small_policy()):
            raise error
        assert on_gpu.llm.mock_calls[-1] == call.sleep(level=2) and not on_gpu.running
        assert call.llm_engine.abort_request(["3"]) in on_gpu.llm.mock_calls


def test_a_sleep_that_leaves_gigabytes_stops_the_run(on_gpu):
    on_gpu.free = [60 * 10**9, 30 * 10**9]
    with one_sentence("31.0 GB of the GPU stay in use while vLLM sleeps"):
        with on_gpu.sync(small_policy()):
            pass


def test_what_is_wrong_is_said_in_a_sentence(fp32, monkeypatch, tmp_path):
    policy, sampler = fp32
    policy.save(tmp_path)
    with pytest.raises(UserError, match="cannot run .* with 99999 tokens.*max_model_len"):
        VLLMSampler(str(tmp_path), 99999, "fp32", 0.4, 8)
    engine = sampler.llm.llm_engine
    for error, reason in ((RuntimeError("no kernel for\nhead_dim=16"), "no kernel for head_dim"),
                          (AssertionError(), "AssertionError")):
        with patch.object(engine, "step", side_effect=error), sampler.sync(policy):
            with one_sentence(f"vLLM failed .{reason}.*: rerun .* --sampler transformers"):
                list(sampler.generate(deque(requests(1)), 1.0, 4))
    import vllm

    # cli.main has the sentence of a full GPU.
    monkeypatch.setattr(vllm, "LLM", Mock(side_effect=FULL))
    with pytest.raises(RuntimeError, match="out of memory"):
        VLLMSampler(str(tmp_path), 64, "fp32", 0.4, 8)
    with patch.object(engine, "step", side_effect=FULL), sampler.sync(policy):
        with pytest.raises(RuntimeError, match="out of memory"):
            list(sampler.generate(deque(requests(1)), 1.0, 4))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="pip install -r requirements-vllm.txt, or use --sam"):
        VLLMSampler("nowhere", 8, "fp32", 0.4, 8)


def test_a_plan_has_no_notes_of_vllm():
    assert helpers.python("run_alfworld.py", "--dry-run", "--sampler", "vllm").stderr == ""
