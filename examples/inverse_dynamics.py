"""Inverse dynamics beside the next observation: the action that has led from o_t to o_{t+1}.

    python -m examples.inverse_dynamics alfworld
    python -m examples.inverse_dynamics webshop --algo gigpo --preset paper --data DIR

EnvRL (arXiv 2606.17680) adds two losses to GRPO or GiGPO: the policy predicts the next observation,
and the action from the observations around it. Their weight falls by a cosine from 0.2 (1.5B; 7B:
--wm-scale 0.1). This file is built from second-hand notes that say no more than that; paper and
code were not seen. So these are guesses:

1. The next observation is PaW's row, o_{t+1} after the response, with cross entropy on all of them.
2. The action has a row of its own, a chat: the user shows o_t and o_{t+1}, the assistant answers
   with the executed command and the end token, without a thought. Malformed responses, and those
   without a next observation, have no such row. The words of the prompt are ours.
3. Either loss is a mean over the tokens of a row, over the rows of a group and over the groups.
   Both have the same weight.
4. The weight of update k of K is 0.2 (1 + cos(pi (k - 1) / K)) / 2, so it would be 0 in update
   K + 1. --updates changes it, so do not resume a run with another.
5. Both losses are in the optimizer steps of RL: a mini-batch has twice the rows.

The flags are those of the benchmark's run script. Legend: N rows, T tokens of the longest response.
"""

import math
from dataclasses import replace

import torch

from paw_min import losses
from paw_min.cli import fork
from paw_min.config import Config
from paw_min.model.policy import Policy
from paw_min.rows import Rows, TokenRow, Transition
from paw_min.running.session import Session
from paw_min.train import paw

SETTINGS = dict(wm_loss="ce", alpha=1.0, lambda_g="constant", wm_scale=0.2)
PROMPT = """
An agent in an environment observed: {before}
It executed one action. Then it observed: {after}
Which action was it? Answer with the action alone.
"""


def inverse_dynamics(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """Learn from PaW's rows, and from one that asks for the action of each -> metrics.

    wm_loss and the other metrics of the world model are those of both kinds of rows.
    """
    scale = cfg.wm_scale * cosine(k, cfg.updates)
    doubled = replace(cfg, wm_scale=scale, mini_batch=2 * cfg.mini_batch)
    return {"wm_scale": scale} | paw(doubled, s, with_inverse_rows(cfg, s, rows), k)


def cosine(k: int, updates: int) -> float:
    """The factor of update k, from 1 in the first to nearly 0 in the last."""
    return (1 + math.cos(math.pi * (k - 1) / updates)) / 2


def with_inverse_rows(cfg: Config, s: Session, rows: Rows) -> Rows:
    """N rows -> 2N, for update.optimize: the second half is for the actions."""
    tokens = [inverse_row(cfg, s.policy, transition) for transition in rows.transitions]
    asked = torch.tensor([bool(row.obs_ids) for row in tokens])  # (N,)
    weight = losses.row_weights(rows.group, asked, rows.lambdas)  # (N,), lambda_g is 1
    # Its rows have no response, so nothing for the RL loss. PPO has an advantage per token.
    no_tokens = [[] for _ in tokens]
    if isinstance(rows.advantage, list):
        advantage = rows.advantage + no_tokens
    else:
        advantage = torch.cat([rows.advantage, torch.zeros(len(tokens))])  # (2N,)
    return replace(
        rows,
        tokens=[*rows.tokens, *tokens],
        row_weight=torch.cat([rows.row_weight, weight]),
        advantage=advantage,
        old_logp=None if rows.old_logp is None else rows.old_logp + no_tokens,
        ref_logp=None if rows.ref_logp is None else rows.ref_logp + no_tokens,
    )


def inverse_row(cfg: Config, policy: Policy, transition: Transition) -> TokenRow:
    """o_t, o_{t+1} -> the executed command, as a chat. Its target stands where others have o'.

    `--prompt compact` is for the stand-ins, which have no words for the question. A prompt loses
    its beginning beyond --max-prompt-tokens.
    """
    before, after = transition.observation, transition.next_observation
    text = PROMPT.format(before=before, after=after)
    if cfg.prompt == "compact":
        text = f"{before}\n{after}\n>"
    prompt = policy.encode_chat(text)[-cfg.max_prompt_tokens :]
    answer = []
    if transition.obs_ids and transition.valid:
        answer = [*policy.encode(transition.command), policy.eos_ids[0]]
    return TokenRow(prompt, [], answer[: policy.positions - len(prompt)])


if __name__ == "__main__":
    fork(inverse_dynamics, SETTINGS, __doc__)
