"""Reinforcement World Model Learning (RWML, arXiv 2602.05842): before RL, predict what actions do.

    python -m paw_min.world_models.rwml ENV --out FOLDER [--method METHOD] [flags of run_ENV.py]

    collect     N = 3 episodes per task; triplets (history, action, next observation)      2.2, 3.1
    fit         a copy of the model, on 10 % of the triplets                               2.2
    filter      the copy tries the others K = 10 times; one hit: keep with p = 0.1         E1, B.1
    train       GRPO with KL on the rest; reward 1 if the prediction is close enough       2.2
    then        RL with the run scripts from this checkpoint; the last line says how       B.2

The model answers in text, <think>...</think><next_state>...</next_state>, and a frozen sentence
encoder E compares: d = 1 - cos(E(prediction), E(truth)), reward 1 if d < tau_d, else 0. No task
reward is used. The gradient step is the one of RL, update.prepare and update.learn, without PaW: an
answer is a row, and the answers to one triplet are a group.

METHOD is rwml, wm-sft (the paper's baseline: cross entropy on the same triplets, with an empty
thought) or early-experience (early_experience.py). Placebos, as in arXiv 2609.33335: --target
shuffled, --reward coin.

FOLDER has triplets.jsonl, held_out.jsonl (of the evaluation panel), collected.json, start/,
filter.json, and a run folder per method. Rerunning the command resumes.

Not in the paper: the stand-in models cannot write the format, and their vocabulary has no
<next_state>. start/ has the tags and a format warm start, cross entropy on the 10 % of triplets.
What the paper leaves open is in CHOICES.md.

Legend: B triplets of an update, G answers per triplet.
"""

import json
import math
import os
import random
import shlex
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from tokenizers import AddedToken

from paw_min.model import lora
from paw_min.model.batches import TokenRow
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response
from paw_min.model.scoring import check_sync
from paw_min.retrieval.dense import Encoder
from paw_min.rollout import Rows
from paw_min.running import distributed
from paw_min.running.console import progress_bar, say
from paw_min.running.errors import UserError, user_errors
from paw_min.running.evaluate import evaluate
from paw_min.running.metrics import mean
from paw_min.running.runs import remove, writing
from paw_min.running.seeds import generator, request_seed
from paw_min.running.session import (
    Session,
    make_optimizer,
    open_session,
    start_model,
)
from paw_min.running.tasks import draw_groups
from paw_min.running.untrusted import exact, read_json
from paw_min.targets import random_cycle
from paw_min.train import stopped_by_nan
from paw_min.update import NonFinite, learn, prepare
from paw_min.world_models import early_experience
from paw_min.world_models.job import PAPER, Job, arguments
from paw_min.world_models.supervised import fit
from paw_min.world_models.triplets import (
    Triplet,
    collect,
    fitting,
    loaded,
    play,
    prompt_text,
    read_triplets,
    sft_row,
    write,
    write_triplets,
)

KEEP = 0.1  # probability that an easy triplet survives, B.1
MARGIN = 0.15  # from the filter's tau_d to that of training, Table A2 ...
STEP = 0.2  # ... which is rounded to a multiple of this
THRESHOLDS = (0.01, 0.5)  # range of the filter's tau_d: above, generic answers pass (Table A2)
HELD_OUT = 200  # transitions of the panel that are predicted, at most
TAGS = ["<think>", "</think>", "<next_state>", "</next_state>"]


# ---- the method: answers, reward, thresholds, filter ----


def predicted_state(response: str) -> str | None:
    """The text in the last <next_state> ... </next_state> of an answer; None if it is malformed.

    The last opening tag, since the thought may mention the tags. Nothing else is required.
    """
    _, opened, rest = response.rpartition("<next_state>")
    text, closed, _ = rest.partition("</next_state>")
    return text.strip() or None if opened and closed else None


def reward(distance: float, threshold: float) -> float:
    """r = 1 if d < tau_d, else 0 (2.2); malformed answers have d = inf."""
    return 1.0 if distance < threshold else 0.0


def too_easy(hits_per_triplet: list[int], rng: random.Random) -> list[int]:
    """E1: positions of the kept triplets. One hit in K tries is easy; those stay with p = 0.1."""
    # As printed, E1 compares the mean with tau_easy = 0 by ">=", and all would be easy.
    return [i for i, hits in enumerate(hits_per_triplet) if not hits or rng.random() < KEEP]


