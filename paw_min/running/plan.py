"""The plan of a run, --dry-run: what would be trained, and what this machine lacks for it."""

from pathlib import Path

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
    """Check model, memory, disk and data, and print the plan; each error on its line."""
    if distributed.torchrun_env("RANK", 0):
        return  # The first rank's plan counts all.
    errors = {}  # an ordered set: two checks may say the same
    for part in (print_model, print_memory, check_machine, print_data):
        try:
            part(cfg)
        except UserError as error:
            errors[f"{str(error).rstrip('.')}."] = None
    print_training(cfg)
    if errors:
        raise UserError("\nerror: ".join(errors))


def print_model(cfg: Config) -> None:
    check_model(cfg, start_model(cfg))
    print(f"model     {start_model(cfg)}")


def print_memory(cfg: Config) -> None:
    start = start_model(cfg)
    device = distributed.default_device()
    if device == "cpu" and cfg.sampler == "vllm":
        print(f"memory    {memory.on_another_machine(cfg, start)}")
        return
    for place in memory.check(cfg, start, forward_precision(cfg.precision, device), device):
        print(f"memory    {place}")


def print_data(cfg: Config) -> None:
    print(f"data      {count_tasks(cfg, find_tasks(cfg))}")


def print_training(cfg: Config) -> None:
    episodes = cfg.groups * cfg.group_size
    rows = episodes * cfg.max_turns
    # PaW appends the next observation to a prompt and its response.
    longest = cfg.context_length + (cfg.max_obs_tokens if cfg.paw else 0)
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
    print(f"method    {method}")
    print(f"updates   {cfg.updates} of {cfg.groups} tasks x {cfg.group_size} = {episodes} "
          f"episodes, at most {cfg.max_turns} turns: up to {rows} rows of up to {longest} "
          "tokens")
    print(f"training  up to {steps} optimizer steps per update, {cfg.micro_tokens} tokens per pass")
    print(f"evaluate  {evaluations} times, every {every} updates")
    print(f"folder    {Path(cfg.out) / cfg.name}")
