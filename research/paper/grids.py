"""The runs behind each table and figure: arms, named as in the paper, and their flags.

{size} stands for the size preset of the sweep (tiny, paper), {episodes} for the episodes per update
of that preset. The first arm is the one that `table` compares the others to.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arm:
    label: str
    flags: str = ""  # The run script without flags trains GRPO w/ PaW.


def pair(name: str, flags: str) -> list[Arm]:
    return [Arm(name, f"{flags} --no-paw"), Arm(f"{name} w/ PaW", flags)]


GRPO = pair("GRPO", "")
MAIN = GRPO + pair("GiGPO", "--algo gigpo")
PLACEBO = Arm("placebo: shuffled targets", "--wm-target shuffled")

GRIDS = {
    "pair": GRPO,
    "table1": MAIN,  # and Table 5, its standard deviations
    "table2": MAIN,  # --env search
    # A.1: PPO plays as many episodes as the others, each in an environment of its own.
    "table3-algorithms": [
        *pair("PPO", "--algo ppo --groups {episodes} --group-size 1"),
        *pair("RLOO", "--algo rloo"),
    ],
    "table3-models": [  # They need -- --preset paper --data DIR.
        *pair("Qwen3-1.7B", "--model Qwen/Qwen3-1.7B --kl-coef 0"),
        *pair("Llama3.2-3B-Instruct", "--model meta-llama/Llama-3.2-3B-Instruct"),
        *pair("Qwen2.5-14B-Instruct", "--model Qwen/Qwen2.5-14B-Instruct"),
    ],
    # The last two are not in the paper. At rho = 1, Eq. 7 keeps every token and Eq. 8 is the MAE.
    "table4": [
        *GRPO,
        Arm("w/o Ada. Coef.", "--lambda-g constant"),
        Arm("w/ CE loss", "--wm-loss ce"),
        Arm("w/o clipping (MAE)", "--rho 1"),
        Arm("w/o selection", "--alpha 1"),
    ],
    "fig6-alpha": [
        Arm("α = 0.25", "--alpha 0.25"),
        Arm("α = 0.5", "--alpha 0.5"),
        Arm("α = 0.75", "--alpha 0.75"),
        Arm("α = 1", "--alpha 1"),
    ],
    "fig6-rho": [
        Arm("ρ = 0.1", "--rho 0.1"),
        Arm("ρ = 0.2", "--rho 0.2"),
        Arm("ρ = 0.4", "--rho 0.4"),
        Arm("ρ = 0.8", "--rho 0.8"),
        Arm("ρ = 1", "--rho 1"),
    ],
    # The paper does not ask: is it the content of the gradient, or its size? And two relatives.
    "neighbors": [
        *GRPO,
        PLACEBO,
        Arm("world-model loss x 0.1", "--wm-scale 0.1"),
        Arm("ECHO", "--preset {size} echo"),
    ],
}
