"""A check of every part of a run on this machine: two short runs with vLLM, and a line per part.

    python -m research.bench.smoke [--model NAME] [--vllm-memory SHARE]

Runs run_alfworld.py with full training and with LoRA: the evaluation at the start, two updates with
a sync before each, the evaluation at the end. That takes five minutes on a GPU, most of them for
vLLM's start. The exit code is 1 if a part is WRONG; its line has the remedy. --tiny: the stand-in
model, on a CPU with vLLM's CPU build.
"""

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paw_min.base.errors import user_errors
from paw_min.base.flags import Parser
from paw_min.model import lora
from paw_min.model.scoring import MAX_GAP
from paw_min.model.vllm_sampler import KEPT
from paw_min.running.runs import read_metrics

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"  # of the presets paper and 24gb
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
TRAINING = {"full": (1, ""), "LoRA": (10, "--lora-rank 16")}  # factor of the rate, flags


@dataclass
class Part:
    name: str
    right: bool
    said: str  # its numbers, or the remedy


def run(training: str, flags: str, rate: float, out: Path) -> tuple[int, str]:
    """Exit code and output of one run."""
    factor, own = TRAINING[training]
    words = f"{RUN} {flags} {own} --lr {factor * rate} --name {training} --out {out}".split()
    done = subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def parts(code: int, output: str, lines: list[dict]) -> Iterator[Part]:
    """What the output of a run and the lines of its metrics.jsonl say of its parts."""
    engine = re.search("^vLLM: (.*)", output, re.M)
    yield Part("start", bool(engine), engine[1] if engine else (
        "VLLM_LOGGING_LEVEL=INFO shows what vLLM does; where its compiler fails: "
        "VLLM_USE_AOT_COMPILE=0, then VLLM_DISABLE_COMPILE_CACHE=1"
    ))
    if lines:
        yield Part("evaluation", True, f"success {lines[0]['eval_success']:.2f}")
    for line in lines[1:]:
        gap = line["sampler_gap"]
        yield Part(f"sync {line['update']}", gap < MAX_GAP["bf16"], f"gap {gap:.1e} nats a token")
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
    last = "done"
    if code:
        last = output.strip().splitlines()[-1] if output.strip() else "no output"
        if "the sampler's log-probabilities" in last:
            last += " Or try VLLM_USE_V2_MODEL_RUNNER=0."
    yield Part(f"exit code {code}", code == 0, last)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", default=MODEL, help="folder or hub name (%(default)s)")
    size.add_argument("--tiny", action="store_true", help="the stand-in model, on a CPU")
    parser.add_argument("--vllm-memory", default="0.4", help="vLLM's share (%(default)s)")
    args = parser.parse_args(argv)
    lora.check_installed()
    flags = TINY if args.tiny else f"{REAL} --model {args.model} --vllm-memory {args.vllm_memory}"
    rate = RATE["tiny" if args.tiny else "real"]
    wrong = 0
    for training in TRAINING:
        with tempfile.TemporaryDirectory() as folder:
            code, output = run(training, flags, rate, Path(folder))
            for part in parts(code, output, read_metrics(Path(folder) / training)):
                mark = "right" if part.right else "WRONG"
                print(f"{mark}  {training}  {part.name:12}  {part.said}", flush=True)
                wrong += not part.right
            if code:
                print(output, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    with user_errors():
        main()
