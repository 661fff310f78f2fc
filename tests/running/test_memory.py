"""What a run needs on a GPU, in CPU memory and on the disk; runs that cannot fit; the plan."""

import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from paw_min import train
from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.cli import parse_args
from paw_min.config import METHOD_PRESETS, Config
from paw_min.envs.benchmarks import NAMES, presets_of
from paw_min.model import lora, shard
from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.model.published import empty_model
from paw_min.model.reference import copied_to, make_reference
from paw_min.model.sampler import HFSampler, rows_that_fit
from paw_min.model.scoring import score_responses
from paw_min.running import memory, plan, runs, session
from paw_min.running.memory import Needs, beside_gpus, needs, on_gpu
from research.bench.memory import QWEN
from tests.helpers import FAMILIES, TOKEN_ROWS, make_policy, one_sentence
from tests.model_kinds import KINDS, write

N = 1_543_714_304
BASE = Config(micro_tokens=1000, kl_coef=0.1)


def of(*, ranks=1, precision="bf16", **settings) -> Needs:
    return needs(replace(BASE, **settings), empty_model(QWEN["1.5B"]), ranks, precision)


def test_needs_of_ppo_of_shards_and_of_vllm():
    ours = of()
    assert (ours.states, ours.gradients, ours.checkpoint) == (16 * N, 4 * N, 12 * N)
    # The head is tied, so the critic, one more decoder, has all parameters.
    assert (of(algo="ppo").states, of(algo="ppo").gradients) == (32 * N, 8 * N)
    assert of(algo="ppo", lora_rank=8).states == of(lora_rank=8).states + 16 * N
    sharded = of(shard=True, ranks=4)
    assert (sharded.states, sharded.gradients) == (4 * N, N)
    assert sharded.reference == ours.reference and sharded.checkpoint == 12 * N  # whole
    assert of(ranks=4).states == 16 * N
    assert of(kl_coef=0.0).reference == of(lora_rank=8).reference == 0
    # There are no gradients beside vLLM or the reference on a GPU.
    assert on_gpu(ours, vllm=0) == 16 * N and on_gpu(ours, vllm=24e9) == 12 * N + 24e9
    assert on_gpu(sharded, vllm=0) == 3 * N + sharded.reference
    assert beside_gpus(ours, 2) == 2 * ours.reference + 12 * N
    assert beside_gpus(of(lora_rank=8), 2) == 2 * 4 * N  # loading


@pytest.mark.parametrize("family, rank, precision", [
    ("qwen2", 0, "fp32"), ("llama", 0, "bf16"), ("qwen2", 4, "bf16"), ("llama", 4, "fp32"),
])
def test_needs_are_those_of_the_real_model(family, rank, precision, config, tmp_path):
    policy = make_policy(family, precision=precision)
    if rank:
        lora.attach(policy.model, rank, precision, 0, None)
    weights = sum(p.nbytes for p in policy.parameters())
    trained = [p for p in policy.parameters() if p.requires_grad]
    model = empty_model(policy.model.config)
    ours = needs(replace(BASE, lora_rank=rank), model, 1, precision)
    assert ours.states == weights + 12 * sum(map(torch.numel, trained))
    assert ours.gradients == sum(p.nbytes for p in trained)
    if not rank:  # With LoRA, there is none.
        policy.save(tmp_path)
        frozen = make_reference(BASE, policy, str(tmp_path))
        assert ours.reference == sum(p.nbytes for p in frozen.parameters())
    # The checkpoint, as it is on the disk.
    optimizer = torch.optim.AdamW(trained)
    sum((p**2).sum() for p in trained).backward()
    optimizer.step()
    run = runs.Run(config())
    run.save(policy, optimizer, 1)
    files = [run.checkpoint() / "trainer.pt", *run.checkpoint().glob("*.safetensors")]
    assert 0 < sum(path.stat().st_size for path in files) - ours.checkpoint < 60_000  # headers


@pytest.mark.parametrize("env", NAMES)
@pytest.mark.parametrize("preset, gpu_bytes", [("24gb", 24e9), ("80gb", 80e9), ("paper", 80e9)])
def test_presets_leave_their_gpu_room_for_a_pass(env, preset, gpu_bytes):
    cfg, _ = parse_args(env, presets_of(env), "", ["--preset", preset, "--data", "d"])
    (config,) = (QWEN[size] for size in QWEN if f"-{size}-" in cfg.model)
    ours = needs(cfg, empty_model(config), 1, "bf16")
    assert on_gpu(ours, cfg.vllm_memory * gpu_bytes) < 0.77 * gpu_bytes


# ---- the reference ----


