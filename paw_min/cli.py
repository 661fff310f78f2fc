"""The entry point of the run scripts. Errors of the user end in one sentence and exit code 1."""

import sys


def main(env: str, presets: dict[str, dict], doc: str) -> None:
    try:
        # Imported here, since Ctrl-C must work in the seconds that it takes, too.
        from paw_min import distributed
        from paw_min.config import UserError, parse_args
        from paw_min.session import dry_run
        from paw_min.train import train

        try:
            cfg, mode = parse_args(env, presets, doc)
            dry_run(cfg) if mode == "dry-run" else train(cfg, mode == "eval-only")
            distributed.finish()
        except UserError as error:
            sys.exit(distributed.with_rank(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: rerun the same command to resume")

