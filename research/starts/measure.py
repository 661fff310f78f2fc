"""Start models compared: what they play, what they predict, and the gradients of both losses.

    python -m research.starts.measure ENV [--model MODEL ...] [--temperature-scale TAU]
        [--episodes N] [--out FOLDER] [flags]

ENV: alfworld, webshop or search. MODEL: as in the run scripts; without it, that of the preset.
TAU divides all logits of the model, those of observations too. Above 1, the model explores more.
--episodes: without it, as many as in one update. --out: adds the models to FOLDER/starts.json, and
prints all models of this file. flags: any of the run script, for example --preset.

The episodes are those of the first update: its tasks, groups and seeds. Nothing is trained.
Gradients are of all weights, also with --lora-rank. The tables are explained in
research/starts/README.md.
"""

import json
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import replace_text
from paw_min.base.seeds import generator
from paw_min.cmae import hard_tokens
from paw_min.config import Config
from paw_min.conflict import dot, gradient, gradient_conflict
from paw_min.losses import row_weights
from paw_min.metrics import describe_episodes, mean
from paw_min.model.policy import Policy
from paw_min.model.scoring import score_responses
from paw_min.rows import Episode, Rows, flatten
from paw_min.running.session import loaded
from paw_min.running.untrusted import exact, read_json
from paw_min.update import prepare
from research.paper.fig2c import gradient_shares
from research.paper.table import markdown_table
from research.paper.transitions import Arguments, arguments, collect, observation_logps

UPDATE = 1
LOW = 0.01  # far below rho: such tokens have almost no gradient, p (1 - p)
TAIL_ROWS = 40  # 5 % of them are two rows
TAIL = 0.05


@exact
@dataclass
class Start:
    """One row of the tables. Shares are between 0 and 1; None: undefined."""

    name: str  # as a run's
    episodes: int
    rows: int
    entropy_tokens: float  # nats per response token, mean over tokens
    entropy_rows: float  # the same, mean over the means of the responses
    valid: float  # share of well-formed responses
    won: float  # share of episodes
    no_variance: float  # share of groups whose episodes all have the same return
    response_tokens: Annotated[float, Field(gt=0)]  # T |a|: per episode
    hard: float  # share of observation tokens with p <= rho, which Eq. 7 keeps
    low: float  # ... with p <= LOW
    middle: float  # ... with LOW < p <= rho
    first_p: float  # median p of the first token of o'
    first_low: float  # share of rows whose first token has p <= LOW
    first_share: float  # mean of first_token_share, over the rows that have a gradient
    tail_rows: int  # see tail_share
    tail_share: float | None
    # Keys: those of gradient_conflict, and ratio = grad_norm_wm / grad_norm_rl.
    real: dict[str, float | None]  # with the advantages and lambda_g of training
    unit: dict[str, float | None]  # of unit_rows


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", nargs="+", help="start models (default: that of the preset)")
    parser.add_argument("--temperature-scale", type=float, default=1.0, help="TAU (%(default)s)")
    own, others = parser.parse_known_args(argv)
    tau = own.temperature_scale
    if not 0.01 <= tau <= 100:
        raise UserError(f"--temperature-scale {tau} is out of range: it must be from 0.01 to 100.")
    choices = [["--model", model] for model in own.model] if own.model else [[]]
    # All command lines are read before the first model plays.
    planned = [arguments(__doc__, [*others, *choice]) for choice in choices]
    if planned[0].cfg.algo == "ppo":
        raise UserError("--algo ppo has no advantages before its critic learns: use another one.")
    starts = []
    out = planned[0].out
    if out and (out / "starts.json").is_file():
        read(out / "starts.json")  # refused before a model plays, if it is damaged
    for args in planned:
        starts.append(measure(args, tau))
        if args.out:
            starts = store(args.out / "starts.json", starts)
    print(tables(starts))


def measure(args: Arguments, tau: float) -> Start:
    """Load the model, play, and compute everything."""
    cfg = replace(args.cfg, wm_scale=1.0)
    with loaded(cfg) as (policy, sampler):
        divide_logits(policy, tau)
        played = collect(cfg, policy, sampler, args.episodes, UPDATE).episodes
    # A run's name has the settings that differ from its preset.
    name = cfg.name if tau == 1 else f"{cfg.name}, τ = {tau:g}"
    return describe(cfg, policy, played, name)


@torch.no_grad()
def divide_logits(policy: Policy, tau: float) -> None:
    """Divide all logits by tau: the last norm multiplies by its weight, and the head is linear."""
    policy.model.get_decoder().norm.weight.div_(tau)


