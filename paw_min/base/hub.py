"""The Hugging Face hub: one quick question before transformers asks it."""

from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache

HUB_TIMEOUT = 10.0  # seconds for an answer


def look_on_hub(name: str) -> None:
    """Raise the hub's error for a name that is no folder, not in the cache, and not on the hub.

    One request. transformers makes six, with half a minute of warnings between them.
    """
    if not Path(name).exists() and try_to_load_from_cache(name, "config.json") is None:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
