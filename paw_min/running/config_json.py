"""The settings in a run folder's config.json: written, read, and compared with those of now."""

import json
from dataclasses import asdict
from pathlib import Path

from paw_min.base.errors import UserError, masked
from paw_min.base.files import is_url
from paw_min.base.flags import flag
from paw_min.config import FLAGS, FREE_TO_CHANGE, OF_PAW, Config
from paw_min.envs.benchmarks import BENCHMARKS


def public(cfg: Config) -> dict:
    """All settings, without the passwords in URLs."""
    return {k: masked(v) if isinstance(v, str) else v for k, v in asdict(cfg).items()}


def read_config(path: Path) -> Config:
    """The settings in a run folder's config.json.

    A setting that is not there has its default: a fork that adds one still reads its older runs.
    UserError for one that this version does not have, as in the config.json of a model.
    """
    stored = json.loads(path.read_text("utf-8"))
    unknown = sorted(stored.keys() - asdict(Config()).keys())
    if unknown:
        raise UserError(f"{path} is of another program, or of another version of paw_min: it has "
                        f"{unknown[0]}; use another folder.")
    return Config(**stored)


def differences(stored: Config, cfg: Config) -> list[str]:
    """The flags of a stored config with which a run with the settings `cfg` cannot resume."""
    old = public(stored)
    new = public(cfg)
    free = {*FREE_TO_CHANGE}
    if not (old["paw"] or new["paw"]):
        free |= OF_PAW
    # A server may have moved.
    free |= {key for key in ("data", "retriever") if is_url(old[key]) and is_url(new[key])}
    # Where longer prompts are cut, the limit changes what is trained on. Another method may have
    # prompts of its own, and cut them.
    if BENCHMARKS[cfg.env].cut_prompts or cfg.method != Config.method:
        free.remove("max_prompt_tokens")
    return [
        f"{flag(key) if key in FLAGS else key} {old[key]!r}"
        for key in old
        if key not in free and old[key] != new[key]
    ]
