"""The lines of metrics.jsonl, as curves in TensorBoard, Weights & Biases or Trackio (--track).

metrics.jsonl stays the source; rank 0 writes both. A resumed run continues its curves, without the
updates that it repeats: TensorBoard drops the earlier ones (purge_step), wandb ignores steps that
it has, and Trackio, which would store a step twice, is sent none that it has. wandb's run id and
Trackio's run name are stored in the run folder. A tracker that is new to a run first gets the
earlier lines.

With WANDB_MODE=offline, nothing is sent: `wandb sync` does that later. Trackio writes to a database
in TRACKIO_DIR, by default in ~/.cache/huggingface, and sends nothing, unless TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL is set.
"""

from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from paw_min.base.errors import UserError
from paw_min.base.files import reading, replace_text, writing
from paw_min.config import Config
from paw_min.running.stored import public


def check_installed(name: str) -> None:
    if name != "none" and find_spec(name) is None:
        raise UserError(f"--track {name} needs {name}: pip install {name}, or omit --track.")


class Tracker:
    """Open a tracker for the run in `folder`, of which metrics.jsonl has the lines `done`."""

    def __init__(self, cfg: Config, folder: Path, done: list[dict]):
        self.writer = self.run = None
        self.first = 0  # the first update that Trackio does not have
        if cfg.track == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            known = (folder / "tensorboard").exists()
            following = done[-1]["update"] + 1 if done else 0
            with writing(str(folder / "tensorboard")):
                self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=following)
        elif cfg.track == "wandb":
            known = (folder / "wandb-id").exists()
            self.run = _open_wandb(cfg, folder)
        else:
            known = False  # it may lack the last lines of a killed run: it stores with a delay
            self.run = _open_trackio(cfg, folder)
            self.first = self.run._next_step  # Trackio has no public name for it
        for line in [] if known else done:
            self.log(line)

    def log(self, metrics: dict[str, float]) -> None:
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, metrics["update"])
            self.writer.flush()  # a killed run has what metrics.jsonl has
        elif metrics["update"] >= self.first:
            self.run.log(metrics, step=metrics["update"])

    def close(self) -> None:
        self.writer.close() if self.writer else self.run.finish()


@contextmanager
def _named(path: Path, new: str, remedy: str):
    """Yield the name of the run for its tracker: that in the file `path`, or `new`, then stored.

    UserError, with this remedy, for a tracker that does not start.
    """
    name = new
    if path.exists():
        with reading(path):
            name = path.read_text(encoding="utf-8")
    try:
        yield name
    except Exception as error:  # of the tracker, its client and its disk
        reason = " ".join(str(error).split())[:200]
        tracker = path.name.partition("-")[0]
        raise UserError(f"--track {tracker} cannot start ({reason}): {remedy}.") from error
    replace_text(path, name)


def _open_wandb(cfg: Config, folder: Path):
    import wandb

    with _named(
        folder / "wandb-id", uuid4().hex, "run wandb login, or set WANDB_MODE=offline"
    ) as name:
        return wandb.init(
            project="paw_min", name=cfg.name, id=name, resume="allow",
            dir=str(folder), config=public(cfg),
            settings=wandb.Settings(silent=True, console="off"),
        )


def _open_trackio(cfg: Config, folder: Path):
    import trackio

    # Trackio resumes by name, and run folders of the same name may share its database.
    new = f"{cfg.name}-{uuid4().hex[:8]}"
    remedy = "run hf auth login, or unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL"
    with _named(folder / "trackio-name", new, remedy) as name:
        return trackio.init(project="paw_min", name=name, resume="allow", config=public(cfg))
