"""What all methods of rwml.py share: triplets, and the model that they start from.

The stand-in models cannot write the format, and their vocabulary has no <next_state>. Their start/
has the tags and a format warm start, cross entropy on the 10 % of triplets. Not in the paper, whose
models answer zero-shot.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken

from paw_min.base import distributed
from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.files import remove, replace_text, writing
from paw_min.base.seeds import generator
from paw_min.model.policy import Policy, load_policy
from paw_min.rows import TokenRow
from paw_min.running.session import forward_precision, make_optimizer, start_model
from paw_min.running.stages import Pieces, changed
from paw_min.running.untrusted import exact, read_json
from paw_min.world_models.job import Job
from paw_min.world_models.supervised import fit
from paw_min.world_models.triplets import (
    Triplet,
    collect,
    sft_row,
    write_triplets,
)

HELD_OUT = 200  # transitions of the panel that are predicted, at most
TAGS = ["<think>", "</think>", "<next_state>", "</next_state>"]


@exact
@dataclass
class Record:
    """collected.json: written last, so that a rerun goes on with collecting unless it is there."""

    settings: dict
    triplets: int
    digest: str  # of the files of triplets, which must not change between the stages
    counts: dict[str, int]  # see triplets.collect
    panel: dict[str, float]


def collected(job: Job) -> Record:
    """Read FOLDER's record, or collect first."""
    path = job.folder / "collected.json"
    if not path.exists():
        if (job.folder / "filter.json").exists():
            # Triplets that are collected again would replace those that it was made for.
            raise UserError(f"{path} is missing, but not filter.json: restore it, or use another "
                            "--out.")  # fmt: skip
        if (job.folder / "start").exists() and not (job.folder / "triplets.jsonl").exists():
            raise UserError(f"{job.folder / 'start'} was not made by this command: use another "
                            "--out.")
        pieces = job.pieces("collect")
        settings = job.settings
        found = collect(
            job.cfg, pieces, tasks=settings.tasks, episodes=settings.episodes,
            max_turns=settings.max_turns, answer_tokens=settings.answer_tokens,
        )  # fmt: skip
        if len(found.triplets) * settings.validation < 1 or not found.held_out:
            raise UserError(f"{len(found.triplets)} triplets are too few: use more --tasks.")
        write_triplets(job.folder / "triplets.jsonl", found.triplets)
        # The panel is in the order of the task types.
        n_held_out = min(HELD_OUT, len(found.held_out))
        drawn = generator("held out", job.cfg.seed).sample(found.held_out, n_held_out)
        write_triplets(job.folder / "held_out.jsonl", drawn)
        make_start(job, pieces, split(job, found.triplets).validation, found.acts)
        record = Record(
            settings=job.identity(),
            triplets=len(found.triplets),
            digest=digest(job.folder),
            counts=found.counts,
            panel=found.panel,
        )
        replace_text(path, json.dumps(asdict(record), indent=1) + "\n")
    record = read_json(path, Record)
    if others := changed(record.settings, job.identity()):
        raise UserError(f"{job.folder} was made with {others}: repeat that, or use another --out.")
    job.pieces("collect").remove()
    return record


def digest(folder: Path) -> str:
    """SHA-256 of both files of triplets."""
    found = hashlib.sha256()
    for name in ("triplets.jsonl", "held_out.jsonl"):
        found.update((folder / name).read_bytes())
    return found.hexdigest()


class Split(NamedTuple):
    validation: list[Triplet]
    others: list[Triplet]


def split(job: Job, triplets: list[Triplet]) -> Split:
    """10 % and 90 % of the triplets, not of the tasks (3.1)."""
    order = generator("validation", job.cfg.seed).sample(triplets, len(triplets))
    n = int(job.settings.validation * len(order))
    return Split(order[:n], order[n:])


def make_start(
    job: Job, pieces: Pieces, validation: list[Triplet], acts: list[TokenRow]
) -> None:
    """start/: the model, with the tags in its vocabulary and the format in its habits.

    acts: the model's own responses. The warm start rehearses as many of them as there are labels:
    without, the stand-ins answer every prompt with a prediction, and no episode can be played.
    """
    device = distributed.join(job.cfg.device)
    precision = forward_precision(job.cfg, device)
    policy = load_policy(start_model(job.cfg), device=device, precision=precision)
    add_tags(policy, job.cfg.seed)
    if job.settings.warm_epochs:
        rows = [sft_row(job.cfg, policy, triplet) for triplet in validation]
        rng = generator("rehearsal", job.cfg.seed)
        rows += rng.sample(acts, min(len(rows), len(acts)))
        optimizer = sft_optimizer(job, policy)
        supervise(job, pieces, policy, optimizer, rows, job.settings.warm_epochs, "warm start")
    with writing("the start model"):
        partial = job.folder / "start.partial"
        for folder in (partial, job.folder / "start"):
            if os.path.lexists(folder):
                remove(folder)
        policy.save(partial)
        os.replace(partial, job.folder / "start")


def add_tags(policy: Policy, seed: int) -> None:
    """Tokens for the tags that the tokenizer cannot write; word-level ones have no others."""
    missing = [tag for tag in TAGS if tag not in policy.decode(policy.encode(f"{tag} a"))]
    if not missing:
        return
    tokens = [AddedToken(tag, special=False, normalized=False) for tag in missing]
    policy.tokenizer.add_tokens(tokens)
    with torch.random.fork_rng(devices=[]):  # the new embeddings depend on `seed` only
        torch.manual_seed(seed)
        policy.model.resize_token_embeddings(len(policy.tokenizer), mean_resizing=False)


def supervise(
    job: Job, pieces: Pieces, policy: Policy, optimizer, rows: list[TokenRow], epochs: int,
    what: str,
) -> dict[str, float]:  # fmt: skip
    """Cross entropy on the labels of these rows -> metrics. what: its name."""
    if not rows:
        raise UserError(f"{what}: no label is short enough for an answer; use another --model, or "
                        "more --tasks.")  # fmt: skip
    policy.train()
    losses = fit(
        policy, optimizer, rows, epochs=epochs, batch=job.settings.batch, warm_up=0,
        micro_tokens=job.cfg.micro_tokens, seed_key=("rwml", job.cfg.seed),
        pieces=pieces, name=what,
    )  # fmt: skip
    steps = f"{len(rows)} labels, {len(losses)} steps"
    say(f"{what}: {steps}, {losses[0]:.3f} to {losses[-1]:.3f} nats per token")
    return {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}


def sft_optimizer(job: Job, policy: Policy) -> torch.optim.Optimizer:
    return make_optimizer(replace(job.cfg, lr=sft_rate(job)), policy)


def sft_rate(job: Job) -> float:
    """Learning rate of supervised stages; with LoRA ten times that of the paper, as in RL."""
    is_lora = job.paper_scale and job.cfg.lora_rank > 0
    return (10 if is_lora else 1) * job.settings.sft_lr
