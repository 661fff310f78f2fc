"""What the long commands share: stages, of which a rerun skips those that are complete.

The result of a stage is a JSON file. A stage that was killed starts again, and draws the same
numbers: from keys of its own (seeds.py). If it was killed while it wrote its result, the error says
what to delete first.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.distributed import is_torchelastic_launched

from paw_min.base.errors import UserError, masked
from paw_min.base.files import replace_text


def run_stage(
    path: Path, settings: dict[str, object], writes: tuple[str, ...], make: Callable[[], dict]
) -> dict:
    """The JSON at `path`: made unless it is there, and then read.

    settings: what the result depends on, such as its command; the file begins with them. writes:
    what `make` writes beside `path`. UserError if the result has other settings, or if one of these
    is there without it: something else has made it.
    """
    if not path.is_file():
        left = [name for name in writes if os.path.lexists(path.with_name(name))]
        if left:
            raise UserError(f"{path.parent} has {', '.join(left)} already, and no {path.name}: "
                            "choose another --out, or delete what is named.")
        replace_text(path, json.dumps(settings | make(), indent=1) + "\n")
    found = json.loads(path.read_text("utf-8"))
    others = [f"{key} {found.get(key)!r}" for key in settings if found.get(key) != settings[key]]
    if others:
        raise UserError(f"{path} was made with {', '.join(others)}: repeat that, or choose "
                        "another --out.")
    return found


def command_line(words: Iterable[str]) -> str:
    """A command for files and messages, without passwords."""
    return shlex.join(map(masked, words))


def refuse_ranks(name: str) -> None:
    """UserError if torchrun launched this process; name: of the command, which has no ranks."""
    if is_torchelastic_launched():
        raise UserError(f"{name} runs in one process: start it without torchrun.")
