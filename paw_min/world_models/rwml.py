"""Reinforcement World Model Learning (RWML, arXiv 2602.05842): before RL, predict what actions do.

    python -m paw_min.world_models.rwml ENV --out FOLDER [--method METHOD] [flags of run_ENV.py]

    collect     N = 3 episodes per task; triplets (history, action, next observation)      2.2, 3.1
    fit         a copy of the model, on 10 % of the triplets                               2.2
    filter      the copy tries the others K = 10 times; one hit: keep with p = 0.1         E1, B.1
    train       GRPO with KL on the rest; reward 1 if the prediction is close enough       2.2
    then        RL with the run scripts, from this checkpoint; the last line says how      B.2

The model answers in text, <think>...</think><next_state>...</next_state>, and a frozen sentence
encoder E compares: d = 1 - cos(E(prediction), E(truth)), reward 1 if d < tau_d, else 0. No task
reward is used. The gradient step is the one of RL, update.prepare and update.learn, without PaW: an
answer is a row, and the answers to one triplet are a group.

METHOD is rwml, wm-sft (the paper's baseline: cross entropy on the same triplets, with an empty
thought), early-experience (early_experience.py) or imitation (its second stage alone: what early
experience is worth without predictions). Placebos, as in arXiv 2609.33335: --target shuffled,
--reward coin.

--keep-easy: without the filter. A run has a folder of its own for each of these choices.

FOLDER has triplets.jsonl, held_out.jsonl (of the evaluation panel), collected.json, start/,
filter.json, and a run folder per method. Rerunning the command resumes, in every stage
(running/stages.py). One process, on one GPU.

Not in the paper: the stand-ins' start/ has a format warm start (start.py). What the paper leaves
open is in CHOICES.md.

Legend: B triplets of an update, G answers per triplet.
"""

import shlex
from dataclasses import replace
from pathlib import Path

import torch

from paw_min.base.console import say
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import reading
from paw_min.base.seeds import generator
from paw_min.config import parse_args
from paw_min.metrics import mean
from paw_min.model.sampler import Response
from paw_min.model.scoring import check_sync
from paw_min.rows import Rows, TokenRow
from paw_min.running.evaluate import evaluate
from paw_min.running.presets import presets_of
from paw_min.running.runs import hold
from paw_min.running.session import Session, open_session
from paw_min.running.stages import Pieces
from paw_min.running.tasks import draw_groups
from paw_min.running.untrusted import read_json
from paw_min.targets import random_cycle
from paw_min.update import NonFinite, learn, prepare
from paw_min.world_models import early_experience
from paw_min.world_models.answers import (
    as_written,
    distances,
    predict,
    predicted_state,  # noqa: F401 - part of this module's interface
    predictions,
    quality,
    reward,
)
from paw_min.world_models.filtering import (
    Filtered,
    filter_triplets,
    fits,
    too_easy,  # noqa: F401 - part of this module's interface
    training_threshold,
)
from paw_min.world_models.job import EXPERT, Job, arguments
from paw_min.world_models.start import collected, digest, sft_rate, split, supervise
from paw_min.world_models.triplets import (
    Triplet,
    fitting,
    play,
    prompt_text,
    read_triplets,
    sft_row,
)


def answer_rows(
    prompts: list[list[int]], answers: list[list[Response]], rewards: list[float]
) -> Rows:
    """B prompts with G answers each as rows for update.prepare: a group per prompt."""
    tokens = []
    group = []
    logps = []
    for g, (prompt, of_prompt) in enumerate(zip(prompts, answers, strict=True)):
        for response in of_prompt:
            tokens.append(TokenRow(prompt, response.ids, []))
            group.append(g)
            logps.append(torch.tensor(response.logps))
    return Rows(
        tokens=tokens,
        group=group,
        trajectory=list(range(len(tokens))),
        reward=rewards,
        episode_return=rewards,  # an answer is an episode of one step
        valid=torch.ones(len(tokens), dtype=torch.bool),  # its format is part of the reward
        anchor=[""] * len(tokens),
        command=[""] * len(tokens),
        admissible=[[]] * len(tokens),
        sampler_logp=torch.nn.utils.rnn.pad_sequence(logps, batch_first=True),
    )


