"""The benchmarks by name. To add one, write its folder, with a BENCHMARK in it, and add its name.

A dictionary, since an example or a fork adds its own by assignment (examples/locks.py). It imports
a benchmark at its first use, because a run of one benchmark need not have the packages of the
others, and some take seconds to load.
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


def presets_of(env: str) -> dict[str, dict]:
    """The presets of a benchmark, the default first: {name: {setting: value}}.

    Other settings have the defaults of config.py, such as the groups, alpha, rho and the KL term,
    and with the preset paper the learning rate: those of PaW A.1. What the paper leaves open is
    taken from verl-agent, which PaW builds on.

    env: its name, or a module from outside that adds itself to BENCHMARKS (examples.locks).
    """
    module = env if "." in env else f"paw_min.envs.{env}.presets"
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{env} is not a module here: {error}.") from error
    if not hasattr(found, "PRESETS"):
        raise UserError(f"{env} is no environment, it has no PRESETS: see examples/locks.py.")
    return found.PRESETS
