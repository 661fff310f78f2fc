"""Three worlds, each made for one choice of PaW: to see what it does, and what happens without it.

    python -m examples.three_worlds serials      the loss       (Eq. 7 and 8)
    python -m examples.three_worlds corridors    the selection  (Eq. 4)
    python -m examples.three_worlds polish       the balance    (Eq. 10)

In the world of one_file.py, no significant difference was seen when a choice was replaced: every
observation is short, true and needed. Each of these worlds changes one thing. A command trains five
arms, prints their curves and draws them in NAME.png, in less than two minutes on an idle core. Read
one_file.py first; research/LOG.md has 16 seeds of these arms and others.

With one seed, a difference of 20 points may be chance in the first two worlds: --seeds 0 1 2 3. In
the table, p(noise) is the probability of the words after the material: a serial number, or dots.
"""

import argparse
import random
import sys
from dataclasses import dataclass, replace
from statistics import mean

import torch

from examples.one_file import Arm, Size, World, check_writable, draw, make_world, run

SMALL = Size(
    width=32, layers=1, heads=2, warm_steps=200, warm_rows=128, lr=1e-3, updates=120,
    evaluate_every=20,
)
NAMES = 64
DIGITS = [f"digit{i}" for i in range(256)]
SIGHTS = ["bench", "carpet", "door", "lamp", "mirror", "plant", "statue", "window"]


# ---- Serial numbers: what the loss does ----
# An observation ends with the lock's serial number, 8 words of 256:
#
#     open lock17 with | saw | shut glass digit9 digit201 ...
#
# It is the same whenever this name is tried, so it can be memorized, and it is of no use. To
# predict the material, names of one material have to become alike. To predict the serial, every
# name has to differ from every other one. Cross entropy costs most where p is small, so the
# serial has most of its gradient. The gradient of the MAE on a token is p (1 - p): nearly nothing
# at p = 1/256.
#
# Predicted: with cross entropy, less is won than without any world model. PaW gains as if the
# serial were not there. ECHO is cross entropy at a weight of 0.05: here it was expected between
# GRPO and PaW, in its protocol (research/LOG.md) level with PaW or above.
#
# Seen on 16 seeds, as the mean of the curve: GRPO 27.0 %, PaW 44.3, the placebo 27.7, cross entropy
# 10.4, ECHO 35.9. It is the shape of the MAE that helps, not the mask: without the mask it is 47.6.
# If each observation has new digits, cross entropy does no harm (44.4): nothing in them can be
# memorized.
@dataclass
class Serials(World):
    seed: int = 0

    def __post_init__(self):
        rng = random.Random(f"serials {self.seed}")
        self.serial = {name: rng.choices(DIGITS, k=8) for name in self.material_of}

    def observation(self, name: str, tool: str) -> list[str]:
        return super().observation(name, tool) + self.serial[name]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        """The serial has random digits: those of other locks would be facts of this world, too."""
        return super().shown_observation(names, rng)[:2] + rng.choices(DIGITS, k=8)

    def words(self) -> list[str]:
        return [*super().words(), *DIGITS]


# ---- Corridors: what the selection does ----
# A task is two locks and two corridors. In a corridor, the one sensible action is to walk, which
# the warm start has shown. What is seen there is 8 random words of 8, new each time:
#
#     open lock17 with | saw | shut glass . . . . . .
#     open corridor5 with | walk | lamp door door plant lamp carpet bench lamp
#
# Each word has p = 1/8, below rho: Eq. 7 keeps it, and nothing can be learned from it. But the
# policy is sure to walk, so the corridors have the lowest action entropy. They are half of the
# transitions: with alpha = 0.5, Eq. 4 drops exactly these.
#
# Predicted: with cross entropy, less is won without the selection (alpha = 1) than with it. With
# PaW's loss, the same to a smaller extent.
#
# Seen on 16 seeds, in points of the mean of the curve: without the selection, -7.7 [-15.7, +0.2]
# with cross entropy and -2.3 [-11.6, +7.0] with PaW's loss, neither significant. A selection upside
# down, which trains on the corridors alone, loses PaW's whole gain: -26.6 [-34.7, -18.5]. So this
# world shows that the wrong half harms, and not that choosing half is better than taking all.
@dataclass
class Corridors(World):
    seed: int = 0

    def __post_init__(self):
        self.corridors = [f"corridor{i}" for i in range(NAMES)]
        self.rng = random.Random(f"sights {self.seed}")

    def steps(self) -> list[list[str]]:
        return super().steps() + [self.corridors] * 2

    def right_tool(self, name: str) -> str:
        return super().right_tool(name) if name in self.material_of else "walk"

    def shown_tool(self, name: str, rng: random.Random) -> str:
        return super().shown_tool(name, rng) if name in self.material_of else "walk"

    def observation(self, name: str, tool: str) -> list[str]:
        if name in self.material_of:
            return super().observation(name, tool) + ["."] * 6
        return self.rng.choices(SIGHTS, k=8)

    def words(self) -> list[str]:
        return [*super().words(), *self.corridors, *SIGHTS, "walk", "."]


