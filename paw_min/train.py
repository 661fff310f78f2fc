"""The training loop: lines 1 and 2 of Algorithm 1 (update.py has lines 3-11).

    evaluate -> [ rollout -> update -> log -> evaluate -> save ] * updates

Every random draw is derived from (seed, update, ...), so that a run resumes from weights and
optimizer state alone: on a CPU, with the numbers of an uninterrupted run.
"""

import time

from paw_min.config import Config
from paw_min.critic import learn_values
from paw_min.model.scoring import check_sync
from paw_min.rollout import rollout
from paw_min.running import console, distributed
from paw_min.running.conflict import gradient_conflict
from paw_min.running.errors import UserError
from paw_min.running.evaluate import evaluate, outcomes, transcript
from paw_min.running.metrics import describe_episodes, describe_selection, peak_memory
from paw_min.running.plot import draw
from paw_min.running.runs import read_metrics
from paw_min.running.samples import sample
from paw_min.running.session import Session, open_session, start_model
from paw_min.running.tasks import draw_groups
from paw_min.update import NonFinite, learn, prepare


def train(cfg: Config, eval_only: bool = False) -> None:
    """Run `cfg` to its end, or only evaluate it. runs.py lists the files that it writes."""
    with open_session(cfg, eval_only) as s:  # policy, sampler, optimizer, pool, tasks
        if eval_only:
            checkpoint = s.run.checkpoint()
            metrics = play_panel(cfg, s, int(checkpoint.name[-6:]) if checkpoint else 0)
            lines = [f"{key:48s} {value:8.3f}" for key, value in metrics.items()]
            console.say("\n".join([f"weights: {checkpoint or start_model(cfg)}", *lines]))
            return

        done = s.run.restore(s.policy, s.optimizer)  # 0, unless this is a resumed run
        s.policy.train()  # gradient checkpointing is off in eval mode
        console.print_start(s)
        if not done and not s.run.metrics():  # else update 0 was measured already
            log(s, {"update": 0} | play_panel(cfg, s, 0))

        for k in range(done + 1, cfg.updates + 1):  # Alg. 1, line 1
            metrics = {"update": k} | update(cfg, s, k)
            last = k == cfg.updates  # always evaluated and saved
            if last or (cfg.eval_every and k % cfg.eval_every == 0):
                metrics |= play_panel(cfg, s, k)
            # Metrics first: a kill between the two writes repeats the update, and resuming drops
            # the line that is ahead of the checkpoint.
            log(s, metrics)
            if last or k % cfg.save_every == 0:
                s.run.save(s.policy, s.optimizer, k)
            if "eval_success" in metrics and not last and distributed.rank() == 0:
                draw([s.run.folder])  # for a look at the run while it trains
        if distributed.rank() == 0:
            draw([s.run.folder])
            console.report(s.run.folder, read_metrics(s.run.folder))


def play_panel(cfg: Config, s: Session, done: int) -> dict[str, float]:
    """Evaluate after `done` updates; write outcomes and a transcript -> metrics."""
    played = evaluate(cfg, s.policy, s.sampler, s.pool, s.tasks.held_out)
    s.run.write("episodes.md", transcript(played.episodes))
    s.run.write("evaluation.json", outcomes(done, played.episodes))
    return played.metrics


def update(cfg: Config, s: Session, k: int) -> dict[str, float]:
    """Update k: collect groups of episodes (line 2), learn from them (lines 3-11) -> metrics."""
    start = time.perf_counter()
    drawn = draw_groups(s.tasks.train, cfg.groups, cfg.seed, k - 1)
    tasks = [task for task in drawn for _ in range(cfg.group_size)]  # one entry per episode
    groups = [g for g in range(len(drawn)) for _ in range(cfg.group_size)]
    with s.sampler.sync(s.policy):  # load the current weights; free vLLM's memory afterwards
        played = rollout(
            cfg, s.policy, s.sampler, s.pool, tasks, groups,
            temperature=cfg.temperature, seed_key=(cfg.seed, k), label=f"rollout {k}",
        )  # fmt: skip
    # An episode whose environment broke is neither trained on nor counted in its group.
    episodes = [e for e in played.episodes if not e.failed]
    for reason in (e.failed for e in played.episodes if e.failed):
        console.say(f"episode lost: {reason}")
    if not episodes:
        raise UserError("every episode of the rollout failed; the reasons are printed above.")
    times = [start, time.perf_counter()]

    # Before training: check that the sampler used the current weights.
    gap = check_sync(cfg, s.policy, episodes, k)
    if played.metrics["obs_tokens_cut"] and k == 1:
        console.say("observations longer than --max-obs-tokens are cut, see obs_tokens_cut")
    times.append(time.perf_counter())
    rows = prepare(cfg, s.policy, s.reference, episodes)  # passes without gradient
    times.append(time.perf_counter())
    learned, seed_key = {}, (cfg.seed, k)
    try:
        if cfg.algo == "ppo":
            learned |= learn_values(cfg, s.policy, s.optimizer, rows, seed_key)
        if cfg.paw and cfg.conflict_every and k % cfg.conflict_every == 0:
            learned |= gradient_conflict(cfg, s.policy, rows, seed_key)
        learned |= learn(cfg, s.policy, s.optimizer, rows, seed_key)
    except NonFinite as error:
        weights = s.run.checkpoint() or "the start model"
        raise UserError(
            f"update {k}: {error}; its rows are in {s.run.dump_rows(error.rows, k)}: lower --lr or "
            f"--grad-clip and continue under another --name with --model set to {weights}."
        ) from error
    learned |= describe_selection(rows) if cfg.paw else {}
    s.run.write(f"samples/{k:06d}.json", sample(cfg, k, episodes, rows))  # for paw_min.inspect
    seconds = {
        "seconds_rollout": times[1] - times[0],
        "seconds_old_pass": times[3] - times[2],
        "seconds_update": time.perf_counter() - times[3],
    }
    checks = {"sampler_gap": gap, "memory_gb": peak_memory(s.policy.device)}
    return describe_episodes(played.episodes) | learned | played.metrics | checks | seconds


def log(s: Session, metrics: dict[str, float]) -> None:
    s.run.log(metrics)
    console.say(console.table_line(metrics))
