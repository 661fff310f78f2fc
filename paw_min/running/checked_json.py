"""JSON files that somebody else may have written: their types are checked where they are read.

The type is written as Python's own annotations. pydantic compares the file with them: a number is
finite and no text, an integer no fraction, a text valid Unicode.
"""

from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from paw_min.base.files import reading

# A decorator of the dataclasses and TypedDicts that are read; further keys are refused.
exact = with_config(ConfigDict(strict=True, allow_inf_nan=False, extra="forbid"))


def read_json(path: Path, kind: type):
    """The content of a file, of the type `kind`; UserError that names the first wrong value."""
    with reading(path):
        return parse_as(path.read_bytes(), kind)


def parse_as(content: bytes, kind: type):
    """The value in a JSON text, of the type `kind`; ValueError that names the first wrong part."""
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        # The value is left out: it may be the whole text.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg']}") from error
