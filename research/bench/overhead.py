"""Time and memory that PaW adds to GRPO in one update on the same rows.

    python research/bench/overhead.py [--shape alfworld webshop] [--quick] [--out FILE]

The paper measures a whole step of ALFWorld with Qwen2.5-1.5B, rollout included: +2.1 % time and
+2.4 % peak memory (Fig. 5). This script measures the update alone (update.prepare and
update.learn), because PaW does not change the rollout, which would dilute the difference. The rows
have the lengths of ALFWorld and of WebShop (SHAPES in update.py), with the paper's settings:
old log-probs, KL to a reference, mini-batches, clipped MAE on the observations of three rows in
four.

Target: at most +1.0 %, or the observations' fraction of the tokens plus 0.3 points if that is more.

Model: random weights, a small model with the fraction of parameters in the head of Qwen2.5-1.5B,
fp32, 32 rows of half the length, and tiles of the head in proportion to the vocabulary. Activations
are recomputed in the backward pass. On a GPU: gpu.py.

Time: GRPO and PaW alternate in one process, measured in CPU seconds of one thread.
Every turn makes the same calls in the same order, and each call counts with its minimum over the
turns, which removes the disturbance by other programs. The old pass, the reference and the
optimizer do the same work in both and share one time; the first two run in the first turn only.
`operations` counts the operations of matrix products and attention, without noise.

Memory: the peak of all tensors, weights and optimizer included, by the allocator's count. The
update is planned for whole mini-batches of the paper (256 rows, WebShop 64; with half of
--micro-tokens) and stops after the first micro-batch, which is the largest. The old pass and the
reference are skipped, since they need less. The rows of that micro-batch and its padding are
random, so the result is averaged over DRAWS draws of rows and entropies; `memory_draws` has the
difference in each.

--quick: one turn instead of six. --tiny: a rehearsal in one process; its numbers mean nothing.
Takes four minutes.
"""

import argparse
import gc
import json
import os
import statistics
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages about the profiler's start and stop

import paw_min  # noqa: F401 - before torch, for OMP_WAIT_POLICY

# isort: split
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config
from update import VOCABULARY, child, make_policy, make_rows, now, tensor_peak, versions
from update import write as write_report

from paw_min import update
from paw_min.base.errors import user_errors
from paw_min.config import Config
from paw_min.model import head, scoring
from paw_min.rows import Episode, flatten

SMALL = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=1120,
             num_hidden_layers=4, tie_word_embeddings=True, vocab_size=2500)
ROWS = 32
SCALE = {"cpu": 0.5, "cuda": 1.0}
MICRO_TOKENS = 2048  # for times on a CPU
TILE = head.TILE * SMALL["vocab_size"] // VOCABULARY
DRAWS = 4  # for the memory
MINI_BATCHES = {"alfworld": 256, "webshop": 64}  # rows, A.1
STEPS = 4  # rows of an episode
GROUP = 4  # episodes
SAME = ("old_pass", "reference", "optimizer")  # phases that cost the same with and without PaW
OWN = ("forward", "backward", "rest")


def make_episodes(shape: str, device: str, n_rows: int, vocabulary: int, seed) -> list[Episode]:
    """Episodes of STEPS rows; every second one is won."""
    rows = make_rows(shape, n_rows, vocabulary, SCALE[device], seed)
    episodes = []
    for n in range(0, len(rows), STEPS):
        group = n // STEPS // GROUP
        number = n // STEPS
        for row in rows[n : n + STEPS]:
            row.group = group
            row.trajectory = number
        rows[n + STEPS - 1].reward = 10.0 * (number % 2)
        episodes.append(Episode("", group, number, rows[n : n + STEPS]))
    return episodes


