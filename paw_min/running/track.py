"""The lines of metrics.jsonl, as curves in TensorBoard or Weights & Biases (--track).

Rank 0 writes them, after the checkpoint. If the tracker fails while the run trains, this is said
once, and the run goes on without it. A resumed run relies on its tracker: TensorBoard hides what a
killed process wrote beyond the checkpoint (purge_step), and wandb continues the run whose id is in
the run folder and ignores steps that it has. With WANDB_MODE=offline, `wandb sync` sends them
later.
"""

import os
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.files import reason_of, replace_text, writing
from paw_min.config import Config
from paw_min.running.config_json import public

FINISH = 300.0  # seconds that the end of a run waits for wandb's server


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
        with self._or_without():
            if self.run:
                self.run.log(metrics, step=metrics["update"])
            elif self.writer:
                for name, value in metrics.items():
                    self.writer.add_scalar(name, value, metrics["update"])
                self.writer.flush()  # a killed run has what metrics.jsonl has

    def close(self) -> None:
        with self._or_without():
            if self.run:
                self.run.finish()
            elif self.writer:
                self.writer.close()

    @contextmanager
    def _or_without(self):
        """After an error of the tracker, whatever it raises, the run has none."""
        try:
            yield
        except (Exception, SystemExit) as error:  # its process, its server or its disk is gone
            self.writer = self.run = None
            say(f"the tracker failed ({type(error).__name__}: {reason_of(error)}): the run goes on "
                "without it; metrics.jsonl has all")


def open_wandb(cfg: Config, folder: Path):
    import wandb

    path = folder / "wandb-id"
    name = path.read_text("utf-8") if path.exists() else uuid4().hex
    project = os.environ.get("WANDB_PROJECT", "paw_min")
    try:
        settings = wandb.Settings(silent=True, console="off")
        if hasattr(settings, "finish_timeout"):  # older versions wait for days
            settings.finish_timeout = FINISH
        run = wandb.init(project=project, name=cfg.name, id=name, resume="allow", dir=str(folder),
                         config=public(cfg), settings=settings)
    except (Exception, SystemExit) as error:  # wandb, its client or its disk failed
        raise UserError(f"--track wandb cannot start ({reason_of(error)}): run wandb login, or set "
                        "WANDB_MODE=offline.") from error
    replace_text(path, name)
    return run