def calibrated_threshold(nearest: list[float], easy_share: float) -> float:
    """Table A2: the filter's tau_d for which this share of the triplets is easy.

    nearest: the smallest distance among the K tries of each triplet. A triplet is easy if it is
    below tau_d, so tau_d is the smallest distance that is not to count. Exact predictions, d = 0,
    are easy at any tau_d; the share is then larger.
    """
    in_order = sorted(nearest)
    count = round(easy_share * len(in_order))
    low, high = THRESHOLDS
    return min(max(in_order[min(count, len(in_order) - 1)], low), high)


def training_threshold(filter_threshold: float) -> float:
    """Table A2: tau_d of training, the filter's + 0.15, to the nearest 0.2; halves round up."""
    steps = round((filter_threshold + MARGIN) / STEP, 9)  # 0.3 / 0.2 is 1.4999999999999998
    return round(STEP * math.floor(steps + 0.5), 9)


def distances(encoder: Encoder, predictions: list[str | None], truths: list[str]) -> list[float]:
    """d = 1 - cos(E(p), E(s)) of each pair (2.2); inf without a prediction."""
    texts = sorted({*truths, *(text for text in predictions if text is not None)})
    vectors = dict(zip(texts, encoder.passages(texts, len(texts))))  # of length 1
    found = []
    for prediction, truth in zip(predictions, truths, strict=True):
        d = math.inf
        if prediction is not None:
            d = 1.0 - float(vectors[prediction] @ vectors[truth])
        found.append(d)
    return found


def quality(
    predictions: list[str | None], truths: list[str], d: list[float], threshold: float
) -> dict[str, float]:
    """Means over the predictions, given their distances; a malformed one has the cosine 0."""
    return {
        "reward": mean([reward(one, threshold) for one in d]),
        "exact": mean([p == truth for p, truth in zip(predictions, truths, strict=True)]),
        "cosine": mean([1.0 - min(one, 1.0) for one in d]),
        "well_formed": mean([p is not None for p in predictions]),
    }


# ---- stages before training, each with a file in FOLDER ----


class Split(NamedTuple):
    validation: list[Triplet]
    others: list[Triplet]


def split(job: Job, triplets: list[Triplet]) -> Split:
    """10 % and 90 % of the triplets, not of the tasks (3.1)."""
    order = generator("validation", job.cfg.seed).sample(triplets, len(triplets))
    n = int(job.settings.validation * len(order))
    return Split(order[:n], order[n:])


def make_start(job: Job, validation: list[Triplet], acts: list[TokenRow]) -> None:
    """start/: the model, with the tags in its vocabulary and the format in its habits.

    acts: the model's own responses. The warm start rehearses as many of them as there are labels:
    without, the stand-ins answer every prompt with a prediction, and no episode can be played.
    """
    with loaded(job.cfg, start_model(job.cfg), job.settings.answer_tokens) as (policy, _):
        add_tags(policy, job.cfg.seed)
        if job.settings.warm_epochs:
            rows = [sft_row(job.cfg, policy, triplet) for triplet in validation]
            rng = generator("rehearsal", job.cfg.seed)
            rows += rng.sample(acts, min(len(rows), len(acts)))
            optimizer = sft_optimizer(job, policy)
            supervise(job, policy, optimizer, rows, job.settings.warm_epochs, "warm start")
        if distributed.rank() == 0:
            with writing("the start model"):
                partial = job.folder / "start.partial"
                for folder in (partial, job.folder / "start"):
                    if os.path.lexists(folder):
                        remove(folder)
                policy.save(partial)
                os.replace(partial, job.folder / "start")


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


def supervise(
    job: Job, policy: Policy, optimizer, rows: list[TokenRow], epochs: int, what: str
) -> dict[str, float]:
    """Cross entropy on the labels of these rows -> metrics. what: for the console."""
    policy.train()
    losses = fit(
        policy, optimizer, rows, epochs=epochs, batch=job.settings.batch, warm_up=0,
        micro_tokens=job.cfg.micro_tokens, seed_key=("rwml", job.cfg.seed),
    )  # fmt: skip
    steps = f"{len(rows)} labels, {len(losses)} steps"
    say(f"{what}: {steps}, {losses[0]:.3f} to {losses[-1]:.3f} nats per token")
    return {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}


