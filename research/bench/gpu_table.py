"""The results of gpu.sh as a Markdown table: python research/bench/gpu_table.py FOLDER

A part without a file in FOLDER has no rows.
"""

import json
import sys
from pathlib import Path

TITLES = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search"}


def table(folder: Path) -> str:
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


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
