"""One page to look at a run: stored transitions, token by token, before and after training.

    python -m paw_min.inspect RUN [--against RUN] [--updates N] [--out FILE]

Each token of a response has its entropy (the quantity of Eq. 4), each token of a next observation
its p and whether Eq. 7 keeps it (p <= rho): under the start model, under RUN's newest checkpoint,
and under that of another run. The transitions are those that training stored (samples.py). The page
is one HTML file without server or network; its template, page.html, only displays and counts.

The weights at the time of an update are not stored. Selection, rank, lambda and row weight are
those of training. The probabilities before training are what training saw in update 1 only.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from paw_min.config import Config, check, from_stored
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.running.console import progress_bar
from paw_min.running.distributed import join
from paw_min.running.errors import Parser, UserError, user_errors
from paw_min.running.runs import newest_checkpoint, reading, updates_done, writing
from paw_min.running.samples import Sample, StoredRow, read
from paw_min.running.session import forward_precision, start_model
from paw_min.update import observation_loss

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass
class Stored:
    """A run folder as it is on the disk."""

    cfg: Config
    folder: Path
    checkpoint: Path  # the newest
    done: int  # updates that it has seen


@dataclass
class Weights:
    """Weights that score the transitions."""

    label: str  # before, after, against
    detail: str  # which these are
    folder: str


@dataclass
class Seen:
    """A transition under one set of weights."""

    entropy: list[float]  # of each response token, over the vocabulary, in nats
    p: list[float | None]  # of each observation token; None: a given one, which is no target
    hard: str  # per observation token: 1 if the run's loss counts it (Eq. 7), 0 if not, - if given
    loss: float  # of the transition: Eq. 8, or the run's --wm-loss


def open_run(folder: Path) -> Stored:
    """Settings and newest checkpoint; UserError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: give a run folder, such as runs/NAME.")
    with reading(path):  # settings of the machine are those of this one
        stored = from_stored(json.loads(path.read_text()))
        cfg = replace(stored, device="auto", sampler="transformers", shard=False)
        check(cfg)
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint yet: wait for one, or see --save-every.")
    return Stored(cfg, folder, checkpoint, updates_done(checkpoint))


