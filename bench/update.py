"""Speed and memory of the forward and backward passes, compared with a plain trainer.

    python bench/update.py [--gpu] [--out bench/results/update.json]

Both get the same rows, weights, losses (clipped surrogate, entropy bonus, clipped MAE on the
observations of three rows in four) and tokens per forward pass:

    plain   as most trainers are written: rows in their given order, a fixed number per micro-batch,
            padded to the longest row of the mini-batch; logits, log_softmax and entropy at all
            positions
    ours    paw_min: micro-batches of rows of similar length (batches.py), logits at the scored
            positions only and in chunks (head.py)

Row lengths are those of ALFWorld (SHAPES). The mini-batch has 256 rows; every 64th by length is
computed (GPU: every 4th), and the plain trainer pads to the longest of the 256. Model: random
weights, the config of Qwen2.5-1.5B with its vocabulary of 151,936. On a CPU the hidden size is 64
instead of 1,536, which keeps the head's fraction of the work about the same, and rows have half
their length. fp32 on a CPU, bf16 on a GPU; both recompute activations in the backward pass
(gradient checkpointing).

Each measurement runs in a process of its own. Tokens are counted without padding. Time: CPU seconds
of one thread (GPU: seconds). Memory: the peak in excess of weights and gradients, over the first
micro-batch (ours: the largest; the plain trainer's are all equal). The gradients of the two are
compared: |difference| / |gradient|, worst parameter. Takes two minutes.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paw_min  # noqa: F401 - before torch, for OMP_WAIT_POLICY

# isort: split
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from paw_min import cmae, losses
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy
from paw_min.rollout import Transition

# Tokens of Qwen2.5: (median, standard deviation of the logarithm, minimum, maximum). Prompts and
# observations: measured on the paper's prompts with our environments (ALFWorld: games of 22
# receptacles and more than 20 objects; WebShop: the generated shop, observations cut at 512).
# Responses: only the limit of 512 is published; the rest is an assumption.
RESPONSE = (80, 0.6, 20, 512)
SHAPES = {
    "alfworld": {"prompt": (460, 0.09, 424, 608), "response": RESPONSE, "obs": (16, 0.5, 3, 43)},
    "webshop": {"prompt": (760, 0.35, 190, 1358), "response": RESPONSE, "obs": (150, 0.6, 3, 424)},
}
MINI_BATCH = 256
SCALE, KEEP, MICRO_ROWS = {"cpu": 0.5, "cuda": 1.0}, {"cpu": 4, "cuda": 64}, {"cpu": 2, "cuda": 8}
SELECTED = 0.75  # fraction of the rows, Eq. 4
VOCABULARY = 151_936
QWEN = dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2)  # Qwen2.5-1.5B
NARROW = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
REST = dict(intermediate_size=8960, num_hidden_layers=28, tie_word_embeddings=True)


def make_rows(shape: str, n: int, vocabulary: int, scale=1.0, seed: int = 0) -> list[Transition]:
    """Rows of random tokens with the lengths of a benchmark, times `scale`."""
    rng = random.Random(seed)

    def tokens(kind: str) -> list[int]:
        median, spread, low, high = SHAPES[shape][kind]
        length = min(max(median * rng.lognormvariate(0, spread), low), high)
        return [rng.randrange(2, vocabulary) for _ in range(max(1, round(scale * length)))]

    rows = []
    for i in range(n):
        prompt, response, obs = tokens("prompt"), tokens("response"), tokens("obs")
        rows.append(
            Transition(
                prompt, response, obs, response_logps=[-1.0] * len(response), reward=0.0,
                valid=True, anchor=f"{i}", group=0, trajectory=i,
            )
        )  # fmt: skip
    return rows


def make_policy(config: Qwen2Config, device: str, precision: str) -> Policy:
    """A policy with random weights; its tokenizer is never used on text."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    policy = Policy(model, tokenizer, 1.0, precision)
    model.gradient_checkpointing_enable()
    return policy.train()


def versions(device: str) -> dict:
    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, 1 thread"
    return {"device": name, "versions": found}


