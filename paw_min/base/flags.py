"""Flags of a command: the fields of a dataclass. The comment behind a field is its help.

    class Settings:
        # ---- run ----                  a title in --help
        seed: int = 0  # of training     --seed INT

Fields above the first title, or below `# ---- without a flag ----`, have no flag.
"""

import argparse
import inspect
import re
import sys
from typing import Literal, get_args, get_origin

from paw_min.base.errors import UserError, masked


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which would fill the screen."""

    def __init__(self, **options):
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec:  # python -m sets it; without it, the name of a package is __main__.py
            options["prog"] = f"python -m {spec.name.removesuffix('.__main__')}"
        # A misspelled flag is refused, and is not taken for the beginning of another one.
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def parse_known_args(self, args=None, namespace=None):
        """Parse, unless a value is empty, as that of a shell variable that is not set.

        As a path, it would be the current folder, and be written to.
        """
        name = "a value"
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--"):
                name = word.partition("=")[0]
            if re.fullmatch("(--[^=]+=)?", word):
                self.exit(1, f'error: {name} "" is empty: give a value, or omit it.\n')
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        self.exit(1, f"error: {masked(message)}; see --help\n")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def sections(cls: type) -> dict[str, dict[str, str]]:
    """The fields that have a flag: {title: {name: help}}."""
    found = {}
    section = {}
    for line in inspect.getsource(cls).splitlines():
        if title := re.fullmatch(r"    # ---- (.+) ----", line):
            section = found.setdefault(title[1], {})
        elif field := re.fullmatch(r"    (\w+): .+?  # (.+)", line):
            section[field[1]] = field[2]
    found.pop("without a flag", None)
    return found


def add_flags(parser: Parser, cls: type, skip=(), used: dict = {}, paper: dict = {}) -> None:
    """A flag per field; the parsed arguments have only those that were given.

    used, paper: what a command, and the paper, have in place of the defaults of `cls`: for --help.
    """
    for title, helps in sections(cls).items():
        group = parser.add_argument_group(title)
        for name, text in helps.items():
            if name in skip:
                continue
            kind = cls.__annotations__[name]
            how = {}
            if get_origin(kind) is tuple:  # such as tuple[int, ...]: one value or more
                kind = get_args(kind)[0]
                how["nargs"] = "+"
            if kind is bool:
                how["action"] = argparse.BooleanOptionalAction
            elif get_origin(kind) is Literal:
                how["choices"] = get_args(kind)
            else:
                how |= dict(type=kind, metavar=kind.__name__.upper())
            default, of_paper = (values.get(name, getattr(cls, name)) for values in (used, paper))
            shown = [] if default in ("", ()) else [f"default {default}"]
            shown += [] if of_paper in ("", (), default) else [f"paper {of_paper}"]
            if shown:
                text += f" ({'; '.join(shown)})"
            text = text.replace("%", "%%")  # argparse fills in values
            group.add_argument(flag(name), default=argparse.SUPPRESS, help=text, **how)


def check_bounds(settings, bounds: dict[str, tuple[str, ...]]) -> None:
    """UserError unless each value is in its interval. bounds: {"(0, 1]": names of settings}."""
    for interval, names in bounds.items():
        low, high = map(float, interval[1:-1].split(", "))
        for name in names:
            value = getattr(settings, name)
            above = value > low if interval[0] == "(" else value >= low
            below = value < high if interval[-1] == ")" else value <= high
            if not (above and below):  # nor is NaN
                raise UserError(f"{flag(name)} {value!s:.60} is out of range: it must be in "
                                f"{interval}.")
