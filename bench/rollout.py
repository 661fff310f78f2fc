"""Environment steps per second and the generator's idle share, against lock-step rollouts.

    python bench/rollout.py [--sampler transformers vllm] [--gpu] [--quick] [--out FILE]

Both play the same tasks with the same seeds, sampler and environments:

    lock-step   generate for all, step all, wait for all; an episode that is over leaves the batch
    ours        paw_min.rollout: whoever has an answer generates, whoever has a response steps

An environment is a process that sleeps: log-normal seconds per step, seeded by task and step (heavy
tail), or none at all. A response ends with a share of the vocabulary, so that lengths are geometric
up to a limit; episodes have different numbers of steps. Model: random weights; on a CPU two narrow
layers, with --gpu Qwen2.5-1.5B in bf16, more episodes and longer responses.

The two take turns; a ratio is that of neighbours, and the middle one is given with the extremes.
idle: share of a rollout's wall time in which the sampler did not work. env_wait: share of it in
which the rollout waited for environments. same_responses: share of the responses that are equal,
token by token. Sleeping needs no core, generation one. About a minute for each sampler.
"""

# ruff: noqa: E402 (the repository has to be on the path before paw_min is imported)
import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paw_min.envs.pool import EnvPool  # torch is imported in main(), not in each worker

