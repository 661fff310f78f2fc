"""TextWorld's own games (Côté et al., 2018), the third text game of Word2World.

Prompts and parser are ALFWorld's, which is a TextWorld game, too; `paper` names the environment. No
run script and no stand-in model: PRESETS serves Word2World, and its agent `model` needs --model.
"""

from paw_min.envs.alfworld import prompts
from paw_min.envs.interface import Benchmark, Context
from paw_min.envs.textworld.env import TextworldEnv, list_games, load

__all__ = ["BENCHMARK", "PRESETS", "TextworldEnv", "list_games"]

PRESETS = {
    "tiny": dict(prompt="compact", history_length=1, groups=8, micro_tokens=4096),
    "paper": {},
}


def paper(context: Context, history_length: int) -> str:
    return prompts.paper(context, history_length).replace("ALFRED Embodied", "TextWorld")


BENCHMARK = Benchmark(
    load=load,
    prompts={"paper": paper, "compact": prompts.compact},
    parse=prompts.parse,
)
