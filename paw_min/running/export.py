"""A trained policy for other programs.

    python -m paw_min.running.export runs/NAME --out DIR [--push USER/NAME]

writes the policy of a run's newest checkpoint as a Hugging Face folder, with a model card and the
metrics of the run. LoRA adapters are merged into the weights that they adapt. The weights get the
type of the start model, mostly bf16, to which the passes on a GPU round them, too. --push uploads
the folder to the Hugging Face hub.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import HfApi

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replace_text, replacing
from paw_min.model.policy import load_policy
from paw_min.running.card import model_card
from paw_min.running.runs import newest_checkpoint


@contextmanager
def hub_errors(name: str):
    """Report whatever fails on the way to the hub as a UserError."""
    try:
        yield
    except Exception as error:  # of the hub's client, and of the HTTP client that it uses
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--push {name} failed ({reason}): give a repository of yours, a network, and a token "
            "that may write, with hf auth login or in HF_TOKEN."
        ) from error


def main(argv: list[str] | None = None) -> None:
    """Write the policy of a run as a plain Hugging Face folder."""
    parser = Parser(description=main.__doc__)
    parser.add_argument("run", help="run folder, of which the newest checkpoint is taken")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--push", metavar="USER/NAME", help="upload it to this hub repository")
    args = parser.parse_args(argv)
    out = Path(args.out)
    checkpoint = newest_checkpoint(args.run)
    if checkpoint is None:
        raise UserError(f"{args.run} has no checkpoint: give the folder of a run, runs/NAME.")
    card = model_card(checkpoint)
    # Files of other programs have the same names: a run's config.json, a project's README.md. And
    # --push uploads all that is in the folder.
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: give a new folder.")
    if args.push:
        with hub_errors(args.push):  # before the work, since a token may be missing
            url = HfApi().create_repo(args.push, exist_ok=True)
    # Complete or not at all, so that an interrupted command can be repeated.
    with replacing(out.resolve()) as partial:
        policy = load_policy(str(checkpoint))
        policy.model.to(getattr(torch, policy.published.get("dtype", "float32")))
        policy.save(partial)
        replace_text(partial / "README.md", card)
        shutil.copyfile(checkpoint.parent / "metrics.jsonl", partial / "metrics.jsonl")
    print(f"{out}: the policy of {checkpoint}")
    if args.push:
        with hub_errors(args.push):
            HfApi().upload_folder(repo_id=args.push, folder_path=out)
        print(f"{url}: the same")


if __name__ == "__main__":
    with user_errors():
        main()