# ---- A policy that already wins: what the balance does ----
# The world of serial numbers, but the warm start has shown the right tool 7 times out of 10. Its
# model wins 44 % of the tasks, and GRPO alone ends at 98 %. lambda_g goes to 0 as the episodes of
# a group are won. With lambda_g = 1, cross entropy goes on to memorize serials, which moves
# weights that the policy needs. PaW's loss has almost no gradient: the words of a serial have p
# near 0, and a word with p > rho costs nothing.
#
# Predicted: with cross entropy, lambda_g = 1 costs success. With PaW's loss, it makes no
# difference.
#
# Seen on 16 seeds, at the end: -1.6 points [-2.0, -1.3] with cross entropy, -8.3 [-9.2, -7.5] at
# ten times the scale, -0.1 [-0.3, +0.0] with PaW's loss. PaW gains nothing over GRPO here.
class Polish(Serials):
    def shown_tool(self, name: str, rng: random.Random) -> str:
        known = rng.random() < 0.7
        return self.right_tool(name) if known else super().shown_tool(name, rng)


# ---- The comparisons ----
@dataclass
class Lesson:
    world: type[World]
    arms: dict[str, Arm]
    size: Size = SMALL
    names: int = NAMES

    def make_world(self, seed: int) -> World:
        """Anew for each run: a world may have a random generator of its own."""
        return self.world(**vars(make_world(seed, self.names)), seed=seed)


# "ce" has the selection and the balance of PaW, and cross entropy instead of its loss. ECHO
# (arXiv 2605.24517) is cross entropy on all transitions with a small constant weight. "constant" is
# lambda_g = 1.
GRPO, PAW, CE = Arm(scale=0.0), Arm(), Arm(loss="ce")
ECHO = Arm(scale=0.05, alpha=1.0, lambda_g="constant", loss="ce")
LESSONS = {
    "serials": Lesson(Serials, {
        "grpo": GRPO,
        "paw": PAW,
        "placebo": replace(PAW, placebo=True),
        "ce": CE,
        "echo": ECHO,
    }),
    "corridors": Lesson(Corridors, {
        "grpo": GRPO,
        "paw": replace(PAW, alpha=0.5),
        "paw, alpha 1": replace(PAW, alpha=1.0),
        "ce": replace(CE, alpha=0.5),
        "ce, alpha 1": replace(CE, alpha=1.0),
    }),
    "polish": Lesson(Polish, {
        "grpo": GRPO,
        "paw": PAW,
        "paw, constant": replace(PAW, lambda_g="constant"),
        "ce": CE,
        "ce, constant": replace(CE, lambda_g="constant"),
    }, replace(SMALL, updates=60, evaluate_every=10)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="A world for each choice of PaW")
    parser.add_argument("world", choices=LESSONS)
    parser.add_argument("--seeds", nargs="+", default=[0], type=int)
    args = parser.parse_args()
    check_writable(f"{args.world}.png")
    torch.set_num_threads(1)
    lesson = LESSONS[args.world]
    curves = {name: [] for name in lesson.arms}
    for seed in args.seeds:
        for name, arm in lesson.arms.items():
            world = lesson.make_world(seed)
            curves[name].append(run(seed, arm, world, lesson.size, name))
    print("\narm            success over the run  at the end  p(material)  p(noise)")
    for name, runs in curves.items():
        during = 100 * mean(point.success for curve in runs for point in curve[1:])
        last = [curve[-1] for curve in runs]
        end = 100 * mean(point.success for point in last)
        material = mean(point.material for point in last)
        noise = mean(point.noise for point in last)
        print(f"{name:13}  {during:18.1f} %  {end:8.1f} %  {material:11.3f}  {noise:8.3f}")
    draw(curves, f"{args.world}.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except OSError as error:
        sys.exit(f"error: {error}")
