"""Data files that somebody else wrote: text that is Unicode, and paths. Imports no torch."""

import json
from pathlib import Path

from paw_min.running.errors import UserError


def parse_json(content: bytes):
    """The value in a JSON file; ValueError also for a text that is not Unicode.

    json accepts one half of a surrogate pair, "\\ud800", which no tokenizer and no file takes.
    """
    value = json.loads(content)
    # Most files are ASCII without such an escape, and are not encoded again.
    if not content.isascii() or b"\\ud" in content.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def refuse_special(path: Path) -> None:
    """ValueError for a pipe or a device, from which a program could read without an end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is a pipe or a device, not a file")


def expanded(path: str | Path) -> Path:
    """The path with its ~ replaced; UserError if it names a user who does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} begins with a home folder that does not exist: write the whole "
                        "path.") from error  # fmt: skip
