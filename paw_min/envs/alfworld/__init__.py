"""ALFWorld (Shridhar et al., 2021): household tasks as text games."""

from paw_min.envs.alfworld import prompts
from paw_min.envs.alfworld.env import SPLITS, AlfworldEnv, list_games, load
from paw_min.envs.interface import Benchmark

__all__ = ["BENCHMARK", "AlfworldEnv", "list_games"]

BENCHMARK = Benchmark(
    load=load,
    prompts={"paper": prompts.paper, "compact": prompts.compact},
    parse=prompts.parse,
    splits=SPLITS,
)
