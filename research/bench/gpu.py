"""The parts of research/bench/gpu.sh that no other script measures.

    python research/bench/gpu.py {correctness,roofline,lora} {--gpu,--tiny} --out FILE
    python research/bench/gpu.py table --out FOLDER    the results of all parts, as Markdown

correctness   The stand-in model, trained weights of 0.9 M parameters. Sampler against trainer in
              bf16: mean difference of log-probabilities, in nats per token. Checkpoint: two updates
              with one between them that a CPU loads and writes again, against two without: largest
              difference of a weight, in learning rates.
roofline      Forward and backward passes at the size of Qwen2.5-1.5B, random weights, bf16, rows
              with the lengths of ALFWorld and WebShop: tokens per second, and as fraction of what
              the device would do at the speed of a large bf16 matrix product. Counted are matrix
              products and attention, with the recomputation of the activations.
lora          The same model with LoRA of rank 16 on a card that is limited to 24 GB: peak memory of
              an update of ALFWorld's rows with PaW and KL, 8,192 tokens per pass, no sampler.

--tiny: small sizes on a CPU, a rehearsal. Its numbers mean nothing.
"""

import argparse
import json
import sys
import tempfile
from collections import deque
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import paw_min  # noqa: F401 - before torch, for OMP_WAIT_POLICY

# isort: split
import torch
from overhead import make_episodes
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config
from update import (
    NARROW,
    QWEN,
    REST,
    VOCABULARY,
    make_policy,
    make_rows,
    now,
    tensor_peak,
    versions,
    write,
)

from paw_min.config import Config
from paw_min.model.lora import attach
from paw_min.model.policy import load_policy
from paw_min.model.probe import check_sync
from paw_min.model.sampler import HFSampler, Request
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import Episode, flatten
from paw_min.running.runs import Run
from paw_min.toy import default_model
from paw_min.update import learn, prepare

GIB = 2**30
CARD = 24 * GIB  # of the part lora
RANK = 16
LR = 1e-4
TITLES = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search"}


def correctness(device: str, tiny: bool) -> dict:
    folder = default_model("alfworld")
    report = {"gap_bf16": sampler_gaps(folder, device, tiny)}
    report["checkpoint"] = checkpoint_difference(folder, device)
    # "not <=" instead of ">": a NaN is an error, too.
    if not report["checkpoint"] <= 0.1:
        raise SystemExit(f"Differences that rounding does not explain: {report}")
    return report


def sampler_gaps(folder: str, device: str, tiny: bool) -> dict[str, float]:
    """{sampler: mean |log pi - log mu| in nats per token}; more than rounding is an error."""
    samplers = {}
    if find_spec("vllm") and not tiny:  # before the policy: it measures the free memory
        samplers["vllm"] = VLLMSampler(folder, 1024, "bf16", 0.3, 0)
    samplers["transformers"] = HFSampler()
    policy = load_policy(folder, device=device, precision="bf16")
    rows = make_rows("alfworld", 4 if tiny else 64, len(policy.tokenizer), scale=0.5)
    episodes = [Episode("", i, i, [row]) for i, row in enumerate(rows)]  # a group each
    gaps = {}
    for name, sampler in samplers.items():
        with sampler.sync(policy):
            queue = deque(Request(i, row.prompt_ids, i) for i, row in enumerate(rows))
            for finished in sampler.generate(queue, 1.0, 8 if tiny else 64):
                for r in finished:
                    rows[r.slot].response_ids = r.ids
                    rows[r.slot].response_logps = r.logps
        cfg = Config(sampler=name)
        gaps[name] = check_sync(cfg, policy, flatten(episodes), "bench")
        sampler.close()
    return gaps


def checkpoint_difference(folder: str, device: str) -> float:
    """Largest difference of a weight after two updates, in learning rates."""
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its gradients differ between two runs
    with tempfile.TemporaryDirectory() as out:
        cfg = Config(out=out, name="r", mini_batch=0, kl_coef=0.0, lr=LR)
        run = Run(cfg)

        def load(where: str):
            policy = load_policy(str(run.checkpoint() or folder), device=where).train()
            optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
            run.restore(policy, optimizer)
            return policy, optimizer

        def update(policy, optimizer, k: int) -> None:
            episodes = make_episodes("alfworld", "cpu", 16, len(policy.tokenizer), seed=k)
            learn(cfg, policy, optimizer, prepare(cfg, policy, None, flatten(episodes)), (0, k))

        straight = load(device)
        update(*straight, 1)
        run.save(*straight, 1)
        update(*straight, 2)
        run.save(*load("cpu"), 1)
        resumed = load(device)
        update(*resumed, 2)
        pairs = zip(straight[0].parameters(), resumed[0].parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs) / LR


def model_config(tiny: bool):
    if tiny:
        small = dict(intermediate_size=64, num_hidden_layers=2, tie_word_embeddings=True)
        return Qwen2Config(vocab_size=500, **NARROW, **small)
    return Qwen2Config(vocab_size=VOCABULARY, **QWEN, **REST)


