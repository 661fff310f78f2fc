"""Entry point of the run scripts."""

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
