"""The text of each token, exactly.

A character of several tokens belongs to the first of them; the others are empty. Bytes that are no
character are U+FFFD, as a tokenizer decodes them, or <0xE2> where that is the name of the token.
"""

import re
from itertools import groupby

from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE = re.compile("<0x([0-9A-F]{2})>")  # byte fallback, as in Llama 2, Mistral and Gemma
LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}  # byte-level BPE


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text of each token; joined, they are the text of all."""

    def text(first: int, end: int) -> str:
        return tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)

    names = [tokenizer.convert_ids_to_tokens(token) or "" for token in ids]
    parts = []
    raw = []  # the bytes of each token; None: it has a text of its own
    for k, name in enumerate(names):
        alone = text(k, k + 1)
        byte = BYTE.fullmatch(name)
        found = None
        if byte and alone != name:
            found = bytes.fromhex(byte[1])
        elif "\ufffd" in alone and all(letter in LETTERS for letter in name):
            found = bytes(LETTERS[letter] for letter in name)
        raw.append(found)
        # Decoded with the token before, since some tokenizers drop a leading space.
        context = max(k - 1, 0)
        parts.append("" if found else text(context, k + 1)[len(text(context, k)) :])
    for has_bytes, run in groupby(range(len(ids)), key=lambda k: raw[k] is not None):
        if has_bytes:
            fill(parts, names, raw, list(run))
    return parts


def fill(parts: list[str], names: list[str], raw: list[bytes | None], run: list[int]) -> None:
    """Write the characters of successive tokens that are bytes."""
    data = b"".join(raw[k] for k in run)
    owner = [k for k in run for _ in raw[k]]  # of each byte
    at = 0
    while at < len(data):
        broken = b""  # the bytes after `valid` that are no character
        try:
            valid = data[at:].decode()
        except UnicodeDecodeError as error:
            valid = data[at : at + error.start].decode()
            broken = data[at + error.start : at + error.end]
        for character in valid:
            parts[owner[at]] += character
            at += len(character.encode())
        if broken and not BYTE.fullmatch(names[owner[at]]):
            parts[owner[at]] += "\ufffd"
        elif broken:
            for k in owner[at : at + len(broken)]:
                parts[k] = names[k]
        at += len(broken)
