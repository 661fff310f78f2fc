"""What an update is trained on: episodes become rows, one row per environment step.

    Episode    one trajectory: its transitions, its task, its outcome
    flatten    episodes -> Rows, the pool P (Alg. 1, line 3)
    Rows       one column per quantity: update.prepare adds columns to a copy, update.optimize reads

Every step is a separate row, with its own prompt, because an agent's prompt is rendered anew in
each step: an episode is not one sequence of tokens. An example: group 0 has two episodes of one
task. The first wins in two steps, the second loses in one.

    row  group  trajectory  reward  episode_return    prepare adds (GRPO):  advantage  lambdas
     0     0        0         0.0        10.0                                  0.58      0.5
     1     0        0        10.0        10.0                                  0.58      0.5
     2     0        1         0.0         0.0                                 -1.15      0.5

Both steps of the first episode have its return, 10: the return does not say which step was right.
The advantage is (return - mean over rows) / (unbiased) std over rows, as no response is badly
formatted here. lambda_g is 1 - 5 / 10 (balance.py): 5 is the mean over episodes, 10 is R_max.

A column has an entry per row, except `lambdas`, which is {group: lambda_g}. Columns of a pass that
was not made are None. Numbers per token are a list per response; batches.py puts them where the
tokens are in a pass. Two columns have the tokens: `transitions` is what was played, with its texts;
`tokens` is what is trained on, the same list until the placebo (in update.prepare) or a fork
(examples/multi_step.py) replaces it.

Legend: N transitions (rows), T_i tokens of the response of row i.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

PerToken = list[list[float]]  # N x T_i: a number per response token


@dataclass
class TokenRow:
    """The tokens of one transition: what a forward pass takes."""

    prompt_ids: list[int]  # h_t
    response_ids: list[int]  # a_t, exactly as sampled
    obs_ids: list[int]  # o_{t+1}; may be empty
    # The tokens between a_t and o_{t+1}, with --wm-separator turn: context, in no loss.
    separator_ids: list[int] = field(default_factory=list, kw_only=True)
    # Positions in obs_ids that are context, not targets: the actions between several observations.
    context_positions: list[int] = field(default_factory=list, kw_only=True)


@dataclass
class Transition(TokenRow):
    """One environment step, the unit of training: TokenRow has the tokens h_t, a_t and o_{t+1}.

    Its texts are whole, even where --max-obs-tokens has cut the tokens.
    """

    sampler_logp: list[float]  # log-probs of the response's tokens, at the sampling temperature
    reward: float  # r_t of the environment, without penalties
    valid: bool  # is the response well formed?
    observation: str  # o_t, the state in GiGPO's sense
    group: int
    trajectory: int
    admissible: list[str] = field(default_factory=list, kw_only=True)  # commands that o_t admits
    response: str = field(default="", kw_only=True)  # a_t
    command: str = field(default="", kw_only=True)  # the part of it that was executed
    next_observation: str = field(default="", kw_only=True)  # o_{t+1}


@dataclass
class Episode:
    """One trajectory: its transitions, its task and its outcome."""

    task: str  # e.g. a game file
    group: int
    trajectory: int
    transitions: list[Transition] = field(default_factory=list)
    instruction: str = ""  # the task as text
    task_type: str = ""
    won: bool = False
    score: float | None = None  # the benchmark's own score in [0, 1], where it has one (WebShop)
    failed: str = ""  # why the environment broke, if it did; such an episode is not trained on

    @property
    def episode_return(self) -> float:
        """R(tau): undiscounted sum of the environment's rewards."""
        return sum(t.reward for t in self.transitions)


@dataclass
class Rows:
    """The transition pool P of an update (Alg. 1, line 3), one column per quantity.

    `flatten` fills the first block, `update.prepare` returns a copy with the second, without PPO's
    advantage (ppo.py). Treat `Rows` as immutable.

    `update.optimize` reads tokens, advantage and row_weight, and, unless they are None, old_logp
    and ref_logp. To train on other rows, fill these (examples/tapo.py).
    """

    transitions: list[Transition]  # N, as they were played, with their texts
    tokens: list[TokenRow]  # N x (h_t, a_t, o_{t+1}), what the passes take
    group: list[int]  # N x g
    trajectory: list[int]  # N x tau
    reward: list[float]  # N x r_t, without penalties
    episode_return: list[float]  # N x R(tau), of the row's episode
    valid: Tensor  # (N,) bool: is the response well formed?

    advantage: Tensor | PerToken | None = None  # (N,), one A per response, or one per token
    old_logp: PerToken | None = None  # log pi_old(a_t), in nats; None: the policy is still pi_old
    ref_logp: PerToken | None = None  # log pi_ref(a_t), in nats; None: no KL term
    entropy: Tensor | None = None  # (N,) H(a_t | h_t), Eq. 4; None: no pass was made for it
    candidates: Tensor | None = None  # (N,) bool: rows that compete in Eq. 4
    selected: Tensor | None = None  # (N,) bool, Eq. 4; all False without PaW
    lambdas: dict[int, float] | None = None  # {group: lambda_g}, Eq. 10; 0 without PaW
    row_weight: Tensor | None = None  # (N,) lambda_g / (G |S_g|) or 0: weight in Eq. 11


def flatten(episodes: list[Episode]) -> Rows:
    """The transitions of these episodes in order, as columns."""
    # Group by group, episode by episode, in time order: discounted returns and targets of several
    # steps rely on the order within an episode.
    transitions = [t for episode in episodes for t in episode.transitions]
    # Each row has R(tau) of its whole episode: all steps share the outcome.
    returns = [episode.episode_return for episode in episodes for _ in episode.transitions]
    return Rows(
        transitions=transitions,
        tokens=transitions,
        group=[t.group for t in transitions],
        trajectory=[t.trajectory for t in transitions],
        reward=[t.reward for t in transitions],
        episode_return=returns,
        valid=torch.tensor([t.valid for t in transitions]),
    )
