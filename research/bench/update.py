"""Speed and memory of the forward and backward passes, compared with TRL and a plain trainer.

    python -m research.bench.update {alfworld,webshop,search} [--gpu] [--out FILE]

All get the same rows, weights and loss (clipped surrogate, entropy bonus, clipped MAE on the
observations of three rows in four). A pass takes MICRO_ROWS rows; in paw_min, whose limit is a
number of tokens, half as many as the positions that TRL pads them to:

    plain       rows padded to the longest of the mini-batch; logits, log_softmax and entropy at all
                positions (ALFWorld only: the others need too much memory)
    trl         the scoring of TRL's GRPOTrainer and its padding: prompts on the left, completions
                (responses and observations) on the right, each to the longest of the generation
                batch; its head computes logits in tiles, on a CPU at all positions
    trl_valid   the same, with logits at completion tokens only, as TRL does where it has Triton; on
                a GPU, `trl` does so itself
    ours        paw_min: micro-batches of rows of similar length (batches.py), logits at the scored
                positions only and in tiles (head.py)

Row lengths: SHAPES. The generation batch has 1,024 rows, fewer than an update of the paper; the
mini-batch has 256 of them. Times are those of KEEP rows: neighbors by length, since these can share
a pass in paw_min. Memory is that of the largest pass over the mini-batch. Model: random weights,
the config of Qwen2.5-1.5B with its vocabulary of 151,936. On a CPU the hidden size is 64 instead of
1,536, which keeps the head's fraction of the work about the same, and rows have half their length.
fp32 on a CPU, bf16 on a GPU; all recompute activations in the backward pass (gradient
checkpointing).

Each measurement runs in a process of its own. Tokens are counted without padding. Time: CPU seconds
of one thread (GPU: seconds), the best of --repeats. Memory: the peak of the tensors in a pass,
without weights and gradients. Losses and gradients are compared with ours: |difference| /
|gradient|, worst parameter. A benchmark takes two to six minutes; the results of the others are
kept. TRL is in requirements-test.txt; left out if it is not installed. --tiny: a rehearsal for
research/bench/gpu.sh, in one process and without TRL; its numbers mean nothing.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import paw_min  # noqa: F401 - before torch, for OMP_WAIT_POLICY

# isort: split
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from paw_min import cmae, losses
from paw_min.base.errors import user_errors
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark
from paw_min.model.batches import micro_batches, split
from paw_min.model.policy import Policy
from paw_min.rows import Episode, Transition

if not find_spec("textworld"):  # of ALFWorld, an update needs R_max only, which is the default
    BENCHMARKS["alfworld"] = Benchmark(load=None, prompts={}, parse=None)

# Tokens of Qwen2.5: (median, standard deviation of the logarithm, minimum, maximum). Prompts and
# observations: measured on the paper's prompts with our environments (ALFWorld: games of 22
# receptacles and more than 20 objects; WebShop: the generated shop, observations cut at 512;
# search: three passages of 100 words per query). Responses: only the limit of 512 is published; the
# rest is an assumption, as is the number of queries before a prompt of search (0 to 3).
RESPONSE = (80, 0.6, 20, 512)
SHAPES = {
    "alfworld": {"prompt": (460, 0.09, 424, 608), "response": RESPONSE, "obs": (16, 0.5, 3, 43)},
    "webshop": {"prompt": (760, 0.35, 190, 1358), "response": RESPONSE, "obs": (150, 0.6, 3, 424)},
    "search": {"prompt": (660, 0.7, 174, 1532), "response": RESPONSE, "obs": (415, 0.1, 330, 512)},
}
GENERATION_BATCH = 1024
MINI_BATCH = 256
SCALE = {"cpu": 0.5, "cuda": 1.0}
KEEP = {"cpu": 4, "cuda": 64}
MICRO_ROWS = {"cpu": 2, "cuda": 8}
SELECTED = 0.75  # fraction of the rows, Eq. 4
VOCABULARY = 151_936
QWEN = dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2)  # Qwen2.5-1.5B
NARROW = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
REST = dict(intermediate_size=8960, num_hidden_layers=28, tie_word_embeddings=True)


def make_rows(shape: str, n: int, vocabulary: int, scale=1.0, seed: int = 0) -> list[Transition]:
    """Rows of random tokens with the lengths of a benchmark, times `scale`."""
    rng = random.Random(seed)

    def tokens(kind: str) -> list[int]:
        median, spread, low, high = SHAPES[shape][kind]
        length = min(max(median * rng.lognormvariate(0, spread), low), high)
        return [rng.randrange(2, vocabulary) for _ in range(max(1, round(scale * length)))]

    rows = []
    for i in range(n):
        prompt = tokens("prompt")
        response = tokens("response")
        obs = tokens("obs")
        rows.append(
            Transition(
                prompt, response, obs, response_logps=[-1.0] * len(response), reward=0.0,
                valid=True, observation=f"{i}", group=0, trajectory=i,
            )
        )
    return rows


def make_episodes(shape: str, device: str, n_rows: int, vocabulary: int, seed) -> list[Episode]:
    """Rows as groups of four episodes of four rows; every second episode is won."""
    rows = make_rows(shape, n_rows, vocabulary, SCALE[device], seed)
    episodes = []
    for number in range(len(rows) // 4):
        steps = rows[4 * number : 4 * number + 4]
        for row in steps:
            row.group = number // 4
            row.trajectory = number
        steps[-1].reward = 10.0 * (number % 2)
        episodes.append(Episode("", number // 4, number, steps))
    return episodes


def make_policy(config: PretrainedConfig, device: str, precision: str) -> Policy:
    """A policy with random weights; its tokenizer is never used on text."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = Policy(model, tokenizer, 1.0, precision)
    model.gradient_checkpointing_enable()
    return policy.train()