class Bench:
    """A policy, a reference and an optimizer, and updates of them with or without PaW."""

    def __init__(self, shape: str, what: str, seed: int = 0):
        torch.set_num_threads(1)
        mini = MINI_BATCHES[shape]
        tokens = Config.micro_tokens // 2
        n_rows = ROWS if what == "time" else mini
        if what == "time":
            mini = n_rows // 2
            tokens = MICRO_TOKENS
        self.seed = seed
        config = Qwen2Config(**SMALL)
        head.TILE = TILE
        self.episodes = make_episodes(shape, "cpu", n_rows, config.vocab_size, seed)
        self.policy = make_policy(config, "cpu", "fp32")
        self.reference = make_policy(config, "cpu", "fp32").requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-6)
        for p in self.policy.parameters():
            p.grad = torch.ones_like(p).zero_()  # written to, so that its memory is resident
        self.optimizer.step()
        self.cfg = {paw: Config(paw=paw, mini_batch=mini, micro_tokens=tokens)
                    for paw in (False, True)}
        self.seconds = defaultdict(list)
        self.scored = {}
        if what == "time":
            self.watch()

    def watch(self) -> None:
        """Wrap the parts of an update in timers."""

        def timed(function, phase):
            def run(*arguments, **options):
                start = now("cpu")
                result = function(*arguments, **options)
                if torch.is_grad_enabled():  # not the forward passes inside the old pass
                    self.seconds[phase].append(now("cpu") - start)
                return result

            return run

        def once(function, phase):
            def run(*arguments):
                if phase not in self.scored:
                    self.scored[phase] = function(*arguments)
                return self.scored[phase]

            return run

        # The old pass calls it by its name in scoring.py, the reference by that in update.py.
        for module, phase in ((scoring, "old_pass"), (update, "reference")):
            module.score_responses = once(timed(module.score_responses, phase), phase)
        self.policy.forward = timed(self.policy.forward, "forward")
        torch.Tensor.backward = timed(torch.Tensor.backward, "backward")
        self.optimizer.step = timed(self.optimizer.step, "optimizer")

    def first_micro_batch(self, paw: bool) -> None:
        """An update that stops there, with random entropies instead of those of the old pass."""
        backward = torch.Tensor.backward

        def last(loss):
            backward(loss)
            raise StopIteration

        def random_scores(cfg, policy, rows):
            draws = torch.Generator().manual_seed(self.seed)
            return scoring.Scores(torch.zeros(len(rows), 1), torch.rand(len(rows), generator=draws))

        with (suppress(StopIteration), patch.object(scoring, "score_responses", random_scores),
              patch.object(update, "score_responses", random_scores),
              patch.object(torch.Tensor, "backward", last)):
            self.update(paw)

    def update(self, paw: bool) -> tuple[dict, dict]:
        """One update -> seconds of each call by phase, metrics."""
        self.seconds.clear()
        cfg = self.cfg[paw]
        start = now("cpu")
        rows = update.prepare(cfg, self.policy, self.reference, flatten(self.episodes))
        metrics = update.learn(cfg, self.policy, self.optimizer, rows, (0, 1))
        seconds = {"total": [now("cpu") - start]} | self.seconds
        known = sum(sum(seconds[phase]) for phase in SAME + OWN[:2])
        seconds["rest"] = [seconds["total"][0] - known]
        return seconds, metrics


def peak(shape: str, paw: bool, seed: int) -> int:
    """The peak of all tensors in an update, in bytes."""
    gc.collect()  # the models of the last draw

    def build_and_pass():
        Bench(shape, "memory", seed).first_micro_batch(paw)

    return tensor_peak(build_and_pass, "cpu")[1]


def measure(shape: str, what: str, turns: int) -> dict:
    """what: "time" or "memory"."""
    if what == "memory":
        peaks = {}  # MiB
        for name in ("grpo", "paw"):
            bytes_of = [peak(shape, name == "paw", seed) for seed in range(DRAWS)]
            peaks[name] = [count / 2**20 for count in bytes_of]
        return peaks
    bench = Bench(shape, what)
    bench.update(True)  # warm-up
    found = {False: [], True: []}
    for turn in range(turns):
        for paw in (False, True) if turn % 2 else (True, False):
            if turn == 0:
                bench.scored.clear()
            seconds, metrics = bench.update(paw)
            found[paw].append((seconds, metrics))
    operations = {}
    for paw in (False, True):
        bench.scored.clear()
        with FlopCounterMode(display=False) as counter:
            bench.update(paw)
        operations["paw" if paw else "grpo"] = counter.get_total_flops()
    return {"grpo": found[False], "paw": found[True], "operations": operations,
            "parameters": bench.policy.model.num_parameters(), **versions("cpu")}