@pytest.mark.parametrize("kind", ["phi3", "gpt_neox"])
def test_a_reference_in_the_type_of_its_passes_is_the_same_to_the_last_bit(kind, tmp_path):
    folder = write(kind, tmp_path, **KINDS[kind])
    plain = load_policy(folder, precision="bf16")
    frozen = make_reference(BASE, plain, folder)
    ours, its = (score_responses(policy, TOKEN_ROWS, 1000).logp for policy in (plain, frozen))
    assert ours == its


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # a tied head, and one of its own
def test_a_reference_is_dropped_from_the_gpu(family):
    """From the device of tensors without numbers, nothing could be copied back."""
    frozen = make_policy(family).requires_grad_(False)
    before = {name: tensor.data_ptr() for name, tensor in everything(frozen)}
    ids = torch.tensor([[3, 4, 5]])
    logits = frozen.model(ids).logits
    with pytest.raises(KeyError), copied_to(frozen, "meta"):
        assert {tensor.device.type for _, tensor in everything(frozen)} == {"meta"}
        raise KeyError
    assert {name: tensor.data_ptr() for name, tensor in everything(frozen)} == before
    assert torch.equal(frozen.model(ids).logits, logits)
    head, embedding = frozen.model.get_output_embeddings(), frozen.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == (family == "qwen2")
    assert not any(p.requires_grad for p in frozen.parameters())


def everything(module):
    return [*module.named_parameters(), *module.named_buffers()]


def test_the_communicator_of_shards_is_made_before_vllm_wakes(monkeypatch):
    """Its first call makes it. Policies are sharded before the first sync."""
    made = []
    monkeypatch.setattr(distributed, "all_reduce", lambda tensors: made.append(tensors[0].device))
    monkeypatch.setattr(shard, "init_device_mesh", lambda *args: None)
    monkeypatch.setattr(shard, "fully_shard", Mock(side_effect=KeyboardInterrupt))
    policy = make_policy()
    with pytest.raises(KeyboardInterrupt):
        shard.shard_policy(policy)
    assert made == [policy.device]


# ---- a run ----

Usage = namedtuple("Usage", "free")


