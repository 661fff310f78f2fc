"""Search-augmented question answering: NQ, HotpotQA and others, with a retriever as the tool."""

from paw_min.envs.interface import Benchmark
from paw_min.envs.search import prompts
from paw_min.envs.search.env import load

BENCHMARK = Benchmark(
    load=load,
    prompts={"paper": prompts.paper, "compact": prompts.compact},
    parse=prompts.parse,
    r_max=1.0,
    similarity=0.9,  # A.1
    cut_prompts=True,
)
