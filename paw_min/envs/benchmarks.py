"""The benchmarks by name. To add one, write its folder and add its line."""

from paw_min.envs import alfworld, search, textworld, webshop
from paw_min.envs.interface import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    "alfworld": alfworld.BENCHMARK,
    "webshop": webshop.BENCHMARK,
    "search": search.BENCHMARK,
    "textworld": textworld.BENCHMARK,
}
