"""The time of a step of the preset `paper` on ALFWorld, computed and not measured.

    python -m research.bench.step

One update of Qwen2.5-1.5B on one H100 by vLLM, part by part, so that the first real run has
something to be compared with: metrics.jsonl has the same parts. Not counted: padding, the
optimizer, environments, logging. The paper reports 505 s, on GPUs that it does not name.
"""

from dataclasses import dataclass

from paw_min.metrics import PEAK
from research.study import markdown_table

PARAMETERS = 1.54e9
ROWS = 6_300  # 128 episodes of 50 steps, some shorter
PROMPT, RESPONSE, OBSERVATION = 500, 85, 18  # mean tokens of a row
PASS_SHARE = 0.33  # of the card's peak: MFU of gradient steps in results/gpu/update-1.5b.json, H200
PREFILL_SHARE = 0.4  # guess
DECODE_STEPS = 5_500  # 50 turns of about 110 tokens: the longest response of those at a time
SECONDS_PER_STEP = {"one after the other": 7e-3, "asynchronous": 4e-3}  # scheduling, vLLM PR 26866
SECONDS_PER_PROMPT = 2e-3  # to render and tokenize it: guess
SYNC = 5.0  # guess: 3 GB of weights, in the layout of vLLM


@dataclass
class Part:
    name: str  # with the metric in metrics.jsonl
    seconds: float
    by: str  # how it is computed


def pass_seconds(per_weight: int, n_tokens: float, share: float) -> float:
    """Of a pass with so many operations per parameter and token, at a share of the card's peak."""
    return per_weight * PARAMETERS * n_tokens / (share * PEAK["H100"])


def parts(checkpointing: bool = True, scheduling: str = "asynchronous") -> list[Part]:
    scored = ROWS * (PROMPT + RESPONSE)
    trained = scored + ROWS * OBSERVATION
    step = SECONDS_PER_STEP[scheduling]
    operations = 8 if checkpointing else 6
    return [
        Part("gradient steps (`seconds_update`)", pass_seconds(operations, trained, PASS_SHARE),
             f"{operations} n T at {PASS_SHARE:.0%} of the peak"),
        Part("old policy (`seconds_old_pass`)", pass_seconds(2, scored, PASS_SHARE), "2 n T"),
        Part("reference (`seconds_old_pass`)", pass_seconds(2, scored, PASS_SHARE), "2 n T"),
        Part("reading prompts (`seconds_generate`)",
             pass_seconds(2, ROWS * PROMPT, PREFILL_SHARE), f"2 n T at {PREFILL_SHARE:.0%}"),
        Part("decoding (`seconds_generate`)", DECODE_STEPS * step,
             f"{DECODE_STEPS:,} tokens one after another, {1000 * step:.0f} ms each"),
        Part("rendering and tokenizing (`seconds_rollout`)", ROWS * SECONDS_PER_PROMPT,
             f"{ROWS:,} prompts, {1000 * SECONDS_PER_PROMPT:.0f} ms each, if none is hidden by the "
             "token that the GPU computes meanwhile"),
        Part("weights to vLLM (`seconds_sync`)", SYNC, "a guess"),
    ]


def seconds(**changes) -> float:
    return sum(part.seconds for part in parts(**changes))


def table() -> str:
    lines = [[part.name, f"{part.seconds:.0f}", part.by] for part in parts()]
    lines.append(["all", f"{seconds():.0f}", ""])
    slower = seconds(scheduling="one after the other") - seconds()
    lines.append(["without asynchronous scheduling", f"+{slower:.0f}", ""])
    faster = seconds() - seconds(checkpointing=False)
    lines.append(["without gradient checkpointing, on 80 GB", f"-{faster:.0f}", "6 n T"])
    return markdown_table(["part, computed", "seconds", "by"], lines)


if __name__ == "__main__":
    print(table())
