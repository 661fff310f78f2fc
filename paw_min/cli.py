"""Entry point of the run scripts. User errors exit with one sentence and code 1."""

import sys


def main(env: str, presets: dict[str, dict], doc: str) -> None:
    try:
        # Imported here so that Ctrl-C also works during the imports, which take seconds.
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

