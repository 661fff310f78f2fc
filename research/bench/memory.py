"""The estimate of paw_min/running/memory.py compared with the peak of a real update.

    python research/bench/memory.py [--out research/bench/results/memory.json]

Small random models of three families. Their weights, gradients, optimizer state and reference are
counted. The passes (prepare and learn of paw_min/update.py) are measured: the peak of the tensors
that they allocate, as in research/bench/update.py. All rows have the same length, so every pass has
--micro-tokens tokens, as the estimate assumes. On a CPU; bf16 is autocast there.
"""

import argparse
import gc
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from research.bench.update import tensor_peak, versions, write

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
from paw_min.rows import Episode, Transition, flatten
from paw_min.running.memory import Estimate, estimate
from paw_min.update import learn, prepare

VOCABULARY = 16_384
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
             eos_token_id=1)  # fmt: skip
MODELS = {
    "Qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True, head_dim=64),
    "Llama": LlamaConfig(**SHAPE | dict(num_hidden_layers=6), tie_word_embeddings=False),
}
TURNS = 4  # of each of 2 x 2 episodes
BASE = dict(groups=2, group_size=2, max_turns=TURNS, mini_batch=0, select_ratio=1.0,
            max_prompt_tokens=160, max_response_tokens=40, max_obs_tokens=50, micro_tokens=2000,
            precision="fp32")  # fmt: skip
LORA = dict(lora_rank=16)
AGAIN = dict(grad_checkpointing=True)
BF16 = dict(precision="bf16")
CASES = [
    ("Qwen2", {}), ("Qwen2", dict(micro_tokens=1000)), ("Qwen2", AGAIN), ("Qwen2", LORA),
    ("Qwen2", LORA | AGAIN), ("Qwen3", {}), ("Qwen3", LORA | AGAIN), ("Llama", {}),
    ("Llama", AGAIN), ("Llama", LORA), ("Qwen2", BF16), ("Qwen2", BF16 | AGAIN),
    ("Qwen2", BF16 | LORA | AGAIN),
]  # fmt: skip


def make_policy(name: str, precision: str) -> Policy:
    """A policy with random weights; its tokenizer is never used on text."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
    return Policy(model, tokenizer, 1.0, precision).train()


def make_episodes(cfg: Config) -> list[Episode]:
    """Two groups of two episodes, of which one is won; random tokens."""

    def tokens(n: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (n,)).tolist()

    episodes = []
    for i in range(4):
        rows = [
            Transition(
                tokens(cfg.max_prompt_tokens), tokens(cfg.max_response_tokens),
                tokens(cfg.max_obs_tokens), response_logps=[-1.0] * cfg.max_response_tokens,
                reward=0.0, valid=True, anchor="", group=i // 2, trajectory=i,
            )
            for _ in range(cfg.max_turns)
        ]  # fmt: skip
        rows[-1].reward = 10.0 * (i == 0)
        episodes.append(Episode("", i // 2, i, transitions=rows))
    return episodes


def size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def estimated(name: str, settings: dict) -> Estimate:
    cfg = Config(**BASE | settings)
    return estimate(cfg, MODELS[name], ranks=1, bf16=cfg.precision == "bf16", gpu_bytes=0)


def measure(name: str, settings: dict) -> dict:
    """Bytes of an update: what is there before it, and the peaks of its two parts above that."""
    torch.manual_seed(0)
    cfg = Config(**BASE | settings)
    policy = reference = make_policy(name, cfg.precision)
    if cfg.lora_rank:
        lora.attach(policy.model, cfg.lora_rank, cfg.precision, 0, None)
    else:
        reference = make_policy(name, cfg.precision).requires_grad_(False)
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)

    # As in an update: the moments exist, and after the first backward pass the gradients.
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    gradients = size(p.grad for p in trained)
    held = size(policy.parameters()) + gradients + size(moments)
    if reference is not policy:
        held += size(reference.parameters())
    collected = flatten(make_episodes(cfg))
    rows, scoring = tensor_peak(lambda: prepare(cfg, policy, reference, collected), "cpu")
    # tensor_peak does not see old tensors freed. The new gradients, which it counts, replace the
    # old ones, which are in `held`: subtract them once.
    optimizer.zero_grad()
    _, passes = tensor_peak(lambda: learn(cfg, policy, optimizer, rows, (0, 0)), "cpu")
    passes -= gradients
    # The passes without gradient come before the first backward pass.
    peak = held + max(scoring - gradients, passes)
    return dict(held=held, scoring=scoring, passes=passes, peak=peak)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="research/bench/results/memory.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, settings in tqdm(CASES):
        measured = measure(name, settings)
        plan = asdict(estimated(name, settings))
        error = {
            "passes": (plan["peak"] - measured["held"]) / measured["passes"] - 1,
            "all": plan["peak"] / measured["peak"] - 1,
        }
        print(f"{name} {settings}: {error}", flush=True)
        rows.append(dict(model=name, settings=settings, **measured, plan=plan, error=error))
        gc.collect()  # models have reference cycles
    write({"command": "python research/bench/memory.py", "rows": rows} | versions("cpu"), args.out)


if __name__ == "__main__":
    main()
