"""Word2World's supervised fine-tuning: of a world model, and of an agent (sections 4 and 7.2).

Full fine-tuning with the schedule of Table 7. train.json of a world model has its marker and its
context, which reading it back needs.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.batches import TokenRow
from paw_min.model.policy import Policy, load_policy
from paw_min.running.distributed import join
from paw_min.running.errors import UserError
from paw_min.running.runs import writing
from paw_min.running.seeds import generator
from paw_min.running.session import forward_precision, start_model
from paw_min.running.untrusted import open_ended, read_json
from paw_min.toy.standins import make_model, make_optimizers
from paw_min.world_models.dream import WorldModel, word_tokenizer
from paw_min.world_models.supervised import fit
from paw_min.world_models.trajectories import MARKER, decisions, read_trajectories

WARM_UP = 10  # steps, Table 7


def train(args: Namespace, cfg: Config) -> dict:
    """Fit a world model to all answers of the trajectories; failures count like successes."""
    trajectories = read_trajectories(args.trajectories)
    generator("limit", cfg.seed).shuffle(trajectories)
    trajectories = trajectories[: args.limit or None]
    device = join(cfg.device)
    precision = forward_precision(cfg, device)
    if args.start:
        policy = load_policy(args.start, device=device, precision=precision)
    else:
        texts = [m["content"] for t in trajectories for m in t.messages]
        tokenizer = word_tokenizer(texts)
        model = make_model(tokenizer, cfg.seed, args.width, args.context).to(device)
        policy = Policy(model, tokenizer, precision=precision)
    world_model = WorldModel(policy, args.context)
    rows = [row for row in map(world_model.row, trajectories) if row]
    if not rows:
        raise UserError(f"no answer fits into --context {args.context}: raise it.")
    found = {"marker": MARKER, "context": args.context, "trajectories": len(rows)}
    return found | fit_and_save(args, cfg, policy, rows)


def imitate(args: Namespace, cfg: Config) -> dict:
    """Fit the agent --model to thoughts and commands of won trajectories."""
    won = [t for t in read_trajectories(args.trajectories) if t.won]
    if len(won) < max(1, args.wins):
        raise UserError(f"--trajectories has {len(won)} won episodes: collect more.")
    won = won[: args.wins or None]
    for number, trajectory in enumerate(won):
        counts = [len(trajectory.responses), len(trajectory.commands), len(trajectory.answers)]
        if not counts[0] == counts[1] == counts[2] > 0:
            raise UserError(
                "--trajectories: won episode {} has {} responses, {} commands and {} answers, "
                "expected as many of each: collect it again.".format(number, *counts)
            )
    device = join(cfg.device)
    policy = load_policy(start_model(cfg), device=device, precision=forward_precision(cfg, device))
    prompt = BENCHMARKS[cfg.env].prompts[cfg.prompt]
    rows = []
    for trajectory in won:
        for context, response in decisions(trajectory):
            prompt_ids = policy.encode_chat(prompt(context, cfg.history_length))
            response_ids = [*policy.encode(response), policy.eos_ids[0]]
            rows.append(TokenRow(prompt_ids, response_ids, []))
    return {"trajectories": len(won)} | fit_and_save(args, cfg, policy, rows)


def fit_and_save(args: Namespace, cfg: Config, policy: Policy, rows: list[TokenRow]) -> dict:
    """Full fine-tuning with the schedule of Table 7; write the model -> what happened."""
    policy.train()
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    if args.command == "train" and not args.start:
        optimizer = Together(make_optimizers(policy.model, args.lr))
    else:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    losses = fit(
        policy, optimizer, rows, epochs=args.epochs, batch=args.batch, warm_up=WARM_UP,
        micro_tokens=cfg.micro_tokens, seed_key=("word2world", cfg.seed),
    )  # fmt: skip
    with writing(str(args.out)):
        policy.save(args.out)
    tenth = max(1, len(losses) // 10)
    parts = [losses[i : i + tenth] for i in range(0, len(losses), tenth)]
    means = [sum(part) / len(part) for part in parts]
    return {
        "rows": len(rows),
        "parameters": policy.model.num_parameters(),
        "steps": len(losses),
        "loss": [round(mean, 4) for mean in means],  # nats per token, of each tenth of the steps
    }


class Together:
    """Several optimizers as one. From scratch, Muon needs half the steps that AdamW needs."""

    def __init__(self, rates: dict[torch.optim.Optimizer, float]):
        self.optimizers = list(rates)
        self.param_groups = []
        for optimizer, rate in rates.items():
            optimizer.param_groups[0]["lr"] = rate
            self.param_groups += optimizer.param_groups

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@open_ended
@dataclass
class TrainRecord:
    """What train.json says about a world model."""

    marker: str
    context: int


def load_world_model(folder: Path, cfg: Config, answer_tokens: int = 512) -> WorldModel:
    path = folder / "train.json"
    if not path.is_file():
        raise UserError(f"{folder} is no world model (no train.json): give the folder of a "
                        "complete `word2world train`.")
    record = read_json(path, TrainRecord)
    if record.context < 1:
        raise UserError(f"{path} has the context {record.context}: train the world model again.")
    if record.marker != MARKER:
        raise UserError(f"{path} has the marker {record.marker!r}, expected {MARKER!r}: train the "
                        "world model again.")
    device = join(cfg.device)
    policy = load_policy(
        str(folder), device=device, precision=forward_precision(cfg, device)
    )
    return WorldModel(policy, record.context, answer_tokens)
