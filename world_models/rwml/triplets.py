"""Triplets (history, action, next observation): from rollouts to prompts, labels and files.

What RWML (arXiv 2602.05842), WM-SFT and early experience share. The triplets come from the model's
own rollouts, successes and failures alike; task rewards are not used. A prompt asks for the next
observation; the answer has tags, <think>...</think><next_state>...</next_state>. Which triplets
RWML trains on is decided by rwml.too_easy.
"""

import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from paw_min.base.files import replace_text
from paw_min.config import Config
from paw_min.envs.interface import Context, Turn, recent
from paw_min.model.policy import Policy
from paw_min.retrieval.dense import Encoder
from paw_min.rows import Episode, TokenRow

TAG_TOKENS = 16  # tokens that an answer needs for its tags and end token
# Why a step is not a triplet: a malformed response; "Nothing happens." (ALFWorld, others do not say
# so); nothing to predict, as after a purchase; equal to an earlier triplet.
DROPPED = ("malformed", "no_effect", "no_observation", "duplicates")


@dataclass
class Triplet:
    """One environment step: what is known, the action, and what the environment answered."""

    instruction: str
    history: list[Turn]  # the last history_length steps before this one, oldest first
    observation: str  # o_t
    action: str  # the executed command
    next_observation: str  # o_{t+1}
    steps: int = 0  # t, the number of steps before this one


SUPPOSE = """
Suppose that your next action is: {action}
Predict the observation that follows immediately, in the style of the earlier ones. {how}
"""
REASON = """\
First reason briefly, within <think> </think> tags, about what is known of the environment and \
what the action changes. Then write the predicted observation within <next_state> </next_state> \
tags."""
DIRECT = """\
Do not reason: leave the <think> </think> tags empty, and write the predicted observation within \
<next_state> </next_state> tags."""


def prompt_text(cfg: Config, triplet: Triplet, reason: bool = True) -> str:
    """The question to the world model (Tables A4 and A5). reason: not with WM-SFT.

    It begins as the agent's own prompt does; what follows is in our words.
    """
    if cfg.prompt == "compact":
        # The same facts. The tag at the end tells this prompt from one that asks for an action.
        turns = [f"{turn.observation.strip()}\n> {turn.command}" for turn in triplet.history]
        lines = [f"task {triplet.instruction}", *turns, triplet.observation.strip()]
        return "\n".join([*lines, f"> {triplet.action}", "<next_state>"])
    # The agent's own prompt, up to what it can do. The steps before the history only count.
    unseen = [Turn("", "")] * (triplet.steps - len(triplet.history))
    context = Context(triplet.instruction, triplet.observation, [], unseen + triplet.history)
    prompts = import_module(f"paw_min.envs.{cfg.env}.prompts")
    seen = prompts.situation(context, len(triplet.history))
    return seen + SUPPOSE.format(action=triplet.action, how=REASON if reason else DIRECT)


def sft_row(cfg: Config, policy: Policy, triplet: Triplet) -> TokenRow:
    """WM-SFT (B.1, Table A5): an empty thought and the true next observation as the label."""
    label = f"<think></think><next_state>{triplet.next_observation}</next_state>"
    prompt_ids = policy.encode_chat(prompt_text(cfg, triplet, reason=False))
    return TokenRow(prompt_ids, policy.encode_response(label), [])


class Found(NamedTuple):
    triplets: list[Triplet]
    counts: dict[str, int]  # number of steps, and of dropped ones by reason


def triplets_of(cfg: Config, episodes: list[Episode]) -> Found:
    """The triplets of these episodes, without invalid actions and exact duplicates."""
    counts = dict.fromkeys(DROPPED, 0) | {"steps": 0}
    found = {}  # JSON -> triplet: exact duplicates are dropped
    for episode in episodes:
        turns = []
        for played in episode.transitions:
            history = recent(turns, cfg.history_length)
            following = played.next_observation.strip()
            triplet = Triplet(
                episode.instruction, history, played.observation, played.command, following
            )
            key = json.dumps(asdict(triplet))  # a later step may be equal
            triplet.steps = len(turns)
            turns.append(Turn(played.observation, played.command))
            counts["steps"] += 1
            # The rollout has read it already: a template may have opened the thought in the prompt.
            if not played.valid:
                counts["malformed"] += 1
            elif following.startswith("Nothing happens"):
                counts["no_effect"] += 1
            elif not following:
                counts["no_observation"] += 1
            elif key in found:
                counts["duplicates"] += 1
            else:
                found[key] = triplet
    return Found(list(found.values()), counts)


def fitting(
    cfg: Config, policy: Policy, triplets: list[Triplet], answer_tokens: int, encoder: Encoder
) -> list[Triplet]:
    """The triplets whose prompt fits, and whose next observation fits into an answer and into E."""
    read = encoder.reads([triplet.next_observation for triplet in triplets])
    found = []
    for triplet, whole in zip(triplets, read, strict=True):
        n_prompt = len(policy.encode_chat(prompt_text(cfg, triplet)))
        n_truth = len(policy.encode(triplet.next_observation)) + TAG_TOKENS
        if whole and n_prompt <= cfg.max_prompt_tokens and n_truth <= answer_tokens:
            found.append(triplet)
    return found


# ---- files ----


def write_triplets(path: Path, triplets: list[Triplet]) -> None:
    replace_text(path, "".join(json.dumps(asdict(triplet)) + "\n" for triplet in triplets))


def read_triplets(path: Path) -> list[Triplet]:
    """One JSON object per line."""
    found = [Triplet(**json.loads(line)) for line in path.read_bytes().splitlines()]
    for triplet in found:
        triplet.history = [Turn(*turn) for turn in triplet.history]
    return found
