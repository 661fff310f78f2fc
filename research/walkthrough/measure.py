"""One update of run_alfworld.py with all its numbers: the tables and the figure of WALKTHROUGH.md.

    python -m research.walkthrough.measure --out research/walkthrough

plays two of the eight groups of its first update (16 of its 64 episodes, the same ones: seed 0, the
stand-in of run_alfworld.py) and makes one optimizer step on them. It prints the tables, and writes
them (tables.txt) and walkthrough.png.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from examples.conflict import gradient_conflict
from paw_min import cmae
from paw_min.base import distributed
from paw_min.base.errors import Parser, user_errors
from paw_min.base.files import replace_text, writing
from paw_min.config import Config, parse_args
from paw_min.envs.benchmarks import presets_of
from paw_min.inspect.__main__ import pieces, score
from paw_min.model.policy import Policy, load_policy
from paw_min.model.sampler import HFSampler
from paw_min.rows import Episode, Rows, TokenRow, flatten
from paw_min.running.session import make_optimizer, start_model
from paw_min.update import optimize, prepare
from research.paper.transitions import collect, observation_logps
from research.study import markdown_table

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

GROUPS = 2  # shown, among the eight groups of the update
UPDATE = 1
# (trajectory, turn) of the transitions that are shown: an outcome that was unlikely, a step that
# Eq. 4 leaves out, and an action without effect, in this order.
SHOWN = ((0, 10), (0, 8), (8, 7))
SURE = 0.99  # tokens of o' with a higher p have no row
STEP = {  # metrics of the optimizer step
    "grad_norm_rl": "gradient norm of the RL loss",
    "grad_norm_wm": "gradient norm of the world-model loss",
    "grad_cosine": "their cosine",
    "grad_norm": "gradient norm of the sum",
    "loss_pg": "RL loss",
    "loss_wm": "world-model term of Eq. 11",
    "wm_clipped_tokens": "fraction of the observation tokens with p > ρ",
}


@dataclass
class Shown:
    """A transition, token by token."""

    row: int
    prompt: str
    response: list[str]
    entropy: list[float]  # nats, one per token of the response
    observation: list[str]
    expected: list[str]  # most likely token in the place of each token of the observation


@dataclass
class Measured:
    """The update, and p of the tokens of o' before and after it."""

    rho: float  # Eq. 7
    episodes: list[Episode]
    rows: Rows
    shown: list[Shown]
    metrics: dict[str, float]
    before: list[Tensor]  # N x (|o'|,)
    after: list[Tensor]


def main(argv: list[str] | None = None) -> None:
    """Measure; write the tables and the figure where --out is given."""
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for tables and figure (default: none)")
    args = parser.parse_args(argv)
    measured = measure()
    text = tables(measured)
    print(text)
    if args.out:
        with writing(f"the folder {args.out}"):
            args.out.mkdir(parents=True, exist_ok=True)
            replace_text(args.out / "tables.txt", text + "\n")
            draw(measured, args.out / "walkthrough.png")


def measure() -> Measured:
    """Play, prepare, score, learn, and score again."""
    distributed.limit_threads()
    cfg, _ = parse_args("alfworld", presets_of("alfworld"), __doc__, [])
    policy = load_policy(start_model(cfg))
    reference = load_policy(start_model(cfg))
    optimizer = make_optimizer(policy, cfg.lr, cfg.beta2)

    episodes = collect(cfg, policy, HFSampler(), GROUPS * cfg.group_size, UPDATE).episodes
    rows = prepare(cfg, policy, reference, flatten(episodes))
    before = probabilities(cfg, policy, rows)
    seed_key = (cfg.seed, UPDATE)
    conflict = gradient_conflict(cfg, policy, rows, seed_key)
    indices = [rows.trajectory.index(trajectory) + turn for trajectory, turn in SHOWN]
    scored = score(policy, [rows.tokens[i] for i in indices], cfg.micro_tokens)
    shown = [show(policy, rows, i, one.entropy) for i, one in zip(indices, scored, strict=True)]
    metrics = optimize(cfg, policy, optimizer, rows, seed_key)  # one step: 243 rows, mini-batch 256
    after = probabilities(cfg, policy, rows)
    return Measured(cfg.rho, episodes, rows, shown, conflict | metrics, before, after)


def show(policy: Policy, rows: Rows, i: int, entropy: list[float]) -> Shown:
    tokens = rows.tokens[i]
    return Shown(
        row=i,
        prompt=policy.decode(tokens.prompt_ids),
        response=pieces(policy.tokenizer, tokens.response_ids),
        entropy=entropy,
        observation=pieces(policy.tokenizer, tokens.obs_ids),
        expected=expected(policy, tokens),
    )


@torch.no_grad()
def expected(policy: Policy, row: TokenRow) -> list[str]:
    """The most likely token in the place of each observation token."""
    ids = [*row.prompt_ids, *row.response_ids, *row.separator_ids, *row.obs_ids]
    logits = policy.model(torch.tensor([ids])).logits[0]  # (L, V)
    return pieces(policy.tokenizer, logits[-len(row.obs_ids) - 1 : -1].argmax(-1).tolist())


