"""The results of bench/gpu.sh as a Markdown table: python bench/gpu_table.py FOLDER

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

    if r := found.get("correctness"):
        for name, gap in r["gap_bf16"].items():
            add("correctness", f"{name} against the trainer, nats per token", f"{gap:.1e}", "0.1")
        add("correctness", "checkpoint, in learning rates", f"{r['checkpoint']:.1e}", "0.1")
    for shape, title in TITLES.items():
        if r := found.get(f"overhead-{shape}"):
            percent = r[shape]["percent"]
            for what in ("time", "memory"):
                value, aim = f"{percent[what]:+.1f} %", f"{percent['aim']:+.1f} %"
                add("overhead", f"PaW on {title}'s rows, {what}", value, aim)
        if r := found.get(f"update-{shape}"):
            for name, ratio in r[shape]["speed_ratio"].items():
                what, memory = f"{name}, {title}", r[shape]["memory_ratio"][name]
                add("update", f"speed over {what}", f"{ratio:.2f}", "2")
                add("update", f"memory over {what}", f"{memory:.2f}", "0.5")
        if r := found.get("roofline", {}).get(shape):
            add("roofline", f"{title}'s rows, tokens per second", f"{r['tokens_per_s']:,.0f}")
            add("roofline", f"{title}'s rows, fraction of a matmul", f"{r['fraction']:.2f}")
    for r in found.get("rollout", {}).get("results", []):
        what = f"idle {r['sampler']}, delays of {r['mean_delay_s']} s"
        add("rollout", what, f"{100 * r['idle']['ours']:.0f} %")
    if r := found.get("lora"):
        add("lora", "peak, GiB", f"{r['peak_gib']:.2f}", f"{r['card_gib']:.0f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
