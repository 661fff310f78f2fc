"""The plan of a run, --dry-run: what would be trained, and what this machine lacks for it."""

from pathlib import Path

from paw_min import toy
from paw_min.base import distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.running import memory
from paw_min.running.session import (
    check_machine,
    check_model,
    count_tasks,
    find_tasks,
    forward_precision,
    start_model,
)


def dry_run(cfg: Config) -> None:
    """Check memory, disk, model and data, and print the plan; each error on its line."""
    errors = {}  # an ordered set: two checks may say the same of a model
    for part in (models, sizes, check_machine, data):
        try:
            for line in part(cfg) or []:
                print(line)
        except UserError as error:
            errors[f"{str(error).rstrip('.')}."] = None
    for line in training(cfg):
        print(line)
    if errors:
        raise UserError("\nerror: ".join(errors))


def models(cfg: Config) -> list[str]:
    check_model(cfg, start_model(cfg))
    return [f"model     {start_model(cfg)}"]


def sizes(cfg: Config) -> list[str]:
    model = start_model(cfg)
    device = distributed.usual_device()
    if device == "cpu" and cfg.sampler == "vllm":
        needs = [memory.on_another_machine(cfg, model)]
    else:
        needs = memory.check(cfg, model, forward_precision(cfg.precision, device), device)
    return [f"memory    {need}" for need in needs]


def data(cfg: Config) -> list[str]:
    if not cfg.data and not toy.folder_of(cfg.env).exists():
        return [f"data      {toy.folder_of(cfg.env)}: not there, the run unpacks it"]
    return [f"data      {count_tasks(cfg, find_tasks(cfg))}"]


def training(cfg: Config) -> list[str]:
    episodes = cfg.groups * cfg.group_size
    rows = episodes * cfg.max_turns
    steps = -(-rows // cfg.mini_batch) if cfg.mini_batch else 1
    every = cfg.eval_every or cfg.updates or 1
    evaluations = 1 + -(-cfg.updates // every)  # the start, and the last update whatever `every`
    method = f"{cfg.algo} without a world model"
    if cfg.paw:
        targets = "" if cfg.wm_target == "next" else f", {cfg.wm_target} targets"
        threshold = f" (rho {cfg.rho})" if cfg.wm_loss == "cmae" else ""
        method = (f"{cfg.algo} with {cfg.method}: {cfg.wm_scale} x {cfg.wm_loss}{threshold}, alpha "
                  f"{cfg.alpha}, lambda {cfg.lambda_g}{targets}")
    if cfg.lora_rank:
        method += f"; LoRA of rank {cfg.lora_rank}, where the paper's tables train all weights"
    return [
        f"method    {method}",
        f"updates   {cfg.updates} of {cfg.groups} tasks x {cfg.group_size} = {episodes} episodes, "
        f"at most {cfg.max_turns} turns: up to {rows} rows of up to {cfg.row_length} tokens",
        f"training  up to {steps} optimizer steps per update, {cfg.micro_tokens} tokens per pass",
        f"evaluate  {evaluations} times, every {every} updates",
        f"folder    {Path(cfg.out) / cfg.name}",
    ]
