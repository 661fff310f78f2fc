"""Plain weights of a policy: for vLLM at every sync, and as a folder for other programs.

    python -m paw_min.model.export runs/NAME --out DIR [--push USER/NAME]

writes the policy of a run's newest checkpoint as a Hugging Face folder, with a model card and the
metrics of the run. Sharded weights are gathered, and LoRA adapters are merged into the weights that
they adapt. --push uploads the folder to the Hugging Face hub.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn

from paw_min.base.distributed import whole
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replace_text, writing
from paw_min.model.lora import SCALE
from paw_min.model.policy import load_policy
from paw_min.running.card import model_card
from paw_min.running.runs import newest_checkpoint


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight, unsharded, merged. Collective: every rank must iterate."""
    # named_parameters() omits a head that is tied to the embedding; vLLM's CPU build needs it.
    weights = model.state_dict()
    for name, stored in weights.items():
        if ".lora_" in name:
            continue  # added to its layer's weight below
        weight = whole(stored)
        if name.endswith("base_layer.weight"):
            layer = name.removesuffix("base_layer.weight")
            a = whole(weights[f"{layer}lora_A.default.weight"])  # (r, D_in)
            b = whole(weights[f"{layer}lora_B.default.weight"])  # (D_out, r)
            weight = torch.addmm(weight.float(), b, a, alpha=SCALE)  # W + s B A
        yield name.replace(".base_layer", ""), weight


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
    parser = Parser(prog="python -m paw_min.model.export", description=main.__doc__)
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
    partial = out.resolve().with_name(f"{out.resolve().name}.partial")
    with writing(f"the folder {out}"):
        shutil.rmtree(partial, ignore_errors=True)
        load_policy(str(checkpoint)).save(partial)
        replace_text(partial / "README.md", card)
        shutil.copyfile(checkpoint.parent / "metrics.jsonl", partial / "metrics.jsonl")
        os.replace(partial, out)
    print(f"{out}: the policy of {checkpoint}")
    if args.push:
        with hub_errors(args.push):
            HfApi().upload_folder(repo_id=args.push, folder_path=out)
        print(f"{url}: the same")


if __name__ == "__main__":
    with user_errors():
        main()