def versions(device: str) -> dict:
    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, 1 thread"
    return {"device": name, "versions": found}


def joint_loss(logp, entropy, response_mask, obs_mask, advantage, n_tokens: int, n_rows: int):
    """A micro-batch's part of the loss; however the rows are split, the parts have the same sum."""
    share = response_mask.sum() / n_tokens
    surrogate, _ = losses.clipped_surrogate(logp, logp.detach(), advantage, response_mask)
    bonus = losses.masked_mean(entropy, response_mask)
    world_model = cmae.clipped_mae(logp, obs_mask, rho=0.2).sum() / n_rows
    return share * (surrogate - 0.001 * bonus) + world_model


class Widths(NamedTuple):
    """Tokens to pad to."""

    row: int  # longest row of the mini-batch
    prompt: int  # longest prompt of the generation batch
    completion: int  # longest response with its observation
    budget: int  # tokens per pass of paw_min, --micro-tokens


def sequences(rows, with_obs) -> list[list[int]]:
    return [r.prompt_ids + r.response_ids + r.obs_ids * keep for r, keep in zip(rows, with_obs)]


def plain_parts(policy: Policy, rows, with_obs, widths: Widths, batches):
    """The plain trainer: (logp, entropy, response mask, observation mask, rows) of each batch."""
    for micro in batches:
        ids = torch.full((len(micro), widths.row), policy.pad_id)  # (B, L)
        present, response_mask, obs_mask = (torch.zeros_like(ids) for _ in range(3))
        for line, number in enumerate(micro):
            row = rows[number]
            tokens = row.prompt_ids + row.response_ids + row.obs_ids * with_obs[number]
            response = len(row.prompt_ids)  # where it begins
            obs = response + len(row.response_ids)
            ids[line, : len(tokens)] = torch.tensor(tokens)
            present[line, : len(tokens)] = 1
            response_mask[line, response:obs] = 1
            obs_mask[line, obs : len(tokens)] = 1
        on_device = [x.to(policy.device) for x in (ids, present, response_mask, obs_mask)]
        ids, present, response_mask, obs_mask = on_device
        bf16 = policy.precision == "bf16"
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=bf16):
            logits = policy.model(ids, attention_mask=present, use_cache=False).logits
        all_logp = logits[:, :-1].float().log_softmax(-1)  # (B, L - 1, V)
        logp = all_logp.gather(-1, ids[:, 1:, None])[..., 0]  # (B, L - 1)
        entropy = -(all_logp.exp() * all_logp).sum(-1)  # (B, L - 1)
        yield logp, entropy, response_mask[:, 1:], obs_mask[:, 1:], micro
        del logits, all_logp


