"""Word2World's supervised fine-tuning: of a world model, and of an agent (sections 4 and 7.2).

Full fine-tuning with the learning rates of Table 7. train.json of a world model has its
environment and context, which reading it back needs.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from paw_min.base.distributed import join
from paw_min.base.errors import UserError
from paw_min.base.files import writing
from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.loading import load_tokenizer
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.running.session import forward_precision, start_model
from paw_min.toy.standins import make_model, make_optimizers
from world_models.supervised import fit, load
from world_models.word2world.settings import Word2WorldJob
from world_models.word2world.trajectories import decisions, read_trajectories
from world_models.word2world.world_model import WorldModel, check_template, word_tokenizer

WARM_UP = 10  # steps, Table 7


def train(job: Word2WorldJob) -> dict:
    """Fit a world model to all answers of the trajectories; failures count like successes."""
    cfg = job.cfg
    settings = job.settings
    trajectories = read_trajectories(settings.trajectories)
    if len(trajectories) < settings.limit:
        raise UserError(f"--trajectories has {len(trajectories)} episodes, --limit asks for "
                        f"{settings.limit}: collect more.")
    generator("limit", cfg.seed).shuffle(trajectories)
    trajectories = trajectories[: settings.limit or None]
    if settings.start:
        policy = load(cfg, start_model(replace(cfg, model=settings.start)))
        optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr)
    else:
        texts = [m["content"] for t in trajectories for m in t.messages]
        tokenizer = word_tokenizer(texts)
        device = join()
        precision = forward_precision(cfg.precision, device)
        model = make_model(tokenizer, cfg.seed, settings.width, settings.context).to(device)
        policy = Policy(model, tokenizer, precision=precision)
        optimizer = Together(make_optimizers(model, settings.lr))
    world_model = WorldModel(policy, settings.context)
    check_template(world_model)
    rows = [row for row in map(world_model.row, trajectories) if row]
    if not rows:
        raise UserError(f"no answer fits into --context {settings.context}: raise it.")
    fitted = fit_and_save(job, policy, optimizer, rows, len(rows))
    return {"env": cfg.env, "context": settings.context} | fitted


def imitate(job: Word2WorldJob) -> dict:
    """Fit the agent --model to thoughts and commands of won trajectories."""
    cfg = job.cfg
    wins = job.settings.wins
    won = []
    for path in job.settings.trajectories:
        of_file = [t for t in read_trajectories([path]) if t.won]
        if len(of_file) < max(1, wins):
            raise UserError(f"{path} has {len(of_file)} won episodes, --wins asks for "
                            f"{max(1, wins)}: collect more.")
        won += of_file[: wins or None]
    # UserError if a prompt may be longer than the model's positions.
    load_tokenizer(start_model(cfg), cfg.context_length)
    policy = load(cfg, start_model(cfg))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=job.settings.lr)
    prompt = BENCHMARKS[cfg.env].prompts[cfg.prompt]
    rows = []
    for trajectory in won:
        for context, response in decisions(trajectory):
            prompt_ids = policy.encode_chat(prompt(context, cfg.history_length))
            # A rollout cuts it so, too: pages of a dream may be longer than any real one.
            prompt_ids = prompt_ids[-cfg.max_prompt_tokens :]
            rows.append(TokenRow(prompt_ids, policy.encode_response(response), []))
    return fit_and_save(job, policy, optimizer, rows, len(won))


def fit_and_save(
    job: Word2WorldJob, policy: Policy, optimizer, rows: list[TokenRow], trajectories: int
) -> dict:
    """Full fine-tuning with the schedule of Table 7; write the model -> what happened.

    loss: nats per token, the means of successive parts, each a tenth of the steps or less.
    trajectories: how many were used.
    """
    policy.train()
    if job.cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    losses = fit(
        policy, optimizer, rows,
        epochs=job.settings.epochs, batch=job.settings.batch, warm_up=WARM_UP,
        micro_tokens=job.cfg.micro_tokens, seed_key=("word2world", job.cfg.seed),
    )
    with writing(str(job.out)):
        policy.save(job.out)
    tenth = max(1, len(losses) // 10)
    parts = [losses[i : i + tenth] for i in range(0, len(losses), tenth)]
    return {
        "trajectories": trajectories,
        "rows": len(rows),
        "parameters": policy.model.num_parameters(),
        "steps": len(losses),
        "loss": [round(sum(part) / len(part), 4) for part in parts],
    }


class Together:
    """Several optimizers as one. From scratch, Muon needs half the steps that AdamW needs."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def load_world_model(folder: Path, cfg: Config, answer_tokens: int) -> WorldModel:
    """The world model of `word2world train`; UserError for any other folder."""
    path = folder / "train.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a world model (no train.json): give the folder of a "
                        "complete `word2world train`, or add --shots 0 to prompt a model.")
    record = json.loads(path.read_text("utf-8"))
    env = record.get("env")
    if env != cfg.env:
        raise UserError(f"{path} is of {env!r}: give a world model of {cfg.env}.")
    return WorldModel(load(cfg, str(folder)), record["context"], answer_tokens)
