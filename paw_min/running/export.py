"""A trained policy for other programs.

    python -m paw_min.running.export runs/NAME --out DIR

writes the policy of a run's newest checkpoint as a Hugging Face folder, with a model card and the
metrics of the run. LoRA adapters are merged into the weights that they adapt. The weights are bf16,
to which the passes on a GPU round them, too. `hf upload` puts the folder on the Hugging Face hub.
"""

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import ModelCardData

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replace_text, replacing
from paw_min.base.hub import is_hub_name
from paw_min.config import Config
from paw_min.model.policy import load_policy
from paw_min.running.runs import newest_checkpoint, updates_done
from paw_min.running.untrusted import read_config

# It names no license, which depends on the base model.
CARD = """\
---
{head}
---

# {name}

A policy for `{env}` after {updates} updates of paw_min, an implementation of PaW (*Policy and World
Modeling Co-Training for Language Agents*, [arXiv 2606.02388](https://arxiv.org/abs/2606.02388)).
The license of its base model applies: add `license` to the head of this file. `metrics.jsonl` has
the metrics of the run.
"""


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
    card = model_card(read_config(checkpoint.parent / "config.json"), updates_done(checkpoint))
    # Files of other programs have the same names: a run's config.json, a project's README.md.
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: give a new folder.")
    # Complete or not at all, so that an interrupted command can be repeated.
    with replacing(out.resolve()) as partial:
        policy = load_policy(str(checkpoint))
        policy.model.to(torch.bfloat16)
        policy.save(partial)
        add_old_names(partial / "config.json")
        replace_text(partial / "README.md", card)
        shutil.copyfile(checkpoint.parent / "metrics.jsonl", partial / "metrics.jsonl")
    print(f"{out}: the policy of {checkpoint}")


def add_old_names(path: Path) -> None:
    """The rotary embeddings of a config.json also in the names of transformers 4.

    transformers 5 writes rope_parameters alone. An older program finds no rope_theta there, and
    takes 10,000 in silence.
    """
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        rope = dict(part.get("rope_parameters") or {})
        if "rope_theta" in rope:  # the same for all layers
            part["rope_theta"] = rope.pop("rope_theta")
            part["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    replace_text(path, json.dumps(config, indent=2) + "\n")


def model_card(cfg: Config, updates: int) -> str:
    """README.md of an exported policy, as the Hugging Face hub shows it."""
    head = ModelCardData(
        base_model=cfg.model if "/" in cfg.model and is_hub_name(cfg.model) else None,
        library_name="transformers", pipeline_tag="text-generation",
        tags=["paw", "reinforcement-learning", cfg.env],
    )
    return CARD.format(head=head, name=cfg.name, env=cfg.env, updates=updates)


if __name__ == "__main__":
    with user_errors():
        main()
