"""The episodes that a run stores of each update: token ids, and what training knew of each row.

One file per update, samples/000012.json in the run folder. It depends only on the rollout and on
`update.prepare`, so an update that is redone after a kill writes the same file. Scores per token
are not stored: paw_min.page computes them, under the weights before and after training.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from paw_min.rows import Episode, Rows, TokenRow
from paw_min.running.evaluate import asked, short

LIMIT = 48  # transitions of an update, in whole episodes; more only if the first one is longer


@dataclass
class StoredRow(TokenRow):
    """One row of an update. Its o' is stored even where training did not append it."""

    reward: float  # r_t of the environment
    valid: bool  # is the response well formed?
    selected: bool  # Eq. 4
    # Its place by entropy among the rows that compete in Eq. 4; 1: the highest. None: it does not,
    # or all are selected, whatever their entropy.
    rank: int | None


@dataclass
class StoredEpisode:
    group: int
    trajectory: int
    task: str
    won: bool
    episode_return: float
    lambda_g: float  # of its group, Eq. 10
    steps: list[StoredRow]
    asked: str = ""  # what it was asked to do; older runs have no such text


@dataclass
class StoredUpdate:
    update: int
    candidates: int  # rows of the update that compete in Eq. 4
    episodes: list[StoredEpisode]


def choose(episodes: list[Episode]) -> list[Episode]:
    """The first lost and the first won episode of each group, then others, up to LIMIT steps."""
    first = {(e.group, e.won): e for e in reversed(episodes)}
    in_order_of_interest = sorted(episodes, key=lambda e: first[e.group, e.won] is not e)
    chosen = []
    total = 0
    for e in in_order_of_interest:
        total += len(e.transitions)
        if chosen and total > LIMIT:
            break
        chosen.append(e)
    return sorted(chosen, key=lambda e: e.trajectory)


def stored_episodes(update: int, episodes: list[Episode], rows: Rows) -> str:
    """The file of this update, as JSON. rows: of the same episodes, after `update.prepare`."""
    steps = steps_of(rows)
    stored = StoredUpdate(
        update=update,
        candidates=int(rows.candidates.sum()),
        episodes=[
            StoredEpisode(
                group=e.group,
                trajectory=e.trajectory,
                task=short(e.task),
                won=e.won,
                episode_return=e.episode_return,
                lambda_g=rows.lambdas[e.group],
                steps=steps[e.trajectory],
                asked=asked(e),
            )
            for e in choose(episodes)
        ],
    )
    return json.dumps(asdict(stored), separators=(",", ":")) + "\n"


def steps_of(rows: Rows) -> dict[int, list[StoredRow]]:
    """{trajectory: its rows}"""
    rank = torch.zeros(len(rows.tokens), dtype=torch.long)  # (N,) 0: none
    if rows.entropy is not None:
        # Ties as in select.top_alpha. argsort inverts the order: the place of each row in it.
        order = torch.sort(rows.entropy[rows.candidates], descending=True, stable=True).indices
        rank[rows.candidates] = order.argsort() + 1
    steps = defaultdict(list)
    for i, tokens in enumerate(rows.tokens):
        row = StoredRow(
            **{f.name: getattr(tokens, f.name) for f in fields(TokenRow)},
            reward=rows.reward[i],
            valid=rows.valid[i].item(),
            selected=rows.selected[i].item(),
            rank=rank[i].item() or None,
        )
        steps[rows.trajectory[i]].append(row)
    return steps


def read(path: Path) -> StoredUpdate:
    """The episodes in a file that a run has written."""
    stored = json.loads(path.read_text("utf-8"))
    episodes = []
    for episode in stored["episodes"]:
        steps = [StoredRow(**step) for step in episode["steps"]]
        episodes.append(StoredEpisode(**episode | {"steps": steps}))
    return StoredUpdate(**stored | {"episodes": episodes})
