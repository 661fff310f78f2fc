"""TAPO (arXiv 2607.27973): RL and world modeling take turns, and a transition is a chat of its own.

    --wm-every I       every I-th update is followed by one on the world-model loss alone (TAPO: 4)
    --wm-rows tapo     its rows: o_t and the executed command -> o_{t+1}, without a response

The loss of those rows is cross entropy, weighted by losses.tuple_weights (TAPO's Eq. 6). What
differs from TAPO's paper is in CHOICES.md. `--preset tapo` has its settings.

Legend: N rows of the update.
"""

from dataclasses import replace

import torch

from paw_min import losses
from paw_min.config import Config
from paw_min.model.policy import Policy
from paw_min.rows import Rows, TokenRow
from paw_min.update import learn

# The facts of TAPO's Fig. 7 and 9 (arXiv 2607.27973) in our words. Neither the task nor the history
# nor a thought is among them.
TRANSITION = """
You are modeling the transitions of an environment.
Its current observation is: {observation}
{admissible}The action that is executed now: {command}
Predict the next observation, and present it within <prediction> </prediction> tags.
"""
ADMISSIBLE = "Its admissible actions are: [{commands}].\n"
TAGS = ("<prediction>", "</prediction>")


def learn_in_turns(
    cfg: Config, policy: Policy, optimizer, rows: Rows, k: int
) -> dict[str, float]:
    """TAPO: update k on the RL loss alone; every wm_every-th is followed by one on line 8 alone.

    "Alone" holds for the gradients: both share one AdamW, whose moments carry those of either.
    Its rows are PaW's or, with --wm-rows tapo, its own.
    -> metrics of the RL part, and those of the world model with names that begin with wm_ or
    loss_wm. The tokens that both train are added up.
    """
    no_weight = torch.zeros_like(rows.row_weight)
    rl_rows = replace(rows, row_weight=no_weight)
    metrics = learn(cfg, policy, optimizer, rl_rows, seed_key=(cfg.seed, k))
    if k % cfg.wm_every:
        return metrics
    # Without advantages, KL and entropy bonus, only the world-model loss has a gradient.
    alone = replace(cfg, kl_coef=0.0, entropy_coef=0.0)
    wm_rows = replace(rows, advantage=torch.zeros_like(rows.advantage))
    if cfg.wm_rows == "tapo":
        wm_rows = tapo_rows(cfg, policy, wm_rows)
    learned = learn(alone, policy, optimizer, wm_rows, seed_key=(cfg.seed, k, "world model"))
    for name, value in learned.items():
        if name.startswith(("wm_", "loss_wm")):
            metrics[name] = value
        elif name in ("tokens_trained", "tokens_forward"):
            metrics[name] += value
    metrics["grad_norm_wm_alone"] = learned["grad_norm"]
    return metrics


def tapo_rows(cfg: Config, policy: Policy, rows: Rows) -> Rows:
    """The same transitions as TAPO's rows with its weights; they have no response."""
    tokens = transition_rows(cfg, policy, rows)
    n_targets = [len(row.obs_ids) for row in tokens]
    weight = losses.tuple_weights(rows.group, rows.selected, rows.lambdas, n_targets)
    return replace(rows, tokens=tokens, row_weight=weight, old_logp=None, ref_logp=None)


def transition_rows(cfg: Config, policy: Policy, rows: Rows) -> list[TokenRow]:
    """TAPO's row of each transition: o_t and the executed command -> o_{t+1}, as a chat.

    An answer of the assistant that nobody has sampled: the row has no response, and its `obs_ids`
    are <prediction>, the row's own, </prediction> and the end token. `--prompt compact` is for the
    stand-ins, which have words for neither the instructions nor the tags: it leaves both out. A row
    without an observation has no target. Limits: a prompt loses its beginning beyond
    `--max-prompt-tokens`, an answer its end beyond the model's positions.
    """
    opening, closing = [], []
    if cfg.prompt != "compact":
        opening, closing = map(policy.encode, TAGS)
    found = []
    for i, row in enumerate(rows.tokens):
        text = transition_prompt(cfg, rows.anchor[i], rows.admissible[i], rows.command[i])
        prompt = policy.encode_chat(text)[-cfg.max_prompt_tokens :]
        answer = []
        if row.obs_ids:
            answer = [*opening, *row.obs_ids, *closing, policy.eos_ids[0]]
        found.append(TokenRow(prompt, [], answer[: policy.positions - len(prompt)]))
    return found


def transition_prompt(cfg: Config, observation: str, admissible: list[str], command: str) -> str:
    """The user's message of such a row. Search admits any text and lists no commands."""
    if cfg.prompt == "compact":
        listed = ["| " + " | ".join(admissible)] if admissible else []
        return "\n".join([observation, *listed, f"> {command}"])
    shown = ""
    if admissible:
        shown = ADMISSIBLE.format(commands=", ".join(f"'{one}'" for one in admissible))
    return TRANSITION.format(observation=observation, admissible=shown, command=command)
