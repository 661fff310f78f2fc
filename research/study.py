"""What the studies share: a file of runs, one JSON object per line, that a kill may cut short."""

import json
from pathlib import Path

from paw_min.base.files import reading


def read_lines(path: Path) -> list[dict]:
    """The runs in a file, none if it is missing; UserError for a line that is damaged.

    A kill can leave half a line at the end. It is cut off, so that a rerun makes this run again and
    does not append to it.
    """
    if not path.exists():
        return []
    with reading(path):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)
        return [json.loads(line) for line in whole.splitlines()]
