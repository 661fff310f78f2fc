"""A trained policy for other programs.

    python -m paw_min.running.export runs/NAME --out DIR

writes the policy of a run's newest checkpoint as a Hugging Face folder. LoRA adapters are merged
into the weights that they adapt. The weights are bf16, to which the passes on a GPU round them,
too. `hf upload` puts the folder on the Hugging Face hub; the license of the base model applies.
"""

import json
from pathlib import Path

import torch

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replace_text, replacing
from paw_min.model.policy import load_policy
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
    # Complete or not at all, so that an interrupted command can be repeated.
    with replacing(out.resolve()) as partial:
        policy = load_policy(str(checkpoint))
        policy.model.to(torch.bfloat16)
        policy.save(partial)
        add_old_names(partial / "config.json")
    print(f"{out}: the policy of {checkpoint}")


def add_old_names(path: Path) -> None:
    """The rotary embeddings of a config.json also in the names of transformers 4.

    transformers 5 writes rope_parameters alone. An older program finds no rope_theta there, and
    takes 10,000 in silence.
    """
    config = json.loads(path.read_text())
    rope = dict(config.get("rope_parameters") or {})
    if "sliding_attention" in rope:  # Gemma 3 and OLMo 3 scale it in the other layers only
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    replace_text(path, json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    with user_errors():
        main()