def roofline(device: str, tiny: bool) -> dict:
    n = 256 if tiny else 8192
    square = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    peak = 0.0
    for _ in range(8):
        start = now(device)
        square @ square
        peak = max(peak, 2 * n**3 / (now(device) - start))
    config = model_config(tiny)
    policy = make_policy(config, device, "bf16")
    report = {"matmul_tflops": peak / 1e12}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    cfg = Config(mini_batch=0, kl_coef=0.0, select_ratio=1.0)  # a single step without an old pass
    for shape in ("alfworld", "webshop"):
        episodes = make_episodes(shape, device, 16 if tiny else 128, config.vocab_size, seed=0)
        rows = prepare(cfg, policy, None, flatten(episodes))
        with FlopCounterMode(display=False) as counter:
            metrics = learn(cfg, policy, optimizer, rows, (0, 0))
        seconds = []
        for _ in range(1 if tiny else 3):
            start = now(device)
            learn(cfg, policy, optimizer, rows, (0, 0))
            seconds.append(now(device) - start)
        speed = counter.get_total_flops() / min(seconds)
        report[shape] = {"tokens_per_s": metrics["tokens_trained"] / min(seconds),
                         "tflops": speed / 1e12, "fraction": speed / peak}
    return report


def lora(device: str, tiny: bool) -> dict:
    config = model_config(tiny)
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CARD / total))

    def run() -> int:
        policy = make_policy(config, device, "bf16")
        attach(policy.model, RANK, "bf16", 0, None)
        trained = [p for p in policy.parameters() if p.requires_grad]
        cfg = Config(mini_batch=8 if tiny else 64, micro_tokens=8192, lora_rank=RANK)
        episodes = make_episodes("alfworld", device, 16 if tiny else 128, config.vocab_size, 0)
        rows = prepare(cfg, policy, policy, flatten(episodes))
        learn(cfg, policy, torch.optim.AdamW(trained, lr=LR), rows, (0, 0))
        return sum(p.numel() for p in trained)

    trained, peak = tensor_peak(run, device)
    return {"peak_gib": peak / GIB, "card_gib": CARD / GIB, "trained_parameters": trained}


PARTS = {"correctness": correctness, "roofline": roofline, "lora": lora}


def table(folder: Path) -> str:
    """The results as a Markdown table; a part without a file in the folder has no rows."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    lines = ["| part | what | measured | target |", "|---|---|---|---|"]

    def add(part: str, what: str, measured: str, target: str = "-") -> None:
        lines.append(f"| {part} | {what} | {measured} | {target} |")

    correctness = found.get("correctness")
    if correctness:
        for name, gap in correctness["gap_bf16"].items():
            add("correctness", f"{name} against the trainer, nats per token", f"{gap:.1e}", "0.1")
        apart = f"{correctness['checkpoint']:.1e}"
        add("correctness", "checkpoint, in learning rates", apart, "0.1")
    for shape, title in TITLES.items():
        overhead = found.get(f"overhead-{shape}")
        if overhead:
            percent = overhead[shape]["percent"]
            for what in ("time", "memory"):
                value = f"{percent[what]:+.1f} %"
                aim = f"{percent['aim']:+.1f} %"
                add("overhead", f"PaW on {title}'s rows, {what}", value, aim)
        update = found.get(f"update-{shape}")
        if update:
            for name, ratio in update[shape]["speed_ratio"].items():
                what = f"{name}, {title}"
                memory = update[shape]["memory_ratio"][name]
                add("update", f"speed over {what}", f"{ratio:.2f}", "2")
                add("update", f"memory over {what}", f"{memory:.2f}", "0.5")
        roofline = found.get("roofline", {}).get(shape)
        if roofline:
            speed = f"{roofline['tokens_per_s']:,.0f}"
            add("roofline", f"{title}'s rows, tokens per second", speed)
            fraction = f"{roofline['fraction']:.2f}"
            add("roofline", f"{title}'s rows, fraction of a matmul", fraction)
    for line in found.get("rollout", {}).get("results", []):
        what = f"idle {line['sampler']}, delays of {line['mean_delay_s']} s"
        add("rollout", what, f"{100 * line['idle']['ours']:.0f} %")
    lora = found.get("lora")
    if lora:
        add("lora", "peak, GiB", f"{lora['peak_gib']:.2f}", f"{lora['card_gib']:.0f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=[*PARTS, "table"])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpu", action="store_true", help="the size of Qwen2.5-1.5B (default)")
    size.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="file, or folder of a table")
    args = parser.parse_args()
    if args.part == "table":
        print(table(args.out), end="")
        return
    device = "cpu" if args.tiny else "cuda"
    write(PARTS[args.part](device, args.tiny) | versions(device), args.out)


if __name__ == "__main__":
    main()
