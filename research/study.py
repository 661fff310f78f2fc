"""What the studies share: a run of an example, and a file of runs, one JSON object per line."""

import json
import subprocess
import sys
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.base.files import reading
from paw_min.running.runs import read_metrics

ROOT = Path(__file__).parents[1]


def play(example: str, flags: list[str], folder: Path) -> list[dict]:
    """Run an example in its run folder, or resume it -> the lines of its metrics.jsonl."""
    command = [sys.executable, "-m", f"examples.{example}", *flags]
    command += ["--out", str(folder.parent), "--name", folder.name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"the run {folder} ended with exit code {done.returncode}, see above: "
                        "rerun the same command when its cause is gone.")
    return read_metrics(folder)


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
