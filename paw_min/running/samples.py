"""The episodes that a run stores of each update: token ids, and what training knew of each row.

One file per update, samples/000012.json in the run folder. It depends only on the rollout and on
`update.prepare`, so an update that is redone after a kill writes the same file. Scores per token
are not stored: paw_min.inspect computes them, under the weights before and after training.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from paw_min.rows import Episode, Rows, TokenRow
from paw_min.running.evaluate import short

LIMIT = 48  # transitions of an update, in whole episodes; more only if the first one is longer


@dataclass
class StoredRow(TokenRow):
    """One row of an update. Its o' is stored even where training did not append it."""

    reward: float  # r_t of the environment
    valid: bool  # is the response well formed?
    selected: bool  # Eq. 4
    entropy: float | None  # H(a_t | h_t), Eq. 4; None: not needed, since all rows are selected
    rank: int | None  # its rank among the rows that compete in Eq. 4; 1: the highest
    weight: float  # weight of the world-model loss in Eq. 11: lambda_g / (G |S_g|) or 0


@dataclass
class StoredEpisode:
    group: int
    trajectory: int
    task: str
    task_type: str
    won: bool
    episode_return: float
    steps: list[StoredRow]


@dataclass
class Group:
    group: int
    lambda_g: float  # lambda_g, Eq. 10
    returns: list[float]  # returns of all episodes of the group, even of those that are not stored


@dataclass
class Sample:
    update: int
    candidates: int  # rows of the update that compete in Eq. 4
    kept: int  # how many of these Eq. 4 selected
    groups: list[Group]  # the groups of the episodes below
    episodes: list[StoredEpisode]


def choose(episodes: list[Episode], limit: int = LIMIT) -> list[Episode]:
    """The first lost and the first won episode of each group, then others, up to `limit` steps."""
    first = {(e.group, e.won): e for e in reversed(episodes)}
    in_order_of_interest = sorted(episodes, key=lambda e: first[e.group, e.won] is not e)
    chosen = []
    total = 0
    for e in in_order_of_interest:
        total += len(e.transitions)
        if chosen and total > limit:
            break
        chosen.append(e)
    return sorted(chosen, key=lambda e: e.trajectory)


def sample(update: int, episodes: list[Episode], rows: Rows) -> str:
    """The file of this update, as JSON. rows: of the same episodes, after `update.prepare`."""
    steps = steps_of(rows)
    returns = defaultdict(list)  # group -> R(tau) of its episodes
    for e in episodes:
        returns[e.group].append(e.episode_return)
    played = [
        StoredEpisode(
            group=e.group,
            trajectory=e.trajectory,
            task=short(e.task),
            task_type=e.task_type,
            won=e.won,
            episode_return=e.episode_return,
            steps=steps[e.trajectory],
        )
        for e in choose(episodes)
    ]
    shown = dict.fromkeys(e.group for e in played)
    stored = Sample(
        update=update,
        candidates=int(rows.candidates.sum()),
        kept=int(rows.selected.sum()),
        groups=[Group(g, rows.lambdas[g], returns[g]) for g in shown],
        episodes=played,
    )
    return json.dumps(asdict(stored), separators=(",", ":")) + "\n"


def steps_of(rows: Rows) -> dict[int, list[StoredRow]]:
    """{trajectory: its rows}"""
    rank = torch.zeros(len(rows.tokens), dtype=torch.long)  # (N,)
    if rows.entropy is not None:
        rank[rows.candidates] = ranks(rows.entropy[rows.candidates])
    steps = defaultdict(list)
    for i, tokens in enumerate(rows.tokens):
        row = StoredRow(
            **{f.name: getattr(tokens, f.name) for f in fields(TokenRow)},
            reward=rows.reward[i],
            valid=rows.valid[i].item(),
            selected=rows.selected[i].item(),
            entropy=None if rows.entropy is None else rows.entropy[i].item(),
            rank=rank[i].item() or None,
            weight=rows.row_weight[i].item(),
        )
        steps[rows.trajectory[i]].append(row)
    return steps


def ranks(entropy: torch.Tensor) -> torch.Tensor:
    """1 for the highest entropy; ties as in select.top_alpha: (N,) -> (N,)."""
    order = torch.sort(entropy, descending=True, stable=True).indices
    return torch.empty_like(order).index_put_((order,), torch.arange(1, len(order) + 1))


def read(path: Path) -> Sample:
    """The sample in a file that a run has written."""
    stored = json.loads(path.read_text())
    groups = [Group(**group) for group in stored["groups"]]
    episodes = []
    for episode in stored["episodes"]:
        steps = [StoredRow(**step) for step in episode["steps"]]
        episodes.append(StoredEpisode(**episode | {"steps": steps}))
    return Sample(**stored | {"groups": groups, "episodes": episodes})
