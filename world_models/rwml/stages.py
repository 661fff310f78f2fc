"""The command of RWML: its stages. A rerun skips those that are complete.

    python -m world_models.rwml ENV --out FOLDER [--method METHOD] [flags of run_ENV.py]

    collect     N = 3 episodes per task; triplets (history, action, next observation)      2.2, 3.1
    fit         a copy of the model, on 10 % of the triplets                               2.2
    filter      the copy tries the others K = 10 times; one hit: keep with p = 0.1         E1, B.1
    train       GRPO with KL on the rest; reward 1 if the prediction is close enough       2.2
    then        RL with the run scripts, from this checkpoint; the last line says how      B.2

METHOD is rwml, wm-sft (the paper's baseline: cross entropy on the same triplets, with an empty
thought) or early-experience (early_experience.py).

FOLDER has triplets.jsonl, held_out.jsonl (of the evaluation panel), collected.json, start/,
filter.json, and a run folder per method and --name. RWML's updates resume from the last checkpoint,
as in RL; another stage that was killed starts again (world_models/stage.py). One process, on one
GPU.

The stand-in models cannot write the format, and their vocabulary has no <next_state>. So start/ has
the tags that a vocabulary lacks, and with the preset tiny a format warm start, cross entropy on the
10 % of triplets. Not in the paper, whose models answer zero-shot.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken

from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.files import replacing
from paw_min.base.seeds import generator
from paw_min.cli import parse_config
from paw_min.config import Config
from paw_min.envs.benchmarks import presets_of
from paw_min.metrics import mean
from paw_min.model import lora
from paw_min.model.loading import load_tokenizer
from paw_min.model.policy import Policy
from paw_min.rollout import rollout
from paw_min.rows import Episode, TokenRow
from paw_min.running.evaluate import evaluate
from paw_min.running.runs import lock_folder
from paw_min.running.session import (
    PANEL_SLOTS,
    Session,
    find_tasks,
    loaded,
    make_optimizer,
    open_session,
    start_model,
)
from paw_min.running.tasks import draw_groups
from paw_min.update import NonFinite
from world_models import rwml
from world_models.rwml import early_experience
from world_models.rwml.settings import RwmlJob, parse
from world_models.rwml.triplets import (
    Triplet,
    fitting,
    prompt_text,
    read_triplets,
    sft_row,
    triplets_of,
    write_triplets,
)
from world_models.stage import command_line, run_stage
from world_models.supervised import fit, load
from world_models.teachers import TEACHERS

HELD_OUT = 200  # transitions of the panel that are predicted, at most
TAGS = ["<think>", "</think>", "<next_state>", "</next_state>"]


# ---- the stages ----


def main(argv: list[str] | None = None) -> None:
    job = parse(__doc__, argv)
    # Another command may use the same triplets, but not while they are made.
    lock = lock_folder(job.folder, "--out")
    path = job.folder / "collected.json"
    writes = ("triplets.jsonl", "held_out.jsonl", "start")
    record = run_stage(path, job.shared(), writes, lambda: make_triplets(job))
    say(found_in(record["counts"], record["triplets"]))
    say("collector: " + ", ".join(f"{name} {x:.3f}" for name, x in record["panel"].items()))

    validation, others = split(job, read_triplets(job.folder / "triplets.jsonl"))
    held_out = read_triplets(job.folder / "held_out.jsonl")
    path = job.folder / "filter.json"
    found = run_stage(path, job.shared(), (), lambda: make_filter(job, validation, others))
    lock.release()
    tau = rwml.training_threshold(found["threshold"])
    kept = [others[i] for i in found["kept"]]
    say(f"filter: {100 * found['easy']:.1f} % easy at tau_d {found['threshold']:.3f}, "
        f"{len(kept)} of {len(others)} triplets kept; training: tau_d {tau:g}")
    train(job, kept, held_out, tau)


# ---- what all methods share: triplets, the model that they start from, the filter ----


def make_triplets(job: RwmlJob) -> dict:
    """Play -> triplets.jsonl, held_out.jsonl and start/; their numbers are collected.json.

    The triplets come from the model's own rollouts at temperature 1 (3.1, B.1), the held-out ones
    from its play on the evaluation panel.
    """
    cfg = job.cfg
    settings = job.settings
    # The run folder of the method has these --groups, too, but is opened only after the filter.
    tasks = find_tasks(replace(cfg, groups=max(settings.tasks, cfg.groups)))
    drawn = draw_groups(tasks.train, settings.tasks, cfg.seed, 0)
    games = [task for task in drawn for _ in range(settings.episodes)]
    slots = min(max(len(games), len(tasks.held_out)), PANEL_SLOTS)
    with (
        loaded_for_answers(cfg, start_model(cfg), settings.answer_tokens) as (policy, sampler),
        closing(tasks.make_pool(slots)) as pool,
    ):
        with sampler.sync(policy):
            sampled = replace(cfg, max_turns=settings.max_turns, temperature=1.0)
            rolled = rollout(sampled, policy, sampler, pool, games, (cfg.seed, 0)).episodes
        panel = evaluate(cfg, policy, sampler, pool, tasks.held_out).episodes
        found = triplets_of(cfg, [episode for episode in rolled if not episode.failed])
        triplets = fitting(cfg, policy, found.triplets, settings.answer_tokens, job.encoder)
        held_out = triplets_of(cfg, panel).triplets
        held_out = fitting(cfg, policy, held_out, settings.answer_tokens, job.encoder)
    counts = found.counts | {"too_long": len(found.triplets) - len(triplets)}
    if len(triplets) * settings.validation < 1 or not held_out:
        raise UserError(f"{found_in(counts, len(triplets))}. These are too few: use more --tasks; "
                        "if most are too_long, raise --answer-tokens and --max-prompt-tokens.")
    steps = [step for episode in rolled for step in episode.transitions]
    acts = [TokenRow(t.prompt_ids, t.response_ids, []) for t in steps if t.valid]
    make_start(job, split(job, triplets)[0], acts)
    # The panel is in the order of the task types, so a part of it is drawn.
    n_held_out = min(HELD_OUT, len(held_out))
    held_out = generator("held out", cfg.seed).sample(held_out, n_held_out)
    write_triplets(job.folder / "held_out.jsonl", held_out)
    write_triplets(job.folder / "triplets.jsonl", triplets)
    return {"triplets": len(triplets), "counts": counts, "panel": play(cfg, panel)}


@contextmanager
def loaded_for_answers(cfg: Config, model: str, answer_tokens: int) -> Iterator[tuple]:
    """A policy and a sampler for one stage, which can write answers as well as actions."""
    longest = max(answer_tokens, cfg.max_response_tokens)
    load_tokenizer(model, cfg.max_prompt_tokens + longest)
    with loaded(replace(cfg, max_response_tokens=longest), model) as found:
        yield found


def found_in(counts: dict[str, int], n_triplets: int) -> str:
    """One sentence on the steps that were collected."""
    dropped = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "steps")
    return f"{n_triplets} triplets of {counts['steps']} steps; dropped: {dropped}"


def split(job: RwmlJob, triplets: list[Triplet]) -> tuple[list[Triplet], list[Triplet]]:
    """10 % and 90 % of the triplets, not of the tasks (3.1)."""
    order = generator("validation", job.cfg.seed).sample(triplets, len(triplets))
    n = int(job.settings.validation * len(order))
    return order[:n], order[n:]


def make_start(job: RwmlJob, validation: list[Triplet], acts: list[TokenRow]) -> None:
    """start/: the model, with the tags in its vocabulary and the format in its habits.

    acts: the model's own well-formed responses. The warm start rehearses as many of them as there
    are labels: without, the stand-ins answer every prompt with a prediction, and no episode can be
    played.
    """
    policy = load(job.cfg, start_model(job.cfg))
    add_tags(policy, job.cfg.seed)
    if job.settings.warm_epochs:
        rows = [sft_row(job.cfg, policy, triplet) for triplet in validation]
        rng = generator("rehearsal", job.cfg.seed)
        rows += rng.sample(acts, min(len(rows), len(acts)))
        optimizer = sft_optimizer(job, policy)
        supervise(job, policy, optimizer, rows, job.settings.warm_epochs, "warm start")
    with replacing(job.folder / "start") as partial:
        policy.save(partial)


def add_tags(policy: Policy, seed: int) -> None:
    """Tokens for the tags that the tokenizer cannot write; word-level ones have no others."""
    missing = [tag for tag in TAGS if tag not in policy.decode(policy.encode(f"{tag} a"))]
    if not missing:
        return
    tokens = [AddedToken(tag, special=False, normalized=False) for tag in missing]
    policy.tokenizer.add_tokens(tokens)
    with torch.random.fork_rng(devices=[]):  # the new embeddings depend on `seed` only
        torch.manual_seed(seed)
        policy.model.resize_token_embeddings(len(policy.tokenizer), mean_resizing=False)


def make_filter(job: RwmlJob, validation: list[Triplet], others: list[Triplet]) -> dict:
    """E1: a copy of the start model learns the task from the 10 %, and tries the others.

    A triplet is easy if one try is a hit at the filter's tau_d, which is stricter than that of
    training. The result is filter.json: this threshold, the share of easy triplets, and which of
    the others are kept.
    """
    cfg = job.cfg
    settings = job.settings
    start = str(job.folder / "start")
    with loaded_for_answers(cfg, start, settings.answer_tokens) as (policy, sampler):
        if cfg.lora_rank:
            lora.attach(policy.model, cfg.lora_rank, policy.precision, cfg.seed, None)
        if cfg.grad_checkpointing:
            policy.model.gradient_checkpointing_enable()
        rows = [sft_row(cfg, policy, triplet) for triplet in validation]
        optimizer = sft_optimizer(job, policy)
        supervise(job, policy, optimizer, rows, settings.sft_epochs, "filter")
        nearest = rwml.tries(
            cfg, policy, sampler, job.encoder, others, settings.tries, settings.answer_tokens
        )
    threshold = rwml.calibrated_threshold(nearest, settings.easy_share)
    hits = [int(rwml.reward(d, threshold)) for d in nearest]
    kept = rwml.too_easy(hits, generator("too easy", cfg.seed))
    if not kept:
        raise UserError(f"all {len(others)} triplets are easy, and none is drawn to stay: use more "
                        "--tasks, and another --out.")
    return {"threshold": threshold, "easy": mean(hits), "kept": kept}


# ---- the methods ----


def train(job: RwmlJob, kept: list[Triplet], held_out: list[Triplet], tau: float) -> None:
    """Train the start model by the job's method, measured before and after."""
    method = job.settings.method
    cfg = job.method_config()
    if method == "rwml":
        cfg = replace(cfg, updates=job.settings.epochs * -(-len(kept) // job.settings.batch))
    else:
        cfg = replace(cfg, lr=job.settings.sft_lr, kl_coef=0.0)
    with open_session(cfg) as s:
        if not s.run.metrics():
            metrics = {"update": 0} | measure(job, s, held_out, tau)
            s.run.log(metrics)
            s.run.track(metrics)
        if s.done < cfg.updates:
            if method == "rwml":
                metrics = train_rwml(job, cfg, s, kept, tau)
            elif method == "wm-sft":
                rows = [sft_row(cfg, s.policy, t) for t in kept]
                epochs = job.settings.sft_epochs
                metrics = supervise(job, s.policy, s.optimizer, rows, epochs, "wm-sft")
            else:
                metrics = train_on_expert(job, s)
            metrics = {"update": cfg.updates} | metrics | measure(job, s, held_out, tau)
            s.run.log(metrics)
            s.run.save(s.policy, s.optimizer, cfg.updates)
            s.run.track(metrics)
        show_change(s)
        checkpoint = s.run.checkpoint()
    say("then RL:")
    say(f"python run_{cfg.env}.py {command_line(policy_rl(job, checkpoint))}")


def train_rwml(
    job: RwmlJob, cfg: Config, s: Session, triplets: list[Triplet], tau: float
) -> dict[str, float]:
    """The updates after `s.done` -> metrics of the last, which is not logged yet."""
    prompts = [s.policy.encode_chat(prompt_text(cfg, t)) for t in triplets]
    truths = rwml.truths_of(s.policy, triplets)
    for k in range(s.done + 1, cfg.updates + 1):
        chosen = rwml.batch_of_update(k, len(triplets), job.settings.batch, cfg.seed)
        try:
            metrics = rwml.update(
                cfg, s, k, job.encoder, [prompts[i] for i in chosen], [truths[i] for i in chosen],
                tau,
            )
        except NonFinite as error:
            remedy = f"delete {s.run.folder}, and lower --lr."
            raise UserError(f"update {k}: {error}: {remedy}") from error
        shown = ("reward", "spread", "exact", "cosine", "well_formed")
        values = "  ".join(f"{name} {metrics[name]:.3f}" for name in shown)
        say(f"update {k} of {cfg.updates}  {values}")
        if k < cfg.updates:
            s.run.log({"update": k} | metrics)
            if k % cfg.save_every == 0:
                s.run.save(s.policy, s.optimizer, k)
            s.run.track({"update": k} | metrics)
    return metrics


def train_on_expert(job: RwmlJob, s: Session) -> dict[str, float]:
    """early_experience.py: prediction for one epoch, then imitation -> metrics."""
    cfg = job.cfg
    games = draw_groups(s.tasks.train, job.settings.tasks, cfg.seed, 0)
    demonstrations = TEACHERS[cfg.env].demonstrations(games, cfg.seed, haste=0.0, episodes=1)
    branches = early_experience.branches(cfg, s.pool, demonstrations)
    branches = fitting(cfg, s.policy, branches, job.settings.answer_tokens, job.encoder)
    labels = [sft_row(cfg, s.policy, t) for t in branches]
    supervise(job, s.policy, s.optimizer, labels, 1, "branches")
    rows = early_experience.imitation_rows(cfg, s.policy, demonstrations)
    epochs = job.settings.sft_epochs
    imitated = supervise(job, s.policy, s.optimizer, rows, epochs, "imitation")
    return imitated | {"branches": len(branches)}


def supervise(
    job: RwmlJob, policy: Policy, optimizer, rows: list[TokenRow], epochs: int, what: str
) -> dict[str, float]:
    """Cross entropy on the labels of these rows -> metrics. what: its name."""
    if not rows:
        raise UserError(f"{what}: no label is short enough for an answer; use another --model, or "
                        "more --tasks.")
    policy.train()
    losses = fit(
        policy, optimizer, rows, epochs=epochs, batch=job.settings.batch, warm_up=0,
        micro_tokens=job.cfg.micro_tokens, seed_key=("rwml", job.cfg.seed), name=what,
    )
    steps = f"{len(rows)} labels, {len(losses)} steps"
    say(f"{what}: {steps}, {losses[0]:.3f} to {losses[-1]:.3f} nats per token")
    return {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}


def sft_optimizer(job: RwmlJob, policy: Policy) -> torch.optim.Optimizer:
    return make_optimizer(policy, job.settings.sft_lr, job.cfg.beta2)


# ---- before and after ----


def measure(job: RwmlJob, s: Session, held_out: list[Triplet], tau: float) -> dict[str, float]:
    """Greedy predictions of held-out steps, and the policy's play on the panel."""
    # The other methods learn to answer without a thought, so they are asked so even before
    # training. With --prompt paper, the values before training are therefore not those of rwml.
    reason = job.settings.method == "rwml"
    prompts = [s.policy.encode_chat(prompt_text(job.cfg, t, reason)) for t in held_out]
    with s.sampler.sync(s.policy):
        answers = rwml.predict(
            s.sampler, prompts, 1, temperature=0.0, max_tokens=job.settings.answer_tokens,
            seed_key=(job.cfg.seed, 0),
        )
    predictions = rwml.predictions_of(s.policy, answers)
    truths = rwml.truths_of(s.policy, held_out)
    d = rwml.distances(job.encoder, predictions, truths)
    measured = rwml.quality(predictions, truths, d, tau)
    panel = evaluate(job.cfg, s.policy, s.sampler, s.pool, s.tasks.held_out).episodes
    return play(job.cfg, panel) | {f"held_out_{key}": x for key, x in measured.items()}


def play(cfg: Config, episodes: list[Episode]) -> dict[str, float]:
    """Success on the panel, and the share of invalid actions: malformed, or without effect."""
    counts = triplets_of(cfg, episodes).counts
    invalid = counts["malformed"] + counts["no_effect"]
    return {
        "eval_success": mean([episode.won for episode in episodes if not episode.failed]),
        "eval_invalid": invalid / max(1, counts["steps"]),
    }


def show_change(s: Session) -> None:
    """Print what was measured before and after training."""
    first, *_, last = s.run.metrics()
    for name in first:
        if name != "update":
            say(f"{name:22s} {first[name]:6.3f} -> {last[name]:6.3f}")


def policy_rl(job: RwmlJob, checkpoint: Path) -> list[str]:
    """The flags of the paper's policy RL (B.2), without PaW, in a run folder of its own."""
    flags = [*job.flags, "--no-paw"]
    plain = parse_config(job.cfg.env, presets_of(job.cfg.env), "", flags)
    name = f"{plain.name}-after-{job.name}"
    return [*flags, "--name", name, "--model", str(checkpoint)]
