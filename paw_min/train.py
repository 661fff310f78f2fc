"""A training run: lines 1 and 2 of Algorithm 1, and everything around them.

    set up -> evaluate -> [ rollout -> update (lines 3-11) -> log -> evaluate -> save ] * updates

A run is a folder (runs.py). The same command goes on where the last complete checkpoint stands:
every random draw is derived from (seed, update, ...), so nothing but the weights and the state of
the optimizer has to be restored, and on a CPU the numbers are those of a run never interrupted.
"""

import importlib
import sys
import time
from pathlib import Path

import torch

from paw_min.config import Config, UserError, parse_args
from paw_min.evaluate import evaluate, summarize, transcript
from paw_min.plot import draw
from paw_min.policy import load_policy, load_tokenizer
from paw_min.rollout import rollout
from paw_min.runs import Run, write_atomically
from paw_min.sampler import HFSampler
from paw_min.tasks import draw_groups, panel
from paw_min.tiny import STANDINS
from paw_min.update import NonFinite, update


def main(presets: dict[str, dict], doc: str) -> None:
    """Entry point of the run_*.py scripts."""
    try:
        cfg, args = parse_args(presets, doc)
        if args.dry_run:
            plan(cfg)
        else:
            train(cfg, args.eval_only)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command goes on from the last checkpoint")


def train(cfg: Config, eval_only: bool = False) -> None:
    """Run `cfg` to its end, or evaluate it once; leaves behind what runs.py lists."""
    torch.set_num_threads(cfg.threads)
    device = cfg.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Run(cfg)
    start_model = str(cfg.model or STANDINS / cfg.env)
    policy = load_policy(str(run.checkpoint() or start_model), cfg.temperature, device)
    make_pool, train_tasks, panel_tasks = find_tasks(cfg)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay
    )
    sampler = HFSampler(policy)
    seats = max(cfg.groups * cfg.group_size, min(len(panel_tasks), 128))
    with make_pool(seats) as pool:
        if eval_only:
            metrics, episodes = evaluate(cfg, policy, sampler, pool, panel_tasks)
            write_atomically(run.folder / "episodes.md", transcript(episodes))
            print("\n".join(f"{key:48s} {value:8.3f}" for key, value in metrics.items()))
            return
        done = run.restore(optimizer)
        reference = None
        if cfg.kl_coef > 0:
            reference = load_policy(start_model, cfg.temperature, device)
            reference.model.requires_grad_(False)
        policy.model.train()
        if cfg.grad_checkpointing:
            policy.model.gradient_checkpointing_enable()
        print(
            f"run {run.folder}: {policy.model.num_parameters():,} parameters on {device}, "
            f"{len(train_tasks)} training tasks, panel of {len(panel_tasks)}"
        )
        print(HEADER)
        for line in run.metrics():  # of the run that is resumed
            print(console_line(line))
        if not run.metrics():
            log(run, {"update": 0} | evaluate(cfg, policy, sampler, pool, panel_tasks)[0])

        for k in range(done + 1, cfg.updates + 1):  # Alg. 1, line 1
            metrics, episodes = step(
                cfg, policy, reference, optimizer, sampler, pool, train_tasks, run, k
            )
            last = k == cfg.updates
            if last or (cfg.eval_every and k % cfg.eval_every == 0):
                evaluation, episodes = evaluate(cfg, policy, sampler, pool, panel_tasks)
                metrics |= evaluation
                write_atomically(run.folder / "episodes.md", transcript(episodes))
            log(run, metrics)
            if last or k % cfg.save_every == 0:
                run.save(policy, optimizer, k)
            if "eval_success" in metrics and not last:
                draw([run.folder])
    draw([run.folder])
    report(run)


def find_tasks(cfg: Config) -> tuple:
    """(make_pool, training tasks, evaluation panel); bad data shows here, before any long work.

    Each file of envs/ that is a benchmark has the same function `setup`.
    """
    environment = importlib.import_module(f"paw_min.envs.{cfg.env}")
    try:
        make_pool, train_tasks, held_out = environment.setup(cfg)
        n_panel = min(cfg.eval_tasks or len(held_out), len(held_out))
        draw_groups(train_tasks, cfg.groups, cfg.seed, 0)  # are there enough?
        return make_pool, train_tasks, panel(held_out, n_panel, seed=0)  # the same for every run
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error


