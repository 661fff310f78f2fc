"""The lines of metrics.jsonl, as curves in TensorBoard or Weights & Biases (--track).

Rank 0 writes them. A resumed run relies on its tracker: TensorBoard hides what a killed process
wrote beyond the checkpoint (purge_step), and wandb continues the run whose id is in the run folder
and ignores steps that it has. With WANDB_MODE=offline, `wandb sync` sends them later.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from paw_min.base.errors import UserError
from paw_min.base.files import reason_of, replace_text, writing
from paw_min.config import Config
from paw_min.running.config_json import public


def check_installed(name: str) -> None:
    if name != "none" and find_spec(name) is None:
        raise UserError(f"--track {name} needs {name}: pip install {name}, or omit --track.")


class Tracker:
    """The tracker of the run in `folder`, whose next line is that of update `start`."""

    def __init__(self, cfg: Config, folder: Path, start: int):
        self.writer = self.run = None
        if cfg.track == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            with writing(str(folder / "tensorboard")):
                self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        else:
            self.run = open_wandb(cfg, folder)

    def log(self, metrics: dict[str, float]) -> None:
        if self.run:
            self.run.log(metrics, step=metrics["update"])
        else:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, metrics["update"])
            self.writer.flush()  # a killed run has what metrics.jsonl has

    def close(self) -> None:
        self.run.finish() if self.run else self.writer.close()


def open_wandb(cfg: Config, folder: Path):
    import wandb

    path = folder / "wandb-id"
    name = path.read_text() if path.exists() else uuid4().hex
    project = os.environ.get("WANDB_PROJECT", "paw_min")
    try:
        run = wandb.init(project=project, name=cfg.name, id=name, resume="allow", dir=str(folder),
                         config=public(cfg), settings=wandb.Settings(silent=True, console="off"))
    except Exception as error:  # wandb, its client or its disk failed
        raise UserError(f"--track wandb cannot start ({reason_of(error)}): run wandb login, or set "
                        "WANDB_MODE=offline.") from error
    replace_text(path, name)
    return run
