"""The folder of a run: settings, metrics, checkpoints. Rerunning the same command resumes it.

    runs/<name>/config.json           every setting
                sources.json          digests of the source files with which it began
                metrics.jsonl         one line per update; line 0 is the evaluation before training
                episodes.md           a few episodes of the latest evaluation as text
                evaluation.json       all its outcomes, per task
                *-only.md, *-only.json    the same two of --eval-only
                curves.png, paw.png   the metrics as curves
                samples/000012.json   some episodes of update 12, for paw_min.page
                checkpoint-000012/    Hugging Face folder + trainer.pt, after update 12
                lock                  held by the process that writes here
                tensorboard/, wandb/, wandb-id    with --track

Settings, texts, pictures and checkpoints are written beside their place, as NAME.partial. A
checkpoint is renamed when it is complete and on the disk, and the previous one is removed only
then. Resuming drops later metrics and removes all checkpoints but the newest, so a run that dies at
any moment resumes consistently. Only rank 0 writes. Checkpoints are not sharded, so that any number
of ranks can resume from them.
"""

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint import state_dict

from paw_min.base import distributed
from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.files import reading, remove, replace_text, replacing, writing
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.running import track
from paw_min.running.config_json import differences, public, read_config

CHECKPOINTS = "checkpoint-" + 6 * "[0-9]"


