"""The Hugging Face hub: one quick request before the slow ones of transformers."""

import functools
import os
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from paw_min.base.console import say
from paw_min.base.errors import UserError

HUB_TIMEOUT = 10.0  # seconds for an answer


def look_on_hub(name: str) -> None:
    """An error for a name that is not a folder and that the hub does not give."""
    if Path(name).exists():
        return
    is_name = not os.path.lexists(name)  # a link to a missing disk is not a name
    try:
        validate_repo_id(name)
    except HFValidationError:
        is_name = False
    if not is_name:
        raise UserError(f"the folder {name} does not exist: give a model folder, or the name of a "
                        "model on the Hugging Face hub.")
    if not constants.HF_HUB_OFFLINE:
        ask(name)


@functools.cache  # A start needs the same answer several times.
def ask(name: str) -> None:
    """One request. transformers makes six, and without a network repeats each for a minute.

    If this one fails and the model is in the cache, the process makes no further request.
    """
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except Exception as error:  # The hub's client raises many types, and so does its HTTP client.
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise OSError(f"no such folder, and from the hub: {error}") from error
        say(f"the hub does not give {name}: its copy in the cache is used")
        # This process reads the constant; vLLM's and others that it may start, the variable.
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
