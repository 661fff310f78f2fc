"""What a long command has completed: killed at any moment, a rerun goes on, with the same numbers.

    stage      a result: the JSON at a path, made unless it is there
    Pieces     the complete pieces of a result, in a folder that is there until the result is
      once         one piece, as JSON: made, or read
      sampler      a sampler whose responses are pieces
      save, load   the newest epoch of a training: weights, optimizer, losses

    OUT/train.json                  the result
        train.unfinished/settings   before: what the pieces are of
                         pieces     one line per piece
                         fit.pt     the newest epoch

Pieces are what costs a model, or many steps of an environment. All else is done again, so it must
follow from the settings and the pieces, as draws do from the keys of seeds.py. On a CPU, the
numbers are then those of a command that was not killed, to the last bit. vLLM and worker processes
make other batches, and differ by rounding.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch.utils._pytree import tree_map_only

from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.files import (
    is_url,
    parse_json,
    reading,
    refuse_link,
    replace_text,
    replacing,
    writing,
)
from paw_min.config import flag
from paw_min.model.sampler import Request, Response
from paw_min.running.runs import moments_only
from paw_min.running.stored import SOURCES
from paw_min.running.untrusted import parse_as


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
    for sentence in moved(found, settings):
        say(f"{path}: {sentence}")
    return found


def changed(stored: dict, settings: dict[str, object]) -> str:
    """The stored settings that are others now; "" if there are none.

    The same data may lie at another place.
    """
    return ", ".join(
        f"{key} {stored[key]!r}"
        for key, value in settings.items()
        if not is_same(key, stored[key], value)
    )


def is_same(name: str, old, new) -> bool:
    """Whether two values of a setting are equal, or name two places where the same data may lie."""
    if name in SOURCES and old and new:
        return is_url(old) == is_url(new)
    return old == new


def moved(old: dict, new: dict) -> list[str]:
    """One sentence for each source of data at another place.

    old, new: settings that differ in their places only; new may lack sources.
    """
    return [
        f"{flag(key)} is {new[key]!r} and was {old[key]!r}: the content is taken to be the same"
        for key in SOURCES
        if key in new and old[key] != new[key]
    ]


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
        for path in (folder, self._path):
            refuse_link(path, "--out")
        if self._begun():
            with reading(folder / "settings") as path:
                others = changed(parse_json(path.read_bytes()), settings)
            if others:
                raise UserError(f"{folder} has the unfinished work of {others:.1000}: repeat that, "
                                "delete the folder, or choose another --out.")
        if self._path.exists():
            self._read()

    def once(self, key: str, kind: type, make: Callable[[], object]):
        """The piece with this key, of the type `kind`: made and written, or read."""
        if key not in self._found:
            text = TypeAdapter(kind).dump_json(make()).decode()
            self._begin()
            with writing(str(self._path)), open(self._path, "a") as file:
                file.write(json.dumps([key, text]) + "\n")
            self._found[key] = text
        # A new piece is read as well, so that both commands go on with the same values.
        with reading(self._path):
            return parse_as(self._found[key].encode(), kind)

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def sampler(self, sampler) -> "StoredSampler":
        return StoredSampler(sampler, self)

    def save(self, name: str, of: str, policy, optimizer, losses: list[float]) -> None:
        """Replace the file of an epoch by that of the next. of: what the training depends on."""
        weights = {key: p.detach() for key, p in policy.named_parameters() if p.requires_grad}
        state = {"of": of, "losses": losses, "weights": weights}
        state["optimizer"] = optimizer.state_dict()
        self._begin()
        with replacing(self.folder / f"{name}.pt") as partial:
            torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), partial)

    def load(self, name: str, of: str, policy, optimizer) -> list[float]:
        """Go to the end of the newest epoch -> the losses so far; none at the beginning."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return []
        with reading(path):
            state = torch.load(path, weights_only=True, map_location="cpu")
            if state["of"] != of:
                raise UserError(f"{path} is of other data: delete {self.folder}.")
            trained = {key: p for key, p in policy.named_parameters() if p.requires_grad}
            with torch.no_grad():
                for key, parameter in trained.items():
                    parameter.copy_(state["weights"][key])
            with moments_only(optimizer):
                optimizer.load_state_dict(state["optimizer"])
        return state["losses"]

    def check_data(self, data: str) -> None:
        """UserError if the pieces are of other data; data: their digest (tasks.data_digest)."""
        if self._begun():
            with reading(self.folder / "settings") as path:
                begun = parse_json(path.read_bytes()).get("data digest", data)
            if begun != data:
                raise UserError(f"{self.folder} has the unfinished work of other data: repeat its "
                                "--data (or $ALFWORLD_DATA) and --retriever, delete the folder, or "
                                "choose another --out.")
        self._settings = self._settings | {"data digest": data}

    def claim(self, path: Path) -> None:
        """UserError if there is a file or folder that the command would write over.

        One that was killed may have written it, and has left pieces.
        """
        if os.path.lexists(path) and not self._begun():
            raise UserError(f"{path.parent} has a {path.name} already: choose another --out, or "
                            "delete it.")

    def remove(self) -> None:
        """The result is there, or cannot be."""
        if self.folder.is_dir():
            with writing(str(self.folder)):
                shutil.rmtree(self.folder)
        self._found = {}

    def _begun(self) -> bool:
        return (self.folder / "settings").exists()

    def _begin(self) -> None:
        """The folder, for the first piece."""
        if not self._begun():
            with writing(str(self.folder)):
                self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / "settings", json.dumps(self._settings, indent=1) + "\n")

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


