"""A trained policy for other programs.

    python -m paw_min.running.export runs/NAME --out DIR

writes the policy of a run's newest checkpoint as a Hugging Face folder, with a model card and the
metrics of the run. LoRA adapters are merged into the weights that they adapt. The weights get the
type of the start model, mostly bf16, to which the passes on a GPU round them, too. `hf upload` puts
the folder on the Hugging Face hub.
"""

import shutil
from pathlib import Path

import torch

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replace_text, replacing
from paw_min.model.policy import load_policy
from paw_min.running.card import model_card
from paw_min.running.runs import newest_checkpoint


def main(argv: list[str] | None = None) -> None:
    """Write the policy of a run as a plain Hugging Face folder."""
    parser = Parser(description=main.__doc__)
    parser.add_argument("run", help="run folder, of which the newest checkpoint is taken")
    parser.add_argument("--out", required=True, help="folder to write")
    args = parser.parse_args(argv)
    out = Path(args.out)
    checkpoint = newest_checkpoint(args.run)
    if checkpoint is None:
        raise UserError(f"{args.run} has no checkpoint: give the folder of a run, runs/NAME.")
    card = model_card(checkpoint)
    # Files of other programs have the same names: a run's config.json, a project's README.md.
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: give a new folder.")
    # Complete or not at all, so that an interrupted command can be repeated.
    with replacing(out.resolve()) as partial:
        policy = load_policy(str(checkpoint))
        policy.model.to(getattr(torch, policy.published.get("dtype", "float32")))
        policy.save(partial)
        replace_text(partial / "README.md", card)
        shutil.copyfile(checkpoint.parent / "metrics.jsonl", partial / "metrics.jsonl")
    print(f"{out}: the policy of {checkpoint}")


if __name__ == "__main__":
    with user_errors():
        main()
