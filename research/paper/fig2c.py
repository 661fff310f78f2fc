"""Fig. 2c: the share of the world-model gradient that goes to noisy tokens (section A.4).

    python -m research.paper.fig2c SOURCE [--teacher] [--episodes N] [--out FOLDER] [flags]

100 transitions are drawn at random from those of a rollout whose next observation is a page of
search results. p is the model's probability of a token of that page, given the prompt, the response
and the tokens before. The gradient magnitude at the logit of the target token is

    cross entropy   1 - p                 Eq. 5
    MAE             p (1 - p)             section 3.2
    clipped MAE     p (1 - p) [p <= rho]  Eq. 8; not a bar of the paper's figure

summed per class of tokens and divided by the sum over all tokens of the sampled pages. A token is
noisy if it overlaps a product identifier or an upper-case brand (noisy_spans). The paper does not
say whether these patterns may match inside of longer words; here they match whole words.

Use a pretrained --model: a stand-in has read the words of its shop, not its pages, and the shares
say little about a pretrained one. A model that cannot act yet reaches no page of results; with
--teacher, the rule-based teacher of the generated shop plays, and the model scores its steps.

The rules are WebShop's: SOURCE is webshop or a run folder of it. The flags: see transitions.py.
"""

import random
import re
from pathlib import Path

import torch
from torch import Tensor

from paw_min import cmae
from paw_min.base.errors import UserError, user_errors
from paw_min.metrics import mean
from paw_min.model.policy import Policy
from paw_min.running.plot import plt
from research.paper import transitions
from research.paper.figures import save
from research.paper.transitions import Played, TextRow
from research.study import markdown_table

STEPS = 100  # A.4
RESULTS = "'Back to Search' [SEP] 'Page "  # how a page of search results begins
NOISE = re.compile(r"\bB[0-9A-Z]{9}\b|\b[A-Z]{4,}[0-9]*\b")  # identifier, brand; not SEP
Span = tuple[int, int]  # characters from, to (exclusive)


def noisy_spans(text: str) -> list[Span]:
    """The product identifiers and brands in an observation."""
    return [match.span() for match in NOISE.finditer(text)]


def token_classes(spans: list[Span], offsets: list[Span]) -> list[bool]:
    """Whether each token overlaps a span. offsets: the characters of each token.

    A byte-level tokenizer includes the leading space in a token. Spans contain no space, so that
    space never causes an overlap.
    """
    return [any(overlap(span, token) for span in spans) for token in offsets]


def overlap(one: Span, other: Span) -> bool:
    """Whether two spans share a character; touching is not overlapping."""
    return max(one[0], other[0]) < min(one[1], other[1])


def gradients(p: Tensor, rho: float) -> dict[str, Tensor]:
    """|dl / d logit of the target| of each token under each loss: (M,) -> (M,) each."""
    mae = p * (1 - p)
    return {"CE": 1 - p, "MAE": mae, "clipped MAE": mae * cmae.hard_tokens(p.log(), rho)}


def gradient_shares(p: Tensor, marked: Tensor, rho: float) -> dict[str, float | None]:
    """The marked tokens' share of the gradient magnitude, by loss; None: there is no gradient.

    p: (M,). marked: (M,) bool.
    """
    shares = {}
    for name, gradient in gradients(p, rho).items():
        part = gradient[marked].sum().item()
        whole = gradient.sum().item()
        shares[name] = part / whole if whole else None
    return shares


def observation_classes(policy: Policy, row: TextRow) -> list[bool]:
    """Whether each token of the row's next observation is noisy."""
    text = policy.without_control_tokens(row.next_observation)
    encoded = policy.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    n = len(row.tokens.obs_ids)  # cut at --max-obs-tokens
    if encoded["input_ids"][:n] != row.tokens.obs_ids:
        raise RuntimeError("the offsets are of other tokens than the transition has")
    return token_classes(noisy_spans(text), encoded["offset_mapping"][:n])


def sample_steps(played: Played) -> list[TextRow]:
    """Up to 100 transitions to a page of search results."""
    rows = [row for row in played.rows if row.next_observation.startswith(RESULTS)]
    if not rows:
        raise UserError("no transition to sample from in this rollout: raise --episodes.")
    return random.Random(f"fig2c {played.cfg.seed}").sample(rows, min(STEPS, len(rows)))


def measure(played: Played, rows: list[TextRow]) -> dict:
    """Number of tokens, probabilities and gradient shares of both classes, over all rows."""
    cfg = played.cfg
    logps = transitions.observation_logps(cfg, played.policy, [row.tokens for row in rows])
    p = torch.cat(logps).exp()  # (M,)
    classes = []
    for row in rows:
        classes += observation_classes(played.policy, row)
    noisy = torch.tensor(classes)  # (M,) bool
    result = {"steps": len(rows), "rho": cfg.rho}
    for name, mask in (("noisy", noisy), ("meaningful", ~noisy)):
        part = p[mask]
        result[name] = {
            "tokens": len(part),
            "share": len(part) / len(p),
            "mean_p": mean(part.tolist()) if len(part) else None,
            "hard": mean((part <= cfg.rho).tolist()) if len(part) else None,  # Eq. 7 keeps
        }
        result[name] |= gradient_shares(p, mask, cfg.rho)
    return result


def draw(result: dict, path: Path) -> None:
    """Stacked bars: the noisy and the meaningful share of the tokens and of each gradient."""
    bars = {"share": "tokens", "CE": "CE", "MAE": "MAE", "clipped MAE": "clipped MAE"}
    bars = {key: name for key, name in bars.items() if result["noisy"][key] is not None}
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    bottom = [0.0] * len(bars)
    for name, color in (("noisy", "tab:red"), ("meaningful", "tab:blue")):
        heights = [100 * result[name][key] for key in bars]
        drawn = axis.bar(bars.values(), heights, 0.6, bottom, color=color, alpha=0.8, label=name)
        axis.bar_label(drawn, fmt="%.1f", label_type="center", fontsize=9)
        bottom = heights
    axis.set_ylabel("share (%)")
    axis.set_title(f"Gradient magnitude by class, {result['steps']} steps", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = transitions.arguments(__doc__, argv, teacher=True)
    if args.cfg.env != "webshop":
        raise UserError(f"fig2c is for webshop, not for {args.cfg.env}: use it, or a run of it.")
    played = transitions.play(args)
    steps = sample_steps(played)
    result = measure(played, steps)
    header = ["tokens of o_t+1", "number", "share", "mean p", f"p <= {result['rho']}"]
    header += [f"{loss} gradient" for loss in ("CE", "MAE", "clipped MAE")]
    lines = [[name, *result[name].values()] for name in ("noisy", "meaningful")]
    print(f"## Fig. 2c\n\n{played.summary} {len(steps)} sampled steps.\n")
    print(markdown_table(header, lines))
    marked = NOISE.sub(r"{{\g<0>}}", steps[0].next_observation)
    print(
        f"\nOne of the observations, noise marked:\n\n```\n{transitions.shorten(marked, 60)}\n```"
    )
    played.save("fig2c", result)
    if played.out:
        draw(result, played.out / "fig2c-webshop.png")


if __name__ == "__main__":
    with user_errors():
        main()
