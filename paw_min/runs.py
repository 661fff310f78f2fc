"""The folder of a run: settings, metrics, checkpoints. Rerunning the same command resumes it.

    runs/<name>/config.json           every setting
                metrics.jsonl         one line per update; line 0 is the evaluation before training
                episodes.md           a few episodes as text
                curves.png, paw.png   the metrics as curves
                checkpoint-000012/    Hugging Face folder + trainer.pt, after update 12

A checkpoint is written under a temporary name, flushed to disk and renamed when it is complete; the
previous one is removed only then. Resuming drops metrics after the last checkpoint. A run that dies
at any moment therefore resumes from a consistent state.

Only rank 0 writes. Checkpoints are not sharded, so that any number of ranks can resume from them.
"""

import errno
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict

from paw_min import distributed
from paw_min.config import Config, UserError, differences


class Run:
    """A run folder; opening it checks that it belongs to these settings."""

    def __init__(self, cfg: Config):
        self.folder = Path(cfg.out) / cfg.name
        if distributed.rank() > 0:
            return
        path = self.folder / "config.json"
        if path.exists() and (read_metrics(self.folder) or self.checkpoint()):
            changed = differences(json.loads(path.read_text()), cfg)
            if changed:
                raise UserError(
                    f"{self.folder} belongs to a run with {', '.join(changed)}: "
                    "repeat those settings to resume it, or choose another --name."
                )
        with disk_space("the run folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(cfg), indent=2) + "\n")
        for partial in self.folder.glob("*.partial"):  # of a run that was killed while writing
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()

    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self.folder.glob("checkpoint-*[0-9]"), default=None)

    def save(self, policy, optimizer, done: int) -> None:
        """Write the checkpoint after `done` updates, then remove the older ones."""
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = state_dict.get_state_dict(policy, optimizer, options=options)
        if distributed.rank() > 0:
            return
        final = self.folder / f"checkpoint-{done:06d}"
        partial = final.with_suffix(".partial")
        with disk_space("a checkpoint"):
            shutil.rmtree(partial, ignore_errors=True)
            others = policy.save(partial, weights)
            state = {"done": done, "optimizer": state, "weights": others}
            torch.save(state, partial / "trainer.pt")
            for file in partial.iterdir():
                flush(file)
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
        for old in self.folder.glob("checkpoint-*[0-9]"):
            if old != final:
                shutil.rmtree(old)

    def restore(self, policy, optimizer) -> int:
        """Load the newest checkpoint's trainer.pt -> number of updates done, 0 without one.

        The language model's weights are in the same folder (policy.load_policy); trainer.pt has
        the optimizer state and all other weights of the policy. Later metrics are dropped.
        """
        done = 0
        if checkpoint := self.checkpoint():
            state = torch.load(checkpoint / "trainer.pt", weights_only=True, map_location="cpu")
            options = state_dict.StateDictOptions(full_state_dict=True, strict=False)
            state_dict.set_model_state_dict(policy, state["weights"], options=options)
            state_dict.set_optimizer_state_dict(
                policy, optimizer, state["optimizer"], options=options
            )
            done = state["done"]
        if distributed.rank() == 0:
            kept = [line for line in read_metrics(self.folder) if line["update"] <= done]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            write_atomically(self.folder / "metrics.jsonl", text)
        return done

    def metrics(self) -> list[dict]:  # on every rank
        return distributed.all_gather(read_metrics(self.folder) if distributed.rank() == 0 else [])

    def dump_rows(self, rows: list, update: int) -> Path:
        """Save the rows of a NaN loss -> the file."""
        file = self.folder / f"nonfinite-{update:06d}.pt"
        torch.save([vars(row) for row in rows], file)
        return file

    def write(self, name: str, text: str) -> None:
        if distributed.rank() == 0:
            write_atomically(self.folder / name, text)

    def log(self, metrics: dict) -> None:
        """Append one line to metrics.jsonl."""
        if distributed.rank() > 0:
            return
        with disk_space("metrics.jsonl"), open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(folder: str | Path) -> list[dict]:
    """The lines of metrics.jsonl, without a last one that a kill cut off."""
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    flush(partial)
    os.replace(partial, path)


def flush(path: Path) -> None:
    """Write a file through to the disk, before it is renamed."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def disk_space(what: str):
    """Turn the errors of a full disk into one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save reports a short write as RuntimeError
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "enforce fail" in str(error) or "No space left" in str(error):
            raise UserError(
                f"No space left on the disk to write {what}: free some and rerun the same "
                "command, which resumes from the last checkpoint."
            ) from error
        raise
