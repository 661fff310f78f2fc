"""Files: reading those of others, and writing each completely or not at all. No torch."""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from paw_min.base.errors import FULL, UserError


def parse_json(content: bytes):
    """The value in a JSON file; ValueError also for a text that is not Unicode.

    json accepts one half of a surrogate pair, "\\ud800", which no tokenizer and no file takes.
    """
    value = json.loads(content)
    # Most files are ASCII without such an escape, and are not encoded again.
    if not content.isascii() or b"\\ud" in content.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def read_dict(path: Path, remedy: str) -> dict:
    """The JSON object in a file; UserError with the remedy if there is none."""
    with damaged(str(path), remedy):
        content = parse_json(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError("it is not a JSON object")
        return content


def is_url(source: str | Path) -> bool:
    return "://" in str(source)  # any scheme: the client names the one that it does not support


def expanded(path: str | Path) -> Path:
    """The path with its ~ replaced; UserError if it names a user who does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path} begins with a home folder that does not exist: write the whole "
                        "path.") from error


def remove(path: Path) -> None:
    """Delete a folder, a file or a link; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def replacing(path: Path):
    """Yield a free name beside `path`; the file or folder written there then takes its place.

    It does so whole and on the disk, or not at all. Links of both names are replaced, not followed.
    """
    partial = path.with_name(f"{path.name}.partial")
    with writing(str(path)):
        try:
            if os.path.lexists(partial):  # A process that was killed left it.
                remove(partial)
            yield partial
            if partial.is_dir():
                for file in partial.rglob("*"):
                    flush(file)
            flush(partial)
            if partial.is_dir() and os.path.lexists(path):
                remove(path)
            os.replace(partial, path)
        except Exception:
            if os.path.lexists(partial):  # the disk may be full
                remove(partial)
            raise
        flush(path.parent)


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` write a folder, complete or not at all, unless it is there.

    Several processes may ask at the same time: one makes it; the others wait here, then find it.
    It is not flushed to the disk as in `replacing`, which takes 7 ms per file: what a power failure
    cuts short can be deleted and made again.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            if os.path.lexists(partial):  # A process that was killed left it.
                remove(partial)
            make(partial)
            partial.rename(folder)


def apply_umask(folder: Path) -> None:
    """Let others read the weights: safetensors writes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(0o666 & ~umask)


def replace_text(path: Path, text: str) -> None:
    """Write a text file, see `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")  # whatever the locale


def check_writable(path: Path) -> None:
    """UserError before long work, not after it, if no file can be written at `path`."""
    with writing(str(path)):
        if path.exists() and not path.is_file():  # a folder, or /dev/null
            raise ValueError("not a regular file")
        tempfile.TemporaryFile(dir=path.parent).close()


def flush(path: Path) -> None:
    """Through to the disk: a file, or the names in a folder where the disk can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network disks flush files only
            raise
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: str):
    """Report a full disk, or a path that cannot be written, as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # OSError, or the errors that torch and safetensors make of one
        remedy = "free space or fix the path"  # torch and safetensors do not tell
        if isinstance(error, (OSError, ValueError)):
            remedy = "free space" if getattr(error, "errno", 0) in FULL else "fix the path"
        raise UserError(
            f"{what} cannot be written ({reason_of(error)}): {remedy}, and rerun the same command; "
            "it resumes from the last checkpoint, if there is one."
        ) from error


@contextmanager
def reading(path: Path):
    """Report a damaged file of a run as a UserError."""
    with damaged(str(path), "restore it, or start again in another folder"):
        yield path


@contextmanager
def damaged(where: str, remedy: str):
    """Report what cannot be read as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each library has errors of its own
        reason = f"{type(error).__name__}: {reason_of(error)}"
        if isinstance(error, FileNotFoundError):
            reason = "it is missing"
        raise UserError(f"{where} cannot be read ({reason}): {remedy}.") from error


def reason_of(error: Exception) -> str:
    """What a library says of an error, on one line, unless it proposes to run a file's code."""
    text = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text:
        return "it is damaged, or has code in it, which is not run"
    if "trust_remote_code" in text:
        return "it has code of its own, which is not run: use a model that transformers has"
    return text[:300] or type(error).__name__
