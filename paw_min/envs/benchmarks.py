"""The benchmarks by name. To add one, write its folder, with a BENCHMARK in it, and add its name.

A dictionary, since an example or a fork adds its own by assignment (examples/locks.py). It imports
a benchmark at its first use, since each needs packages that a run of another one has not installed,
or would load for seconds.
"""

from importlib import import_module

from paw_min.base.errors import UserError
from paw_min.envs.interface import Benchmark

NAMES = ("alfworld", "webshop", "search")


class _Benchmarks(dict[str, Benchmark]):
    def __missing__(self, name: str) -> Benchmark:
        if name not in NAMES:
            raise UserError(f"env is {name!r}, expected {' or '.join(NAMES)}")
        self[name] = import_module(f"paw_min.envs.{name}").BENCHMARK
        return self[name]


BENCHMARKS = _Benchmarks()
