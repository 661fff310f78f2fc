"""What each world-model loss can teach, without RL.

    python -m research.teach.measure ENV [--losses NAME ...] [--epochs N] [--episodes N]
        [--out FOLDER] [--save FOLDER] [flags of the run script]

A start model plays; a quarter of the groups is held out. A fresh copy of the model trains on the
transitions of the others with one world-model loss alone: no advantages, no KL, no selection,
lambda_g = 1. After each epoch it is measured on the held-out transitions (outcomes.py). The figure
shows the AUC of "no effect" and the mean p of the branch tokens over the optimizer steps; band.py
shows where the p of all tokens lie. --save writes each copy to FOLDER/NAME, which `--model` takes.

NAME: ce, mae, or cmae-RHO, for example cmae-0.2 (Eq. 7 with rho = 0.2). A constant factor of the
gradient does not change AdamW's steps, so the losses need no common scale. Only the clip at norm 1
does: cross entropy, with its large gradients, meets it more often. The table is explained in
research/teach/README.md.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from paw_min.base.distributed import join
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import writing
from paw_min.config import Config, check
from paw_min.model.policy import load_policy
from paw_min.rows import Episode, Rows, flatten
from paw_min.running.plot import plt
from paw_min.running.session import forward_precision, loaded, make_optimizer, start_model
from paw_min.running.untrusted import exact
from paw_min.update import learn
from research.outcomes import Outcomes, measure
from research.paper.table import markdown_table
from research.paper.transitions import Arguments, arguments, collect, text_rows

LOSSES = ("ce", "mae", "cmae-0.2", "cmae-0.4", "cmae-0.8")
HELD_OUT = 4  # every fourth group


@exact
@dataclass
class Taught:
    """One loss: the measurements before training and after each epoch."""

    loss: str
    steps: Annotated[list[int], Field(min_length=1)]  # optimizer steps done
    outcomes: Annotated[list[Outcomes], Field(min_length=1)]


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, allow_abbrev=False)
    names = " ".join(LOSSES)
    parser.add_argument(
        "--losses", nargs="+", default=list(LOSSES), metavar="NAME", help=f"(default: {names})"
    )
    parser.add_argument("--epochs", type=int, default=8, help="over the transitions (%(default)s)")
    parser.add_argument("--save", type=Path, help="folder to write the trained models to")
    own, others = parser.parse_known_args(argv)
    if own.epochs < 1:
        raise UserError(f"--epochs {own.epochs} is out of range: it must be at least 1.")
    args = arguments(__doc__, others)
    settings = {loss: with_loss(args.cfg, loss) for loss in own.losses}  # checked before long work
    if args.cfg.groups < HELD_OUT:
        raise UserError(f"{args.cfg.groups} groups are too few, since every fourth is held out: "
                        "raise --groups or --episodes.")
    if own.save:
        with writing(f"the folder {own.save}"):
            own.save.mkdir(parents=True, exist_ok=True)
    train, held_out = split(play(args))
    found = []
    for loss, cfg in settings.items():
        found.append(teach(cfg, loss, train, held_out, own.epochs, own.save))
        print(table(found[-1:]), flush=True)
        if args.out:  # after each loss, since one takes minutes
            path = args.out / f"teach-{args.cfg.env}.json"
            with writing(path):
                path.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
                draw(found, path.with_suffix(".png"))


def with_loss(cfg: Config, loss: str) -> Config:
    """The settings of a world-model loss alone."""
    kind, _, rho = loss.partition("-")
    if (kind == "cmae") != bool(rho) or kind not in ("ce", "mae", "cmae"):
        raise UserError(f"--losses {loss} is not supported: use ce, mae or cmae-RHO.")
    try:
        cfg = replace(
            cfg, wm_loss=kind, rho=float(rho or 1.0), paw=True, kl_coef=0.0, entropy_coef=0.0,
            mini_batch=32,
        )
        check(cfg)
    except ValueError as error:
        raise UserError(f"--losses {loss}: {error}") from error
    return cfg


def play(args: Arguments) -> list[Episode]:
    """The episodes of the start model, without those whose environment broke."""
    with loaded(args.cfg) as (policy, sampler):
        played = collect(args.cfg, policy, sampler, args.episodes).episodes
    return [episode for episode in played if not episode.failed]


def split(episodes: list[Episode]) -> tuple[list[Episode], list[Episode]]:
    """(train, held out), by groups, since transitions of one task are alike."""
    held_out = [episode for episode in episodes if episode.group % HELD_OUT == HELD_OUT - 1]
    train = [episode for episode in episodes if episode.group % HELD_OUT != HELD_OUT - 1]
    for part in (train, held_out):
        if not any(row.obs_ids for episode in part for row in episode.transitions):
            raise UserError("too few groups with an observation: raise --groups or --episodes.")
    return train, held_out


def teach(
    cfg: Config, loss: str, train: list[Episode], held_out: list[Episode], epochs: int,
    save: Path | None = None,
) -> Taught:
    """Train a fresh copy of the start model with this loss; measure it after each epoch.

    save: the folder to write the trained copy to, under the name of the loss.
    """
    device = join(cfg.device)
    policy = load_policy(start_model(cfg), cfg.temperature, device, forward_precision(cfg, device))
    optimizer = make_optimizer(cfg, policy)
    rows = world_model_rows(train)
    others = [row for row in text_rows(cfg, held_out) if row.next_observation]
    per_epoch = -(-len(rows.tokens) // cfg.mini_batch)  # rounded up
    taught = Taught(loss, [0], [measure(cfg, policy, others)])
    for epoch in range(1, epochs + 1):
        learn(cfg, policy, optimizer, rows, seed_key=(cfg.seed, epoch))
        taught.steps.append(epoch * per_epoch)
        taught.outcomes.append(measure(cfg, policy, others))
    if save:
        with writing(f"the folder {save}"):
            policy.save(save / loss)
    return taught


def world_model_rows(episodes: list[Episode]) -> Rows:
    """All transitions with an advantage of 0: only the world-model loss has a gradient."""
    rows = flatten(episodes)
    observed = torch.tensor([len(row.obs_ids) > 0 for row in rows.tokens])  # (N,)
    return replace(
        rows,
        advantage=torch.zeros(len(rows.tokens)),  # (N,)
        row_weight=observed / observed.sum(),  # (N,) equal weights, whatever the group
    )


def draw(found: list[Taught], path: Path) -> None:
    """Curves over the optimizer steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for one in found:
        left.plot(one.steps, [outcome.auc for outcome in one.outcomes], label=one.loss)
        right.plot(one.steps, [outcome.p_branch for outcome in one.outcomes], label=one.loss)
    left.axhline(0.5, color="gray", linewidth=0.8, linestyle=":")
    left.set(xlabel="optimizer steps", ylabel='AUC of "no effect"')
    right.set(xlabel="optimizer steps", ylabel="mean p, branch tokens", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(found: list[Taught]) -> str:
    """A Markdown table: a line for each measurement of each loss."""
    header = ["loss", "steps", "p", "p, branch tokens", "band", "AUC"]
    header += ['p("no effect") where true', "where false"]
    lines = []
    for one in found:
        for steps, outcome in zip(one.steps, one.outcomes, strict=True):
            lines.append(
                [one.loss, steps, outcome.p, outcome.p_branch, outcome.band, outcome.auc,
                 outcome.p_if_no_effect, outcome.p_if_effect]
            )
    return markdown_table(header, lines)


if __name__ == "__main__":
    with user_errors():
        main()
