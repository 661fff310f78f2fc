"""Train a stand-in model: see __init__.py."""

from pathlib import Path

import torch

from paw_min.base.errors import user_errors
from paw_min.base.flags import Parser
from world_models.teachers import LESSONS, warm_start

if __name__ == "__main__":
    with user_errors():
        parser = Parser(description="Train a stand-in model (minutes).")
        parser.add_argument("env", choices=LESSONS, metavar="ENV", help=", ".join(LESSONS))
        parser.add_argument("--out", type=Path, required=True, help="folder to write")
        args = parser.parse_args()
        torch.set_num_threads(1)  # The number affects the last bits.
        warm_start(args.env, args.out)