def plan(cfg: Config) -> None:
    """Check what a run needs, without weights; say what it would do. UserError: what is missing."""
    start_model = str(cfg.model or STANDINS / cfg.env)
    missing = []
    try:
        load_tokenizer(start_model)
        print(f"model     {start_model}")
    except UserError as error:
        missing.append(str(error))
    try:
        _, train_tasks, panel_tasks = find_tasks(cfg)
        print(f"data      {len(train_tasks)} training tasks, panel of {len(panel_tasks)}")
    except UserError as error:
        missing.append(str(error))
    episodes, rows = cfg.groups * cfg.group_size, cfg.groups * cfg.group_size * cfg.max_turns
    steps = -(-rows // cfg.mini_batch) if cfg.mini_batch else 1
    length = cfg.max_prompt_tokens + cfg.max_response_tokens + cfg.max_obs_tokens * cfg.paw
    evaluations = 2 + (cfg.updates - 1) // cfg.eval_every if cfg.eval_every else 2
    print(
        f"updates   {cfg.updates} of {cfg.groups} tasks x {cfg.group_size} = {episodes} episodes, "
        f"at most {cfg.max_turns} turns: up to {rows} rows of up to {length} tokens\n"
        f"training  {cfg.algo}{' with PaW' if cfg.paw else ''}, up to {steps} optimizer steps an "
        f"update, {cfg.micro_batch} rows at a time\n"
        f"panel     {evaluations} times, every {cfg.eval_every or cfg.updates} updates\n"
        f"folder    {Path(cfg.out) / cfg.name}"
    )
    if missing:
        raise UserError(" Also: ".join(missing))


def step(cfg, policy, reference, optimizer, sampler, pool, train_tasks, run, k) -> tuple:
    """Update k: sample tasks, collect groups (line 2), learn (lines 3-11) -> metrics, episodes."""
    start = time.perf_counter()
    sampler.sync()
    drawn = draw_groups(train_tasks, cfg.groups, cfg.seed, k - 1)
    tasks = [task for task in drawn for _ in range(cfg.group_size)]
    groups = [g for g in range(len(drawn)) for _ in range(cfg.group_size)]
    episodes, stats = rollout(
        cfg, policy, sampler, pool, tasks, groups,
        temperature=cfg.temperature, seed=(cfg.seed, k), label=f"rollout {k}",
    )  # fmt: skip
    for episode in episodes:
        if episode.failed:
            print(f"episode lost: {episode.failed}")
    played = [e for e in episodes if not e.failed]
    if not played:
        raise UserError("every episode of the rollout failed, see the reasons above.")
    rolled = time.perf_counter()
    try:
        metrics = update(cfg, policy, reference, optimizer, played, (cfg.seed, k))
    except NonFinite as error:
        dump = run.folder / f"nonfinite-{k:06d}.pt"
        torch.save([vars(row) for row in error.rows], dump)
        raise UserError(
            f"update {k}: {error}; the rows are in {dump}, the last checkpoint is good: lower --lr "
            "or --grad-clip and go on under another --name with --model set to that checkpoint."
        ) from error
    metrics = {"update": k} | summarize(episodes) | metrics | stats
    metrics["seconds_rollout"] = rolled - start
    return metrics, episodes


def log(run: Run, metrics: dict) -> None:
    run.log(metrics)
    print(console_line(metrics), flush=True)


HEADER = " update  success  return  length  valid  lambda  wm loss  entropy  clipped  kl old    s"
HEADER += "  held out"


def console_line(m: dict) -> str:
    """One aligned line per update; blanks where a number does not exist."""

    def cell(key: str, form: str) -> str:
        width = int(form.split(".")[0])
        return f"{m[key]:{form}}" if key in m else " " * width

    if "seconds_rollout" in m:
        m = m | {"seconds": m["seconds_rollout"] + m["seconds_old_pass"] + m["seconds_update"]}
    return "  ".join(
        [
            f"{m['update']:7d}", cell("success", "7.3f"), cell("return", "6.2f"),
            cell("length", "6.1f"), cell("valid", "5.3f"), cell("lambda", "6.3f"),
            cell("wm_loss", "7.4f"), cell("entropy", "7.4f"), cell("clip_fraction", "7.4f"),
            cell("approx_kl", "6.4f"), cell("seconds", "3.0f"), cell("eval_success", "8.3f"),
        ]
    )  # fmt: skip


def report(run: Run) -> None:
    """Held-out success, and the benchmark's own score where it has one, before and after."""
    evaluated = [line for line in run.metrics() if "eval_success" in line]
    for key, form in (("success", ".3f"), ("score", ".1f")):
        if evaluated and f"eval_{key}" in evaluated[0]:
            before, after = evaluated[0], evaluated[-1]
            print(
                f"held-out {key}: {before[f'eval_{key}']:{form}} before, "
                f"{after[f'eval_{key}']:{form}} after {after['update']} updates ({run.folder})"
            )