def sft_optimizer(job: Job, policy: Policy) -> torch.optim.Optimizer:
    return make_optimizer(replace(job.cfg, lr=job.settings.sft_lr), policy)


@exact
@dataclass
class Filtered:
    threshold: float  # the filter's tau_d
    easy: float  # share of the triplets that the filter predicts at least once
    kept: list[int]  # positions among the training triplets


def filter_triplets(job: Job, validation: list[Triplet], others: list[Triplet]) -> Filtered:
    """E1: which triplets are worth training on -> filter.json."""
    settings = job.settings
    start = str(job.folder / "start")
    with loaded(job.cfg, start, job.settings.answer_tokens) as (policy, sampler):
        if job.cfg.lora_rank:
            lora.attach(policy.model, job.cfg.lora_rank, policy.precision, job.cfg.seed, None)
        # 1. A separate copy learns the task from the 10 %.
        rows = [sft_row(job.cfg, policy, triplet) for triplet in validation]
        supervise(job, policy, sft_optimizer(job, policy), rows, settings.sft_epochs, "filter")
        # 2. It answers each of the others K times.
        prompts = [policy.encode_chat(prompt_text(job.cfg, t)) for t in others]
        with sampler.sync(policy):
            answers = predict(job, policy, sampler, prompts, settings.tries, 1.0, (job.cfg.seed, 0))
        truths = [as_written(policy, t.following) for t in others for _ in range(settings.tries)]
        d = distances(job.encoder, predictions(policy, answers), truths)
    # 3. Hits at the filter's own threshold, which is stricter than that of training.
    tries = [d[i : i + settings.tries] for i in range(0, len(d), settings.tries)]  # N x K
    threshold = calibrated_threshold([min(one) for one in tries], settings.easy_share)
    hits = [int(sum(reward(x, threshold) for x in one)) for one in tries]
    # 4., 5. The easy ones stay with p = 0.1.
    result = Filtered(
        threshold=threshold,
        easy=mean([count > 0 for count in hits]),
        kept=too_easy(hits, generator("too easy", job.cfg.seed)),
    )
    write(job.folder / "filter.json", json.dumps(asdict(result)) + "\n")
    return result


# ---- training ----