SIGMA = 1.2  # spread of the logarithm of a delay: the mean is 2.05 medians, one in 100 above 16
SIZES = {  # rounds: with delays, and without, where a round is short and noisy
    "quick": dict(
        episodes=8, turns=(2, 4), median=0.05, tokens=24, end_share=1 / 12, rounds=(1, 1)
    ),
    "cpu": dict(episodes=16, turns=(4, 8), median=0.1, tokens=48, end_share=1 / 24, rounds=(2, 5)),
    "gpu": dict(
        episodes=128, turns=(5, 10), median=0.2, tokens=256, end_share=1 / 100, rounds=(2, 3)
    ),
}
WORDS = [f"w{i}" for i in range(500)]
NARROW = dict(vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
              num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
QWEN = dict(vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
            num_attention_heads=12, num_key_value_heads=2)  # fmt: skip


class Sleeper:
    """An environment that takes its time; the task decides how much, and how many steps."""

    def __init__(self, median: float, turns: tuple[int, int]):
        self.median, self.turns = median, turns

    def reset(self, task):
        self.task, self.random = task, random.Random(task)
        self.left = self.random.randint(*self.turns)
        return self._answer()

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        observation, info = self._answer()
        return observation, float(over), over, info | {"won": over}

    def _answer(self):
        time.sleep(self.median * self.random.lognormvariate(0, SIGMA))
        info = {"task": self.task, "task_type": "sleep", "admissible": []}
        return " ".join(self.random.choices(WORDS, k=30)), info


class LockStepPool:
    """A pool that has no answer before all that was sent is answered."""

    def __init__(self, pool):
        self.pool, self.n_envs, self.sent, self.ready = pool, pool.n_envs, 0, deque()

    def send(self, slot, method, argument):
        self.pool.send(slot, method, argument)
        self.sent += 1

    def recv(self, timeout=None):
        if timeout is None:
            self.ready.extend(self.pool.recv() for _ in range(self.sent))
            self.sent = 0
        return self.ready.popleft() if self.ready else None


class LockStepSampler:
    """A sampler that has no response before all that was asked has one."""

    def __init__(self, sampler):
        self.sampler = sampler

    def generate(self, *arguments):
        yield [r for finished in self.sampler.generate(*arguments) for r in finished]


def make_policy(size: dict, config: dict, device: str):
    """Random weights, and as many end tokens as make responses end where they should."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from paw_min.model.policy import Policy
    from paw_min.toy import standins as tiny

    tokenizer = tiny.make_tokenizer([" ".join(WORDS)])
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**config, tie_word_embeddings=True))
    policy = Policy(model, tokenizer, 1.0, "bf16" if device == "cuda" else "fp32").eval()
    n_ends = round(size["end_share"] * config["vocab_size"])
    policy.eos_ids = list(range(config["vocab_size"] - n_ends, config["vocab_size"]))
    return policy


def make_sampler(name: str, config: dict, cfg, device: str):
    from transformers import Qwen2Config

    from paw_min.model.sampler import HFSampler
    from paw_min.model.vllm_sampler import VLLMSampler

    if name == "transformers":
        return HFSampler(batch_size=128)
    with tempfile.TemporaryDirectory() as folder:
        architecture = dict(tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
        Qwen2Config(**config, **architecture).save_pretrained(folder)
        length = cfg.max_prompt_tokens + cfg.max_response_tokens
        return VLLMSampler(folder, length, "bf16" if device == "cuda" else "fp32", 0.5, 0)


def play(how: str, cfg, policy, sampler, pool, size: dict) -> dict:
    """One rollout -> its steps per second, shares and responses."""
    from paw_min.rollout import rollout

    if how == "lock-step":
        sampler, pool = LockStepSampler(sampler), LockStepPool(pool)
    tasks = [f"task {i}" for i in range(size["episodes"])]
    start = time.perf_counter()
    episodes, stats = rollout(
        cfg, policy, sampler, pool, tasks, range(len(tasks)), temperature=1.0, seed=(0,), label=how
    )
    seconds = time.perf_counter() - start
    responses = [t.response_ids for e in episodes for t in e.transitions]
    return {"steps_per_s": len(responses) / seconds, "idle": stats["generator_idle"],
            "env_wait": stats["env_wait"], "responses": responses}  # fmt: skip


def compare(cfg, policy, sampler, size: dict, median: float) -> dict:
    """Both ways of playing in turn -> one line of the report."""
    runs = {"lock-step": [], "ours": []}
    n = size["episodes"]
    with EnvPool(partial(Sleeper, median, size["turns"]), n, workers=n) as pool:
        with sampler.sync(policy):
            play("warm-up", cfg, policy, sampler, pool, size | {"episodes": 2})
            for _ in range(size["rounds"][median == 0]):
                for how, results in runs.items():
                    results.append(play(how, cfg, policy, sampler, pool, size))
    ratios = [b["steps_per_s"] / a["steps_per_s"] for a, b in zip(*runs.values())]
    pairs = list(zip(runs["lock-step"][0]["responses"], runs["ours"][0]["responses"], strict=True))
    line = {"mean_delay_s": round(median * math.exp(SIGMA**2 / 2), 3), "steps": len(pairs)}
    line["tokens_per_response"] = round(statistics.mean(len(a) for a, _ in pairs), 1)
    for key in ("steps_per_s", "idle", "env_wait"):
        line[key] = {
            how: round(statistics.median(r[key] for r in results), 3)
            for how, results in runs.items()
        }
    line["ratio"] = round(statistics.median(ratios), 2)
    line["ratio_range"] = [round(min(ratios), 2), round(max(ratios), 2)]
    line["same_responses"] = round(statistics.mean(a == b for a, b in pairs), 3)
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sampler", nargs="+", choices=("transformers", "vllm"),
                        default=["transformers"])  # fmt: skip
    parser.add_argument("--gpu", action="store_true", help="Qwen2.5-1.5B, 128 episodes")
    parser.add_argument("--quick", action="store_true", help="a few short episodes, once")
    parser.add_argument("--out", default="bench/results/rollout.json")
    args = parser.parse_args()
    import torch
    import transformers  # noqa: F401 - its version is reported

    from paw_min.config import Config

    torch.set_num_threads(1)
    device = "cuda" if args.gpu else "cpu"
    size = SIZES["quick" if args.quick else "gpu" if args.gpu else "cpu"]
    config = (QWEN if args.gpu else NARROW) | {"max_position_embeddings": 2048}
    cfg = Config(prompt="compact", max_prompt_tokens=1024, max_turns=size["turns"][1],
                 max_response_tokens=size["tokens"])  # fmt: skip
    lines = []
    for name in args.sampler:
        sampler = make_sampler(name, config, cfg, device)  # vLLM comes before the trainer's model
        policy = make_policy(size, config, device)
        for median in (size["median"], 0.0):
            line = {"sampler": name} | compare(cfg, policy, sampler, size, median)
            lines.append(line)
            print("\n".join(f"{key:24}{value}" for key, value in line.items()) + "\n", flush=True)
        if name == "vllm":
            sampler.close()

    packages = ("torch", "transformers", "vllm")[: 2 + ("vllm" in args.sampler)]
    report = {
        "command": "python bench/rollout.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.gpu else f"{platform.machine()}, 1 thread",
        "load_average": round(os.getloadavg()[0], 1),
        "episodes": size["episodes"], "turns": size["turns"], "rounds": size["rounds"],
        "results": lines,
        "versions": {"python": platform.python_version()}
        | {name: sys.modules[name].__version__ for name in packages},
    }  # fmt: skip
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"Written to {args.out}")


if __name__ == "__main__":
    main()