def choose_files(run: Stored, n: int) -> list[Path]:
    """The samples of n updates, from the first to the last that the checkpoint has seen."""
    files = sorted((run.folder / "samples").glob("[0-9]" * 6 + ".json"))
    files = [file for file in files if int(file.stem) <= run.done]
    if not files:
        raise UserError(
            f"{run.folder} has no samples of its updates: it was trained by a version that did not "
            "store them, so train it again under another --name."
        )
    if n < 1:
        raise UserError(f"--updates {n} is out of range: it must be at least 1.")
    n = min(n, len(files))
    return [files[k * (len(files) - 1) // max(n - 1, 1)] for k in range(n)]


def weights_of(run: Stored, against: Stored | None) -> list[Weights]:
    """The columns of the page; UserError if their tokenizers differ."""
    columns = [
        Weights("before", "start model", start_model(run.cfg)),
        Weights("after", updates(run.done), str(run.checkpoint)),
    ]
    if against:
        detail = f"{against.folder.resolve().name}, {updates(against.done)}"
        columns.append(Weights("against", detail, str(against.checkpoint)))
    vocabulary = load_tokenizer(str(run.checkpoint)).get_vocab()
    for column in columns:
        if load_tokenizer(column.folder).get_vocab() != vocabulary:
            raise UserError(
                f"{column.folder} has another tokenizer than {run.checkpoint}, so it cannot score "
                "the stored tokens: compare runs of one model."
            )
    return columns


def updates(n: int) -> str:
    return f"{n} update{'s' * (n != 1)}"


@torch.no_grad()
def score(cfg: Config, policy: Policy, steps: list[StoredRow], label: str = "score") -> list[Seen]:
    """One pass over h_t, a_t and o_{t+1} of each step, by the functions of training."""
    seen, everything = [None] * len(steps), list(range(len(steps)))
    with progress_bar(len(steps), label, "row") as bar:
        with_obs = [True] * len(steps)
        for batch in micro_batches(policy, steps, everything, with_obs, cfg.micro_tokens):
            logp, entropy = policy(batch)  # (B, S), (B, S)
            observations = observation_loss(cfg, logp, batch.obs_mask)
            for b, i in enumerate(batch.index):
                n = len(steps[i].response_ids)
                obs = slice(n, n + len(steps[i].obs_ids))
                targets = batch.obs_mask[b, obs].tolist()
                p = [rounded(x) for x in logp[b, obs].exp().tolist()]
                counted = observations.counted[b, obs].int().tolist()
                seen[i] = Seen(
                    [rounded(x) for x in entropy[b, :n].tolist()],
                    [x if target else None for x, target in zip(p, targets)],
                    "".join(str(x) if t else "-" for x, t in zip(counted, targets)),
                    rounded(observations.per_row[b].item()),
                )
            bar.update(len(batch.index))
    return seen


def rounded(x: float) -> float:
    return round(x, 4) + 0.0  # without -0.0


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text of each token, exactly: joined, they are the text of all.

    Decoded with the token before, since some tokenizers drop a leading space. A character of
    several tokens belongs to the first of them; the others are empty.
    """

    def text(first: int, end: int) -> str:
        return tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)

    parts, first = [""] * len(ids), 0
    for end in range(1, len(ids) + 1):
        context = max(first - 1, 0)
        new = text(context, end)[len(text(context, first)) :]
        if new.endswith("\ufffd") and end < len(ids):  # a character that is not complete yet
            continue
        parts[first], first = new, end
    return parts


def page_data(run: Stored, columns: list[Weights], samples: list[Sample]) -> dict:
    """All that the page shows: run, weights, updates, and the steps of all episodes in order."""
    cfg, steps = run.cfg, [s for sample in samples for e in sample.episodes for s in e.steps]
    device, seen = join("auto"), []
    precision = forward_precision(cfg, device)
    for column in columns:  # one model in memory at a time
        policy = load_policy(column.folder, cfg.temperature, device, precision)
        seen.append(score(cfg, policy, steps, column.label))
    scores, shown = zip(*seen), []
    with progress_bar(len(steps), "text", "row") as bar:
        for k, sample in enumerate(samples):
            for e in sample.episodes:
                of_episode = dict(
                    update=k, group=e.group, episode=e.trajectory, task=e.task, type=e.task_type,
                    won=e.won, ret=e.episode_return, of=len(e.steps),
                )  # fmt: skip
                for n, s in enumerate(e.steps, start=1):
                    of_step = step_data(policy.tokenizer, s, next(scores))
                    shown.append(of_episode | {"n": n} | of_step)
                    bar.update()
    keys = ("env", "algo", "paw", "rho", "select_ratio", "wm_loss", "lambda_mode", "r_max")
    return dict(
        run=run.folder.resolve().name, done=run.done, steps=shown,
        settings={key: getattr(cfg, key) for key in keys},
        weights=[dict(label=column.label, detail=column.detail) for column in columns],
        updates=[
            dict(update=x.update, candidates=x.candidates, kept=x.kept,
                 groups=[asdict(group) for group in x.groups])
            for x in samples
        ],
    )  # fmt: skip


def step_data(tokenizer, s: StoredRow, seen: list[Seen]) -> dict:
    prompt = tokenizer.decode(s.prompt_ids, clean_up_tokenization_spaces=False)
    return dict(
        reward=s.reward, valid=s.valid, selected=s.selected, entropy=s.entropy, rank=s.rank,
        weight=s.weight, prompt=prompt, promptTokens=len(s.prompt_ids),
        response=pieces(tokenizer, s.response_ids), obs=pieces(tokenizer, s.obs_ids),
        seen=[asdict(x) for x in seen],
    )  # fmt: skip


def render(data: dict) -> str:
    """The page. Texts of environments are untrusted: none of their characters can end the data."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # all ASCII
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def summary(data: dict) -> str:
    """What the page contains, in two lines."""
    steps, weights = data["steps"], data["weights"]
    episodes = {(s["update"], s["episode"]) for s in steps}
    names = ", ".join(str(u["update"]) for u in data["updates"])
    lines = f"{len(steps)} transitions of {len(episodes)} episodes, updates {names}; Eq. 4 kept "
    lines += f"{sum(s['selected'] for s in steps)}.\nObservation tokens that the loss counts: "
    kept = [s for s in steps if s["weight"] > 0]
    shares = []
    for k, column in enumerate(weights):
        hard = "".join(s["seen"][k]["hard"] for s in kept).replace("-", "")
        shares.append(f"{hard.count('1')} of {len(hard)} {column['label']}")
    return lines + ", ".join(shares) + "."


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--against", type=Path, help="run folder whose weights score them as well")
    text = "number of updates to show, spread over training (%(default)s)"
    parser.add_argument("--updates", type=int, default=4, help=text)
    parser.add_argument("--out", type=Path, help="file to write (RUN/inspect.html)")
    args = parser.parse_args(argv)
    run = open_run(args.run)
    files = choose_files(run, args.updates)
    columns = weights_of(run, open_run(args.against) if args.against else None)
    vocabulary = len(load_tokenizer(str(run.checkpoint)))
    data = page_data(run, columns, [read(file, vocabulary) for file in files])
    out = args.out or args.run / "inspect.html"
    with writing(out):
        out.write_text(render(data), encoding="utf-8")
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB): {summary(data)}")


if __name__ == "__main__":
    with user_errors():
        main()
