"""Resuming a long command: after a kill, a rerun skips complete pieces and gets the same numbers.

    stage      a result: the JSON at a path, made unless it is there
    Pieces     the complete pieces of a result, in a folder that is there until the result is
      once         one piece: made and appended to a file, or read
      parts        the same for the parts of a list, such as 64 tasks
      save, load   the newest epoch of a training: weights, optimizer, losses

    OUT/train.json               the result
        train.unfinished/pieces  before: what the pieces are of, and a line per piece
                         fit.pt  the newest epoch

What is not complete is done again from its beginning, and draws the same numbers: from keys of its
own (seeds.py), in the same batches. On a CPU, the result is then that of a command that was not
killed, to the last bit. vLLM and worker processes make other batches, and differ by rounding.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch.utils._pytree import tree_map_only

from paw_min.base.errors import UserError
from paw_min.base.files import (
    parse_json,
    reading,
    replace_text,
    replacing,
    writing,
)
from paw_min.config import FREE_TO_CHANGE
from paw_min.running.checked_json import parse_as

# Settings of the agent that do not change what a stage stores. These three may change in a run of
# RL, but here they decide what is played.
FREE_IN_STAGES = {*FREE_TO_CHANGE} - {"eval_temperature", "sampler", "max_prompt_tokens"}


def stage(path: Path, settings: dict[str, object], make: Callable[[], dict]) -> dict:
    """The JSON at `path`: made unless it is there, and then read.

    settings: what the result depends on, such as its command; the file begins with them. UserError
    if it has others.
    """
    if not path.is_file():
        replace_text(path, json.dumps(settings | make(), indent=1) + "\n")
    with reading(path):
        found = parse_json(path.read_bytes())
        others = changed(found, settings)
    if others:
        raise UserError(f"{path} was made with {others}: repeat that, or choose another --out.")
    return found


def changed(stored: dict, settings: dict[str, object]) -> str:
    """The stored settings that are others now; "" if there are none."""
    return ", ".join(f"{key} {stored[key]!r}" for key in settings if stored[key] != settings[key])


def digest(*parts) -> str:
    """A short name of these words, numbers, lists and so on."""
    return hashlib.blake2b(repr(parts).encode(errors="replace"), digest_size=16).hexdigest()


class Pieces:
    """The pieces that are complete. Nothing is written before the first.

    settings: what the pieces are of; UserError if the folder has those of others.
    """

    def __init__(self, folder: Path, settings: dict[str, object]):
        self.folder = folder
        self._settings = settings
        self._path = folder / "pieces"
        self._found: dict[str, str] = {}  # key -> JSON
        if self._path.exists():
            self._read()
        if self._found:
            with reading(self._path):
                others = changed(json.loads(self._found["settings"]), settings)
            if others:
                raise UserError(f"{folder} has the unfinished work of {others:.1000}: repeat that, "
                                "delete the folder, or choose another --out.")

    def once(self, key: str, kind: type, make: Callable[[], object]):
        """The piece with this key, of the type `kind`: made and written, or read."""
        if key not in self._found:
            text = TypeAdapter(kind).dump_json(make()).decode()
            self._begin()
            self._append(key, text)
        # A new piece is read as well, so that both commands go on with the same values.
        with reading(self._path):
            return parse_as(self._found[key].encode(), kind)

    def parts(
        self, name: str, items: list, size: int, kind: type, make: Callable[[int, list], object]
    ) -> list:
        """make(position of the first, up to `size` items in turn) for all items; each is a piece.

        No part may depend on an earlier one, or share a batch with it.
        """
        found = []
        for first in range(0, len(items), size):
            some = items[first : first + size]
            found.append(self.once(f"{name} from {first}", kind, partial(make, first, some)))
        return found

    def save(self, name: str, policy, optimizer, losses: list[float]) -> None:
        """Replace the file of an epoch by that of the next."""
        weights = {key: p.detach() for key, p in policy.named_parameters() if p.requires_grad}
        state = {"losses": losses, "weights": weights, "optimizer": optimizer.state_dict()}
        self._begin()
        with replacing(self.folder / f"{name}.pt") as partial_path:
            torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), partial_path)

    def load(self, name: str, policy, optimizer) -> list[float]:
        """Go to the end of the newest epoch -> the losses so far; none at the beginning."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return []
        with reading(path):
            state = torch.load(path, weights_only=True, map_location="cpu")
            trained = {key: p for key, p in policy.named_parameters() if p.requires_grad}
            with torch.no_grad():
                for key, parameter in trained.items():
                    parameter.copy_(state["weights"][key])
            optimizer.load_state_dict(state["optimizer"])
        return state["losses"]

    def refuse_to_overwrite(self, path: Path) -> None:
        """UserError if there is a file or folder that the command would write over.

        One that was killed may have written it, and has left pieces.
        """
        if os.path.lexists(path) and not self._found:
            raise UserError(f"{path.parent} has a {path.name} already: choose another --out, or "
                            "delete it.")

    def remove(self) -> None:
        """The result is there, or cannot be."""
        if self.folder.is_dir():
            with writing(str(self.folder)):
                shutil.rmtree(self.folder)
        self._found = {}

    def _begin(self) -> None:
        """The folder, for the first piece."""
        if not self._found:
            with writing(str(self.folder)):
                self.folder.mkdir(parents=True, exist_ok=True)
            self._append("settings", json.dumps(self._settings))

    def _append(self, key: str, text: str) -> None:
        with writing(str(self._path)), open(self._path, "a") as file:
            file.write(json.dumps([key, text]) + "\n")
        self._found[key] = text

    def _read(self) -> None:
        """A line that is not whole, as a kill leaves one, ends the file; it is made again."""
        with reading(self._path):
            content = self._path.read_bytes()
            n_whole = 0  # bytes
            for line in content.splitlines(keepends=True):
                try:
                    key, text = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                self._found[key] = text
                n_whole += len(line)
        if n_whole < len(content):
            with writing(str(self._path)):
                os.truncate(self._path, n_whole)
