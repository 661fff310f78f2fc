"""The folder of a run: settings, metrics, checkpoints. Rerunning the same command resumes it.

    runs/<name>/config.json           every setting
                data-digest           a hash of the data, so that a resumed run takes no others
                metrics.jsonl         one line per update; line 0 is the evaluation before training
                episodes.md           a few episodes of the latest evaluation as text
                evaluation.json       all its outcomes, per task
                *-only.md, *-only.json    the same two of --eval-only
                curves.png, paw.png   the metrics as curves
                samples/000012.json   some episodes of update 12, for paw_min.inspect
                checkpoint-000012/    Hugging Face folder + trainer.pt, after update 12
                lock                  held by the process that writes here
                nonfinite-*.pt        the rows of a loss or gradient that is not finite
                tensorboard/, wandb/, wandb-id, trackio-name    with --track

Each of these is written beside its place, as NAME.partial, except the lines of metrics.jsonl. A
checkpoint is renamed when it is complete and on the disk, and the previous one is removed only
then. Resuming drops later metrics, so a run that dies at any moment resumes consistently. Only rank
0 writes. Checkpoints are not sharded, so that any number of ranks can resume from them.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint import state_dict

from paw_min.base import distributed
from paw_min.base.console import say
from paw_min.base.errors import UserError, masked
from paw_min.base.files import (
    is_url,
    reading,
    refuse_link,
    remove,
    replace_text,
    replacing,
    writing,
)
from paw_min.config import Config
from paw_min.running import track
from paw_min.running.stored import differences, from_stored, public

MAX_UPDATES = 999_999  # the names of checkpoints have six digits
CHECKPOINTS = "checkpoint-" + 6 * "[0-9]"
# What libraries write to, and what is sent to a tracker. Checkpoints may be links: only their
# weights are read, and no file in them is written.
NO_LINKS = ("samples", "tensorboard", "wandb", "wandb-id", "trackio-name")


class Run:
    """A run folder; opening it checks that it belongs to these settings.

    Without a name, as in a plain Config(), it is cfg.out itself.
    """

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.folder = Path(cfg.out) / cfg.name
        self.tracker = None
        self.data_digest = ""  # see check_data
        if distributed.rank() > 0:
            return
        path = self.folder / "config.json"
        with writing(f"the run folder {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in NO_LINKS:
                refuse_link(self.folder / name, "--name")
            self.lock = hold(self.folder, "--name")
        self.saved_every = cfg.save_every  # updates between the checkpoints that should be there
        self.is_trained = bool(read_metrics(self.folder) or self.checkpoint())
        if path.exists() or self.is_trained:
            with reading(path):  # it may be that of a model, or of another program
                stored = json.loads(path.read_text())
                old = from_stored(stored)
        if self.is_trained:
            # Killed before its first checkpoint, a run may resume with a shorter interval.
            self.saved_every = max(cfg.save_every, old.save_every)
            if changed := differences(stored, cfg):
                raise UserError(
                    f"{self.folder} belongs to a run with {', '.join(changed)}: "
                    "repeat those settings to resume it, or choose another --name."
                )
        else:
            self.write_settings()

    def write_settings(self) -> None:
        self.write("config.json", json.dumps(public(self.cfg), indent=2) + "\n")

    def check_data(self, digest: str, where: str) -> None:
        """UserError if the run was begun with other data; restore() stores the digest.

        where: the folder of the data, for messages.
        """
        self.data_digest = digest
        if not self.is_trained:
            return
        path = self.folder / "data-digest"
        if not path.is_file():
            say(f"{self.folder} has no data-digest: it is taken to be of the data in {where}")
        else:
            with reading(path):
                begun = path.read_text()
            if begun != digest:
                raise UserError(
                    f"{self.folder} was begun with other data than those in {where}: repeat its "
                    "--data (or $ALFWORLD_DATA) and --retriever, or choose another --name."
                )
        for source in (self.cfg.data, self.cfg.retriever):
            if is_url(source):
                say(f"{self.folder}: what {masked(source)} serves is taken to be the same")

    def checkpoint(self) -> Path | None:
        return newest_checkpoint(self.folder)

    def lower_rate(self) -> str:
        """What to do after a NaN. A run keeps its learning rate, so another one goes on."""
        weights = self.checkpoint() or "the start model"
        return f"lower --lr and continue under another --name with --model set to {weights}"

    def save(self, policy, optimizer, done: int) -> None:
        """Write the checkpoint after `done` updates, then remove the older ones."""
        options = state_dict.StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        weights, state = state_dict.get_state_dict(policy, optimizer, options=options)
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise UserError(
                f"update {done} made weights NaN or infinite; not saved: {self.lower_rate()}."
            )
        if distributed.rank() > 0:
            return
        final = self.folder / f"checkpoint-{done:06d}"
        with replacing(final) as partial:
            policy.save(partial, weights)
            others = policy.besides_the_model(weights)
            state = {"done": done, "optimizer": state, "weights": others}
            torch.save(state, partial / "trainer.pt")
        with writing(str(final)):
            for old in self.folder.glob(CHECKPOINTS):
                if old != final:
                    remove(old)

    def restore(self, policy, optimizer) -> int:
        """Load the optimizer state, and weights outside of the language model -> updates done."""
        done = 0
        if checkpoint := self.checkpoint():
            options = state_dict.StateDictOptions(full_state_dict=True, strict=False)
            with reading(checkpoint / "trainer.pt") as path:
                state = torch.load(path, weights_only=True, map_location="cpu")
                state_dict.set_model_state_dict(policy, state["weights"], options=options)
                with moments_only(optimizer):
                    state_dict.set_optimizer_state_dict(
                        policy, optimizer, state["optimizer"], options=options
                    )
                done = state["done"]
                if type(done) is not int or done != updates_done(checkpoint):
                    raise ValueError(f"it is of update {done!r:.20}, not of its folder's")
        if distributed.rank() == 0:
            lines = read_metrics(self.folder)
            if not done and lines and lines[-1]["update"] > self.saved_every:
                raise UserError(f"{self.folder} has metrics, but no checkpoint: use another --name")
            # Not before: a start that fails, as with wrong data, leaves the settings as they were.
            # So does an evaluation, whose settings may differ (FREE_TO_CHANGE).
            self.write_settings()
            if self.data_digest:
                self.write("data-digest", self.data_digest)
            for partial in list(self.folder.glob(f"{CHECKPOINTS}.partial")):  # of a killed run
                remove(partial)
            kept = [line for line in lines if line["update"] <= done]
            self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
            if self.cfg.track != "none":
                self.tracker = track.Tracker(self.cfg, self.folder, kept)
        return done

    def metrics(self) -> list[dict]:  # on every rank
        return distributed.all_gather(read_metrics(self.folder) if distributed.rank() == 0 else [])

    def dump_rows(self, rows: list, update: int) -> Path:
        """Save the rows of a NaN loss -> the file."""
        # A gradient norm is NaN on all ranks at once, and each of them writes.
        of_rank = f"-rank{distributed.rank()}" if distributed.rank() else ""
        file = self.folder / f"nonfinite-{update:06d}{of_rank}.pt"
        with replacing(file) as partial:
            torch.save([vars(row) for row in rows], partial)
        return file

    def write(self, name: str, text: str) -> None:
        """Write a text file, see replace_text."""
        if distributed.rank() == 0:
            with writing(name):
                (self.folder / name).parent.mkdir(exist_ok=True)  # samples/
            replace_text(self.folder / name, text)

    def log(self, metrics: dict) -> None:
        """Append one line to metrics.jsonl."""
        if distributed.rank() > 0:
            return
        with writing("metrics.jsonl"), open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.tracker:
            self.tracker.log(metrics)

    def close(self) -> None:
        if self.tracker:
            self.tracker.close()


def hold(folder: Path, flag: str) -> FileLock:
    """Lock a folder until this process ends; UserError if another process holds it.

    flag: the one that chooses another folder.
    """
    refuse_link(folder / "lock", flag)
    # The system releases the lock of a killed process. A process may open its folder twice: the two
    # share one lock.
    lock = FileLock(folder / "lock", is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UserError(
            f"{folder} is in use by another process: wait for it, or choose another {flag}"
        ) from error
    return lock


@contextmanager
def moments_only(optimizer):
    """What is loaded within changes the moments of AdamW; its settings stay those of the run.

    Otherwise a file would set the learning rate. ValueError for moments that do not fit.
    """
    groups = optimizer.param_groups
    own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    yield
    # The groups may be others now.
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name == "step":
                if not value >= 0:
                    raise ValueError(f"the number of steps is {value}")
            elif value.shape != parameter.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, and its weights "
                                 f"have {tuple(parameter.shape)}")


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run folder, which may be a link to another disk."""
    found = Path(folder).glob(CHECKPOINTS)
    # A link to nothing counts: its disk is missing, and the run must not start again from 0.
    newest = max((p for p in found if not p.is_file()), key=updates_done, default=None)
    if newest and not newest.is_dir():  # else the hub would be asked for a model of this name
        raise UserError(f"{newest} is a link to a folder that is missing: attach its disk, or "
                        "delete the link.")
    return newest


def updates_done(checkpoint: Path) -> int:
    """The number of updates in the name of a checkpoint, for example 12 for checkpoint-000012."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def read_metrics(folder: str | Path) -> list[dict]:
    """The lines of metrics.jsonl, without an incomplete last line."""
    with reading(Path(folder) / "metrics.jsonl") as path:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A run that was killed while it wrote a line left one without its end.
        metrics = [json.loads(line) for line in lines if line.endswith("\n")]
        before = -1
        for line in metrics:
            for value in line.values():
                if not isinstance(value, (int, float)):
                    raise ValueError("a metric is not a number")
                float(value)  # OverflowError for an integer that no curve could show
            update = line["update"]
            if type(update) is not int or not before < update <= MAX_UPDATES:
                raise ValueError(f"the update {update} is not an integer from {before + 1} to "
                                 f"{MAX_UPDATES}")
            before = update
    return metrics
