"""The entry point of the run scripts. Errors of the user end in one sentence and exit code 1."""

import sys
from pathlib import Path

from paw_min import distributed
from paw_min.config import Config, UserError, parse_args
from paw_min.model.policy import load_tokenizer
from paw_min.model.vllm_sampler import check_installed
from paw_min.session import find_tasks, start_model
from paw_min.train import train


def main(env: str, presets: dict[str, dict], doc: str) -> None:
    try:
        cfg, mode = parse_args(env, presets, doc)
        if mode.dry_run:
            dry_run(cfg)
        else:
            train(cfg, mode.eval_only)
        distributed.finish()
    except UserError as error:
        sys.exit(distributed.with_rank(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: rerun the same command to resume from the last checkpoint")


def dry_run(cfg: Config) -> None:
    """Check the model's folder and the data, and print the plan; loads no weights."""
    model, missing = start_model(cfg), []
    try:
        if cfg.sampler == "vllm":
            check_installed()
        load_tokenizer(model)
        print(f"model     {model}")
    except UserError as error:
        missing.append(str(error))
    try:
        tasks = find_tasks(cfg)
        print(f"data      {len(tasks.train)} training tasks, panel of {len(tasks.held_out)}")
    except UserError as error:
        missing.append(str(error))
    episodes = cfg.groups * cfg.group_size
    rows = episodes * cfg.max_turns
    steps = -(-rows // cfg.mini_batch) if cfg.mini_batch else 1
    length = cfg.max_prompt_tokens + cfg.max_response_tokens + cfg.max_obs_tokens * cfg.paw
    evaluations = 2 + (cfg.updates - 1) // cfg.eval_every if cfg.eval_every else 2
    print(
        f"updates   {cfg.updates} of {cfg.groups} tasks x {cfg.group_size} = {episodes} episodes, "
        f"at most {cfg.max_turns} turns: up to {rows} rows of up to {length} tokens\n"
        f"training  {cfg.algo}{' with PaW' if cfg.paw else ''}, up to {steps} optimizer steps per "
        f"update, {cfg.micro_tokens} tokens per pass\n"
        f"panel     {evaluations} times, every {cfg.eval_every or cfg.updates} updates\n"
        f"folder    {Path(cfg.out) / cfg.name}"
    )
    if missing:
        raise UserError(" Also: ".join(missing))
