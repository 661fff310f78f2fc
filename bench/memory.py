"""The plan of paw_min/running/memory.py compared with the peak of a real update.

    python bench/memory.py [--out bench/results/memory.json]

Small random models of three families, whose weights, gradients, optimizer state and reference are
counted exactly, and whose passes (prepare and learn of paw_min/update.py) are measured: the peak of
the tensors that they allocate, as in bench/update.py. The rows have equal lengths, so that every
pass has exactly --micro-tokens tokens, as the plan assumes. On a CPU; bf16 is autocast there.
"""

import argparse
import gc
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.update import tensor_peak, versions, write

# isort: split
import torch
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.policy import Policy
from paw_min.rollout import Episode, Transition, flatten
from paw_min.running import memory
from paw_min.update import learn, prepare

VOCABULARY, PROMPT, RESPONSE, OBSERVATION, ROWS = 16_384, 160, 40, 50, 16
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
             eos_token_id=1)  # fmt: skip
MODELS = {
    "Qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True, head_dim=64),
    "Llama": LlamaConfig(**SHAPE | dict(num_hidden_layers=6), tie_word_embeddings=False),
}
BASE = dict(groups=2, group_size=2, max_turns=ROWS // 4, mini_batch=0, select_ratio=1.0,
            max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE, max_obs_tokens=OBSERVATION,
            micro_tokens=2000)  # fmt: skip
LORA, AGAIN = dict(lora_rank=16), dict(grad_checkpointing=True)
CASES = [
    ("Qwen2", {}), ("Qwen2", dict(micro_tokens=1000)), ("Qwen2", AGAIN), ("Qwen2", LORA),
    ("Qwen2", LORA | AGAIN), ("Qwen3", {}), ("Qwen3", LORA | AGAIN), ("Llama", {}),
    ("Llama", AGAIN), ("Llama", LORA), ("Qwen2", dict(precision="bf16")),
    ("Qwen2", dict(precision="bf16") | AGAIN), ("Qwen2", dict(precision="bf16") | LORA | AGAIN),
]  # fmt: skip


def make_policy(config, cfg: Config) -> Policy:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Policy(model, tokenizer, 1.0, cfg.precision).train()


def make_episodes() -> list[Episode]:
    """Two groups of two episodes, of which one is won; random tokens."""

    def tokens(n: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (n,)).tolist()

    episodes = []
    for i in range(4):
        rows = [
            Transition(
                tokens(PROMPT), tokens(RESPONSE), tokens(OBSERVATION),
                response_logps=[-1.0] * RESPONSE, reward=0.0, valid=True, anchor="", group=i // 2,
                trajectory=i,
            )
            for _ in range(ROWS // 4)
        ]  # fmt: skip
        rows[-1].reward = 10.0 * (i == 0)
        episodes.append(Episode("", i // 2, i, transitions=rows))
    return episodes


def size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(name: str, settings: dict) -> dict:
    """Bytes of an update: what is there before it, and the peaks of its two parts above that."""
    torch.manual_seed(0)
    cfg = Config(**BASE | dict(precision="fp32") | settings)
    config, bf16 = MODELS[name], cfg.precision == "bf16"
    policy = reference = make_policy(config, cfg)
    if cfg.lora_rank:
        lora.attach(policy.model, cfg.lora_rank, cfg.precision, 0, None)
    else:
        reference = make_policy(config, cfg).requires_grad_(False)
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)

    def gradients() -> None:
        for p in trained:
            p.grad = torch.zeros_like(p)

    gradients()
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    held = size([*policy.parameters(), *trained, *moments])
    held += 0 if reference is policy else size(reference.parameters())
    flat = flatten(make_episodes())
    rows, scoring = tensor_peak(lambda: prepare(cfg, policy, reference, flat), "cpu")
    gradients()
    _, passes = tensor_peak(lambda: learn(cfg, policy, optimizer, rows, (0, 0)), "cpu")
    ours = memory.plan(cfg, config, 1, bf16, 0)
    return dict(held=held, scoring=scoring, passes=passes, peak=held + max(scoring, passes),
                plan=asdict(ours) | {"peak": ours.peak()})  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="bench/results/memory.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, settings in tqdm(CASES):
        row = {"model": name, "settings": settings} | measure(name, settings)
        passes = row["plan"]["peak"] - row["held"]  # planned
        row["error"] = {"passes": passes / row["passes"] - 1,
                        "all": row["plan"]["peak"] / row["peak"] - 1}  # fmt: skip
        print(f"{name} {settings}: {row['error']}", flush=True)
        rows.append(row)
        gc.collect()  # models have reference cycles
    write({"command": "python bench/memory.py", "rows": rows} | versions("cpu"), args.out)


if __name__ == "__main__":
    main()
