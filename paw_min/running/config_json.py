"""The settings in a run folder's config.json: written, read, and compared with those of now."""

import json
import reprlib
from dataclasses import Field, asdict, fields
from pathlib import Path

from paw_min.base.errors import masked
from paw_min.base.files import reading
from paw_min.config import FREE_TO_CHANGE, PAW, Config, check, flag, names_of, settings
from paw_min.envs.benchmarks import BENCHMARKS


def public(cfg: Config) -> dict:
    """All settings, without the passwords in URLs."""
    return {k: masked(v) if isinstance(v, str) else v for k, v in asdict(cfg).items()}


def read_config(path: Path) -> Config:
    """The settings in a config.json; UserError unless each is one that a run accepts.

    The environment may be one from elsewhere, which is not known here.
    """
    with reading(path):
        cfg = from_stored(json.loads(path.read_text()))
    check(cfg)
    return cfg


def from_stored(stored: dict) -> Config:
    """The settings in a run folder's config.json.

    A setting that is not there has its default: a fork that adds one still reads its older runs.
    ValueError for a setting that this version does not have, and for a value of another type than
    its setting's, or that is not one of its choices.
    """
    if not isinstance(stored, dict):
        raise ValueError("it is not a JSON object")
    unknown = sorted(stored.keys() - asdict(Config()).keys())
    if unknown:
        raise ValueError(f"another version of paw_min wrote it: it has {unknown[0]}")
    cfg = Config(**stored)
    for f in fields(Config):
        check_stored(f, getattr(cfg, f.name))
    return cfg


def check_stored(f: Field, value) -> None:
    """Raise ValueError unless a value has the type of its setting and is one of its choices."""
    # 1 is a number like 1.0, but True is not.
    allowed = (int, float) if f.type is float else (f.type,)
    choices = f.metadata.get("choices")
    if type(value) not in allowed:
        expected = f.type.__name__
    elif choices and value not in choices:
        expected = " or ".join(choices)
    else:
        return
    raise ValueError(f"{flag(f.name)} is {reprlib.repr(value)}, expected {expected}")


def differences(stored: dict, cfg: Config) -> list[str]:
    """The flags of a stored config with which a run with the settings `cfg` cannot resume."""
    old = public(from_stored(stored))
    flags = {f.name for f in settings()}
    free = {*FREE_TO_CHANGE}
    if not (old["paw"] or cfg.paw):
        free |= names_of(PAW)
    # Where longer prompts are cut, the limit changes what is trained on. Another method may have
    # prompts of its own, and cut them.
    if BENCHMARKS[cfg.env].cut_prompts or cfg.learn != Config.learn:
        free.remove("max_prompt_tokens")
    return [
        f"{flag(key) if key in flags else key} {old[key]!r}"
        for key, value in public(cfg).items()
        if key not in free and old[key] != value
    ]