def trl_parts(policy: Policy, rows, with_obs, widths: Widths, batches):
    """The same by TRL. Observations are part of the completions, as in its multi-turn rollouts."""
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(policy.model, outputs=("log_probs", "entropy"))  # as GRPOTrainer does
    precision = {"fp32": "no", "bf16": "bf16"}[policy.precision]
    accelerator = Accelerator(mixed_precision=precision, cpu=policy.device.type == "cpu")
    trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(report_to=[]))
    score = GRPOTrainer._get_per_token_logps_and_entropies

    def part(micro):
        ids = torch.full((len(micro), widths.prompt + widths.completion), policy.pad_id)  # (B, P+C)
        present, response_mask, obs_mask = (torch.zeros_like(ids) for _ in range(3))
        for line, number in enumerate(micro):
            row = rows[number]
            tokens = row.prompt_ids + row.response_ids + row.obs_ids * with_obs[number]
            # Prompts are padded on the left, so that all completions begin at the same column.
            response = widths.prompt
            first = response - len(row.prompt_ids)
            obs = response + len(row.response_ids)
            end = first + len(tokens)
            ids[line, first:end] = torch.tensor(tokens)
            present[line, first:end] = 1
            response_mask[line, response:obs] = 1
            obs_mask[line, obs:end] = 1
        on_device = [x.to(policy.device) for x in (ids, present, response_mask, obs_mask)]
        ids, present, response_mask, obs_mask = on_device
        logp, entropy, _ = score(
            trainer, policy.model, ids, present, widths.completion, compute_entropy=True
        )  # (B, C), (B, C)
        completion = slice(widths.prompt, None)
        return logp, entropy, response_mask[:, completion], obs_mask[:, completion], micro

    return map(part, batches)


def our_parts(policy: Policy, rows, with_obs, widths: Widths, batches):
    """The same by paw_min."""
    for batch in micro_batches(policy, rows, [*range(len(rows))], with_obs, widths.budget):
        yield *policy(batch), batch.response_mask, batch.obs_mask, batch.index


PARTS = {"plain": plain_parts, "trl": trl_parts, "trl_valid": trl_parts, "ours": our_parts}


