"""Fig. 2c: the share of the world-model gradient that goes to noisy tokens (section A.4).

    python -m research.paper.fig2c webshop [--teacher] [--episodes N] [--out FOLDER] [flags]
    python -m research.paper.fig2c RUN [the same]

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
--teacher, the rule-based teacher of the generated shop plays, and the model scores its steps. The
other flags are those of run_webshop.py; with a run of it, settings and weights are the run's. The
tasks are those of the first training update, the responses are drawn anew.
"""

import json
import random
import re
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from paw_min import cmae
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import writing
from paw_min.base.flags import Parser
from paw_min.cli import parse_config
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS, presets_of
from paw_min.metrics import mean
from paw_min.model.policy import Policy
from paw_min.model.sampler import Sampler
from paw_min.page.__main__ import score
from paw_min.rollout import rollout
from paw_min.rows import TokenRow
from paw_min.running.config_json import read_config
from paw_min.running.runs import newest_checkpoint
from paw_min.running.session import find_tasks, loaded
from paw_min.running.tasks import draw_groups
from research.paper.figures import save
from research.study import markdown_table
from world_models.teachers import TEACHERS

STEPS = 100  # A.4
RESULTS = "'Back to Search' [SEP] 'Page "  # how a page of search results begins
NOISE = re.compile(r"\bB[0-9A-Z]{9}\b|\b[A-Z]{4,}[0-9]*\b")  # identifier, brand; not SEP


def noisy_spans(text: str) -> list[tuple[int, int]]:
    """First and last (exclusive) character of the product identifiers and brands in a text."""
    return [match.span() for match in NOISE.finditer(text)]


def gradients(p: Tensor, rho: float) -> dict[str, Tensor]:
    """|dl / d logit of the target| of each token under each loss: (M,) -> (M,) each."""
    mae = p * (1 - p)
    return {"CE": 1 - p, "MAE": mae, "clipped MAE": mae * cmae.hard_tokens(p.log(), rho)}


@dataclass
class Step:
    """A transition, and the text of its next observation."""

    tokens: TokenRow
    next_observation: str


# ---- the rollout ----


def settings(source: str, flags: list[str]) -> Config:
    """Of the benchmark, or of a run with its newest checkpoint as the model."""
    presets = presets_of("webshop")
    if source != "webshop":
        path = Path(source) / "config.json"
        stored = asdict(read_config(path)) if path.is_file() else {}
        if stored.get("env") != "webshop":
            raise UserError(f"fig2c is for webshop, not for {source}: use it, or a run of it.")
        checkpoint = newest_checkpoint(Path(source)) or stored["model"]
        presets = {"run": stored | {"model": str(checkpoint), "shard": False}}
    return parse_config("webshop", presets, __doc__, flags)


