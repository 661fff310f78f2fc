"""The time of a step of the preset `paper` on ALFWorld, computed and not measured.

    python -m research.bench.step

One update of Qwen2.5-1.5B on one H100 by vLLM, part by part, so that the first real run has
something to be compared with: metrics.jsonl has the same parts. Not counted: the optimizer,
environments that a rollout waits for, logging. The paper reports 505 s, on GPUs that it does not
name.
"""

from dataclasses import dataclass

from paw_min.metrics import PEAK
from research.study import markdown_table

PARAMETERS = 1.54e9
ROWS = 6_300  # 128 episodes of 50 steps, some shorter
PROMPT, RESPONSE, OBSERVATION = 500, 85, 18  # mean tokens of a row
PASS_SHARE = 0.33  # of the card's peak: MFU of gradient steps in results/gpu/update-1.5b.json, H200
PREFILL_SHARE = 0.4  # guess
PADDING = 1.037  # tokens of a pass with and without it: simulated in an audit, without a file
DECODE_STEPS = 5_500  # 50 turns of about 110 tokens: the longest response of those at a time
# The main thread's part of a decoding step: vLLM's Python, and what rendering a prompt takes, about
# as often. Read in an audit on a busy CPU, without a file. The GPU computes beside it.
SECONDS_PER_STEP = 8e-3
NOT_BESIDE = 3e-3  # more where it does not: scheduling, vLLM PR 26866
SYNC = 5.0  # guess: 3 GB of weights, in the layout of vLLM
REFERENCE = 1.0  # guess: 5 GB to the GPU
CHECKPOINT = 18.5  # guess: as many GB at 1 GB a second
UPDATES, EVERY = 150, 5  # updates, and those between evaluations and checkpoints


@dataclass
class Part:
    name: str  # with the metric in metrics.jsonl
    seconds: float
    by: str  # how it is computed


def pass_seconds(per_weight: int, n_tokens: float, share: float) -> float:
    """Of a pass with so many operations per parameter and token, at a share of the card's peak."""
    return per_weight * PARAMETERS * n_tokens / (share * PEAK["H100"])


def parts(checkpointing: bool = True) -> list[Part]:
    scored = ROWS * (PROMPT + RESPONSE) * PADDING
    trained = ROWS * (PROMPT + RESPONSE + OBSERVATION) * PADDING
    operations = 8 if checkpointing else 6
    reading = pass_seconds(2, ROWS * PROMPT, PREFILL_SHARE)
    decoding = DECODE_STEPS * SECONDS_PER_STEP
    return [
        Part("gradient steps (`seconds_update`)", pass_seconds(operations, trained, PASS_SHARE),
             f"{operations} n T at {PASS_SHARE:.0%} of the peak"),
        Part("old policy (`seconds_old_pass`)", pass_seconds(2, scored, PASS_SHARE), "2 n T"),
        Part("reference (`seconds_old_pass`)",
             pass_seconds(2, scored, PASS_SHARE) + REFERENCE, "2 n T, and its way to the GPU"),
        Part("reading prompts (`seconds_rollout`)", reading, f"2 n T at {PREFILL_SHARE:.0%}"),
        Part("decoding and rendering (`seconds_rollout`)", decoding,
             f"{DECODE_STEPS:,} tokens one after another, {1000 * SECONDS_PER_STEP:.0f} ms each"),
        Part("weights to vLLM (`seconds_rollout`, `seconds_sync`)", SYNC, "a guess"),
        Part("evaluation (`seconds_evaluate`)", (reading + decoding + SYNC) / EVERY,
             f"as many episodes as a rollout, in every {EVERY}th update"),
        Part("checkpoint (`seconds_save`)", CHECKPOINT / EVERY,
             f"18.5 GB at 1 GB a second, in every {EVERY}th update"),
    ]


def seconds(**changes) -> float:
    return sum(part.seconds for part in parts(**changes))


def table() -> str:
    lines = [[part.name, f"{part.seconds:.0f}", part.by] for part in parts()]
    hours = UPDATES * seconds() / 3600
    lines.append(["all (`s`)", f"{seconds():.0f}", f"{hours:.1f} hours for {UPDATES} updates"])
    slower = DECODE_STEPS * NOT_BESIDE
    lines.append(["without asynchronous scheduling", f"+{slower:.0f}", ""])
    faster = seconds() - seconds(checkpointing=False)
    lines.append(["without gradient checkpointing, on 80 GB", f"-{faster:.0f}", "6 n T"])
    return markdown_table(["part, estimated", "seconds", "by"], lines)


if __name__ == "__main__":
    print(table())
