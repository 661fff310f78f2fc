"""What a model knows of the outcomes of its actions: measures that template text cannot raise.

Most tokens of an observation follow from its first words. What an action did is decided at a few:

    branch token   given the state, the first token in which two observed outcomes differ. State:
                   the same task and the same o_t. In ALFWorld, the first word is one, since some
                   commands have an effect and others do not
    no effect      o_{t+1} is what the environment shows if a command does nothing: "Nothing
                   happens." in ALFWorld, o_t again in WebShop (the page) and in search (the
                   passages of the query before; in the first step, the question)
    AUC            the probability that the model finds "no effect" more likely after an action
                   without an effect than after one with an effect. 0.5: chance. The score is the
                   mean log-probability of the tokens of the text that "no effect" would have

Not in the paper.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.running.untrusted import exact
from research.paper.transitions import TextRow, observation_logps

EDGES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 1.0)
Share = Annotated[float, Field(ge=0, le=1)]
Histogram = Annotated[list[Share], Field(min_length=len(EDGES), max_length=len(EDGES))]


@exact
@dataclass
class Outcomes:
    """What one policy knows of these transitions. None: there are none to measure it on."""

    transitions: int
    p: float  # mean over all observation tokens
    branch_tokens: int
    p_branch: float | None  # mean over the branch tokens
    no_effect: float  # share of the transitions
    p_if_no_effect: float | None  # mean p of the first token of the "no effect" text: after
    p_if_effect: float | None  # ... actions without an effect, and after others
    auc: float | None
    # Shares of the tokens of each kind with p up to each of EDGES, above the one before.
    branch_shares: Histogram
    other_shares: Histogram

    @property
    def band(self) -> float:
        """Share of the branch tokens with 0.01 < p <= 0.2, where the paper's loss teaches.

        Below, 1 - p has almost no gradient, p (1 - p); above rho = 0.2, Eq. 7 drops the token.
        """
        low = EDGES.index(0.01)
        high = EDGES.index(0.2)
        return sum(self.branch_shares[low + 1 : high + 1])


def measure(cfg: Config, policy: Policy, rows: list[TextRow]) -> Outcomes:
    """rows: with an observation each."""
    p = [logp.exp() for logp in observation_logps(cfg, policy, [row.tokens for row in rows])]
    flat = torch.cat(p)  # (tokens,)
    branch = torch.cat(branch_tokens(rows))  # (tokens,) bool
    p_branch = flat[branch]

    without = torch.tensor([has_no_effect(cfg, row) for row in rows])  # (N,) bool
    unchanged = observation_logps(cfg, policy, unchanged_rows(cfg, policy, rows))  # N x (|o|,)
    score = torch.stack([logp.mean() for logp in unchanged])  # (N,)
    first = torch.stack([logp[0] for logp in unchanged]).exp()  # (N,)
    return Outcomes(
        transitions=len(rows),
        p=flat.mean().item(),
        branch_tokens=len(p_branch),
        p_branch=mean(p_branch),
        no_effect=without.float().mean().item(),
        p_if_no_effect=mean(first[without]),
        p_if_effect=mean(first[~without]),
        auc=auc(score[without], score[~without]),
        branch_shares=shares(p_branch),
        other_shares=shares(flat[~branch]),
    )


def shares(p: Tensor) -> list[float]:
    """A histogram over EDGES; all 0 without tokens: (M,) -> numbers."""
    # The first edge that is not below p.
    place = torch.bucketize(p, torch.tensor(EDGES))
    counts = place.bincount(minlength=len(EDGES))[: len(EDGES)]
    return (counts / max(1, len(p))).tolist()


def mean(values: Tensor) -> float | None:
    return values.mean().item() if len(values) else None


def auc(positive: Tensor, negative: Tensor) -> float | None:
    """The share of pairs in which the positive one is larger; ties count half: (P,), (N,) -> ()."""
    if not len(positive) or not len(negative):
        return None
    difference = positive[:, None] - negative[None]  # (P, N)
    return ((difference > 0).float() + 0.5 * (difference == 0).float()).mean().item()


def has_no_effect(cfg: Config, row: TextRow) -> bool:
    expected = BENCHMARKS[cfg.env].unchanged(row.observation)
    return row.next_observation.strip() == expected.strip()


def unchanged_rows(cfg: Config, policy: Policy, rows: list[TextRow]) -> list[TokenRow]:
    """The rows with the "no effect" text as their target."""
    found = []
    for row in rows:
        text = BENCHMARKS[cfg.env].unchanged(row.observation)
        obs_ids = policy.encode(text)[: cfg.max_obs_tokens]
        found.append(replace(row.tokens, obs_ids=obs_ids, given=[]))
    return found


def branch_tokens(rows: list[TextRow]) -> list[Tensor]:
    """Whether each observation token is a branch token -> N x (|o|,) bool.

    The outcomes of a state form a tree of tokens; a branch token is the child of a node that has
    several children. An outcome that ends where another goes on has no token there.
    """
    children = defaultdict(set)  # (state, tokens so far) -> the tokens that follow
    for row in rows:
        ids = row.tokens.obs_ids
        for k, token in enumerate(ids):
            children[row.task, row.observation, tuple(ids[:k])].add(token)
    marks = []
    for row in rows:
        ids = row.tokens.obs_ids
        mark = [
            len(children[row.task, row.observation, tuple(ids[:k])]) > 1 for k in range(len(ids))
        ]
        marks.append(torch.tensor(mark))
    return marks