def summary(timing: dict, peaks: dict, tokens: int) -> dict:
    """Relative differences in percent, and the breakdown in seconds."""
    grpo = [seconds for seconds, _ in timing["grpo"]]
    paw = [seconds for seconds, _ in timing["paw"]]

    def least(turns: list, phase: str) -> float:
        """Every call with its minimum over the turns, which make the same calls."""
        calls = zip(*(seconds[phase] for seconds in turns), strict=True)
        return sum(min(times) for times in calls)

    first = grpo[:1] + paw[:1]
    best = {}
    for name, own in (("grpo", grpo), ("paw", paw)):
        phases = {phase: least(first, phase) for phase in SAME[:2]}
        phases["optimizer"] = least(grpo + paw, "optimizer")
        for phase in OWN:
            phases[phase] = least(own, phase)
        best[name] = phases
    total = {name: sum(phases.values()) for name, phases in best.items()}
    more = timing["paw"][0][1]["tokens_trained"] - timing["grpo"][0][1]["tokens_trained"]
    percent = {
        "observation_tokens": more / tokens,
        "time": total["paw"] / total["grpo"] - 1,
        "operations": timing["operations"]["paw"] / timing["operations"]["grpo"] - 1,
        "memory": sum(peaks["paw"]) / sum(peaks["grpo"]) - 1,
    }
    percent["aim"] = max(0.01, percent["observation_tokens"] + 0.003)
    draws = zip(peaks["grpo"], peaks["paw"])
    seconds = {}
    for name, phases in best.items():
        seconds[name] = {"total": round(total[name], 3)}
        for phase, value in phases.items():
            seconds[name][phase] = round(value, 3)
    return {
        "percent": {name: round(100 * value, 2) for name, value in percent.items()},
        "memory_draws": [round(100 * (more / less - 1), 2) for less, more in draws],
        "peak_mb": {name: round(statistics.mean(drawn), 1) for name, drawn in peaks.items()},
        "seconds": seconds,
        "tokens": tokens,
        "tokens_forward": {name: int(timing[name][0][1]["tokens_forward"]) for name in peaks},
    }


def make_tiny() -> None:
    global DRAWS, ROWS
    SMALL.update(hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    ROWS = 8
    DRAWS = 1
    MINI_BATCHES.update(alfworld=8, webshop=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["alfworld", "webshop"], help="of the rows")
    parser.add_argument("--quick", action="store_true", help="one turn instead of six")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of a few seconds")
    parser.add_argument("--out", default="research/bench/results/overhead.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # shape, what
    args = parser.parse_args()
    turns = 1 if args.quick else 6
    if args.child:
        print(json.dumps(measure(*args.child, turns)))
        return

    if args.tiny:
        make_tiny()
    flags = ["--quick"] * args.quick
    report = {"command": " ".join(["python research/bench/overhead.py", *flags])}
    for shape in args.shape:
        if args.tiny:
            peaks = measure(shape, "memory", 1)
            timing = measure(shape, "time", 1)
        else:
            peaks = child(__file__, "memory", *flags, "--child", shape, "memory")
            timing = child(__file__, "time", *flags, "--child", shape, "time")
        rows = make_rows(shape, ROWS, 10, SCALE["cpu"])
        tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in rows)
        report[shape] = summary(timing, peaks, tokens)
    report |= {key: timing[key] for key in ("parameters", "device", "versions")}
    report["rows"] = ROWS
    write_report(report, args.out)


if __name__ == "__main__":
    with user_errors():
        main()