def probabilities(cfg: Config, policy: Policy, rows: Rows) -> list[Tensor]:
    """p of each token of o_{t+1} -> N x (|o|,)."""
    return [logp.exp() for logp in observation_logps(cfg, policy, rows.tokens)]


# ---- tables ----


def tables(m: Measured) -> str:
    """The tables of WALKTHROUGH.md as Markdown, with an empty line between two parts."""
    header = ["group", "task type", "won", "λ_g", "rows", "selected (Eq. 4)"]
    parts = [markdown_table(header, [group_line(m, g) for g in range(GROUPS)])]
    for shown in m.shown:
        parts += shown_parts(m, shown)
    trained = (m.rows.row_weight > 0).nonzero()[:, 0].tolist()
    before = torch.cat([m.before[i] for i in trained])  # (observation tokens,)
    after = torch.cat([m.after[i] for i in trained])
    lines = []
    for name, low, high in (
        ("at most 0.01", 0.0, 0.01), (f"from 0.01 to ρ = {m.rho}", 0.01, m.rho),
        ("above ρ", m.rho, 1.0),
    ):
        inside = (before > low) & (before <= high)
        means = [f"{p[inside].mean():.4f}" for p in (before, after)]
        lines.append([name, int(inside.sum()), *means])
    parts.append(markdown_table(["p before the update", "tokens", "mean p before", "after"], lines))
    step = [[title, f"{m.metrics[key]:.4f}"] for key, title in STEP.items()]
    parts.append(markdown_table(["", "value"], step))
    threshold = m.rows.entropy[m.rows.selected].min()
    parts.append(f"The lowest entropy that Eq. 4 keeps: {threshold:.4f} nats per token.")
    return "\n\n".join(parts)


def group_line(m: Measured, g: int) -> list:
    members = [e for e in m.episodes if e.group == g]
    in_group = torch.tensor(m.rows.group) == g  # (N,)
    won = sum(e.won for e in members)
    return [g, f"`{members[0].task_type}`", f"{won} of {len(members)}", m.rows.lambdas[g],
            int(in_group.sum()), int(m.rows.selected[in_group].sum())]


def shown_parts(m: Measured, shown: Shown) -> list[str]:
    """Prompt, response, observation, and what training knew of the transition."""
    rows = m.rows
    i = shown.row
    response = [f"`{word.strip()}` {h:.4f}" for word, h in zip(shown.response, shown.entropy)]
    lines = []
    for word, other, before, after in zip(
        shown.observation, shown.expected, m.before[i].tolist(), m.after[i].tolist(), strict=True
    ):
        if before > SURE:
            continue
        instead = "" if other == word else f"`{other.strip()}`"
        kept = "kept" if before <= m.rho else "dropped"
        lines.append([f"`{word.strip()}`", p(before), instead, kept, p(after)])
    logp = m.before[i].log()[None]  # (1, |o'|)
    loss = cmae.clipped_mae(logp, torch.ones_like(logp), m.rho).item()
    terms = [
        f"{rows.entropy[i]:.4f}", "yes" if rows.selected[i] else "no", rows.advantage[i].item(),
        rows.lambdas[rows.group[i]], f"{rows.row_weight[i]:.5f}", loss,
    ]
    header = ["token of o'", "p", "expected instead", "Eq. 7", "p after the step"]
    return [
        "> " + shown.prompt.replace("<", "\\<"),
        " · ".join(response),
        markdown_table(header, lines),
        markdown_table(["H", "selected (Eq. 4)", "A", "λ_g", "weight", "loss, Eq. 8"], [terms]),
    ]


def p(probability: float) -> str:
    return f"{probability:.4f}" if probability >= 1e-4 else f"{probability:.0e}"


# ---- figure ----


def draw(m: Measured, file: Path) -> None:
    """p of each observation token before and after the step, one panel per shown transition."""
    figure, axes = plt.subplots(len(m.shown), 1, figsize=(9, 8), layout="constrained")
    for axis, shown in zip(axes, m.shown):
        i = shown.row
        for x, (before, after) in enumerate(zip(m.before[i].tolist(), m.after[i].tolist())):
            axis.plot(x, before, marker="o", color="tab:orange" if before <= m.rho else "gray")
            axis.plot([x, x], [before, after], color="tab:blue")
            axis.plot(x, after, marker="_", color="tab:blue", markersize=10)
        axis.axhline(m.rho, color="black", linewidth=0.8, linestyle=":")
        axis.text(1.01, m.rho, "ρ", va="center", transform=axis.get_yaxis_transform())
        axis.set_xlim(-0.7, len(shown.observation) - 0.3)
        words = [word.strip() for word in shown.observation]
        axis.set_xticks(range(len(words)), words, rotation=30, ha="right", fontsize=8)
        axis.set_yscale("log")
        axis.set_ylim(1e-7, 3)
        axis.set_ylabel("p")
        axis.grid(axis="y", alpha=0.3)
        choice = "selected" if m.rows.selected[i] else "left out"
        command = "".join(shown.response).split("<action>")[-1].split("</action>")[0].strip()
        axis.set_title(
            f"{command}: entropy {m.rows.entropy[i]:.3f}, {choice} by Eq. 4, "
            f"λ = {m.rows.lambdas[m.rows.group[i]]:.3f}",
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
