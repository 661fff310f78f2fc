"""The training loop: what happens in an update, and in which order.

    evaluate -> [ collect -> check_sync -> prepare -> optimize -> (evaluate) -> log -> (save) ] * n

`train` takes a Config and leaves a run folder (running/runs.py lists its files). The loop is line 1
of Algorithm 1, `collect` is line 2; update.py lists all eleven. Evaluations and checkpoints come
every few updates. The order follows from the method. RL is on-policy, so the sampler gets the
current weights before each rollout. Eq. 4 and the ratio of the RL loss refer to the policy that
sampled, so `prepare` runs before the first optimizer step. With the preset `paper` on ALFWorld, a
rollout plays 16 tasks 8 times, in at most 50 steps each: up to 6,400 rows, or 25 optimizer steps of
256 rows.

What an update does with its prepared rows is `method(cfg, session, rows, k) -> metrics`, an
argument of `train`; the default is `paw`. A fork passes its own (examples/tapo.py). PPO wraps
whichever method is given: its critic gives the rows their advantages first (ppo.with_critic).

Each random draw has a key instead of a state (base/seeds.py), so a run resumes from weights and
optimizer state alone. On a CPU, with the environments in this process, it then has the numbers of
an uninterrupted run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from paw_min import update
from paw_min.base import console, distributed
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.metrics import (
    Stopwatch,
    describe_episodes,
    describe_selection,
    describe_speed,
    peak_memory,
    timed,
)
from paw_min.model.scoring import check_sync
from paw_min.ppo import with_critic
from paw_min.rollout import Rollout, rollout
from paw_min.rows import Episode, Rows, flatten
from paw_min.running.episodes import stored_episodes
from paw_min.running.evaluate import evaluate, outcomes, transcript
from paw_min.running.plot import draw
from paw_min.running.runs import read_metrics
from paw_min.running.session import Session, count_tasks, open_session, start_model
from paw_min.running.tasks import draw_groups
from paw_min.update import NonFinite, WorldModelLoss, observation_loss, prepare

# method(cfg, session, rows, k) -> metrics, which go into the update's line of metrics.jsonl. The
# rows are those of update.prepare, the same on every rank; k is the number of the update, from 1.
Method = Callable[[Config, Session, Rows, int], dict[str, float]]


def paw(
    cfg: Config, s: Session, rows: Rows, k: int,
    world_model_loss: WorldModelLoss = observation_loss,
) -> dict[str, float]:
    """Lines 5, 7, 8 and 11: the gradient steps of update k on the joint objective.

    A fork may pass another world_model_loss.
    """
    return update.optimize(cfg, s.policy, s.optimizer, rows, (cfg.seed, k), world_model_loss)


def train(cfg: Config, eval_only: bool = False, method: Method = paw) -> None:
    """Run `cfg` to its end, or only evaluate it. runs.py lists the files that it writes.

    method: what an update does with its rows, PaW or that of a fork (examples/tapo.py). The run
    folder stores its name, so that only the same method resumes it.
    """
    cfg = replace(cfg, method=method.__name__)
    if cfg.algo == "ppo":
        method = with_critic(method)  # A critic computes the advantages before any method.
    # The session has policy, sampler, optimizer, environment pool and tasks; session.py loads them.
    with open_session(cfg, eval_only) as s:
        if eval_only:
            report_evaluation(cfg, s)
            return

        print_start(cfg, s)
        if s.done and s.done >= cfg.updates:
            console.say(f"all {s.done} updates were done before: nothing is trained")
        watch = Stopwatch()
        # A resumed run has measured its start model already.
        if not s.done and not s.run.metrics():
            with watch.part("seconds_evaluate"):
                metrics = {"update": 0} | play_panel(cfg, s, 0)
            metrics |= watch.take()
            log(s, metrics)
            s.run.track(metrics)

        for k in range(s.done + 1, cfg.updates + 1):  # Alg. 1, line 1
            metrics = {"update": k} | run_update(cfg, s, k, method, watch)
            # The last update is always evaluated and saved, whatever the intervals.
            is_last = k == cfg.updates
            if is_last or (cfg.eval_every and k % cfg.eval_every == 0):
                with watch.part("seconds_evaluate"):
                    metrics |= play_panel(cfg, s, k)
            # The seconds since the last line; so a checkpoint's are in the line after it.
            metrics |= watch.take()
            # Metrics first: a kill between the two writes repeats the update, and resuming drops
            # the line that is ahead of the checkpoint.
            log(s, metrics)
            if is_last or k % cfg.save_every == 0:
                with watch.part("seconds_save"):
                    s.run.save(s.policy, s.optimizer, k)
            s.run.track(metrics)
            # The curves show the run while it trains.
            if "eval_success" in metrics and not is_last and distributed.rank() == 0:
                draw([s.run.folder])
        if distributed.rank() == 0:
            draw([s.run.folder])
            console.report(Path(cfg.out) / cfg.name, read_metrics(s.run.folder))


def print_start(cfg: Config, s: Session) -> None:
    """Print what is trained on which data, and the lines that a resumed run has so far."""
    ranks = f", {distributed.n_ranks()} ranks" if distributed.n_ranks() > 1 else ""
    console.say(
        f"run {Path(cfg.out) / cfg.name}: {s.policy.model.num_parameters():,} parameters on "
        f"{s.policy.device}{ranks}, {count_tasks(cfg, s.tasks)}"
    )
    if 0 < s.done < cfg.updates:
        console.say(f"resumed after update {s.done}; the lines up to there ran before")
    console.say(console.HEADER)
    for line in s.run.metrics():
        console.say(console.table_line(line))


def run_update(
    cfg: Config, s: Session, k: int, method: Method, watch: Stopwatch
) -> dict[str, float]:
    """Update k, from 1: collect groups of episodes, train on them -> metrics, without seconds."""
    with watch.part("seconds_rollout"):
        # Line 2: the sampler generates with the weights of this moment, so the data are on-policy.
        played = collect(cfg, s, k)
        episodes = unbroken(played)
        if k == s.done + 1:
            compare_groups(episodes)
        rows = flatten(episodes)  # line 3: the transition pool, the same on every rank

    with watch.part("seconds_old_pass"):
        # Check before training that the sampler used the current weights.
        gap = check_sync(cfg, s.policy, s.sampler, rows, f"update {k}")
        # Lines 4, 6, 9: advantages, old log-probs, selection, lambda_g. All passes without
        # gradient, before the first optimizer step moves the policy away from pi_old.
        rows = prepare(cfg, s.policy, s.reference, rows, k)

    # lambda_g and the selection are PaW's: a baseline has no such metrics.
    metrics = describe_selection(rows) if cfg.paw else {}
    with watch.part("seconds_update"):
        try:
            metrics |= method(cfg, s, rows, k)  # lines 5, 7, 8 and 11: the gradient steps
        except NonFinite as error:
            raise UserError(f"update {k}: {error}: {s.run.nan_remedy()}.") from error

    # For the page of the run, paw_min.page.
    s.run.write(f"samples/{k:06d}.json", stored_episodes(k, episodes, rows))
    metrics["sampler_gap"] = gap
    # What a sleeping vLLM has released is subtracted: PyTorch still counts it.
    metrics["memory_gb"] = peak_memory(s.policy.device, s.sampler.released)
    if s.policy.device.type == "cuda":
        metrics["asleep_gb"] = s.sampler.kept / 1e9
    metrics |= played.metrics
    return describe_episodes(played.episodes) | metrics | describe_speed(
        s.policy.model, rows, metrics | watch.seconds, s.policy.device
    )


def collect(cfg: Config, s: Session, k: int) -> Rollout:
    """Line 2: `groups` tasks, `group_size` episodes of each, by the current policy."""
    # The episodes of a group play the same task. Only their seeds differ, so that their returns can
    # be compared.
    tasks = draw_groups(s.tasks.train, cfg.groups, cfg.seed, k - 1)
    seconds = {}
    with ExitStack() as synced:
        with timed(seconds, "seconds_sync"):
            synced.enter_context(s.sampler.sync(s.policy))  # loads the current weights
        played = rollout(
            cfg, s.policy, s.sampler, s.pool, tasks, (cfg.seed, k), cfg.group_size,
            label=f"rollout {k}",
        )
        with timed(seconds, "seconds_sync"):
            synced.close()  # frees the sampler's memory
    played.metrics |= seconds
    return played


def unbroken(played: Rollout) -> list[Episode]:
    """The episodes to train on: those whose environment did not break; UserError without any."""
    for episode in played.episodes:
        if episode.failed:
            console.say(f"episode discarded: {episode.failed}")
    episodes = [e for e in played.episodes if not e.failed]
    if not episodes:
        raise UserError("every episode of the rollout failed; the reasons are printed above.")
    return episodes


def compare_groups(episodes: list[Episode]) -> None:
    """Say so if the members of a group began differently: their returns cannot be compared."""
    begins = {}  # group -> what its members were shown first
    for episode in episodes:
        shown = [transition.observation for transition in episode.transitions[:1]]
        begins.setdefault(episode.group, set()).update(shown)
    if other := sum(len(seen) > 1 for seen in begins.values()):
        console.say(f"warning: in {other} of {len(begins)} groups, the first observations differ; "
                    "`reset` must give the same room for the same task")


def play_panel(cfg: Config, s: Session, done: int, suffix: str = "") -> dict[str, float]:
    """Evaluate after `done` updates; write outcomes and a transcript -> metrics."""
    played = evaluate(cfg, s.policy, s.sampler, s.pool, s.tasks.held_out)
    s.run.write(f"episodes{suffix}.md", transcript(played.episodes))
    s.run.write(f"evaluation{suffix}.json", outcomes(done, played.episodes))
    return played.metrics


def report_evaluation(cfg: Config, s: Session) -> None:
    """Evaluate the newest checkpoint, or without one the start model, and print the metrics."""
    checkpoint = s.run.checkpoint()
    console.say(f"weights: {checkpoint or f'the start model {start_model(cfg)}'}")
    # An evaluation may have other settings than the run, so it has files of its own.
    metrics = play_panel(cfg, s, s.done, suffix="-only")
    for name, value in metrics.items():
        console.say(f"{name:48s} {value:8.3f}")


def log(s: Session, metrics: dict[str, float]) -> None:
    """One line in metrics.jsonl, one on the console, and another if responses were cut."""
    s.run.log(metrics)
    console.say(console.table_line(metrics))
    if cut := console.cut_line(metrics):
        console.say(cut)