class Run:
    """A run folder; opening it checks that it belongs to these settings.

    Without a name, as in a plain Config(), it is cfg.out itself.
    """

    def __init__(self, cfg: Config):
        self.cfg = cfg
        # An environment in this process may change the current folder.
        self.folder = (Path(cfg.out) / cfg.name).absolute()
        self.tracker = None
        if distributed.rank() > 0:
            return
        with writing(f"the run folder {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(self.folder, "--name")
        path = self.folder / "config.json"
        is_trained = bool(read_metrics(self.folder) or self.checkpoint())
        # UserError for the config.json of a model: a new run would overwrite it.
        self.before = read_config(path) if is_trained or path.exists() else None
        if not is_trained:
            self.write_settings()
        elif changed := differences(self.before, cfg):
            raise UserError(
                f"{self.folder} belongs to a run with {', '.join(changed)}: "
                "repeat those settings to resume it, or choose another --name."
            )

    def write_settings(self) -> None:
        self.write("config.json", json.dumps(public(self.cfg), indent=2) + "\n")

    def checkpoint(self) -> Path | None:
        return newest_checkpoint(self.folder)

    def nan_remedy(self) -> str:
        """What to do after a NaN. A run keeps its learning rate, so another run has to continue."""
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
                f"update {done} made weights NaN or infinite; not saved: {self.nan_remedy()}."
            )
        if distributed.rank() > 0:
            return
        final = self.folder / f"checkpoint-{done:06d}"
        with replacing(final) as partial:
            policy.save(partial, weights)
            others = policy.besides_the_model(weights)
            torch.save({"optimizer": state, "weights": others}, partial / "trainer.pt")
        self.remove_all_but(final)

    def remove_all_but(self, newest: Path | None) -> None:
        """Remove older checkpoints, and what is left of one that a kill has cut short."""
        with writing(str(self.folder)):
            for pattern in (CHECKPOINTS, f"{CHECKPOINTS}.partial"):
                for found in list(self.folder.glob(pattern)):
                    if found != newest:
                        remove(found)

    def load(self, policy, optimizer) -> None:
        """Load the checkpoint's state of the optimizer, and PPO's critic, if there is one.

        The weights of the language model are loaded where the policy is made (session.py).
        """
        checkpoint = self.checkpoint()
        if not checkpoint:
            return
        options = state_dict.StateDictOptions(full_state_dict=True, strict=False)
        with reading(checkpoint / "trainer.pt") as path:
            # Mapped, so that the ranks of a machine share its pages.
            state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            state_dict.set_model_state_dict(policy, state["weights"], options=options)
            state_dict.set_optimizer_state_dict(
                policy, optimizer, state["optimizer"], options=options
            )

    def begin(self, done: int) -> None:
        """Make the folder agree with the checkpoint, then write the settings and open the tracker.

        Called when everything else is loaded: a start that fails, as with wrong data, leaves the
        folder unchanged. UserError if metrics would be lost.
        """
        if distributed.rank() > 0:
            return
        lines = read_metrics(self.folder)
        if not done and lines and lines[-1]["update"] > self.before.save_every:
            raise UserError(f"{self.folder} has metrics, but no checkpoint: use another --name.")
        sources = source_digests(self.cfg.env)
        if done or lines:
            self.compare(sources)
        else:
            self.write("sources.json", json.dumps(sources, indent=0) + "\n")
        self.remove_all_but(self.checkpoint())
        kept = [line for line in lines if line["update"] <= done]
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        self.write_settings()
        if self.cfg.track != "none":
            self.tracker = track.Tracker(self.cfg, self.folder, start=len(kept))

    def compare(self, sources: dict[str, str]) -> None:
        """Say so if the method may be another one than that with which the run began."""
        path = self.folder / "sources.json"
        old = json.loads(path.read_text("utf-8")) if path.exists() else sources
        names = sorted(old.keys() | sources)
        if changed := [name for name in names if old.get(name) != sources.get(name)]:
            say(f"changed since the run began: {', '.join(changed)}; use another --name to keep "
                "two methods apart")

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl, on every rank."""
        return distributed.all_gather(read_metrics(self.folder) if distributed.rank() == 0 else [])

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
        path = self.folder / "metrics.jsonl"
        with writing("metrics.jsonl"), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def track(self, metrics: dict) -> None:
        """The line in the tracker, after the checkpoint: it may hang or die."""
        if self.tracker:
            self.tracker.log(metrics)

    def close(self) -> None:
        if self.tracker:
            self.tracker.close()


def source_digests(env: str) -> dict[str, str]:
    """Digests of source files by name: the package's, and those behind this program.

    The latter are the program, the module of its environment, and what they use of their folders.
    """
    package = Path(__file__).parents[1]
    names = ("__main__", BENCHMARKS[env].load.__module__)  # such as examples.tapo
    path_of = {name: getattr(m, "__file__", None) or "" for name, m in list(sys.modules.items())}
    folders = {os.path.dirname(path_of[name]) for name in names if path_of[name]}
    used = {Path(path) for path in path_of.values() if os.path.dirname(path) in folders}
    files = {file for file in {*package.rglob("*.py"), *used} if file.is_file()}
    return {
        os.path.relpath(file, package.parent): hashlib.blake2b(file.read_bytes()).hexdigest()[:16]
        for file in sorted(files)
    }


def lock_folder(folder: Path, flag: str) -> FileLock:
    """Lock a folder until this process ends; UserError if another process holds it.

    flag: the one that chooses another folder.
    """
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


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    return max(Path(folder).glob(CHECKPOINTS), key=updates_done, default=None)


def interrupted(cfg: Config) -> str:
    """After Ctrl-C: where the same command continues."""
    checkpoint = newest_checkpoint(Path(cfg.out) / cfg.name)
    place = f"after update {updates_done(checkpoint)}" if checkpoint else (
        f"at update 0, since no checkpoint was written (--save-every {cfg.save_every})")
    return f"interrupted: the same command continues {place}"


def updates_done(checkpoint: Path) -> int:
    """The number of updates in the name of a checkpoint, for example 12 for checkpoint-000012."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def read_metrics(folder: str | Path) -> list[dict]:
    """The lines of metrics.jsonl, without an incomplete last line."""
    path = Path(folder) / "metrics.jsonl"
    *lines, last = path.read_text("utf-8").split("\n") if path.exists() else [""]
    metrics = [json.loads(line) for line in lines]
    # A run that was killed while it wrote a line left a part of it, which is not JSON. After a
    # whole last line, an editor may have removed the newline.
    with suppress(ValueError):
        metrics.append(json.loads(last))
    return metrics
