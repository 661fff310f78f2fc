"""A check of every part of a run on this machine: short runs with vLLM, and a line per part.

    python -m research.bench.smoke [--model NAME] [--vllm-memory SHARE] [--only PART]

    full        run_alfworld.py, all weights: the evaluation at the start, two updates with a sync
                before each, the evaluation at the end; a third update by resuming, --workers 2
    LoRA        two updates; how much of what adapters learn at the preset's rate is in the weights
                for vLLM; a pass of 16,384 tokens, in the longest rows of the preset
    pass        such a pass with all weights
    two-ranks   two updates by torchrun with --shard, where two GPUs are

That takes about eight minutes on a GPU, most of them for vLLM's starts. A line is printed as soon
as its part has ended. The exit code is 1 if a part is WRONG; its line has the remedy. A part that
does not fit on the card is skipped. --tiny: the stand-in model, on a CPU with vLLM's CPU build.
"""

import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from paw_min.base import distributed
from paw_min.base.errors import is_out_of_memory, user_errors
from paw_min.base.flags import Parser
from paw_min.cli import parse_config
from paw_min.config import Config
from paw_min.envs.benchmarks import presets_of
from paw_min.metrics import peak_memory
from paw_min.model import lora
from paw_min.model.batches import micro_batches
from paw_min.model.loading import load_policy
from paw_min.model.scoring import MAX_GAP
from paw_min.model.vllm_sampler import KEPT
from paw_min.rows import TokenRow
from paw_min.running import memory
from paw_min.running.runs import newest_checkpoint, read_metrics
from paw_min.running.session import make_optimizer, start_model
from paw_min.update import gradient_step

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"  # of the presets paper and 24gb
PARTS = ("full", "LoRA", "pass", "two-ranks")
RUN = (
    "run_alfworld.py --sampler vllm --precision bf16 --updates 2 --groups 2 --group-size 4 "
    "--eval-tasks 4 --eval-every 2 --grad-checkpointing"
)
REAL = (
    "--prompt paper --max-prompt-tokens 2048 --max-response-tokens 128 --max-turns 8 "
    "--mini-batch 32 --micro-tokens 8192"
)
TINY = "--max-response-tokens 16 --max-turns 3 --mini-batch 8"
RATE = {"real": 3e-5, "tiny": 3e-3}  # An update moves the policy by far more than rounding (KL).
# Nats. A policy that is nearly certain, as the stand-in is, has a first gap of 0, and more later.
SMALL_GAP = {"real": 0.01, "tiny": 0.05}
LORA = "--lora-rank 16"
LORA_RATE = 1e-5  # of the presets 24gb and 80gb
TWO_RANKS = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@dataclass
class Part:
    name: str
    right: bool
    said: str  # its numbers, or the remedy


@dataclass
class Machine:
    """What this machine has."""

    gpus: int
    gpu_bytes: float  # of the first one


def this_machine() -> Machine:
    n = torch.cuda.device_count()
    return Machine(n, torch.cuda.get_device_properties(0).total_memory if n else math.inf)


def lacking(part: str, cfg: Config, machine: Machine) -> str:
    """What this machine does not have for a part; "" if it has all."""
    if part == "two-ranks" and machine.gpus < 2:
        return "2 GPUs"
    if not machine.gpus:
        return ""
    needs = memory.of_folder(cfg, start_model(cfg), "bf16")
    vllm = 0 if part == "pass" else cfg.vllm_memory * machine.gpu_bytes
    needed = memory.on_gpu(needs, vllm)
    return f"{needed / 1e9:.0f} GB" if needed > machine.gpu_bytes else ""


# ---- runs ----


