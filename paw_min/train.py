"""A training run: lines 1 and 2 of Algorithm 1, and everything around them.

    set up -> evaluate -> [ rollout -> update (lines 3-11) -> log -> evaluate -> save ] * updates

A run is a folder (runs.py). The same command goes on where the last complete checkpoint stands:
every random draw is derived from (seed, update, ...), so nothing but the weights and the state of
the optimizer has to be restored, and on a CPU the numbers are those of a run never interrupted.
"""

import importlib
import sys
import time
from contextlib import closing
from pathlib import Path

import torch

from paw_min import dist
from paw_min.config import Config, UserError, parse_args
from paw_min.evaluate import evaluate, summarize, transcript
from paw_min.plot import draw
from paw_min.policy import load_policy, load_tokenizer
from paw_min.rollout import rollout
from paw_min.runs import Run, read_metrics
from paw_min.sampler import HFSampler
from paw_min.scoring import sampler_gap
from paw_min.tasks import draw_groups, panel
from paw_min.tiny import STANDINS
from paw_min.update import NonFinite, update
from paw_min.vllm_sampler import VLLMSampler, check_installed


def main(presets: dict[str, dict], doc: str) -> None:
    """Entry point of the run_*.py scripts."""
    try:
        cfg, args = parse_args(presets, doc)
        if args.dry_run:
            plan(cfg)
        else:
            train(cfg, args.eval_only)
        dist.finish()
    except UserError as error:
        sys.exit(dist.signed(f"error: {error}"))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command goes on from the last checkpoint")


