"""Every random draw has a key, so a checkpoint stores no generator.

    draw                         key                                    function
    ---------------------------  -------------------------------------  -------------------------
    tasks of an update           "groups", seed, epoch                  tasks.draw_groups
    evaluation panel             "panel", 0: the same in every run      tasks.panel
    token of a training rollout  seed, update, trajectory, turn         request_seed, sampler.py
    token of an evaluation       -1, trajectory, turn                   request_seed, sampler.py
    ... in a later trial         -1, trial seed, trajectory, turn       evaluate(trial_seed=...)
    order of rows in an update   (seed, update)                         update.mini_batches
    ... in TAPO's second part    (seed, update, "world model")          update.mini_batches
    shuffled targets (placebo)   "shuffled", seed, update               targets.shuffled
    new LoRA adapters            seed                                   model/lora.py: attach
    rounding of merged adapters  "round_bf16", name of the weight       model/lora.py: round_bf16

So an update that is repeated after a kill draws the same numbers.
"""

import hashlib
import random


def generator(*key) -> random.Random:
    """A generator for one draw; its key is made of words, numbers and tuples of numbers."""
    return random.Random(" ".join(str(part) for part in key))


def request_seed(*key: int) -> int:
    """A 63-bit seed for the tokens of one response."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