def describe(cfg: Config, policy: Policy, played: list[Episode], name: str) -> Start:
    """Everything that the tables show, of these episodes by this policy."""
    episodes = [episode for episode in played if not episode.failed]
    if not any(row.obs_ids for episode in episodes for row in episode.transitions):
        raise UserError("no observation in any episode: check the data with --dry-run.")
    play = describe_episodes(episodes)
    # No reference: the KL to the start model has no gradient at the start model.
    rows = prepare(cfg, policy, None, flatten(episodes))
    lengths = torch.tensor([len(row.response_ids) for row in rows.tokens])  # (N,)
    entropy = score_responses(replace(cfg, select_entropy="full"), policy, rows.tokens).entropy

    logps = observation_logps(cfg, policy, rows.tokens)  # N x (|o|,)
    observed = [logp.exp() for logp in logps if len(logp)]
    p = torch.cat(observed)  # (observation tokens,)
    hard = hard_tokens(p.log(), cfg.rho).bool()
    first = torch.stack([one[0] for one in observed])  # (rows with an observation,)
    first_shares = [first_token_share(one, cfg.rho) for one in observed]

    seed_key = (cfg.seed, UPDATE)
    tail_rows, top_share = tail_share(cfg, policy, rows)
    return Start(
        name=name,
        episodes=len(episodes),
        rows=len(rows.tokens),
        entropy_tokens=((entropy * lengths).sum() / lengths.sum()).item(),
        entropy_rows=entropy.mean().item(),
        valid=play["valid"],
        won=play["success"],
        no_variance=play["no_variance"],
        response_tokens=lengths.sum().item() / len(episodes),
        hard=hard.float().mean().item(),
        low=(p <= LOW).float().mean().item(),
        middle=(hard & (p > LOW)).float().mean().item(),
        first_p=first.median().item(),
        first_low=(first <= LOW).float().mean().item(),
        first_share=mean([share for share in first_shares if share is not None]),
        tail_rows=tail_rows,
        tail_share=top_share,
        real=compare(cfg, policy, rows, seed_key),
        unit=compare(cfg, policy, unit_rows(cfg, rows), seed_key),
    )


def first_token_share(p: Tensor, rho: float) -> float | None:
    """The first token's share of the clipped-MAE gradient of its row: (|o|,) -> a number.

    The size of a token's gradient is that at its own logit: p (1 - p), or 0 where p > rho. None:
    all tokens have p > rho.
    """
    is_first = torch.arange(len(p)) == 0  # (|o|,)
    return gradient_shares(p, is_first, rho)["clipped MAE"]


def compare(cfg: Config, policy: Policy, rows: Rows, seed_key: tuple) -> dict[str, float | None]:
    """gradient_conflict, with the ratio of the norms."""
    found = gradient_conflict(cfg, policy, rows, seed_key)
    rl = found["grad_norm_rl"]
    wm = found["grad_norm_wm"]
    return {
        "grad_norm_rl": rl,
        "grad_norm_wm": wm,
        "ratio": wm / rl if rl else None,
        "cosine": found["grad_cosine"] if rl and wm else None,
    }


def unit_rows(cfg: Config, rows: Rows) -> Rows:
    """The rows with lambda_g = 1, and with a random sign per trajectory as their advantage.

    Starts that never win have no RL gradient of their own but that of format penalties. With these
    advantages, their gradients can be compared.
    """
    signs = [generator("sign", cfg.seed, t).choice((-1.0, 1.0)) for t in rows.trajectory]
    ones = dict.fromkeys(rows.lambda_g, 1.0)
    weights = row_weights(rows.group, rows.selected, ones)  # (N,)
    return replace(rows, advantage=torch.tensor(signs), lambda_g=ones, row_weight=weights)


def tail_share(cfg: Config, policy: Policy, rows: Rows) -> tuple[int, float | None]:
    """Random selected rows, and what the top 5 % of them hold -> their number, the share.

    The share is that of the sum of squared norms of the rows' world-model gradients (Eq. 8 of one
    row, without lambda_g). With equal norms it would be 0.05.
    """
    selected = rows.selected.nonzero()[:, 0].tolist()
    chosen = generator("tail", cfg.seed).sample(selected, min(TAIL_ROWS, len(selected)))
    equal = replace(rows, row_weight=rows.selected.float())
    squares = []
    for i in chosen:
        of_row = gradient(cfg, policy, equal, [i], of_world_model=True)
        squares.append(dot(of_row, of_row))
    squares.sort(reverse=True)
    top = squares[: ceil(TAIL * len(squares))]
    return len(squares), sum(top) / sum(squares) if sum(squares) else None


def store(file: Path, starts: list[Start]) -> list[Start]:
    """Write these starts to the file, in place of those with their names -> all of the file."""
    stored = {start.name: start for start in read(file)} if file.is_file() else {}
    stored |= {start.name: start for start in starts}
    text = json.dumps([asdict(start) for start in stored.values()], indent=1)
    replace_text(file, text + "\n")
    return list(stored.values())


def read(file: Path) -> list[Start]:
    return read_json(file, list[Start])


def tables(starts: list[Start]) -> str:
    """Three Markdown tables: play, observations, gradients."""
    header = ["start", "episodes", "H, tokens", "H, rows", "well-formed", "won", "no variance"]
    header += ["T·\\|a\\|", "1/(T·\\|a\\|)"]
    lines = [
        [one.name, one.episodes, one.entropy_tokens, one.entropy_rows, one.valid, one.won,
         one.no_variance, f"{one.response_tokens:.0f}", f"{1 / one.response_tokens:.4f}"]
        for one in starts
    ]
    found = [markdown_table(header, lines)]

    header = ["start", "p ≤ ρ", f"p ≤ {LOW}", f"{LOW} < p ≤ ρ", "p of the first, median"]
    header += [f"its p ≤ {LOW}", "its gradient share", "top 5 % of rows", "rows"]
    lines = [
        [one.name, one.hard, one.low, one.middle, f"{one.first_p:.1e}", one.first_low,
         one.first_share, one.tail_share, one.tail_rows]
        for one in starts
    ]
    found.append(markdown_table(header, lines))

    header = ["start", "RL", "world model", "ratio", "cosine"]
    header += ["RL, A = ±1", "world model, λ = 1", "ratio", "cosine"]
    lines = [[one.name, *one.real.values(), *one.unit.values()] for one in starts]
    found.append(markdown_table(header, lines))
    return "\n\n".join(found)


if __name__ == "__main__":
    with user_errors():
        main()
