"""One update of run_alfworld.py with all its numbers: the tables and the figure of WALKTHROUGH.md.

    python -m research.walkthrough.measure --out research/walkthrough

plays two of the eight groups of its first update (16 of its 64 episodes, the same
ones: seed 0, the stand-in of run_alfworld.py) and makes one optimizer step on them. It writes
walkthrough.json, walkthrough.png, and prints the tables.
"""

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from examples.conflict import gradient_conflict
from paw_min import cmae
from paw_min.base import distributed
from paw_min.base.errors import Parser, user_errors
from paw_min.base.files import writing
from paw_min.config import Config, parse_args
from paw_min.inspect.__main__ import pieces, score
from paw_min.model.policy import Policy, load_policy
from paw_min.model.sampler import HFSampler
from paw_min.rollout import rollout
from paw_min.rows import Episode, Rows, TokenRow, flatten
from paw_min.running.presets import presets_of
from paw_min.running.session import find_tasks, make_optimizer, start_model
from paw_min.running.tasks import draw_groups
from paw_min.update import learn, prepare
from research.paper.transitions import observation_logps

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

GROUPS = 2  # of the eight groups of the update
UPDATE = 1
# (trajectory, turn) of the transitions that are shown: an outcome that was unlikely, a step that
# Eq. 4 leaves out, and an action without effect, in this order.
SHOWN = ((0, 10), (0, 8), (8, 7))


@dataclass
class Token:
    """A token of the next observation."""

    text: str
    before: float  # p before the update
    expected: str  # the most likely token in its place, before the update
    counted: bool  # p <= rho: Eq. 7 keeps it
    after: float  # p after one optimizer step


@dataclass
class Shown:
    """One transition with what training knew of it."""

    trajectory: int
    turn: int
    group: int
    prompt: str
    response: list[tuple[str, float]]  # token, its entropy in nats
    observation: list[Token]
    entropy: float  # H(a_t | h_t), the mean of those of the response
    selected: bool  # Eq. 4
    advantage: float
    lambda_g: float  # Eq. 10
    row_weight: float  # lambda_g / (G |S_g|) or 0
    loss: float  # Eq. 8


@dataclass
class Group:
    """One rollout group."""

    task: str
    returns: list[float]
    lambda_g: float
    rows: int
    selected: int


@dataclass
class Report:
    """Everything that WALKTHROUGH.md shows."""

    groups: list[Group]
    rows: int
    rho: float  # Eq. 7
    threshold: float  # lowest entropy that Eq. 4 keeps, in nats
    shown: list[Shown]
    metrics: dict[str, float]  # of the update
    # Means over the observation tokens of the rows that trained the world model.
    p_before: float
    p_after: float
    # The same, over tokens with p <= 0.01, 0.01 < p <= rho and rho < p before the update.
    bands: list[tuple[int, float, float]]  # tokens, p before, p after


def main(argv: list[str] | None = None) -> None:
    """Make the report; write it and the figure where --out is given."""
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for JSON and figure (default: none)")
    args = parser.parse_args(argv)
    report = measure()
    print(tables(report))
    if args.out:
        with writing(f"the folder {args.out}"):
            args.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(report), indent=1, ensure_ascii=False)
            (args.out / "walkthrough.json").write_text(text + "\n")
            draw(report, args.out / "walkthrough.png")


def measure() -> Report:
    """Play, prepare, score, learn, and score again."""
    distributed.limit_threads()
    cfg, _ = parse_args("alfworld", presets_of("alfworld"), __doc__, [])
    policy = load_policy(start_model(cfg))
    reference = load_policy(start_model(cfg))
    optimizer = make_optimizer(policy, cfg.lr, cfg.beta2)

    episodes = play(cfg, policy)
    rows = prepare(cfg, policy, reference, flatten(episodes))
    p_before = probabilities(cfg, policy, rows)
    seed_key = (cfg.seed, UPDATE)
    conflict = gradient_conflict(cfg, policy, rows, seed_key)
    indices = [row_of(rows, trajectory, turn) for trajectory, turn in SHOWN]
    seen = score(policy, [rows.tokens[i] for i in indices], cfg.micro_tokens)
    guessed = [expected(policy, rows.tokens[i]) for i in indices]
    learned = learn(cfg, policy, optimizer, rows, seed_key)  # one step: 243 rows, mini-batch 256
    p_after = probabilities(cfg, policy, rows)

    shown = [
        show(policy, rows, i, turn, one.entropy, guesses, p_before[i], p_after[i], cfg.rho)
        for i, (_, turn), one, guesses in zip(indices, SHOWN, seen, guessed, strict=True)
    ]
    trained = (rows.row_weight > 0).nonzero()[:, 0].tolist()
    before = torch.cat([p_before[i] for i in trained])  # (observation tokens,)
    after = torch.cat([p_after[i] for i in trained])
    return Report(
        groups=[describe(rows, episodes, g) for g in range(GROUPS)],
        rows=len(rows.tokens),
        rho=cfg.rho,
        threshold=rows.entropy[rows.selected].min().item(),
        shown=shown,
        metrics=conflict | {name: learned[name] for name in METRICS},
        p_before=before.mean().item(),
        p_after=after.mean().item(),
        bands=[
            band(before, after, low=0.0, high=0.01),
            band(before, after, low=0.01, high=cfg.rho),
            band(before, after, low=cfg.rho, high=1.0),
        ],
    )