def predict(
    job: Job, policy: Policy, sampler, prompts: list[list[int]], tries: int,
    temperature: float, seed_key: tuple[int, ...],
) -> list[list[Response]]:  # fmt: skip
    """`tries` answers to each prompt, within sampler.sync(policy); all of them on every rank."""
    total = len(prompts) * tries
    first = distributed.rank() * total // distributed.n_ranks()
    end = (distributed.rank() + 1) * total // distributed.n_ranks()
    queue = deque()
    for i in range(first, end):
        queue.append(Request(i, prompts[i // tries], request_seed(*seed_key, i)))
    found = {}
    with progress_bar(end - first, "predict", "answer") as bar:
        for finished in sampler.generate(queue, temperature, job.settings.answer_tokens):
            found |= {response.slot: response for response in finished}
            bar.update(len(finished))
    flat = distributed.all_gather([found[i] for i in range(first, end)])
    return [flat[i : i + tries] for i in range(0, total, tries)]


def predictions(policy: Policy, answers: list[list[Response]]) -> list[str | None]:
    return [predicted_state(policy.decode(one.ids)) for group in answers for one in group]


def as_written(policy: Policy, text: str) -> str:
    """A text as this model would write it: a word-level tokenizer loses case and spaces."""
    return policy.decode(policy.encode(text)).strip()


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
        sampler_logp=torch.nn.utils.rnn.pad_sequence(logps, batch_first=True),
    )


def run_update(
    job: Job, s: Session, k: int, prompts: list[list[int]], truths: list[str], threshold: float
) -> dict[str, float]:
    """Update k, from 1: G answers to each of these B prompts, and a GRPO step -> metrics."""
    cfg = job.world
    with s.sampler.sync(s.policy):
        key = (cfg.seed, k)
        answers = predict(job, s.policy, s.sampler, prompts, cfg.group_size, cfg.temperature, key)
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
        raise stopped_by_nan(s, error, k) from error
    size = cfg.group_size
    spread = [len(set(rewards[i : i + size])) > 1 for i in range(0, len(rewards), size)]
    measured = quality(predicted, repeated, d, threshold)
    return {"spread": mean(spread), "sampler_gap": gap} | measured | learned


def train_rwml(
    job: Job, s: Session, done: int, updates: int, triplets: list[Triplet], tau: float
) -> dict[str, float]:
    """The updates after `done` -> metrics of the last, which is not logged yet."""
    cfg = job.world
    batch = job.settings.batch
    prompts = [s.policy.encode_chat(prompt_text(cfg, t)) for t in triplets]
    truths = [as_written(s.policy, t.following) for t in triplets]
    per_epoch = -(-len(triplets) // batch)
    for k in range(done + 1, updates + 1):
        epoch, position = divmod(k - 1, per_epoch)
        order = generator("rwml", cfg.seed, epoch).sample(range(len(triplets)), len(triplets))
        chosen = order[position * batch : (position + 1) * batch]
        metrics = run_update(
            job, s, k, [prompts[i] for i in chosen], [truths[i] for i in chosen], tau
        )
        shown = ("reward", "spread", "exact", "cosine", "well_formed")
        say(f"{k:5d}  " + "  ".join(f"{name} {metrics[name]:.3f}" for name in shown))
        if k < updates:
            s.run.log({"update": k} | metrics)
            if k % cfg.save_every == 0:
                s.run.save(s.policy, s.optimizer, k)
    return metrics


def train_early_experience(job: Job, s: Session) -> dict[str, float]:
    """early_experience.py: prediction for one epoch, then imitation -> metrics."""
    cfg = job.cfg
    games = draw_groups(s.tasks.train, job.settings.tasks, cfg.seed, 0)
    steps = early_experience.demonstrated(cfg, games)
    triplets = early_experience.branches(cfg, s.pool, steps)
    fitted = fitting(cfg, s.policy, triplets, job.settings.answer_tokens)
    rows = [sft_row(cfg, s.policy, t) for t in fitted]
    supervise(job, s.policy, s.optimizer, rows, 1, "branches")
    rows = early_experience.imitation_rows(s.policy, steps)
    epochs = job.settings.sft_epochs
    imitated = supervise(job, s.policy, s.optimizer, rows, epochs, "imitation")
    return imitated | {"branches": len(fitted)}


def measure(job: Job, s: Session, held_out: list[Triplet], tau: float) -> dict[str, float]:
    """Greedy predictions of held-out steps, and the policy's play on the panel."""
    prompts = [s.policy.encode_chat(prompt_text(job.cfg, t)) for t in held_out]
    truths = [as_written(s.policy, t.following) for t in held_out]
    with s.sampler.sync(s.policy):
        answers = predict(job, s.policy, s.sampler, prompts, 1, 0.0, (job.cfg.seed, 0))
    predicted = predictions(s.policy, answers)
    measured = quality(predicted, truths, distances(job.encoder, predicted, truths), tau)
    panel = evaluate(job.cfg, s.policy, s.sampler, s.pool, s.tasks.held_out).episodes
    return play(job.cfg, panel) | {f"held_out_{key}": x for key, x in measured.items()}


def shuffled(triplets: list[Triplet], seed: int) -> list[Triplet]:
    """Placebo: each triplet gets the next observation of another, by a random cycle."""
    result = list(triplets)
    cycle = random_cycle(list(range(len(triplets))), "shuffled triplets", seed)
    for i, source in cycle.items():
        result[i] = replace(triplets[i], following=triplets[source].following)
    return result


# ---- the command ----


@exact
@dataclass
class Record:
    """collected.json: written last, so that a rerun collects again unless it is there."""

    settings: dict
    triplets: int
    counts: dict[str, int]  # see triplets.collect
    panel: dict[str, float]


def collected(job: Job) -> Record:
    """Read FOLDER's record, or collect first."""
    path = job.folder / "collected.json"
    if not path.is_file():
        if (job.folder / "start").exists() and not (job.folder / "triplets.jsonl").exists():
            raise UserError(f"{job.folder / 'start'} is not of this command: use another --out.")
        settings = job.settings
        found = collect(
            job.cfg, tasks=settings.tasks, episodes=settings.episodes,
            max_turns=settings.max_turns, answer_tokens=settings.answer_tokens,
        )  # fmt: skip
        if len(found.triplets) * settings.validation < 1 or not found.held_out:
            raise UserError(f"{len(found.triplets)} triplets are too few: use more --tasks.")
        write_triplets(job.folder / "triplets.jsonl", found.triplets)
        write_triplets(job.folder / "held_out.jsonl", found.held_out[:HELD_OUT])
        make_start(job, split(job, found.triplets).validation, found.acts)
        record = Record(job.identity(), len(found.triplets), found.counts, found.panel)
        write(path, json.dumps(asdict(record), indent=1) + "\n")
    record = read_json(path, Record)
    known = record.settings
    # A setting that is newer than the folder has its default there.
    changed = [key for key, value in job.identity().items() if known.get(key, value) != value]
    if changed:
        shown = ", ".join(f"{key} {known.get(key)!r}" for key in changed)
        raise UserError(f"{job.folder} was made with {shown}: repeat that, or use another --out.")
    return record


def main(argv: list[str] | None = None) -> None:
    job = arguments(__doc__, argv)
    distributed.join(job.cfg.device)
    record = collected(job)
    shown = ", ".join(f"{name} {count}" for name, count in record.counts.items())
    say(f"{record.triplets} triplets; {shown}")
    say("collector: " + ", ".join(f"{name} {x:.3f}" for name, x in record.panel.items()))
    triplets = read_triplets(job.folder / "triplets.jsonl")
    held_out = read_triplets(job.folder / "held_out.jsonl")

    if not (job.folder / "start").is_dir():
        raise UserError(f"{job.folder / 'start'} is missing: delete {job.folder} to collect again.")
    if len(triplets) != record.triplets:
        raise UserError(f"{job.folder / 'triplets.jsonl'} has {len(triplets)} triplets, but "
                        f"{record.triplets} were collected: delete {job.folder} to collect again.")
    validation, others = split(job, triplets)
    path = job.folder / "filter.json"
    if not path.is_file():
        filter_triplets(job, validation, others)
    chosen = read_json(path, Filtered)
    low, high = THRESHOLDS
    in_order = chosen.kept == sorted(set(chosen.kept))
    inside = all(0 <= i < len(others) for i in chosen.kept) and low <= chosen.threshold <= high
    if not (chosen.kept and in_order and inside):
        raise UserError(f"{path} does not fit the triplets: delete it to filter again.")
    tau = training_threshold(chosen.threshold)
    say(f"filter: {100 * chosen.easy:.1f} % easy at tau_d {chosen.threshold:.3f}, "
        f"{len(chosen.kept)} of {len(others)} triplets kept; training: tau_d {tau:g}")  # fmt: skip
    kept = [others[i] for i in chosen.kept]
    if job.target == "shuffled":
        kept = shuffled(kept, job.cfg.seed)
    train(job, kept, held_out, tau)


def train(job: Job, kept: list[Triplet], held_out: list[Triplet], tau: float) -> None:
    """Train the start model by the job's method, measured before and after."""
    if job.method == "early-experience" and job.settings.sft_lr == PAPER.sft_lr:
        job.settings = replace(job.settings, **early_experience.PUBLISHED)
    cfg = job.world
    if job.method == "rwml":
        cfg = replace(cfg, updates=job.settings.epochs * -(-len(kept) // job.settings.batch))
    else:
        cfg = replace(cfg, lr=job.settings.sft_lr, kl_coef=0.0)
    with open_session(cfg) as s:
        done = s.run.restore(s.policy, s.optimizer)
        s.policy.train()
        if not done and not s.run.metrics():
            s.run.log({"update": 0} | measure(job, s, held_out, tau))
        if done < cfg.updates:
            if job.method == "rwml":
                metrics = train_rwml(job, s, done, cfg.updates, kept, tau)
            elif job.method == "wm-sft":
                rows = [sft_row(job.cfg, s.policy, t) for t in kept]
                epochs = job.settings.sft_epochs
                metrics = supervise(job, s.policy, s.optimizer, rows, epochs, "wm-sft")
            else:
                metrics = train_early_experience(job, s)
            metrics |= measure(job, s, held_out, tau)
            s.run.log({"update": cfg.updates} | metrics)
            s.run.save(s.policy, s.optimizer, cfg.updates)
        first, *_, last = s.run.metrics()
        for name in first:
            if name != "update":
                say(f"{name:22s} {first[name]:6.3f} -> {last[name]:6.3f}")
        checkpoint = s.run.checkpoint()
    say("then RL:")
    say(f"python run_{cfg.env}.py {shlex.join(job.flags)} --model {checkpoint}")


if __name__ == "__main__":
    with user_errors():
        main()
        distributed.finish()
