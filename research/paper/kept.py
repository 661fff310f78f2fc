"""What Eq. 4 keeps and what it drops: the transitions of a rollout by kind.

    python -m research.paper.kept SOURCE [--episodes N] [--out FOLDER] [flags]

The selection is that of training: full-vocabulary entropy of the response, the fraction --alpha of
the transitions that have a next observation. The examples are the transitions of highest and lowest
entropy. SOURCE and the flags: see transitions.py.

The kinds are read from the texts alone. ALFWorld: the first word of the command, or "nothing
happens", the answer to a command that is not admissible. WebShop: what the command does on the page
that o_t shows. Search: what the parser reads from the response.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter

from paw_min.base.errors import user_errors
from paw_min.envs.search.env import last_answer, search_query
from paw_min.envs.webshop.pages import BUTTONS, clicked, read_action
from paw_min.metrics import mean
from paw_min.model.scoring import score_responses
from paw_min.update import select_transitions, world_model_candidates
from research.paper import transitions
from research.paper.table import markdown_table
from research.paper.transitions import Played, TextRow

EXAMPLES = 2  # kept, and dropped
WORDS = 40  # of an observation in an example


@dataclass
class Scored:
    """A transition with what Eq. 4 and the world-model loss see of it."""

    row: TextRow
    kind: str
    entropy: float  # H(a_t | h_t), nats per token
    kept: bool
    p: list[float]  # of the tokens of o_{t+1}


def kind(env: str, row: TextRow) -> str:
    if env == "webshop":
        return webshop_kind(row.command, row.observation)
    if env == "search":
        if last_answer(row.command) is not None:
            return "answer"
        return "invalid" if search_query(row.command) is None else "search"
    if row.next_observation.strip() == "Nothing happens.":
        return "nothing happens"
    return row.command.partition(" ")[0]


def webshop_kind(command: str, page: str) -> str:
    """What a command does on a page. A click counts only if the page has the button or link.

    Names of option groups, which cannot be clicked, count as options.
    """
    if read_action(command).name == "search":
        return "search"
    parts = [part.strip("'").lower() for part in page.split(" [SEP] ")]
    argument = clicked(command, parts)
    if argument is None:
        return "no effect"
    if argument == "buy now":
        return "buy"
    if argument in (*BUTTONS, "next >"):
        return "back, next, details"
    if parts[1].startswith("page ") and re.fullmatch("[0-9a-z]{10}", argument):
        return "product"
    # The page of a product: buttons, options, title, price, buttons.
    prices = [number for number, part in enumerate(parts) if part.startswith("price: ")]
    if prices:
        title = prices[0] - 1
        if argument in parts[2 : max(title, 2)]:
            return "option"
    return "no effect"


def score(played: Played) -> list[Scored]:
    """Entropy and selection of each transition by the functions of training, and p of o_{t+1}."""
    cfg = played.cfg
    tokens = [row.tokens for row in played.rows]
    entropy = score_responses(played.policy, tokens, cfg.micro_tokens).entropy  # (N,)
    candidates = world_model_candidates(tokens)  # (N,) bool
    kept = select_transitions(candidates, entropy, cfg.alpha)  # (N,) bool
    logps = transitions.observation_logps(cfg, played.policy, tokens)
    return [
        Scored(
            row=row,
            kind=kind(cfg.env, row),
            entropy=entropy[number].item(),
            kept=kept[number].item(),
            p=logps[number].exp().tolist(),
        )
        for number, row in enumerate(played.rows)
    ]


def by_kind(scored: list[Scored], rho: float) -> dict[str, dict]:
    """Counts and means of each kind, the most frequent first, and of all."""
    kinds = defaultdict(list)
    for one in scored:
        kinds[one.kind].append(one)
    parts = sorted(kinds.values(), key=len, reverse=True)
    found = {part[0].kind: summary(part, rho) for part in parts}
    found["all"] = summary(scored, rho)
    return found


def summary(scored: list[Scored], rho: float) -> dict[str, int | float | None]:
    candidates = [one for one in scored if one.p]  # those with a next observation
    tokens = [p for one in candidates for p in one.p]
    return {
        "transitions": len(scored),
        "candidates": len(candidates),
        "kept": mean([one.kept for one in candidates]) if candidates else None,
        "entropy": mean([one.entropy for one in scored]),
        "mean_p": mean(tokens) if tokens else None,
        "hard": mean([p <= rho for p in tokens]) if tokens else None,  # Eq. 7 keeps these tokens
    }


def examples(scored: list[Scored]) -> list[Scored]:
    """The kept transitions of highest and the dropped ones of lowest entropy, one per command."""
    chosen = []
    for kept in (True, False):
        part = [one for one in scored if one.p and one.kept == kept]
        # The extreme comes last, so that of each command it is the one that stays.
        part.sort(key=attrgetter("entropy"), reverse=not kept)
        by_command = {one.row.command: one for one in part}
        by_entropy = sorted(by_command.values(), key=attrgetter("entropy"), reverse=kept)
        chosen += by_entropy[:EXAMPLES]
    return chosen


def markdown(one: Scored) -> str:
    kept = "kept" if one.kept else "dropped"
    observation = transitions.shorten(one.row.observation, WORDS)
    response = transitions.shorten(one.row.response, WORDS)
    following = transitions.shorten(one.row.next_observation, WORDS)
    return (
        f"{kept}: {one.kind}, entropy {one.entropy:.4f} nats, "
        f"mean p of o_t+1 {mean(one.p):.3f}\n\n"
        f"```\no_t       {observation}\nresponse  {response}\no_t+1     {following}\n```"
    )


def main(argv: list[str] | None = None) -> None:
    played = transitions.play(transitions.arguments(__doc__, argv))
    scored = score(played)
    alpha = played.cfg.alpha
    kinds = by_kind(scored, played.cfg.rho)
    header = ["kind", "transitions", "with o_t+1", "of these, kept", "entropy", "mean p of o_t+1"]
    header += ["p ≤ ρ"]
    lines = [[name, *numbers.values()] for name, numbers in kinds.items()]
    print(
        f"## Eq. 4 at alpha = {alpha}\n\n{played.summary}\n\n{markdown_table(header, lines)}\n"
    )
    for one in examples(scored):
        print(markdown(one) + "\n")
    played.save("kept", {"alpha": alpha, "kinds": kinds})


if __name__ == "__main__":
    with user_errors():
        main()