@pytest.mark.parametrize("lacks, settings, sentence", [
    ("gpu", dict(sampler="vllm", vllm_memory=0.5, lora_rank=4, shard=True),
     "on cuda .*, vLLM 40.00; .* 3.00 GB are free: use a smaller --model, or a smaller --lora"),
    ("gpu", dict(sampler="vllm"), "on cuda .* use adapters .--preset 24gb, .*, or a smaller --mod"),
    ("cpu", {}, "of CPU memory .*, 0.00 GB are free: use adapters .--preset 24gb, .* --model.$"),
    ("disk", {}, "of disk .*, 0.00 GB are free: use another --out, or adapters .--preset 24gb"),
])
def test_a_run_that_cannot_fit_is_stopped(lacks, settings, sentence, monkeypatch, tmp_path):
    free = dict(gpu=80e9, cpu=80e9, disk=80e9) | {lacks: 3e9 if lacks == "gpu" else 1}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["gpu"], 80e9))
    monkeypatch.setattr(memory, "free_cpu", lambda: free["cpu"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(free["disk"]))
    monkeypatch.setattr(memory, "load_config", lambda folder: QWEN["1.5B"])
    cfg = replace(BASE, out=str(tmp_path), name="not/there", **settings)
    with one_sentence(f"^the run needs [0-9.]+ GB {sentence}"):
        memory.check(cfg, "", "bf16", "cuda")
    free[lacks] = 80e9
    assert len(memory.check(cfg, "", "bf16", "cuda")) == 3


def test_a_run_stops_before_the_data_are_loaded(config, monkeypatch):
    """An evaluation does not stop."""
    monkeypatch.setattr(memory, "free_cpu", lambda: 0.0)
    train.train(config(name="e"), eval_only=True)
    monkeypatch.setattr(session, "find_tasks", lambda cfg: pytest.fail("too late"))
    with pytest.raises(UserError, match="the run needs .* 0.00 GB are free: use "):
        train.train(config())


@pytest.mark.parametrize("line, files, free", [
    # A host without limits.
    ("0::/a", {"a/memory.max": "max", "a/memory.current": "9", "a/memory.stat": "inactive_file 1"},
     3072),
    # A container of version 2, which sees itself as the root; files in its cache can be freed.
    ("0::/", {"memory.max": "900", "memory.current": "500", "memory.stat": "inactive_file 200"},
     600),
    # A limit of the group above.
    ("0::/a/b", {"a/memory.max": "900", "a/memory.current": "800",
                 "a/memory.stat": "anon 7\ninactive_file 1"}, 101),
    # Version 1: the path is that of the host, the files are those of the container.
    ("4:memory:/docker/5d", {"memory/memory.limit_in_bytes": "700",
                             "memory/memory.usage_in_bytes": "300",
                             "memory/memory.stat": "cache 9\ntotal_inactive_file 50"}, 450),
    ("4:cpu,cpuacct:/", {"memory.max": "900"}, 3072),
])
def test_a_container_has_the_memory_of_its_limit(line, files, free, tmp_path):
    """As `docker run --memory`, where /proc/meminfo is that of the host."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 2 kB\nSwapFree: 1 kB\n")
    assert memory.free_cpu(tmp_path) == 3072  # a kernel without control groups
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/\n{line}\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert memory.free_cpu(tmp_path) == free


@pytest.fixture
def four_ranks(monkeypatch):
    """This process becomes one of torchrun's, the first, as soon as its function is called."""

    def begin(rank: int = 0) -> None:
        for name, value in (("LOCAL_WORLD_SIZE", 4), ("WORLD_SIZE", 4), ("RANK", rank),
                            ("LOCAL_RANK", rank), ("TORCHELASTIC_RUN_ID", 1)):
            monkeypatch.setenv(name, str(value))

    return begin


def test_memory_is_shared_by_the_ranks_of_a_machine(finished, config, four_ranks, monkeypatch):
    def of_machine() -> float:
        return memory.check(config(), session.start_model(config()), "fp32", "cpu")[0].needed

    alone = of_machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert of_machine() == alone  # A cluster has set it, not torchrun.
    four_ranks()
    assert of_machine() == 4 * alone


@pytest.mark.parametrize("sampler", ["transformers", "vllm"])  # vllm: for another machine
def test_the_plan_of_several_ranks_is_one_and_counts_the_workers_of_all(
    sampler, config, four_ranks, capsys
):
    cfg = config(workers=3, sampler=sampler)
    plan.print_memory(cfg)
    assert "; 3 workers on top, in ALFWorld up to 9.00 GB" in capsys.readouterr().out
    four_ranks()
    plan.print_memory(cfg)
    assert "; 12 workers on top, in ALFWorld up to 36.00 GB" in capsys.readouterr().out
    four_ranks(rank=2)
    plan.dry_run(cfg)
    assert not capsys.readouterr().out


def test_more_ranks_than_gpus(four_ranks, monkeypatch):
    """All ranks say so, before any of them waits for the others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    four_ranks(rank=0)
    with one_sentence("started 4 processes .* has 1 GPU: use --nproc-per-node 1"):
        distributed.join()


def test_a_process_with_a_device_has_no_attention_of_cudnn():
    """vLLM switches it off as well, so that both samplers compute alike."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    distributed.join()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_run_with_a_checkpoint_needs_the_disk_for_one_more(finished, config):
    needed = [memory.check(config(name=name), session.start_model(config()), "fp32", "cpu")[-1]
              for name in ("r", "new")]
    assert 2 * needed[0].needed == needed[1].needed > 0


def test_a_plan_for_a_gpu_that_is_not_here(model, monkeypatch, capsys):
    """It says first what the run needs, and then what this machine lacks, one reason per line."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    words = ["--preset", "paper", "--data", "no/data", "--model", model]
    cfg, _ = parse_args("alfworld", presets_of("alfworld"), "", words)
    with pytest.raises(UserError) as error:
        plan.dry_run(cfg)
    printed = capsys.readouterr().out
    assert "and 0.4 of it for vLLM" in printed and "No GPU was found here" in printed
    assert printed.count("memory  ") == 1  # nothing of this machine
    first, second = sorted(str(error.value).splitlines(), key=lambda line: "no/data" in line)
    assert "--sampler vllm needs vllm" in first and "no/data" in second


@pytest.mark.parametrize("settings, line", [
    ({}, "method    grpo with paw: 1.0 x cmae (rho 0.2), alpha 0.75, lambda adaptive"),
    (dict(paw=False), "method    grpo without a world model"),
    (METHOD_PRESETS["echo"], "method    grpo with paw: 0.05 x ce, alpha 1.0, lambda constant"),
    (dict(updates=0, eval_every=5), "evaluate  1 times"),
    (dict(updates=12, eval_every=5), "evaluate  4 times"),
])
def test_a_plan_names_the_method_and_counts_evaluations(settings, line, config, capsys):
    plan.dry_run(config(**settings))
    assert f"\n{line}" in capsys.readouterr().out


# ---- during a run ----


def test_the_optimizer_on_a_gpu_needs_no_copies_of_what_it_trains(monkeypatch):
    policy = make_policy()
    assert not session.make_optimizer(policy, 1e-3, 0.95).defaults["fused"]
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    assert session.make_optimizer(policy, 1e-3, 0.95).defaults["fused"]


def test_no_gradient_is_stored_in_a_rollout():
    policy = make_policy()
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    with HFSampler().sync(policy):
        assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_on_a_gpu_takes_half_of_the_free_memory(family, precision):
    """Beside the cache that transformers fills, in the type of the passes."""
    policy = make_policy(family, precision=precision)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        cache = policy.model(torch.full((1, 50), 3), use_cache=True).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    rows = rows_that_fit(policy, 10**9, prompt_tokens=30, new_tokens=20)
    counted = rows * (stored + 7 * 4 * policy.model.config.vocab_size)
    assert 0.1 * 10**9 < counted < 0.5 * 10**9
    assert rows_that_fit(policy, 1, 30, 20) == 1