def run(words: list[str], folder: Path, size: str) -> Iterator[Part]:
    """The parts of a run, each as soon as it has ended. folder: of the run. size: real, tiny."""
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = []
    before = read_metrics(folder)
    shown = len(before)
    first_gap = before[1]["sampler_gap"] if shown > 1 else None
    for text in process.stdout:
        output.append(text)
        if engine := re.search("^vLLM: (.*)", text):
            yield Part("start", True, engine[1])
        for line in read_metrics(folder)[shown:]:
            shown += 1
            yield from parts_of_update(line, first_gap, SMALL_GAP[size])
            first_gap = first_gap or line.get("sampler_gap")
    code = process.wait()
    if not any(text.startswith("vLLM: ") for text in output):
        yield Part("start", False, (
            "VLLM_LOGGING_LEVEL=INFO shows what vLLM does; where its compiler fails: "
            "VLLM_USE_AOT_COMPILE=0, then VLLM_DISABLE_COMPILE_CACHE=1"
        ))
    last = "done"
    if code:
        said = "".join(output).strip()
        print(said, file=sys.stderr, flush=True)
        last = said.splitlines()[-1] if said else "no output"
        if "the sampler's log-probabilities" in last:
            last += " Or try VLLM_USE_V2_MODEL_RUNNER=0."
    yield Part(f"exit code {code}", code == 0, last)


def parts_of_update(line: dict, first_gap: float | None, small: float) -> Iterator[Part]:
    """What a line of metrics.jsonl says of its parts.

    first_gap: that of the first update. small: a gap that is right in any case.
    """
    if "sampler_gap" not in line:
        yield Part("evaluation", True, f"success {line['eval_success']:.2f}")
        return
    # Rounding is much the same in every update. Weights that did not arrive add what was learned.
    limit = MAX_GAP["bf16"]
    if first_gap is not None:
        limit = min(limit, max(2 * first_gap, small))
    gap = line["sampler_gap"]
    yield Part(f"sync {line['update']}", gap < limit,
               f"gap {gap:.1e} nats a token (limit {limit:.1e})")
    yield Part(
        "generation", line["tokens_generated"] > 0,
        f"{line['tokens_per_s_generate']:,.0f} tokens/s, sync {line['seconds_sync']:.1f} s",
    )
    mfu = f", MFU {line['mfu']:.0%}" if "mfu" in line else ""
    yield Part(
        f"update {line['update']}", 0 < line["grad_norm"] < math.inf,
        f"{line['tokens_per_s_update']:,.0f} tokens/s{mfu}, KL {line['approx_kl']:.1e}, "
        f"{line['memory_gb']:.1f} GB",
    )
    if "asleep_gb" in line:
        kept = line["asleep_gb"]
        yield Part("sleep", kept < KEPT / 1e9, f"vLLM keeps {kept:.1f} GB")


def optimizer_steps(run_folder: Path) -> float:
    """How many steps the optimizer of the newest checkpoint has made; 0 without a checkpoint."""
    checkpoint = newest_checkpoint(run_folder)
    if not checkpoint:
        return 0
    stored = torch.load(checkpoint / "trainer.pt", weights_only=True, mmap=True)
    return max(float(state["step"]) for state in stored["optimizer"]["state"].values())


def resumed(before: float, after: float) -> Part:
    """Did a resumed run continue with its optimizer? before, after: its steps."""
    return Part("resume", 0 < before < after,
                f"{before:.0f} steps of the optimizer before, {after:.0f} after")


# ---- in this process ----


