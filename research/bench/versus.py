"""Speed and memory as ratios, measured side by side against what a user would use instead.

    python -m research.bench.versus passes [--shape webshop] [--out FILE]
    python -m research.bench.versus rollouts [--out FILE]

passes    Forward and backward passes over the same rows with the same weights and loss, PaW's term
          included. paw_min: rows of similar length together, logits at scored tokens only. TRL's
          GRPOTrainer, by its own functions, as it works on a CPU: prompts padded on the left and
          completions on the right, each to the longest of the generation batch; logits at all
          positions (with Triton: at completions). Random tokens, half the lengths of gpu.py:
          SHAPES. Random weights of Qwen2.5-1.5B, 64 wide in place of 1,536, which about keeps the
          head's share of the work. fp32; both recompute activations. Time: CPU seconds. Memory:
          the peak of tensors, without weights and gradients. Tokens count without padding.
rollouts  The same episodes, seeds and sampler: asynchronous, as in paw_min, and in lock step:
          generate for all, step all, wait for all. Each environment is a process that sleeps,
          log-normal seconds per step with a heavy tail, or not at all. A tiny random model. Idle:
          share of a rollout's wall time in which nothing is generated.

The two take turns, round by round. A ratio is paw_min's number over the other one: the median over
the rounds, with the lowest and the highest.
"""

import argparse
import ctypes
import json
import math
import random
import time
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from multiprocessing import current_process
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from paw_min.envs.interface import Answer, Step
from paw_min.envs.pool import EnvPool

if current_process().name == "MainProcess":  # the environments import this file without torch
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import Qwen2Config

    from paw_min import cmae, losses
    from paw_min.config import Config
    from paw_min.model.batches import micro_batches
    from paw_min.model.policy import Policy
    from paw_min.model.sampler import HFSampler
    from paw_min.rollout import rollout
    from paw_min.toy import standins
    from research.bench.gpu import QWEN, SHAPES, make_policy, make_rows, versions


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """One number per round of each -> medians and ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "paw_min": median(ours), "instead": median(theirs),
        "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios),
    }


# ---- passes ----


def our_passes(policy, rows, learned: int, per_pass: int):
    """(logp, entropy, response mask, observation mask, the rows' numbers) of each pass."""
    longest = max(len(r.prompt_ids + r.response_ids + r.obs_ids) for r in rows[:learned])
    every = [True] * learned
    for batch in micro_batches(policy, rows, [*range(learned)], every, per_pass * longest):
        yield *policy(batch), batch.response_mask, batch.obs_mask, batch.index


def trl_passes(policy, rows, learned: int, per_pass: int):
    """The same by TRL. Observations are parts of completions, as in its multi-turn rollouts."""
    from trl import GRPOTrainer
    from trl.trainer.utils import pad

    def padded(sequences, side: str):
        return pad([torch.tensor(ids) for ids in sequences], policy.pad_id, padding_side=side)

    prompts = padded([r.prompt_ids for r in rows], "left")  # (N, P)
    completions = padded([r.response_ids + r.obs_ids for r in rows], "right")  # (N, C)
    ids = torch.cat([prompts, completions], dim=1)  # (N, P + C)
    present = ids != policy.pad_id  # (N, P + C); no row has this token
    n_response = torch.tensor([[len(r.response_ids)] for r in rows])  # (N, 1)
    response_mask = torch.arange(completions.shape[1]) < n_response  # (N, C)
    obs_mask = present[:, prompts.shape[1] :] & ~response_mask  # (N, C)

    # All that the function needs of a trainer, in fp32.
    accelerator = SimpleNamespace(autocast=nullcontext, is_main_process=True)
    trainer = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(report_to=[]))
    for part in torch.arange(learned).split(per_pass):
        logp, entropy, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, policy.model, ids[part], present[part].long(), completions.shape[1],
            compute_entropy=True,
        )  # (B, C), (B, C)
        yield logp, entropy, response_mask[part], obs_mask[part], part


def joint_loss(logp, entropy, response_mask, obs_mask, advantage, n_tokens: int, n_rows: int):
    """A pass's part of the loss; however the rows are split, the parts have the same sum."""
    share = response_mask.sum() / n_tokens
    surrogate, _ = losses.clipped_surrogate(logp, logp.detach(), advantage, response_mask)
    bonus = losses.masked_mean(entropy, response_mask)
    world_model = cmae.clipped_mae(logp, obs_mask, rho=0.2).sum() / n_rows
    return share * (surrogate - 0.001 * bonus) + world_model


def tensor_peak(function) -> int:
    """Peak of the tensors that a function allocates, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as log:
        function()
    events = [e for e in log.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def keep_freed_memory() -> None:
    """Tell glibc to give no memory back to the system.

    Getting it again for each tile of logits takes TRL's way as long as the computation.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes


