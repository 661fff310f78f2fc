"""Errors that users see, as one sentence each. Imports no torch, so that workers start fast."""

import argparse
import re
import sys
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can fix: shown as one sentence, without a traceback."""


@contextmanager
def user_errors():
    """End the process with one sentence and exit code 1: at a UserError, or at Ctrl-C."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: rerun the same command")
    except OSError as error:
        # A look at a path that is too long, or in a folder of somebody else.
        if error.filename is None:
            raise
        sys.exit(f"error: {error.filename!r:.200} cannot be used: {error.strerror}")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which would fill the screen."""

    def __init__(self, **options):
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec:  # of python -m; without it, the name of a package is __main__.py
            options["prog"] = f"python -m {spec.name.removesuffix('.__main__')}"
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

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
        self.exit(1, f"error: {message}; see --help\n")


def masked(url: str) -> str:
    """A URL without its name and password, for files and messages; works for invalid URLs, too."""
    return re.sub("//.*@", "//***@", url, flags=re.DOTALL)