@torch.no_grad()
def expected(policy: Policy, row: TokenRow) -> list[str]:
    """The most likely token in the place of each observation token."""
    ids = [*row.prompt_ids, *row.response_ids, *row.separator_ids, *row.obs_ids]
    logits = policy.model(torch.tensor([ids])).logits[0]  # (L, V)
    return pieces(policy.tokenizer, logits[-len(row.obs_ids) - 1 : -1].argmax(-1).tolist())


def show(
    policy: Policy, rows: Rows, i: int, turn: int, entropy: list[float], guesses: list[str],
    before: Tensor, after: Tensor, rho: float,
) -> Shown:
    """Row i for the page. entropy: of its response tokens; before, after: p of o', (|o|,)."""
    tokens = rows.tokens[i]
    words = pieces(policy.tokenizer, tokens.obs_ids)
    logp = before.log()
    hard = cmae.hard_tokens(logp, rho)  # (|o|,)
    observation = [
        Token(text=word, before=old, expected=guess, counted=keep > 0, after=new)
        for word, old, guess, keep, new in zip(
            words, before.tolist(), guesses, hard.tolist(), after.tolist(), strict=True
        )
    ]
    response = zip(pieces(policy.tokenizer, tokens.response_ids), entropy, strict=True)
    return Shown(
        trajectory=rows.trajectory[i],
        turn=turn,
        group=rows.group[i],
        prompt=policy.decode(tokens.prompt_ids),
        response=list(response),
        observation=observation,
        entropy=rows.entropy[i].item(),
        selected=bool(rows.selected[i]),
        advantage=rows.advantage[i].item(),
        lambda_g=rows.lambdas[rows.group[i]],
        row_weight=rows.row_weight[i].item(),
        loss=cmae.clipped_mae(logp[None], torch.ones_like(logp)[None], rho).item(),
    )


METRICS = ("loss_pg", "loss_wm", "wm_loss", "wm_clipped_tokens", "grad_norm", "entropy")


def play(cfg: Config, policy: Policy) -> list[Episode]:
    """The first GROUPS groups of the first update of run_alfworld.py, by its own seeds."""
    tasks = find_tasks(cfg)
    drawn = draw_groups(tasks.train, cfg.groups, cfg.seed, UPDATE - 1)[:GROUPS]
    task_of_episode = [task for task in drawn for _ in range(cfg.group_size)]
    group_of_episode = [g for g in range(GROUPS) for _ in range(cfg.group_size)]
    sampler = HFSampler()
    with closing(tasks.make_pool(len(task_of_episode))) as pool, sampler.sync(policy):
        played = rollout(
            cfg, policy, sampler, pool, task_of_episode, group_of_episode,
            temperature=cfg.temperature, seed_key=(cfg.seed, UPDATE),
        )
    return played.episodes


def probabilities(cfg: Config, policy: Policy, rows: Rows) -> list[Tensor]:
    """p of each token of o_{t+1} -> N x (|o|,)."""
    return [logp.exp() for logp in observation_logps(cfg, policy, rows.tokens)]


def read(file: Path) -> Report:
    """A recorded report."""
    stored = json.loads(file.read_text())
    stored["groups"] = [Group(**group) for group in stored["groups"]]
    for shown in stored["shown"]:
        shown["observation"] = [Token(**token) for token in shown["observation"]]
    stored["shown"] = [Shown(**shown) for shown in stored["shown"]]
    return Report(**stored)


def row_of(rows: Rows, trajectory: int, turn: int) -> int:
    return rows.trajectory.index(trajectory) + turn


