"""Environment steps per second and the sampler's idle time, compared with lock-step rollouts.

    python -m research.bench.rollout [--sampler transformers vllm] [--gpu] [--quick] [--out FILE]

Both play the same tasks with the same seeds, sampler and environments:

    lock-step   generate for all, step all, wait for all; a finished episode leaves the batch
    ours        paw_min.rollout, asynchronous: an episode generates as soon as its environment
                answers, and steps as soon as its response is complete

Each environment is a process that sleeps: log-normal seconds per step (heavy tail), seeded by the
task, or no delay at all. A response ends at any token of a fixed fraction of the vocabulary, so
that lengths are geometric up to a limit; episodes have different numbers of steps. Model: random
weights; two narrow layers on a CPU; with --gpu Qwen2.5-1.5B in bf16, more episodes and longer
responses.

The two alternate; each ratio compares neighboring rounds, and the report has the median with the
extremes. idle: fraction of a rollout's wall time in which the sampler did not work. env_wait:
fraction in which the rollout waited for environments. same_responses: fraction of the responses
that are equal, token by token. Sleeping needs no core, generation needs one. Takes about a minute
per sampler.
"""

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from functools import partial
from importlib.metadata import version

os.environ["OMP_NUM_THREADS"] = "1"

from paw_min.base.errors import user_errors
from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool  # torch is imported in main(), not in each worker

SIGMA = 1.2  # of the logarithm of a delay: the mean is 2.05 medians, 1 in 100 exceeds 16 medians
SIZES = {  # rounds: (with delays, without); rounds without delays are short and noisy
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
              num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)


class Sleeper:
    """An environment that sleeps; its task determines the delays and the number of steps."""

    def __init__(self, median: float, turns: tuple[int, int]):
        self.median = median
        self.turns = turns

    def reset(self, task: str) -> Step:
        self.task = task
        self.random = random.Random(task)
        self.left = self.random.randint(*self.turns)
        return self._answer()

    def step(self, command: str) -> Step:
        self.left -= 1
        return self._answer()

    def _answer(self) -> Step:
        time.sleep(self.median * self.random.lognormvariate(0, SIGMA))
        observation = " ".join(self.random.choices(WORDS, k=30))
        done = self.left == 0
        return Step(observation, self.task, "sleep", [], float(done), done, won=done)


class LockStepPool:
    """A pool that answers nothing before it has the answers to all requests."""

    def __init__(self, pool: EnvPool):
        self.pool = pool
        self.n_envs = pool.n_envs
        self.sent = 0
        self.ready = deque()

    def reset(self, slot, task):
        self.pool.reset(slot, task)
        self.sent += 1

    def step(self, slot, command):
        self.pool.step(slot, command)
        self.sent += 1

    def recv(self, timeout=None):
        if timeout is None:
            self.ready.extend(self.pool.recv() for _ in range(self.sent))
            self.sent = 0
        return self.ready.popleft() if self.ready else None


class LockStepSampler:
    """A sampler that returns nothing before all requests have their responses."""

    def __init__(self, sampler):
        self.sampler = sampler

    def generate(self, *arguments):
        yield [r for finished in self.sampler.generate(*arguments) for r in finished]


def make_policy(size: dict, config: dict, device: str):
    """Random weights, and a fraction end_share of the vocabulary as end tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from paw_min.model.policy import Policy
    from paw_min.toy import standins as tiny

    tokenizer = tiny.make_tokenizer([" ".join(WORDS)])
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**config))
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
        Qwen2Config(**config, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        length = cfg.max_prompt_tokens + cfg.max_response_tokens
        return VLLMSampler(folder, length, "bf16" if device == "cuda" else "fp32", 0.5, 0)


def play(how: str, cfg, policy, sampler, pool, size: dict) -> dict:
    """One rollout -> its steps per second, idle fractions and responses."""
    from paw_min.rollout import rollout

    if how == "lock-step":
        sampler = LockStepSampler(sampler)
        pool = LockStepPool(pool)
    tasks = [f"task {i}" for i in range(size["episodes"])]
    start = time.perf_counter()
    played = rollout(
        cfg, policy, sampler, pool, tasks, range(len(tasks)),
        temperature=1.0, seed_key=(0,), label=how,
    )
    seconds = time.perf_counter() - start
    responses = [t.response_ids for e in played.episodes for t in e.transitions]
    return {"steps_per_s": len(responses) / seconds, "idle": played.metrics["generator_idle"],
            "env_wait": played.metrics["env_wait"], "responses": responses}


def compare(cfg, policy, sampler, size: dict, median: float) -> dict:
    """Both ways alternately -> one line of the report."""
    runs = {"lock-step": [], "ours": []}
    n = size["episodes"]
    with EnvPool(partial(Sleeper, median, size["turns"]), n, workers=n) as pool:
        with sampler.sync(policy):
            play("warm-up", cfg, policy, sampler, pool, size | {"episodes": 2})
            for _ in range(size["rounds"][median == 0]):
                for how, results in runs.items():
                    results.append(play(how, cfg, policy, sampler, pool, size))
    rounds = zip(runs["lock-step"], runs["ours"])
    ratios = [ours["steps_per_s"] / base["steps_per_s"] for base, ours in rounds]
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
                        default=["transformers"])
    parser.add_argument("--gpu", action="store_true", help="Qwen2.5-1.5B, 128 episodes")
    parser.add_argument("--quick", action="store_true", help="a few short episodes, one round")
    parser.add_argument("--out", default="research/bench/results/rollout.json")
    args = parser.parse_args()
    import torch

    from paw_min.config import Config
    from research.bench.update import QWEN, REST, VOCABULARY, versions, write

    torch.set_num_threads(1)
    device = "cuda" if args.gpu else "cpu"
    size = SIZES["quick" if args.quick else "gpu" if args.gpu else "cpu"]
    config = dict(vocab_size=VOCABULARY, **QWEN, **REST) if args.gpu else NARROW
    config = config | {"max_position_embeddings": 2048}
    cfg = Config(prompt="compact", max_prompt_tokens=1024, max_turns=size["turns"][1],
                 max_response_tokens=size["tokens"])
    lines = []
    for name in args.sampler:
        sampler = make_sampler(name, config, cfg, device)  # vLLM before the trainer's model
        policy = make_policy(size, config, device)
        for median in (size["median"], 0.0):
            line = {"sampler": name} | compare(cfg, policy, sampler, size, median)
            lines.append(line)
            print("\n".join(f"{key:24}{value}" for key, value in line.items()) + "\n", flush=True)
        if name == "vllm":
            sampler.close()

    report = {
        "command": "python -m research.bench.rollout " + " ".join(sys.argv[1:]),
        "load_average": round(os.getloadavg()[0], 1),
        "episodes": size["episodes"], "turns": size["turns"], "rounds": size["rounds"],
        "results": lines,
        **versions(device),
    }
    if "vllm" in args.sampler:
        report["versions"]["vllm"] = version("vllm")
    write(report, args.out)


if __name__ == "__main__":
    with user_errors():
        main()
