"""Entry point of the run scripts. User errors exit with one sentence and code 1."""

import os
import signal
import sys

INTERRUPTED = "\ninterrupted: rerun the same command to resume\n"


def main(env: str, presets: dict[str, dict], doc: str) -> None:
    # The imports take seconds, and libraries turn some KeyboardInterrupts into other errors.
    old = signal.signal(signal.SIGINT, lambda *_: os.write(2, INTERRUPTED.encode()) and os._exit(1))
    from paw_min.config import parse_args
    from paw_min.running import distributed
    from paw_min.running.errors import UserError
    from paw_min.running.session import dry_run
    from paw_min.train import train

    try:
        signal.signal(signal.SIGINT, old)
        cfg, mode = parse_args(env, presets, doc)
        dry_run(cfg) if mode == "dry-run" else train(cfg, mode == "eval-only")
        distributed.finish()
    except UserError as error:
        sys.exit(distributed.with_rank(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED.rstrip("\n"))
