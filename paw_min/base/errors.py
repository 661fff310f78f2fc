"""How a command ends: errors are one sentence each, without a traceback.

`importing` is for the seconds before a command begins, `user_errors` for the rest. Imports no
torch, so that workers start fast.
"""

import argparse
import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager

INTERRUPTED = "interrupted: rerun the same command to resume"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk
OURS = ("paw_min", "examples", "research")


class UserError(ValueError):
    """An error that the user can fix: shown as one sentence, without a traceback."""


def importing() -> None:
    """Until `user_errors` takes over, Ctrl-C and a package that is missing are one line, too."""
    # A shell starts background jobs with SIGINT ignored: that stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    sys.excepthook = _missing


def _interrupted(*_) -> None:
    # No KeyboardInterrupt: libraries turn some of them into other errors.
    os.write(2, f"\n{INTERRUPTED}\n".encode())
    os._exit(1)


def _missing(kind, error, trace) -> None:
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in OURS:
        print(f"error: the package {package} is not installed: pip install {package}, in the "
              "version that the requirements or the command's file name.", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


@contextmanager
def user_errors(named: Callable[[str], str] = str):
    """End the process with one sentence and exit code 1 where a user can help.

    That is at a UserError, at Ctrl-C, and where the output cannot be written: silently behind
    `| head`, which has closed it. named: adds the rank to a sentence.
    """
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.excepthook is _missing:
        sys.excepthook = sys.__excepthook__
    end = lost = None
    try:
        yield
    except UserError as error:
        end = named(f"error: {error}")
    except KeyboardInterrupt:
        end = INTERRUPTED
    except SystemExit as error:  # of argparse
        end = error.code or 0
    except OSError as error:
        lost = _lost_output("\n")
        if error.filename is not None:
            # A look at a path that is too long, or in a folder of somebody else.
            end = named(f"error: {error.filename!r:.200} cannot be used: {error.strerror}")
        elif not lost and error.errno in FULL:
            end = named(f"error: {error.strerror}: free space, and rerun the same command")
        elif not lost:
            raise
    lost = lost or _lost_output()
    if lost and not end:
        is_closed = isinstance(lost, BrokenPipeError)
        end = 1 if is_closed else named(f"error: the output cannot be written: {lost.strerror}")
    if end is not None:
        sys.exit(end)


def _lost_output(more: str = "") -> OSError | None:
    """Why the output, and `more`, cannot be written, if it cannot.

    more: after an error that may be the output's: without a buffer, nothing is left to write.
    """
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter would try again at its end, and report that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which would fill the screen."""

    def __init__(self, **options):
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec:  # of python -m; without it, the name of a package is __main__.py
            options["prog"] = f"python -m {spec.name.removesuffix('.__main__')}"
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args=None, namespace=None):
        """Parse, unless a value is empty, as that of a shell variable that is not set.

        As a path, it would be the current folder, and be written to. Nor is a value bytes that are
        no text: no file of ours could have it.
        """
        name = "a value"
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--"):
                name = word.partition("=")[0]
            if re.fullmatch("(--[^=]+=)?", word):
                self.exit(1, f'error: {name} "" is empty: give a value, or omit it.\n')
            if re.search("[\ud800-\udfff]", word):
                self.exit(1, f"error: {word!r:.200} is no text in UTF-8: use another name.\n")
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        self.exit(1, f"error: {message}; see --help\n")


def masked(text: str) -> str:
    """A text without name and password in its URL, for files and messages.

    Works for invalid URLs, too. Any other text stays as it is.
    """
    return re.sub("://.*@", "://***@", text, flags=re.DOTALL)


def command_line(words: Iterable[str]) -> str:
    """A command for files and messages, without passwords."""
    return shlex.join(map(masked, words))
