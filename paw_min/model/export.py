"""Plain weights of a policy: for vLLM at every sync, and as a folder for other programs.

    python -m paw_min.model.export runs/NAME --out DIR

writes the policy of a run's newest checkpoint as a Hugging Face folder. Sharded weights are
gathered, and LoRA adapters are merged into the weights that they adapt.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from paw_min.base.distributed import whole
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.model.lora import SCALE
from paw_min.model.policy import load_policy
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


def main(argv: list[str] | None = None) -> None:
    """Write the policy of a run as a plain Hugging Face folder."""
    parser = Parser(prog="python -m paw_min.model.export", description=main.__doc__)
    parser.add_argument("run", help="run folder, of which the newest checkpoint is taken")
    parser.add_argument("--out", required=True, help="folder to write")
    args = parser.parse_args(argv)
    checkpoint = newest_checkpoint(args.run)
    if checkpoint is None:
        raise UserError(f"{args.run} has no checkpoint: give the folder of a run, runs/NAME.")
    load_policy(str(checkpoint)).save(Path(args.out))
    print(f"{args.out}: the policy of {checkpoint}")


if __name__ == "__main__":
    with user_errors():
        main()
