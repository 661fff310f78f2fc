"""The benchmarks by name. To add one, write its folder, with a BENCHMARK in it, and add its name.

A benchmark is imported at its first use, so that a run reads its own and no other.
"""

from importlib import import_module

from paw_min.base.errors import UserError
from paw_min.envs.interface import Benchmark

NAMES = ("alfworld", "webshop", "search", "textworld")


class _Benchmarks(dict[str, Benchmark]):
    """Name -> Benchmark. One from elsewhere is added with BENCHMARKS[name] = ..."""

    def __missing__(self, name: str) -> Benchmark:
        if name not in NAMES:
            raise UserError(f"env is {name!r}, expected {' or '.join(NAMES)}")
        self[name] = import_module(f"paw_min.envs.{name}").BENCHMARK
        return self[name]


BENCHMARKS = _Benchmarks()
