"""One page to look at a run: stored transitions, token by token, before and after training.

    python -m paw_min.inspect RUN [--against RUN] [--updates N] [--out FILE]

Each token of a response has its entropy (the quantity of Eq. 4), each token of a next observation
its p: under the start model, under RUN's newest checkpoint, and under that of another run. The
transitions are those that training stored (samples.py). The page is one HTML file without server or
network. Its template, page.html, answers "what if": from p, the ranks of Eq. 4 and lambda_g, it
computes what teaches, and how much, under another rho, alpha, loss or lambda.

The weights at the time of an update are not stored. Rank and lambda are those of training. The
probabilities before training are what training saw in update 1 only.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paw_min import balance
from paw_min.base.console import progress_bar
from paw_min.base.distributed import join
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import check_writable, replace_text
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS, NAMES
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.running.config_json import read_config
from paw_min.running.runs import newest_checkpoint, updates_done
from paw_min.running.samples import Group, Sample, StoredRow, read
from paw_min.running.session import forward_precision, start_model

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass
class OpenedRun:
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

    entropy: list[float]  # each response token's, over the vocabulary, in nats
    p: list[float | None]  # each observation token's; None: context, not a target


def open_run(folder: Path) -> OpenedRun:
    """Settings and newest checkpoint; UserError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: give a run folder, such as runs/NAME.")
    cfg = read_config(path)
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint yet: wait for one, or see --save-every.")
    return OpenedRun(cfg, folder, checkpoint, updates_done(checkpoint))