def joint_loss(logp, entropy, response_mask, obs_mask, advantage, n_tokens: int, n_rows: int):
    """A micro-batch's part of the loss; however the rows are split, the parts have the same sum."""
    share = response_mask.sum() / n_tokens
    surrogate, _ = losses.clipped_surrogate(logp, logp.detach(), advantage, response_mask)
    bonus = losses.masked_mean(entropy, response_mask)
    world_model = cmae.clipped_mae(logp, obs_mask, rho=0.2).sum() / n_rows
    return share * (surrogate - 0.001 * bonus) + world_model


def plain_parts(policy: Policy, rows, with_obs, width: int, micro_rows: int):
    """The plain trainer: (logp, entropy, response mask, observation mask, rows) of each batch."""
    for start in range(0, len(rows), micro_rows):
        micro = list(range(start, min(start + micro_rows, len(rows))))
        ids = torch.full((len(micro), width), policy.pad_id)  # (B, L)
        present, response_mask, obs_mask = (torch.zeros_like(ids) for _ in range(3))
        for k, i in enumerate(micro):
            row = rows[i]
            tokens = row.prompt_ids + row.response_ids + row.obs_ids * with_obs[i]
            a, o = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
            ids[k, : len(tokens)], present[k, : len(tokens)] = torch.tensor(tokens), 1
            response_mask[k, a:o], obs_mask[k, o : len(tokens)] = 1, 1
        on_device = [x.to(policy.device) for x in (ids, present, response_mask, obs_mask)]
        ids, present, response_mask, obs_mask = on_device
        bf16 = policy.precision == "bf16"
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=bf16):
            logits = policy.model(ids, attention_mask=present, use_cache=False).logits
        all_logp = logits[:, :-1].float().log_softmax(-1)  # (B, L - 1, V)
        logp = all_logp.gather(-1, ids[:, 1:, None])[..., 0]  # (B, L - 1)
        entropy = -(all_logp.exp() * all_logp).sum(-1)  # (B, L - 1)
        yield logp, entropy, response_mask[:, 1:], obs_mask[:, 1:], micro
        del logits, all_logp


def our_parts(policy: Policy, rows, with_obs, width: int, micro_rows: int):
    """The same by paw_min."""
    for batch in micro_batches(policy, rows, [*range(len(rows))], with_obs, width * micro_rows):
        yield *policy(batch), batch.response_mask, batch.obs_mask, batch.index


