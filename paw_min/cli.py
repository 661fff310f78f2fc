"""Entry point of the run scripts."""

import sys
from collections.abc import Callable
from pathlib import Path

from paw_min.base.errors import UserError, importing, user_errors


def main(env: str, presets: dict[str, dict], doc: str) -> None:
    """Parse the command line and train, evaluate or show the plan."""
    importing()  # what follows takes seconds
    import torch

    from paw_min.base import distributed
    from paw_min.config import parse_args
    from paw_min.running.session import dry_run
    from paw_min.train import train

    with user_errors(distributed.with_rank):
        try:
            cfg, mode = parse_args(env, presets, doc)
            if mode == "dry-run":
                dry_run(cfg)
            else:
                train(cfg, eval_only=mode == "eval-only")
            distributed.finish()
        except torch.OutOfMemoryError as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "rerun with a lower --micro-tokens or --vllm-memory; the run then resumes."
            raise UserError(f"the GPU's memory is full ({reason}): {remedy}") from error


def judged(env: str, presets: dict[str, dict], doc: str, folder_of: Callable[..., Path]):
    """The settings of a command that first prepares a folder, for minutes, if they can work.

    folder_of: Config -> that folder. Without it, --dry-run says so and ends.
    """
    from paw_min.config import parse_args
    from paw_min.running.session import check_machine

    cfg, mode = parse_args(env, presets, doc)
    check_machine(cfg)
    folder = folder_of(cfg)
    if mode == "dry-run" and not folder.exists():
        print(f"{folder} is not there: the first run makes it. Repeat --dry-run then.")
        sys.exit()
    return cfg