def run_update(
    job: Job, s: Session, k: int, prompts: list[list[int]], truths: list[str], threshold: float
) -> dict[str, float]:
    """Update k, from 1: G answers to each of these B prompts, and a GRPO step -> metrics."""
    cfg = job.world
    with s.sampler.sync(s.policy):
        key = (cfg.seed, k)
        answers = predict(
            s.sampler, prompts, cfg.group_size,
            temperature=cfg.temperature, max_tokens=cfg.max_response_tokens, seed_key=key,
        )  # fmt: skip
    predicted = predictions(s.policy, answers)
    repeated = [truth for truth in truths for _ in range(cfg.group_size)]  # B * G
    d = distances(job.encoder, predicted, repeated)
    rewards = [reward(one, threshold) for one in d]
    if job.reward == "coin":  # placebo: a reward that knows nothing
        rng = generator("coin", cfg.seed, k)
        rewards = [float(rng.random() < 0.5) for _ in d]
    rows = answer_rows(prompts, answers, rewards)
    gap = check_sync(cfg, s.policy, rows, k)
    rows = prepare(cfg, s.policy, s.reference, rows)
    try:
        learned = learn(cfg, s.policy, s.optimizer, rows, seed_key=key)
    except NonFinite as error:
        raise UserError(f"update {k}: {error}: delete {s.run.folder}, and lower --lr.") from error
    size = cfg.group_size
    spread = [len(set(rewards[i : i + size])) > 1 for i in range(0, len(rewards), size)]
    # With the coin, `spread` is that of the coin, and `reward` that of the predictions.
    measured = quality(predicted, repeated, d, threshold)
    return {"spread": mean(spread), "sampler_gap": gap} | measured | learned