def played(cfg: Config, policy: Policy, sampler: Sampler, episodes: int) -> list[Step]:
    """Steps of the model, in groups as in training."""
    tasks = find_tasks(cfg)
    if episodes > len(tasks.train):
        raise UserError(f"--episodes {episodes} is over {len(tasks.train)}, the number of tasks.")
    groups = draw_groups(tasks.train, -(-episodes // cfg.group_size), cfg.seed, 0)
    drawn = [groups[number // cfg.group_size] for number in range(episodes)]
    with closing(tasks.make_pool(episodes)) as pool, sampler.sync(policy):
        # Training counts its updates from 1, so the responses are not those that it has seen.
        found = rollout(cfg, policy, sampler, pool, drawn, seed_key=(cfg.seed, 0)).episodes
    return [Step(row, row.next_observation) for e in found if not e.failed for row in e.transitions]


def demonstrated(cfg: Config, policy: Policy, episodes: int) -> list[Step]:
    """Steps of the teacher on generated data, as tokens of this model."""
    teacher = TEACHERS["webshop"]
    games = teacher.training_tasks()
    if episodes > len(games):
        raise UserError(f"--episodes {episodes} is over {len(games)}, the number of tasks.")
    render = BENCHMARKS["webshop"].prompts[cfg.prompt]
    tasks = draw_groups(games, episodes, cfg.seed, 0)
    steps = []
    for step in teacher.demonstrations(tasks, cfg.seed, haste=0.0, episodes=1):
        response_ids = policy.encode_response(step.response)
        tokens = TokenRow(
            policy.encode_chat(render(step.context, cfg.history_length)),
            response_ids,
            policy.encode(step.observation)[: cfg.max_obs_tokens],
            separator_ids=policy.separator(response_ids) if cfg.wm_separator == "turn" else [],
        )
        steps.append(Step(tokens, step.observation))
    return steps


def sample(cfg: Config, steps: list[Step]) -> list[Step]:
    """Up to 100 steps to a page of search results."""
    found = [step for step in steps if step.next_observation.startswith(RESULTS)]
    if not found:
        raise UserError("no transition to sample from in this rollout: raise --episodes.")
    return random.Random(f"fig2c {cfg.seed}").sample(found, min(STEPS, len(found)))


# ---- the numbers ----


def observation_classes(policy: Policy, step: Step) -> list[bool]:
    """Whether each token of the next observation is noisy: it shares a character with a span.

    A byte-level tokenizer includes the leading space in a token. Spans contain no space, so that
    space makes no token noisy.
    """
    text = policy.without_control_tokens(step.next_observation)
    encoded = policy.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    n = len(step.tokens.obs_ids)  # cut at --max-obs-tokens
    if encoded["input_ids"][:n] != step.tokens.obs_ids:
        raise RuntimeError("the offsets are of other tokens than the transition has")
    spans = noisy_spans(text)
    return [
        any(max(start, first) < min(end, last) for first, last in spans)
        for start, end in encoded["offset_mapping"][:n]
    ]


def measure(cfg: Config, policy: Policy, steps: list[Step]) -> dict:
    """Number of tokens, probabilities and gradient shares of both classes, over all steps."""
    scored = score(policy, [step.tokens for step in steps], cfg.micro_tokens)
    p = torch.tensor([value for seen in scored for value in seen.p])  # (M,)
    noisy = torch.tensor([one for step in steps for one in observation_classes(policy, step)])
    by_loss = gradients(p, cfg.rho)
    result = {"steps": len(steps), "rho": cfg.rho}
    for name, mask in (("noisy", noisy), ("meaningful", ~noisy)):  # (M,) bool
        part = p[mask]
        result[name] = {
            "tokens": len(part),
            "share": len(part) / len(p),
            "mean_p": mean(part.tolist()) if len(part) else None,
            "hard": mean((part <= cfg.rho).tolist()) if len(part) else None,  # Eq. 7 keeps
        }
        for loss, gradient in by_loss.items():
            whole = gradient.sum().item()
            result[name][loss] = gradient[mask].sum().item() / whole if whole else None
    return result


def draw(result: dict, path: Path) -> None:
    """Stacked bars: the noisy and the meaningful share of the tokens and of each gradient."""
    bars = {"share": "tokens", "CE": "CE", "MAE": "MAE", "clipped MAE": "clipped MAE"}
    bars = {key: name for key, name in bars.items() if result["noisy"][key] is not None}
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
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
    parser = Parser(description=__doc__, epilog="All other flags: see run_webshop.py.")
    parser.add_argument("source", help="webshop, or a run folder of it")
    parser.add_argument("--episodes", type=int, help="episodes to play (default: as in one update)")
    parser.add_argument("--out", type=Path, help="folder for JSON and figure (default: none)")
    parser.add_argument("--teacher", action="store_true", help="score the steps of the generated "
                        "data's rule-based teacher instead of the model's")
    args, flags = parser.parse_known_args(argv)
    if args.episodes is not None and args.episodes < 1:
        raise UserError(f"--episodes {args.episodes} is out of range: it must be at least 1.")
    cfg = settings(args.source, flags)
    episodes = args.episodes or cfg.groups * cfg.group_size
    if args.out:
        with writing(f"the folder {args.out}"):
            args.out.mkdir(parents=True, exist_ok=True)
    with loaded(cfg) as (policy, sampler):
        if args.teacher:
            steps = demonstrated(cfg, policy, episodes)
        else:
            steps = played(cfg, policy, sampler, episodes)
        sampled = sample(cfg, steps)
        result = measure(cfg, policy, sampled)
    who = " (the teacher's)" if args.teacher else ""
    summary = f"webshop, {cfg.model or 'stand-in model'}: {len(steps)} transitions{who} of "
    summary += f"{episodes} episodes, seed {cfg.seed}."
    header = ["tokens of o_t+1", "number", "share", "mean p", f"p <= {result['rho']}"]
    header += [f"{loss} gradient" for loss in ("CE", "MAE", "clipped MAE")]
    lines = [[name, *result[name].values()] for name in ("noisy", "meaningful")]
    print(f"## Fig. 2c\n\n{summary} {len(sampled)} sampled steps.\n")
    print(markdown_table(header, lines))
    marked = NOISE.sub(r"{{\g<0>}}", sampled[0].next_observation)
    print(f"\nOne of the observations, noise marked:\n\n{marked}")
    if args.out:
        with writing(f"the folder {args.out}"):
            text = json.dumps({"rollout": summary} | result, indent=2)
            (args.out / "fig2c-webshop.json").write_text(text + "\n", encoding="utf-8")
        draw(result, args.out / "fig2c-webshop.png")


if __name__ == "__main__":
    with user_errors():
        main()
