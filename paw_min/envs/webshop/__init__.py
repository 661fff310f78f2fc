"""WebShop (Yao et al., 2022): the official environment, and its agent's view for training."""

from paw_min.envs.interface import Benchmark
from paw_min.envs.webshop import prompts
from paw_min.envs.webshop.env import load
from paw_min.envs.webshop.goals import SPLITS
from paw_min.envs.webshop.pages import WebShopEnv
from paw_min.envs.webshop.shop import Shop

__all__ = ["BENCHMARK", "Shop", "WebShopEnv"]

BENCHMARK = Benchmark(
    load=load,
    prompts={"paper": prompts.paper, "compact": prompts.compact},
    parse=prompts.parse,
    splits=SPLITS,
)