def choose_files(run: OpenedRun, n: int) -> list[Path]:
    """The samples of n updates, from the first to the last that the checkpoint has seen."""
    files = sorted((run.folder / "samples").glob("[0-9]" * 6 + ".json"))
    files = [file for file in files if int(file.stem) <= run.done]
    if not files:
        raise UserError(f"{run.folder} has no samples of its updates: train it again, under "
                        "another --name.")
    if n < 1:
        raise UserError(f"--updates {n} is out of range: it must be at least 1.")
    n = min(n, len(files))
    # n positions at equal distances from the first file to the last.
    return [files[k * (len(files) - 1) // max(1, n - 1)] for k in range(n)]


def weights_of(run: OpenedRun, against: OpenedRun | None) -> list[Weights]:
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
def score(
    policy: Policy, steps: list[StoredRow], micro_tokens: int, label: str = "score"
) -> list[Seen]:
    """One pass over h_t, a_t and o_{t+1} of each step, by the functions of training."""
    seen = [None] * len(steps)
    everything = list(range(len(steps)))
    with_obs = [True] * len(steps)
    with progress_bar(len(steps), label, "row") as bar:
        # Batches have rows of similar lengths, in another order than the steps.
        for batch in micro_batches(policy, steps, everything, with_obs, micro_tokens):
            logp, entropy = policy(batch)  # (B, S), (B, S)
            for b, i in enumerate(batch.index):
                row = (entropy, logp.exp(), batch.obs_mask)  # (B, S) each
                seen[i] = seen_in(steps[i], *(column[b].tolist() for column in row))
            bar.update(len(batch.index))
    return seen


def seen_in(
    step: StoredRow, entropy: list[float], p: list[float], is_target: list[bool]
) -> Seen:
    """One row of a batch, S columns each: response, separator, observation, padding."""
    n_response = len(step.response_ids)
    first_obs = n_response + len(step.separator_ids)
    obs = slice(first_obs, first_obs + len(step.obs_ids))
    return Seen(
        entropy=[round(value, 4) + 0.0 for value in entropy[:n_response]],  # -0.0 becomes 0.0
        # Six significant digits: enough to compare with rho as training does. A given token, as the
        # text between two observations, is not a target.
        p=[float(f"{x:.6g}") if target else None for x, target in zip(p[obs], is_target[obs])],
    )


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text of each token, exactly: joined, they are the text of all.

    Decoded with the token before, since some tokenizers drop a leading space. A character of
    several tokens belongs to the first of them; the others are empty.
    """

    def text(first: int, end: int) -> str:
        return tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False)

    parts = [""] * len(ids)
    first = 0  # the first token that has no text yet
    for end in range(1, len(ids) + 1):
        context = max(first - 1, 0)
        new = text(context, end)[len(text(context, first)) :]
        # The decoder writes U+FFFD for a character that is not complete yet: add a token.
        if new.endswith("\ufffd") and end < len(ids):
            continue
        parts[first] = new
        first = end
    return parts


def page_data(run: OpenedRun, columns: list[Weights], samples: list[Sample]) -> dict:
    """All that the page shows: run, weights, updates, and the steps of all episodes in order."""
    steps = []
    for sample in samples:
        for episode in sample.episodes:
            steps += episode.steps
    device = join()
    scores = [score_under(column, run.cfg, steps, device) for column in columns]
    tokenizer = load_tokenizer(str(run.checkpoint))  # that of all columns: see weights_of
    shown = []
    with progress_bar(len(steps), "text", "row") as bar:
        for k, sample in enumerate(samples):
            for episode in sample.episodes:
                of_episode = dict(
                    update=k,
                    group=episode.group,
                    episode=episode.trajectory,
                    task=episode.task,
                    type=episode.task_type,
                    won=episode.won,
                    ret=episode.episode_return,
                    of=len(episode.steps),
                )
                for n, step in enumerate(episode.steps, start=1):
                    seen = [column[len(shown)] for column in scores]  # this step's
                    of_step = step_data(tokenizer, step, seen)
                    shown.append(of_episode | {"n": n} | of_step)
                    bar.update()
    # An environment from elsewhere (examples/hidden.py) is not known here, nor its R_max.
    known = run.cfg.env in (*NAMES, *BENCHMARKS)
    r_max = BENCHMARKS[run.cfg.env].r_max if known else None
    keys = ("env", "method", "algo", "paw", "rho", "alpha", "wm_loss", "wm_target", "lambda_g")
    return dict(
        run=run.folder.resolve().name,
        done=run.done,
        steps=shown,
        settings={key: getattr(run.cfg, key) for key in keys} | {"r_max": r_max},
        weights=[dict(label=column.label, detail=column.detail) for column in columns],
        updates=[update_data(run.cfg, sample, r_max) for sample in samples],
    )


def score_under(
    column: Weights, cfg: Config, steps: list[StoredRow], device: str
) -> list[Seen]:
    """Load the weights of a column and score; a function, so that one model is in memory."""
    precision = forward_precision(cfg.precision, device)
    policy = load_policy(column.folder, cfg.temperature, device, precision)
    return score(policy, steps, cfg.micro_tokens, column.label)


def update_data(cfg: Config, sample: Sample, r_max: float | None) -> dict:
    groups = [
        dict(group=g.group, returns=g.returns, eq10=eq10(cfg, g, r_max)) for g in sample.groups
    ]
    return dict(update=sample.update, candidates=sample.candidates, groups=groups)


def eq10(cfg: Config, group: Group, r_max: float | None) -> float | None:
    """lambda_g of Eq. 10, even where training had another; None if R_max is not known."""
    if cfg.paw and cfg.lambda_g == "adaptive":
        return group.lambda_g
    if r_max is None:
        return None
    return float(balance.lambda_g(sum(group.returns) / len(group.returns), r_max))


def step_data(tokenizer, step: StoredRow, seen: list[Seen]) -> dict:
    prompt = tokenizer.decode(step.prompt_ids, clean_up_tokenization_spaces=False)
    return dict(
        reward=step.reward,
        valid=step.valid,
        entropy=step.entropy,
        rank=step.rank,
        prompt=prompt,
        promptTokens=len(step.prompt_ids),
        response=pieces(tokenizer, step.response_ids),
        separator=tokenizer.decode(step.separator_ids, clean_up_tokenization_spaces=False),
        obs=pieces(tokenizer, step.obs_ids),
        seen=[asdict(x) for x in seen],
    )


def render(data: dict) -> str:
    """The page. Texts of environments are untrusted: none of their characters can end the data."""
    text = json.dumps(data, separators=(",", ":"))  # all ASCII
    text = text.replace("<", "\\u003c")  # the same character for JSON, but not </script> for HTML
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--against", type=Path, help="run folder whose weights score them as well")
    parser.add_argument(
        "--updates", type=int, default=4,
        help="number of updates to show, spread over training (%(default)s)",
    )
    parser.add_argument("--out", type=Path, help="file to write (RUN/inspect.html)")
    args = parser.parse_args(argv)
    run = open_run(args.run)
    files = choose_files(run, args.updates)
    columns = weights_of(run, open_run(args.against) if args.against else None)
    out = args.out or args.run / "inspect.html"
    check_writable(out)
    data = page_data(run, columns, [read(file) for file in files])
    replace_text(out, render(data))
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB): {len(data['steps'])} transitions")


if __name__ == "__main__":
    with user_errors():
        main()