def measure(shape: str, variant: str, what: str, device: str, samples: Path) -> dict:
    """Forward and backward passes over rows of a mini-batch, in this process.

    what: "time", over KEEP of its rows, or "memory", of its largest pass. samples: file to write a
    part of the gradient to.
    """
    torch.set_num_threads(1)
    size = NARROW if device == "cpu" else QWEN
    micro_rows = MICRO_ROWS[device]
    config = Qwen2Config(vocab_size=VOCABULARY, **size, **REST, pad_token_id=0, eos_token_id=1)
    policy = make_policy(config, device, "fp32" if device == "cpu" else "bf16")
    rows = make_rows(shape, GENERATION_BATCH, VOCABULARY, SCALE[device])
    with_obs = [random.Random(i).random() < SELECTED for i in range(len(rows))]
    prompts = [len(row.prompt_ids) for row in rows]
    lengths = [len(x) for x in sequences(rows, with_obs)]
    prompt = max(prompts)
    completion = max(n - p for n, p in zip(lengths, prompts))
    lengths = lengths[:MINI_BATCH]
    longest = max(lengths)
    half = micro_rows * (prompt + completion) // 2
    widths = Widths(longest, prompt, completion, budget=max(longest, half))
    parts = split(lengths, widths.budget)
    by_length = sorted(range(MINI_BATCH), key=lengths.__getitem__)
    if what == "memory" and variant == "ours":
        sizes = [len(part) * lengths[part[0]] for part in parts]  # with padding
        chosen = parts[sizes.index(max(sizes))]
    elif what == "memory":
        chosen = by_length[-micro_rows:]
    else:  # neighbors by length, which paw_min passes together
        stride = MINI_BATCH * micro_rows // KEEP[device]
        first = range((stride - micro_rows) // 2, MINI_BATCH, stride)
        chosen = sorted(i for k in first for i in by_length[k : k + micro_rows])
    rows = [rows[i] for i in chosen]
    with_obs = [with_obs[i] for i in chosen]
    advantage = torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).to(device)
    n_tokens = sum(len(r.response_ids) for r in rows)
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    batches = torch.arange(len(rows)).split(len(rows) if what == "memory" else micro_rows)
    passes = PARTS[variant](policy, rows, with_obs, widths, batches)

    def learn() -> float:
        total = 0.0
        for *scored, micro in passes:
            part = joint_loss(*scored, advantage[micro], n_tokens, len(rows))
            part.backward()
            total += part.item()
            del scored, part
        return total

    # This function decides whether TRL's head scores the valid positions only.
    valid = patch("trl.trainer.utils._use_triton", lambda device: True)
    start = now(device)
    with valid if variant == "trl_valid" else nullcontext():
        if what == "time":
            total = learn()
            peak = None
        else:
            total, peak = tensor_peak(learn, device)
    seconds = now(device) - start
    sampled = {name: p.grad.flatten()[:: 1 + p.numel() // 2**16].cpu().clone()
               for name, p in policy.named_parameters()}
    torch.save(sampled, samples)
    return {
        "seconds": seconds,
        "peak_mb": peak and peak / 2**20,
        "loss": total,
        "rows": len(rows),
        "tokens": sum(lengths[i] for i in chosen),
        "widths": widths._asdict(),
        "passes": {"TRL": MINI_BATCH // micro_rows, "ours": len(parts)},  # of the mini-batch
        "parameters": policy.model.num_parameters(),
        **versions(device),
    }


def tensor_peak(function: Callable, device: str) -> tuple[float, int]:
    """The result of a function, and the peak of the tensors that it allocates, in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        return function(), torch.cuda.max_memory_allocated() - base
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as log:
        result = function()
    recorded = log.profiler.kineto_results.events()
    events = [event for event in recorded if event.name() == "[memory]"]
    events.sort(key=methodcaller("start_ns"))
    return result, max(accumulate(event.nbytes() for event in events))


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


# glibc's malloc, for a CPU. Times: keep freed memory, since getting it back from the system takes
# as long as the computation. Peaks: return it at once, so that the peak is that of memory in use.
MALLOC = {
    "time": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
    "memory": {"MALLOC_MMAP_THRESHOLD_": str(2**22)},
}


def child(what: str, *arguments) -> dict:
    """Run this script in a process of its own -> its last line of output, JSON."""
    command = [sys.executable, "-m", "research.bench.update", *map(str, arguments)]
    env = os.environ | MALLOC[what] | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}: see above.")
    return json.loads(done.stdout.splitlines()[-1])


def distance(one: Path, other: Path) -> float:
    """Largest relative difference of two gradients over the parameters.

    Gradients that are 0 up to rounding (a key's bias does not change the attention weights) are
    compared with the largest gradient instead of their own.
    """
    gradients = torch.load(one)
    others = torch.load(other)
    floor = 1e-4 * max(gradient.norm() for gradient in gradients.values())
    found = []
    for name, gradient in gradients.items():
        apart = (gradient - others[name]).norm() / max(gradient.norm(), floor)
        found.append(apart.item())
    return max(found)


def write(report: dict, out: str) -> None:
    for name, value in report.items():
        print(f"{name:28}{value}")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten to {out}")


def make_tiny() -> None:
    global VOCABULARY, GENERATION_BATCH, MINI_BATCH
    VOCABULARY = 500
    GENERATION_BATCH = 8
    MINI_BATCH = 8
    REST.update(intermediate_size=32, num_hidden_layers=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES, help="lengths of the rows")
    parser.add_argument("--gpu", action="store_true", help="the size of Qwen2.5-1.5B, on a GPU")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of a few seconds")
    parser.add_argument("--repeats", type=int, default=1, help="time: the best of so many")
    parser.add_argument("--out", type=Path, default="research/bench/results/update.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)  # variant, what, gradient file
    args = parser.parse_args()
    device = "cuda" if args.gpu else "cpu"
    if args.child:
        variant, what, samples = args.child
        print(json.dumps(measure(args.shape, variant, what, device, Path(samples))))
        return

    if args.tiny:
        make_tiny()
    flags = ["--gpu"] * args.gpu
    variants = [v for v in PARTS if v != "plain" or args.shape == "alfworld"]
    variants = [v for v in variants if v != "trl_valid" or device == "cpu"]
    if args.tiny or not find_spec("trl"):
        variants = [v for v in variants if not v.startswith("trl")]
    seconds = {}
    peak = {}
    result = {}
    apart = {}
    with tempfile.TemporaryDirectory() as folder:

        def run(variant: str, what: str) -> dict:
            samples = Path(folder) / variant
            if args.tiny:
                one = measure(args.shape, variant, what, device, samples)
            else:
                one = child(what, args.shape, *flags, "--child", variant, what, samples)
            shown = f"{one['seconds']:.1f} s" if what == "time" else f"{one['peak_mb']:.0f} MB"
            print(f"{variant:10} {shown}", flush=True)
            return one

        for variant in variants:
            peak[variant] = run(variant, "memory")["peak_mb"]
        for variant in variants * args.repeats:
            one = result[variant] = run(variant, "time")
            seconds[variant] = min(one["seconds"], seconds.get(variant, one["seconds"]))
        for variant in variants[:-1]:
            apart[variant] = distance(Path(folder) / variant, Path(folder) / "ours")
    if not max(apart.values(), default=0.0) < (1e-3 if device == "cpu" else 5e-2):
        raise SystemExit(f"The gradients differ by {apart}: see tests/test_policy.py.")
    ours = result["ours"]
    report = {
        "parameters": ours["parameters"],
        "rows": ours["rows"],
        "tokens": ours["tokens"],
        "widths": ours["widths"],
        "passes": ours["passes"],
        "tokens_per_s": {v: round(ours["tokens"] / seconds[v], 1) for v in variants},
        "peak_mb": {v: round(peak[v]) for v in variants},
        "speed_ratio": {v: round(seconds[v] / seconds["ours"], 2) for v in variants[:-1]},
        "memory_ratio": {v: round(peak["ours"] / peak[v], 2) for v in variants[:-1]},
        "gradient_difference": {v: float(f"{x:.1e}") for v, x in apart.items()},
        "loss_difference": {v: abs(result[v]["loss"] - ours["loss"]) for v in apart},
        "device": ours["device"],
        "versions": ours["versions"] | ({"trl": version("trl")} if "trl" in variants else {}),
    }
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    kept = {shape: kept[shape] for shape in SHAPES if shape in kept} | {args.shape: report}
    command = " ".join(["python -m research.bench.update", "SHAPE", *flags])
    write({"command": command, "vocabulary": VOCABULARY} | kept, args.out)


if __name__ == "__main__":
    with user_errors():
        main()