@dataclass
class Stored:
    """A response among the pieces."""

    request: str  # its digest
    ids: list[int]
    logps: list[float]


class StoredSampler:
    """A sampler whose responses are pieces, a batch at a time.

    A later command gets them in the same batches. The others then wait in the same order, and share
    a batch with the same requests as without a kill. A request is known by its prompt, seed and
    limits; equal ones get their responses in the order of the batches.
    """

    def __init__(self, sampler, pieces: Pieces):
        self._sampler = sampler
        self._pieces = pieces
        self._n_batches = 0
        # digest of a request -> its responses, with the numbers of their batches
        self._stored: dict[str, deque[tuple[int, Stored]]] = {}
        while self._key() in pieces:
            for one in pieces.once(self._key(), list[Stored], list):
                self._stored.setdefault(one.request, deque()).append((self._n_batches, one))
            self._n_batches += 1

    def sync(self, policy):
        return self._sampler.sync(policy)

    def generate(
        self, queue: deque[Request], temperature: float, max_tokens: int
    ) -> Iterator[list[Response]]:
        """As that of the sampler."""
        waiting: deque[Request] = deque()  # for the sampler
        asked: dict[int, str] = {}  # slot -> digest of its request
        ready: dict[int, list[Response]] = {}  # batch -> its stored responses
        units = self._sampler.generate(waiting, temperature, max_tokens)
        while True:
            while queue:
                request = queue.popleft()
                slot = request.slot
                asked[slot] = digest(request.seed, temperature, max_tokens, request.prompt_ids)
                stored = self._stored.get(asked[slot])
                if stored:
                    batch, one = stored.popleft()
                    ready.setdefault(batch, []).append(Response(slot, one.ids, one.logps))
                else:
                    waiting.append(request)
            if ready:
                yield ready.pop(min(ready))
                continue
            finished = next(units, None)
            if finished is None:
                return
            if finished:
                found = [Stored(asked[one.slot], one.ids, one.logps) for one in finished]
                self._pieces.once(self._key(), list[Stored], lambda found=found: found)
                self._n_batches += 1
            yield finished

    def _key(self) -> str:
        return f"batch {self._n_batches}"
