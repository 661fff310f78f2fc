"""A trained policy for other programs.

    python -m paw_min.running.export runs/NAME --out DIR

writes the policy of a run's newest checkpoint as a Hugging Face folder, for transformers 5. The
weights are bf16, to which the passes on a GPU round them, too. LoRA adapters, which no pass rounds
together with their weights, are merged and rounded at random, as for vLLM (lora.round_bf16): to the
nearest bf16 number, most of a short training would be lost. `hf upload` puts the folder on the
Hugging Face hub; the license of the base model applies.
"""

from importlib.metadata import version
from pathlib import Path

import torch

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import replacing
from paw_min.base.flags import Parser
from paw_min.model import lora
from paw_min.model.loading import load_policy
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
    # Files of other programs have the same names, such as a run's config.json.
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: give a new folder.")
    policy = load_policy(str(checkpoint))
    if lora.base_model(str(checkpoint)):
        lora.round_layers(policy.model)
    policy.model.to(torch.bfloat16)
    # Complete or not at all, so that an interrupted command can be repeated.
    with replacing(out.resolve()) as partial:
        policy.save(partial)
    print(f"{out}: the policy of {checkpoint}, for transformers {version('transformers')}")


if __name__ == "__main__":
    with user_errors():
        main()