def describe(rows: Rows, episodes: list[Episode], g: int) -> Group:
    members = [e for e in episodes if e.group == g]
    in_group = torch.tensor(rows.group) == g  # (N,)
    return Group(
        task=members[0].task_type,
        returns=[e.episode_return for e in members],
        lambda_g=rows.lambdas[g],
        rows=int(in_group.sum()),
        selected=int(rows.selected[in_group].sum()),
    )


def band(before: Tensor, after: Tensor, low: float, high: float) -> tuple[int, float, float]:
    """Tokens whose p was in (low, high], and their mean p before and after."""
    inside = (before > low) & (before <= high)
    return int(inside.sum()), before[inside].mean().item(), after[inside].mean().item()


def tables(report: Report) -> str:
    """The tables of WALKTHROUGH.md as Markdown."""
    lines = ["| group | task type | won | λ_g | rows | selected (Eq. 4) |"]
    lines.append("|---|---|---|---|---|---|")
    for g, group in enumerate(report.groups):
        won = sum(r > 0 for r in group.returns)
        lines.append(
            f"| {g} | `{group.task}` | {won} of {len(group.returns)} | {group.lambda_g:.3f} | "
            f"{group.rows} | {group.selected} |"
        )
    for shown in report.shown:
        lines += ["", "> " + shown.prompt.replace("<", "\\<"), ""]
        words = [f"`{word.strip()}` {entropy:.4f}" for word, entropy in shown.response]
        lines.append(" · ".join(words))
        lines += ["", "| token of o' | p | expected instead | Eq. 7 | p after the step |"]
        lines.append("|---|---|---|---|---|")
        for token in shown.observation:
            other = "" if token.expected == token.text else f"`{token.expected.strip()}`"
            kept = "kept" if token.counted else "dropped"
            lines.append(
                f"| `{token.text.strip()}` | {p(token.before)} | {other} | {kept} | "
                f"{p(token.after)} |"
            )
        lines += ["", "| H | selected (Eq. 4) | A | λ_g | weight | loss, Eq. 8 |"]
        lines.append("|---|---|---|---|---|---|")
        kept = "yes" if shown.selected else "no"
        lines.append(
            f"| {shown.entropy:.4f} | {kept} | {shown.advantage:.3f} | {shown.lambda_g:.3f} | "
            f"{shown.row_weight:.5f} | {shown.loss:.3f} |"
        )
    lines += ["", "| p before the update | tokens | mean p before | after |", "|---|---|---|---|"]
    names = ("at most 0.01", f"from 0.01 to ρ = {report.rho}", "above ρ")
    for name, (count, before, after) in zip(names, report.bands):
        lines.append(f"| {name} | {count} | {before:.4f} | {after:.4f} |")
    return "\n".join(lines)


def p(probability: float) -> str:
    return f"{probability:.4f}" if probability >= 1e-4 else f"{probability:.0e}"


def draw(report: Report, file: Path) -> None:
    """p of each observation token before and after the step, one panel per shown transition."""
    figure, axes = plt.subplots(len(report.shown), 1, figsize=(9, 8), layout="constrained")
    for axis, shown in zip(axes, report.shown):
        for x, token in enumerate(shown.observation):
            color = "tab:orange" if token.counted else "gray"
            axis.plot(x, token.before, marker="o", color=color)
            axis.plot([x, x], [token.before, token.after], color="tab:blue")
            axis.plot(x, token.after, marker="_", color="tab:blue", markersize=10)
        axis.axhline(report.rho, color="black", linewidth=0.8, linestyle=":")
        axis.text(1.01, report.rho, "ρ", va="center", transform=axis.get_yaxis_transform())
        axis.set_xlim(-0.7, len(shown.observation) - 0.3)
        words = [token.text.strip() for token in shown.observation]
        axis.set_xticks(range(len(words)), words, rotation=30, ha="right", fontsize=8)
        axis.set_yscale("log")
        axis.set_ylim(1e-7, 3)
        axis.set_ylabel("p")
        axis.grid(axis="y", alpha=0.3)
        choice = "selected" if shown.selected else "left out"
        response = "".join(word for word, _ in shown.response)
        command = response.split("<action>")[-1].split("</action>")[0].strip()
        axis.set_title(
            f"{command}: entropy {shown.entropy:.3f}, {choice} by Eq. 4, λ = {shown.lambda_g:.3f}",
            fontsize=10,
        )
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color="tab:orange"),
        plt.Line2D([], [], marker="o", linestyle="", color="gray"),
        plt.Line2D([], [], marker="_", color="tab:blue"),
    ]
    labels = ["before, kept by Eq. 7 (p ≤ ρ)", "before, dropped (p > ρ)", "after one step"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    with user_errors():
        main()