def train_rwml(
    job: Job, s: Session, done: int, updates: int, triplets: list[Triplet], tau: float
) -> dict[str, float]:
    """The updates after `done` -> metrics of the last, which is not logged yet."""
    cfg = job.world
    batch = job.settings.batch
    prompts = [s.policy.encode_chat(prompt_text(cfg, t)) for t in triplets]
    truths = [as_written(s.policy, t.next_observation) for t in triplets]
    per_epoch = -(-len(triplets) // batch)
    for k in range(done + 1, updates + 1):
        epoch, position = divmod(k - 1, per_epoch)
        order = generator("rwml", cfg.seed, epoch).sample(range(len(triplets)), len(triplets))
        chosen = order[position * batch : (position + 1) * batch]
        metrics = run_update(
            job, s, k, [prompts[i] for i in chosen], [truths[i] for i in chosen], tau
        )
        shown = ("reward", "spread", "exact", "cosine", "well_formed")
        values = "  ".join(f"{name} {metrics[name]:.3f}" for name in shown)
        say(f"update {k} of {updates}  {values}")
        if k < updates:
            s.run.log({"update": k} | metrics)
            if k % cfg.save_every == 0:
                s.run.save(s.policy, s.optimizer, k)
    return metrics


def train_on_expert(job: Job, pieces: Pieces, s: Session) -> dict[str, float]:
    """early_experience.py: prediction for one epoch, then imitation -> metrics.

    Method imitation: without the prediction.
    """
    cfg = job.cfg
    games = draw_groups(s.tasks.train, job.settings.tasks, cfg.seed, 0)
    demonstrations = early_experience.demonstrated(cfg, games)
    fitted = []
    # Of the environment. Replays that reach a demonstrated state again do not count.
    steps = len(demonstrations)
    if job.method == "early-experience":
        branched = early_experience.branches(cfg, s.pool, demonstrations, pieces)
        steps += branched.steps
        fitted = fitting(cfg, s.policy, branched.triplets, job.settings.answer_tokens)
        labels = [sft_row(cfg, s.policy, t) for t in fitted]
        supervise(job, pieces, s.policy, s.optimizer, labels, 1, "branches")
    rows = early_experience.imitation_rows(cfg, s.policy, demonstrations)
    epochs = job.settings.sft_epochs
    imitated = supervise(job, pieces, s.policy, s.optimizer, rows, epochs, "imitation")
    return imitated | {"branches": len(fitted), "branch_steps": steps}


def measure(job: Job, s: Session, held_out: list[Triplet], tau: float) -> dict[str, float]:
    """Greedy predictions of held-out steps, and the policy's play on the panel."""
    # The other methods learn to answer without a thought, so they are asked so before, too. With
    # --prompt paper, the values before training are therefore not those of rwml.
    reason = job.method == "rwml"
    prompts = [s.policy.encode_chat(prompt_text(job.cfg, t, reason)) for t in held_out]
    truths = [as_written(s.policy, t.next_observation) for t in held_out]
    with s.sampler.sync(s.policy):
        answers = predict(
            s.sampler, prompts, 1, temperature=0.0, max_tokens=job.settings.answer_tokens,
            seed_key=(job.cfg.seed, 0),
        )  # fmt: skip
    predicted = predictions(s.policy, answers)
    measured = quality(predicted, truths, distances(job.encoder, predicted, truths), tau)
    panel = evaluate(job.cfg, s.policy, s.sampler, s.pool, s.tasks.held_out).episodes
    return play(job.cfg, panel) | {f"held_out_{key}": x for key, x in measured.items()}


def shuffled_truths(triplets: list[Triplet], seed: int) -> list[Triplet]:
    """Placebo: each triplet gets the next observation of another, by a random cycle."""
    result = list(triplets)
    cycle = random_cycle(list(range(len(triplets))), "shuffled triplets", seed)
    for i, source in cycle.items():
        result[i] = replace(triplets[i], next_observation=triplets[source].next_observation)
    return result


def train(job: Job, kept: list[Triplet], held_out: list[Triplet], tau: float) -> None:
    """Train the start model by the job's method, measured before and after."""
    if job.method in EXPERT and job.paper_scale:
        job = replace(job, settings=replace(job.settings, **early_experience.PUBLISHED))
    cfg = job.world
    if job.method == "rwml":
        cfg = replace(cfg, updates=job.settings.epochs * -(-len(kept) // job.settings.batch))
    else:
        cfg = replace(cfg, lr=sft_rate(job), kl_coef=0.0)
    with open_session(cfg) as s:
        done = s.run.restore(s.policy, s.optimizer)
        s.policy.train()
        pieces = job.pieces(f"{cfg.name}/train")
        logged = [line["update"] for line in s.run.metrics()]
        if done and logged[:1] + logged[-1:] != [0, done]:
            raise UserError(f"{s.run.folder}/metrics.jsonl lacks updates of the checkpoint beside "
                            "it: restore it, or delete the folder to train again.")  # fmt: skip
        if not logged:
            s.run.log({"update": 0} | measure(job, s, held_out, tau))
        if done < cfg.updates:
            if job.method == "rwml":
                metrics = train_rwml(job, s, done, cfg.updates, kept, tau)
            elif job.method == "wm-sft":
                rows = [sft_row(job.cfg, s.policy, t) for t in kept]
                epochs = job.settings.sft_epochs
                metrics = supervise(job, pieces, s.policy, s.optimizer, rows, epochs, "wm-sft")
            else:
                metrics = train_on_expert(job, pieces, s)
            metrics |= measure(job, s, held_out, tau)
            s.run.log({"update": cfg.updates} | metrics)
            s.run.save(s.policy, s.optimizer, cfg.updates)
        pieces.remove()
        show_change(s)
        checkpoint = s.run.checkpoint()
    say("then RL:")
    say(f"python run_{cfg.env}.py {shlex.join(policy_rl(job, checkpoint))}")


def policy_rl(job: Job, checkpoint: Path) -> list[str]:
    """The flags of the paper's policy RL (B.2), without PaW, in a run folder of its own."""
    flags = [*job.flags, "--no-paw"]
    plain, _ = parse_args(job.cfg.env, presets_of(job.cfg.env), "", flags)
    return [*flags, "--name", f"{plain.name}-after-{job.world.name}", "--model", str(checkpoint)]


def show_change(s: Session) -> None:
    """Print what was measured before and after training."""
    first, *_, last = s.run.metrics()
    with reading(s.run.folder / "metrics.jsonl"):  # a metric may be missing
        for name in first:
            if name != "update":
                say(f"{name:22s} {first[name]:6.3f} -> {last[name]:6.3f}")


def main(argv: list[str] | None = None) -> None:
    job = arguments(__doc__, argv)
    # Another command may use the same triplets, but not while they are made.
    lock = hold(job.folder, "--out")
    record = collected(job)
    dropped = [f"{name} {count}" for name, count in record.counts.items() if name != "steps"]
    say(f"{record.triplets} triplets of {record.counts['steps']} steps; dropped: "
        f"{', '.join(dropped)}")  # fmt: skip
    say("collector: " + ", ".join(f"{name} {x:.3f}" for name, x in record.panel.items()))
    triplets = read_triplets(job.folder / "triplets.jsonl")
    held_out = read_triplets(job.folder / "held_out.jsonl")

    if not (job.folder / "start").is_dir():
        raise UserError(f"{job.folder / 'start'} is missing: delete {job.folder} to collect again.")
    if digest(job.folder) != record.digest:
        raise UserError(f"triplets.jsonl or held_out.jsonl in {job.folder} has changed since it "
                        "was collected: restore it, or delete the folder.")  # fmt: skip
    validation, others = split(job, triplets)
    path = job.folder / "filter.json"
    if not path.exists():
        filter_triplets(job, validation, others)
    lock.release()
    chosen = read_json(path, Filtered)
    if not fits(chosen, len(others)):
        raise UserError(f"{path} does not fit the triplets: delete it to filter again.")
    tau = training_threshold(chosen.threshold)
    say(f"filter: {100 * chosen.easy:.1f} % easy at tau_d {chosen.threshold:.3f}, "
        f"{len(chosen.kept)} of {len(others)} triplets kept; training: tau_d {tau:g}")  # fmt: skip
    kept = others if job.keep_easy else [others[i] for i in chosen.kept]
    if job.target == "shuffled":
        kept = shuffled_truths(kept, job.cfg.seed)
    train(job, kept, held_out, tau)


if __name__ == "__main__":
    with user_errors():
        main()