def measure(variant: str, what: str, device: str, samples: Path) -> dict:
    """One forward and backward pass over KEEP rows of a mini-batch, in this process.

    what: "time", or "memory", which stops after the first micro-batch. samples: file to write a
    part of the gradient to.
    """
    torch.set_num_threads(1)
    size = NARROW if device == "cpu" else QWEN
    config = Qwen2Config(vocab_size=VOCABULARY, **size, **REST, pad_token_id=0, eos_token_id=1)
    policy = make_policy(config, device, "fp32" if device == "cpu" else "bf16")
    rows = make_rows("alfworld", MINI_BATCH, VOCABULARY, SCALE[device])
    with_obs = [random.Random(i).random() < SELECTED for i in range(len(rows))]
    length = [len(r.prompt_ids + r.response_ids) + len(r.obs_ids) * keep
              for r, keep in zip(rows, with_obs)]  # fmt: skip
    stride = MINI_BATCH // KEEP[device]
    chosen = sorted(sorted(range(len(rows)), key=length.__getitem__)[stride // 2 :: stride])
    width = max(length)
    rows, with_obs = [rows[i] for i in chosen], [with_obs[i] for i in chosen]
    advantage = torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).to(device)
    n_tokens = sum(len(r.response_ids) for r in rows)
    for p in policy.parameters():
        p.grad = torch.ones_like(p).zero_()  # written to, so that its memory is resident
    base, start = memory(device), now(device)
    parts = plain_parts if variant == "plain" else our_parts
    total = 0.0
    for *scored, micro in parts(policy, rows, with_obs, width, MICRO_ROWS[device]):
        part = joint_loss(*scored, advantage[micro], n_tokens, len(rows))
        part.backward()
        total += part.item()
        del scored, part
        if what == "memory":
            break
    seconds, peak = now(device) - start, memory(device) - base
    sampled = {name: p.grad.flatten()[:: 1 + p.numel() // 2**16].cpu().clone()
               for name, p in policy.named_parameters()}  # fmt: skip
    torch.save(sampled, samples)
    return {
        "seconds": seconds,
        "peak_mb": peak / 2**20,
        "loss": total,
        "rows": len(rows),
        "tokens": sum(length[i] for i in chosen),
        "longest": width,
        "parameters": policy.model.num_parameters(),
        **versions(device),
    }


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def memory(device: str) -> int:
    """The peak so far, in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# glibc's malloc, for a CPU. Times: keep freed memory, since getting it back from the system takes
# as long as the computation. Peaks: return it at once, so that the peak is that of memory in use.
MALLOC = {
    "time": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
    "memory": {"MALLOC_MMAP_THRESHOLD_": str(2**22)},
}


def child(script: str, what: str, *arguments) -> dict:
    """Run `script` in a process of its own -> its last line of output, JSON. what: time, memory."""
    command = [sys.executable, script, *map(str, arguments)]
    env = os.environ | MALLOC[what] | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}: see above.")
    return json.loads(done.stdout.splitlines()[-1])


def distance(a: Path, b: Path) -> float:
    """Largest relative difference of two gradients over the parameters.

    Gradients that are 0 up to rounding (a key's bias does not change the attention weights) are
    compared with the largest gradient instead of their own.
    """
    a, b = torch.load(a), torch.load(b)
    floor = 1e-4 * max(x.norm() for x in a.values())
    return max(((a[k] - b[k]).norm() / max(a[k].norm(), floor)).item() for k in a)


def write(report: dict, out: str) -> None:
    for name, value in report.items():
        print(f"{name:28}{value}")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten to {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the size of Qwen2.5-1.5B, on a GPU")
    parser.add_argument("--out", default="bench/results/update.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)  # variant, what, gradient file
    args = parser.parse_args()
    device = "cuda" if args.gpu else "cpu"
    if args.child:
        variant, what, samples = args.child
        print(json.dumps(measure(variant, what, device, Path(samples))))
        return

    flags = ["--gpu"] * args.gpu
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("memory", "time"):
            for variant in ("plain", "ours"):
                samples = Path(folder) / variant
                one = child(__file__, what, *flags, "--child", variant, what, samples)
                found[variant, what] = one
                print(f"{variant:8}{one['peak_mb']:9.0f} MB{one['seconds']:9.1f} s, for {what}")
        apart = distance(Path(folder) / "plain", Path(folder) / "ours")
    if not apart < (1e-3 if device == "cpu" else 5e-2):
        raise SystemExit(f"The gradients differ by {apart:.1e}: see tests/test_policy.py.")
    one, ours = found["plain", "time"], found["ours", "time"]
    peak = {variant: found[variant, "memory"]["peak_mb"] for variant in ("plain", "ours")}
    report = {
        "command": " ".join(["python bench/update.py", *flags]),
        "parameters": one["parameters"],
        "vocabulary": VOCABULARY,
        "rows": one["rows"],
        "tokens": one["tokens"],
        "longest_of_mini_batch": one["longest"],
        "plain_tokens_per_s": round(one["tokens"] / one["seconds"], 1),
        "ours_tokens_per_s": round(one["tokens"] / ours["seconds"], 1),
        "speed_ratio": round(one["seconds"] / ours["seconds"], 2),
        "plain_peak_mb": round(peak["plain"]),
        "ours_peak_mb": round(peak["ours"]),
        "memory_ratio": round(peak["ours"] / peak["plain"], 3),
        "gradient_difference": float(f"{apart:.1e}"),
        "loss_difference": float(f"{abs(one['loss'] - ours['loss']):.1e}"),
        "device": one["device"],
        "versions": one["versions"],
    }
    write(report, args.out)


if __name__ == "__main__":
    main()
