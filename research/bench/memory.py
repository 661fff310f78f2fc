"""What does each preset need? The table of RUNNING.md, by paw_min/running/memory.py.

    python -m research.bench.memory

The shapes are those of the published models, so that nothing is downloaded.
"""

from transformers import Qwen2Config

from paw_min.base.errors import user_errors
from paw_min.cli import parse_args
from paw_min.envs.benchmarks import presets_of
from paw_min.model.published import empty_model
from paw_min.running.memory import beside_gpus, needs, on_gpu
from research.study import markdown_table

SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings",
)
SHAPES = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
QWEN = {
    size: Qwen2Config(**dict(zip(SHAPE, shape, strict=True))) for size, shape in SHAPES.items()
}
RETRIEVER = 65e9  # bytes of search's index, in the memory of its server
SHARD = "--preset paper --shard --model Qwen/Qwen2.5-7B-Instruct"
ROWS = (  # first cell, benchmark, flags, ranks, sizes of a GPU in GB
    ("`paper`: ALFWorld, WebShop", "alfworld", "--preset paper", 1, (40, 48, 80)),
    ("`paper`: search", "search", "--preset paper", 1, (80,)),
    ("`paper` with [`--shard`](#several-gpus)", "alfworld", SHARD, 4, (80,)),
    ("`24gb`", "alfworld", "--preset 24gb", 1, (24,)),
    ("`80gb`", "alfworld", "--preset 80gb", 1, (80,)),
)


def table() -> str:
    tiny = "a stand-in of 0.9 M parameters; invented data"
    lines = [["`tiny` (default)", tiny, "none: minutes on one CPU core", "", ""]]
    for title, env, flags, ranks, sizes in ROWS:
        words = [*flags.split(), "--data", "DIR"]
        cfg, _ = parse_args(env, presets_of(env), "", words)
        size = next(size for size in QWEN if f"-{size}-" in cfg.model)
        ours = needs(cfg, empty_model(QWEN[size]), ranks, "bf16")
        cards = []
        for card in sizes:
            needed = on_gpu(ours, cfg.vllm_memory * card * 1e9)
            cards.append(f"{card} GB ({needed / 1e9:.1f}{' each' if ranks > 1 else ''})")
        host = f"{beside_gpus(ours, ranks) / 1e9:.0f} GB"
        if env == "search":
            host += f", the retriever {RETRIEVER / 1e9:.0f} GB"
        model = cfg.model.split("/")[-1] + (" with LoRA" if cfg.lora_rank else "")
        gpus = f"{ranks} of {cards[0]}" if ranks > 1 else ", ".join(cards)
        lines.append([title, model, gpus, host, f"{ours.checkpoint / 1e9:.1f} GB"])
    return markdown_table(["preset", "model", "GPU", "CPU memory", "checkpoint"], lines)


if __name__ == "__main__":
    with user_errors():
        print(table())