def train(cfg: Config, eval_only: bool = False) -> None:
    """Run `cfg` to its end, or evaluate it once; leaves behind what runs.py lists."""
    torch.set_num_threads(cfg.threads)
    device = dist.start(cfg.device)
    precision = cfg.precision
    if precision == "auto":
        precision = "bf16" if device.startswith("cuda") else "fp32"
    start_model = str(cfg.model or STANDINS / cfg.env)
    if cfg.sampler == "vllm":
        check_installed()
    with dist.rank_0_first():  # it makes the folders and, on first use, the data
        run = Run(cfg)
        load_tokenizer(start_model)
        make_pool, train_tasks, panel_tasks = find_tasks(cfg)
    # vLLM takes what memory it finds free, and leaves it again: it comes before the trainer.
    sampler = make_sampler(cfg, str(run.checkpoint() or start_model), precision)
    policy = load_policy(
        str(run.checkpoint() or start_model), cfg.temperature, device, precision, cfg.attention
    )
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    if cfg.shard:
        dist.shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    seats = max(cfg.groups * cfg.group_size, min(len(panel_tasks), 128))
    with closing(sampler), dist.together(), make_pool(-(-seats // dist.world())) as pool:
        if eval_only:
            metrics, episodes = evaluate(cfg, policy, sampler, pool, panel_tasks)
            run.write("episodes.md", transcript(episodes))
            say("\n".join(f"{key:48s} {value:8.3f}" for key, value in metrics.items()))
            return
        done = run.restore(policy, optimizer)
        reference = None
        if cfg.kl_coef > 0:
            where = "cpu" if cfg.ref_offload else device
            reference = load_policy(start_model, cfg.temperature, where, precision, cfg.attention)
            reference.requires_grad_(False)
        policy.train()
        ranks = f", {dist.world()} ranks" if dist.world() > 1 else ""
        say(
            f"run {run.folder}: {policy.model.num_parameters():,} parameters on {device}{ranks}, "
            f"{len(train_tasks)} training tasks, panel of {len(panel_tasks)}\n{HEADER}"
        )
        for line in run.metrics():  # of the run that is resumed
            say(console_line(line))
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
                run.write("episodes.md", transcript(episodes))
            log(run, metrics)
            if last or k % cfg.save_every == 0:
                run.save(policy, optimizer, k)
            if dist.rank() == 0 and "eval_success" in metrics and not last:
                draw([run.folder])
        if dist.rank() == 0:
            draw([run.folder])
            report(run)


def make_sampler(cfg: Config, folder: str, precision: str):
    if cfg.sampler == "transformers":
        return HFSampler()
    length = cfg.max_prompt_tokens + cfg.max_response_tokens
    return VLLMSampler(folder, length, precision, cfg.vllm_memory, cfg.seed)


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
        if cfg.sampler == "vllm":
            check_installed()
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
        f"update, {cfg.micro_tokens} tokens at a time\n"
        f"panel     {evaluations} times, every {cfg.eval_every or cfg.updates} updates\n"
        f"folder    {Path(cfg.out) / cfg.name}"
    )
    if missing:
        raise UserError(" Also: ".join(missing))


def step(cfg, policy, reference, optimizer, sampler, pool, train_tasks, run, k) -> tuple:
    """Update k: sample tasks, collect groups (line 2), learn (lines 3-11) -> metrics, episodes."""
    start = time.perf_counter()
    drawn = draw_groups(train_tasks, cfg.groups, cfg.seed, k - 1)
    tasks = [task for task in drawn for _ in range(cfg.group_size)]
    groups = [g for g in range(len(drawn)) for _ in range(cfg.group_size)]
    with sampler.sync(policy):
        episodes, stats = rollout(
            cfg, policy, sampler, pool, tasks, groups,
            temperature=cfg.temperature, seed=(cfg.seed, k), label=f"rollout {k}",
        )  # fmt: skip
    for episode in episodes:
        if episode.failed:
            say(f"episode lost: {episode.failed}")
    played = [e for e in episodes if not e.failed]
    if not played:
        raise UserError("every episode of the rollout failed, see the reasons above.")
    rolled = time.perf_counter()
    gap = check_sync(cfg, policy, played, k)
    try:
        metrics = update(cfg, policy, reference, optimizer, played, (cfg.seed, k))
    except NonFinite as error:
        dump = run.folder / f"nonfinite-{k:06d}.pt"
        torch.save([vars(row) for row in error.rows], dump)
        raise UserError(
            f"update {k}: {error}; the rows are in {dump}, the last checkpoint is good: lower --lr "
            "or --grad-clip and go on under another --name with --model set to that checkpoint."
        ) from error
    metrics = {"update": k} | summarize(episodes) | metrics | stats | {"sampler_gap": gap}
    metrics["seconds_rollout"] = rolled - start
    return metrics, episodes


# Nats per token that rounding may explain. Measured: 1e-6 in fp32; published for bf16: 0.01 or so.
# A lost sync costs 0.4 and more, see tests/test_vllm.py.
MAX_GAP = {"fp32": 1e-3, "bf16": 0.1}


def check_sync(cfg: Config, policy, episodes, k: int) -> float:
    """|log-prob by the trainer - by the sampler|, mean over the first batch; UserError if stale.

    The batch: the first turn of one episode per group, whose prompts begin alike at every update,
    so that a prefix cache of old weights shows, too.
    """
    rows = list({e.group: e.transitions[0] for e in episodes}.values())
    gap = sampler_gap(cfg, policy, rows)
    if not gap <= MAX_GAP[policy.precision]:
        raise UserError(
            f"update {k}: the sampler's log-probabilities are {gap:.4f} nats per token off the "
            f"trainer's (rounding explains {MAX_GAP[policy.precision]}): it did not generate with "
            "the present weights or temperature; nothing was trained on that, the last checkpoint "
            "is good: go on with --sampler transformers, or with the versions of vLLM and torch "
            "that the README names."
        )
    return gap


def say(text: str) -> None:
    """Print, on one rank only."""
    if dist.rank() == 0:
        print(text, flush=True)


def log(run: Run, metrics: dict) -> None:
    run.log(metrics)
    say(console_line(metrics))


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
    evaluated = [line for line in read_metrics(run.folder) if "eval_success" in line]
    for key, form in (("success", ".3f"), ("score", ".1f")):
        if evaluated and f"eval_{key}" in evaluated[0]:
            before, after = evaluated[0], evaluated[-1]
            print(
                f"held-out {key}: {before[f'eval_{key}']:{form}} before, "
                f"{after[f'eval_{key}']:{form}} after {after['update']} updates ({run.folder})"
            )