@torch.no_grad()
def adapters_arrive(folder: str, device: str) -> Part:
    """How much of a first step of AdamW at the preset's rate is in the weights that vLLM gets?

    That step changes each number of B by the rate. The merged weights M should have what it adds to
    the start's W: the share <M - W, s B A> / <s B A, s B A> is 1. Rounded to the nearest numbers,
    M would be W.
    """
    policy = load_policy(folder, device=device, precision="bf16")
    lora.attach(policy.model, 16, "bf16", 0, None)
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.model.named_parameters():
        if ".lora_B." in name:
            signs = torch.randint(2, weight.shape, generator=generator) * 2.0 - 1
            weight.copy_(LORA_RATE * signs)
    layers = {name: part for name, part in policy.model.named_modules() if hasattr(part, "lora_A")}
    arrived = total = 0.0
    for name, merged in lora.full_weights(policy.model, "bf16"):
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and name.endswith(".weight"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            learned = lora.SCALE * (b @ a)  # s B A
            change = merged.float() - layer.base_layer.weight.float()
            arrived += (change * learned).sum().item()
            total += learned.square().sum().item()
    share = arrived / total
    return Part("adapters arrive", 0.9 < share < 1.1,
                f"{share:.1%} of a step at --lr {LORA_RATE} is in what vLLM gets")


def longest_pass(cfg: Config, device: str) -> Part:
    """A pass of cfg.micro_tokens whose rows are as long as they can be, and a step."""
    policy = load_policy(start_model(cfg), device=device, precision="bf16")
    if cfg.lora_rank:
        lora.attach(policy.model, cfg.lora_rank, "bf16", cfg.seed, None)
    policy.model.gradient_checkpointing_enable()
    policy.train()
    optimizer = make_optimizer(policy, cfg.lr, cfg.beta2)
    draw = random.Random(0)
    sizes = cfg.max_prompt_tokens, cfg.max_response_tokens, cfg.max_obs_tokens
    n = max(1, cfg.micro_tokens // sum(sizes))
    known = policy.model.config.vocab_size
    rows = [TokenRow(*([draw.randrange(known) for _ in range(size)] for size in sizes))
            for _ in range(n)]
    name = f"{n * sum(sizes):,} tokens"
    try:
        for batch in micro_batches(policy, rows, list(range(n)), [True] * n, cfg.micro_tokens):
            scores = policy(batch)
            (scores.logp.mean() + scores.entropy.mean()).backward()
        norm = gradient_step(policy, optimizer).item()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Part(name, False, f"out of memory: --micro-tokens {cfg.micro_tokens // 2}")
    return Part(name, 0 < norm < math.inf, f"{peak_memory(policy.device, 0):.1f} GB")


# ---- all of it ----


def found(part: str, cfg: Config, flags: str, size: str, out: Path) -> Iterator[Part]:
    """The lines of one of PARTS."""
    device = distributed.default_device()
    folder = out / part
    words = f"{RUN} {flags} --lr {RATE[size]} --name {part} --out {out}".split()
    if part == "full":
        for ended in run(words, folder, size):
            yield ended
        if ended.right:
            before = optimizer_steps(folder)
            yield from run([*words, "--updates", "3", "--workers", "2"], folder, size)
            yield resumed(before, optimizer_steps(folder))
    elif part == "LoRA":  # about ten times the learning rate of full training
        yield from run([*words, *LORA.split(), "--lr", str(10 * RATE[size])], folder, size)
        yield adapters_arrive(start_model(cfg), device)
        yield longest_pass(cfg, device)
    elif part == "pass":
        yield longest_pass(cfg, device)
    else:
        yield from run([*TWO_RANKS, *words, "--shard"], folder, size)
    if device == "cuda":
        torch.cuda.empty_cache()  # for the run after it, which has a process of its own


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", default=MODEL, help="folder or hub name (%(default)s)")
    size.add_argument("--tiny", action="store_true", help="the stand-in model, on a CPU")
    parser.add_argument("--vllm-memory", default="0.4", help="vLLM's share (%(default)s)")
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    args = parser.parse_args(argv)
    lora.check_installed()
    preset, flags = ["--preset", "tiny"], TINY
    if not args.tiny:
        own = ["--model", args.model, "--vllm-memory", args.vllm_memory]
        flags = " ".join([REAL, *own])
        preset = ["--preset", "paper", *own, "--data", "."]
    scale = "tiny" if args.tiny else "real"
    machine = this_machine()
    wrong = 0
    for part in [args.only] if args.only else PARTS:
        rank = LORA.split() if part == "LoRA" else []
        cfg = parse_config("alfworld", presets_of("alfworld"), "", [*preset, *rank])
        if missing := lacking(part, cfg, machine):
            print(f"skipped: needs {missing}  {part}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as out:
            for one in found(part, cfg, flags, scale, Path(out)):
                mark = "right" if one.right else "WRONG"
                print(f"{mark}  {part:9}  {one.name:15}  {one.said}", flush=True)
                wrong += not one.right
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    with user_errors():
        main()