def passes(shape="alfworld", generated=256, learned=4, per_pass=2, rounds=3, **sizes) -> dict:
    """learned: rows of the mini-batch, of so many generated ones. sizes: of the model."""
    from trl.trainer.utils import add_fused_lm_head

    keep_freed_memory()
    narrow = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, layer_types=None)
    config = Qwen2Config(**QWEN.to_dict() | narrow | sizes)
    policy = make_policy(config, "cpu", "fp32").train()
    policy.model.gradient_checkpointing_enable()
    add_fused_lm_head(policy.model, outputs=("log_probs", "entropy"))  # as GRPOTrainer does
    rows = make_rows(shape, generated, config.vocab_size, scale=0.5)
    for row in rows[::4]:
        row.obs_ids = []  # Eq. 4 selects three in four
    n_tokens = sum(len(r.response_ids) for r in rows[:learned])
    advantage = torch.randn(learned, generator=torch.Generator().manual_seed(0))
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)

    def learn(scored_rows) -> None:
        policy.zero_grad(set_to_none=False)
        for *scored, numbers in scored_rows(policy, rows, learned, per_pass):
            joint_loss(*scored, advantage[numbers], n_tokens, learned).backward()
            del scored  # before the next pass

    ways = [our_passes, trl_passes]
    peaks = []
    gradients = []
    for way in ways:  # a warm-up, too
        peaks.append([tensor_peak(partial(learn, way)) / 2**20])
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    ours, theirs = gradients
    apart = ((ours - theirs).norm() / theirs.norm()).item()
    if not apart < 1e-3:
        raise SystemExit(f"The gradients differ by {apart}: see tests/test_policy.py.")
    tokens = sum(len(r.prompt_ids + r.response_ids + r.obs_ids) for r in rows[:learned])
    speeds = [[], []]
    for _ in range(rounds):
        for way, found in zip(ways, speeds):
            start = time.process_time()
            learn(way)
            found.append(tokens / (time.process_time() - start))
    ratios = {"tokens per second": compare(*speeds), "peak memory, MB": compare(*peaks)}
    return {"shape": shape, "rows": learned, "tokens": tokens, "rounds": rounds,
            "ratios": ratios, "gradient_difference": apart}  # fmt: skip


# ---- rollouts ----


class Sleeper:
    """An environment that sleeps; its task determines the delays and the number of steps."""

    def __init__(self, delay: float, turns: tuple[int, int]):
        self.delay = delay
        self.turns = turns

    def reset(self, task: str) -> Step:
        self.random = random.Random(task)
        self.left = 1 + self.random.randint(*self.turns)
        return self.step("")

    def step(self, command: str) -> Step:
        self.left -= 1
        time.sleep(self.delay * self.random.lognormvariate(0, 1.2))  # the mean is 2.05 delays
        observation = " ".join(f"w{self.random.randrange(500)}" for _ in range(30))
        return Step(observation, "a task", "sleep", [], done=self.left == 0)


class LockStepPool(EnvPool):
    """Answers nothing before it has the answers to all requests."""

    def recv(self, timeout: float | None = None) -> Answer | None:
        while timeout is None and self._busy():
            self._wait(math.inf)
        return self._ready.popleft() if self._ready else None


def rollouts(episodes=16, turns=(4, 8), delays=(0.1, 0.0), rounds=4) -> dict:
    """turns: fewest and most steps of an episode. delays: medians, in seconds."""
    tokenizer = standins.make_tokenizer([" ".join(f"w{i}" for i in range(500))])
    policy = Policy(standins.make_model(tokenizer, seed=0, width=64), tokenizer).eval()
    policy.eos_ids = [*range(20)]  # of 505 tokens, so that lengths of responses are geometric
    cfg = Config(prompt="compact", max_prompt_tokens=1024, max_turns=turns[1],
                 max_response_tokens=48)  # fmt: skip
    sampler = HFSampler(batch_size=episodes)  # lock step: one batch of all that wait
    tasks = [f"task {i}" for i in range(episodes)]

    def play(pool) -> tuple[float, float]:
        """One rollout -> steps per second, idle share."""
        start = time.perf_counter()
        played = rollout(cfg, policy, sampler, pool, tasks, range(episodes),
                         temperature=1.0, seed_key=(0,), label="")  # fmt: skip
        steps = sum(len(episode.transitions) for episode in played.episodes)
        return steps / (time.perf_counter() - start), played.metrics["generator_idle"]

    ratios = {}
    for delay in delays:
        make = partial(Sleeper, delay, turns)
        with (
            EnvPool(make, episodes, workers=episodes) as ours,
            LockStepPool(make, episodes, workers=episodes) as lock_step,
            sampler.sync(policy),
        ):
            play(ours)  # a warm-up
            pairs = [(play(ours), play(lock_step)) for _ in range(rounds)]
        what = f"delays of {2.05 * delay:.1f} s" if delay else "no delays"
        for k, measure in enumerate(["steps per second", "idle share"]):
            numbers = [(a[k], b[k]) for a, b in pairs]
            ratios[f"{measure}, {what}"] = compare(*zip(*numbers))
    return {"episodes": episodes, "turns": turns, "rounds": rounds, "ratios": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["passes", "rollouts"])
    parser.add_argument("--shape", choices=SHAPES, default="alfworld", help="passes: the lengths")
    parser.add_argument("--out", type=Path, help="default: results/COMMAND.json beside this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = passes(args.shape) if args.command == "passes" else rollouts()
    text = json.dumps(report | versions("cpu"), indent=1)
    print(text)
    out = args.out or Path(__file__).parent / "results" / f"{args.command}.json"
    out.write_text(text + "\n")


if __name__ == "__main__":
    main()
