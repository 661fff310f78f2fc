"""The end of a command: an error is one sentence, without a traceback.

Imports no torch, so that workers start fast.
"""

import errno
import os
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager

INTERRUPTED = "interrupted: rerun the same command to resume"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # A disk is full.


class UserError(ValueError):
    """An error that the user can fix: shown as one sentence, without a traceback."""


def is_out_of_memory(error: BaseException) -> bool:
    """Is the GPU's memory full? torch's error says so, and so do the plain ones of vLLM."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


@contextmanager
def user_errors(named: Callable[[str], str] = str):
    """End the process with one sentence and exit code 1 where a user can help.

    That is at a UserError, at Ctrl-C, with a full disk and with a full GPU. It ends silently where
    the output has been closed, as by `| head`. named: adds the rank to a sentence.
    """
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):  # a terminal need not have every character
            output.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except UserError as error:
        sys.exit(named(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The interpreter would try again at its end, and report that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is not None:
            # The path is too long, or in a folder of somebody else.
            sys.exit(named(f"error: {error.filename!r:.200} cannot be used: {error.strerror}"))
        if error.errno not in FULL:
            raise
        sys.exit(named(f"error: {error.strerror}: free space, and rerun the same command"))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        sys.exit(named(f"error: the GPU's memory is full ({reason}): rerun with a lower "
                       "--micro-tokens or --vllm-memory; the run then resumes."))


def masked(text: str) -> str:
    """A text without name and password in its URL, for files and messages.

    Works for invalid URLs, too. Any other text stays as it is.
    """
    return re.sub("://.*@", "://***@", text, flags=re.DOTALL)
