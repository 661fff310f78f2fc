"""TAPO (arXiv 2607.27973): RL and world modeling take turns, and a transition is a chat of its own.

    python -m examples.tapo alfworld                    a stand-in model on a CPU
    python -m examples.tapo search --preset paper --data DIR --retriever URL

An update trains on the RL loss alone. Every fourth is followed by one on the world model alone: in
rows of o_t and the executed command -> o_{t+1}, without a response and with a prompt of their own,
by cross entropy on all of them (its Eq. 6). "Alone" holds for the gradients: both share one AdamW,
whose moments carry those of either. `--algo gigpo` is TAPO's second base.

Choices and differences: the prompts of Fig. 7 and 9 are in our words and lose their beginning
if they are too long. All rows with an observation train. Eq. 6 is as printed, a mean over rows of
sums over tokens, so the gradient clip acts on nearly every step. Mini-batches, rate, clip, AdamW
and limits are those of RL (an answer on WebShop has 4,096 tokens, TAPO's 1,024).

The flags are those of the benchmark's run script. Legend: N rows of the update.
"""

from dataclasses import replace

import torch

from paw_min import update
from paw_min.cli import fork
from paw_min.config import Config
from paw_min.model.policy import Policy
from paw_min.rows import Rows, TokenRow, Transition
from paw_min.running.session import Session
from paw_min.train import paw

EVERY = 4  # updates on the RL loss between two on the world model
# PaW's choices are off: cross entropy, no selection, lambda_g = 1.
SETTINGS = dict(wm_loss="ce", alpha=1.0, lambda_g="constant")

# The facts of TAPO's Fig. 7 and 9 in our words. Neither the task nor the history nor a thought is
# among them.
TRANSITION = """
You are modeling the transitions of an environment.
Its current observation is: {observation}
{admissible}The action that is executed now: {command}
Predict the next observation, and present it within <prediction> </prediction> tags.
"""
ADMISSIBLE = "Its admissible actions are: [{commands}].\n"
TAGS = ("<prediction>", "</prediction>")


def tapo(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """Update k -> metrics of the RL part, and those of the world model: wm_... and loss_wm.

    The tokens that both train are added up.
    """
    # No observation enters a pass of the RL loss if its row has no weight.
    metrics = paw(cfg, s, replace(rows, row_weight=torch.zeros_like(rows.row_weight)), k)
    if k % EVERY:
        return metrics
    # Its rows have no response, so only the world-model loss has a gradient.
    wm_rows = tapo_rows(cfg, s.policy, rows)
    if not wm_rows.tokens:
        return metrics
    key = (cfg.seed, k, "world model")
    world = update.optimize(cfg, s.policy, s.optimizer, wm_rows, seed_key=key)
    for name, value in world.items():
        if name.startswith(("wm_", "loss_wm")):
            metrics[name] = value
        elif name in ("tokens_trained", "tokens_forward"):
            metrics[name] += value
    metrics["grad_norm_wm_alone"] = world["grad_norm"]
    return metrics


def tapo_rows(cfg: Config, policy: Policy, rows: Rows) -> Rows:
    """The selected transitions with a target, as TAPO's rows with its weights.

    They have no response. Others are left out: on a mini-batch without a target, the gradient is 0,
    and AdamW would still move by its moments.

    The weights w_i make sum_i w_i * loss_i Eq. 6: it has the log-probability of the whole
    observation, a sum over its n_i tokens, where loss_i is their mean.
    """
    chosen = zip(rows.transitions, rows.tokens, rows.selected.tolist())
    tokens = [
        transition_row(cfg, policy, transition, row.obs_ids)
        for transition, row, keep in chosen
        if keep and row.obs_ids
    ]
    n_targets = torch.tensor([len(row.obs_ids) for row in tokens])  # (M,)
    return replace(
        rows,
        tokens=tokens,
        advantage=torch.zeros(len(tokens)),
        row_weight=n_targets / max(1, len(tokens)),
        old_logp=None,
        ref_logp=None,
    )


def transition_row(
    cfg: Config, policy: Policy, transition: Transition, obs_ids: list[int]
) -> TokenRow:
    """TAPO's row of a transition: o_t and the executed command -> o_{t+1}, as a chat.

    obs_ids: of o_{t+1}, or of the placebo's observation. The row has no response. Its `obs_ids` are
    an answer of the assistant that nobody has sampled: <prediction>, the observation, </prediction>
    and the end token. `--prompt compact` is for the stand-ins, which have words for neither the
    instructions nor the tags: it leaves both out. Without an observation there is no target.
    Limits: a prompt loses its beginning beyond --max-prompt-tokens, an answer its end beyond the
    model's positions.
    """
    opening, closing = [], []
    if cfg.prompt != "compact":
        opening, closing = map(policy.encode, TAGS)
    prompt = policy.encode_chat(transition_prompt(cfg, transition))[-cfg.max_prompt_tokens :]
    answer = []
    if obs_ids:
        answer = [*opening, *obs_ids, *closing, policy.eos_ids[0]]
    return TokenRow(prompt, [], answer[: policy.positions - len(prompt)])


def transition_prompt(cfg: Config, transition: Transition) -> str:
    """The user's message of such a row. Search admits any text and lists no commands."""
    observation, command = transition.observation, transition.command
    if cfg.prompt == "compact":
        listed = ["| " + " | ".join(transition.admissible)] if transition.admissible else []
        return "\n".join([observation, *listed, f"> {command}"])
    shown = ""
    if transition.admissible:
        shown = ADMISSIBLE.format(commands=", ".join(f"'{one}'" for one in transition.admissible))
    return TRANSITION.format(observation=observation, admissible=shown, command=command)


if __name__ == "__main__":
    fork(tapo, SETTINGS, __doc__)
