"""One page to look at a run: stored transitions, token by token, before and after training.

    python -m paw_min.inspect RUN [--against RUN] [--updates N] [--out FILE]

Each token of a response has its entropy (the quantity of Eq. 4), each token of a next observation
its p: under the start model, under RUN's newest checkpoint, and under that of another run. The
transitions are those that training stored (samples.py), with the selection (Eq. 4) and lambda_g
(Eq. 10) of training. The page is one HTML file without server or network. Its template, page.html,
has a slider: which tokens would teach with another rho (Eq. 7)?

The weights at the time of an update are not stored. The probabilities before training are what
training saw in update 1 only.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paw_min.base.console import progress_bar
from paw_min.base.distributed import join
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import check_writable, replace_text
from paw_min.base.flags import Parser
from paw_min.config import Config
from paw_min.inspect.tokens import pieces
from paw_min.model.batches import micro_batches
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.running.config_json import read_config
from paw_min.running.runs import newest_checkpoint, updates_done
from paw_min.running.samples import Sample, StoredRow, read
from paw_min.running.session import forward_precision, start_model

TEMPLATE = Path(__file__).with_name("page.html")
SETTINGS = ("env", "method", "algo", "paw", "rho", "wm_loss", "wm_target")


@dataclass
class OpenedRun:
    """A run folder as it is on the disk."""

    cfg: Config
    folder: Path
    checkpoint: Path  # the newest
    done: int  # updates that it has seen


@dataclass
class Weights:
    """Weights that score the transitions: a column of the page."""

    label: str  # before, after, against
    detail: str  # which these are
    folder: str


@dataclass
class Seen:
    """A transition under one set of weights."""

    entropy: list[float]  # each response token's, over the vocabulary, in nats
    p: list[float | None]  # each observation token's; None: context, not a target


@dataclass
class Shown:
    """A transition on the page."""

    update: int
    group: int
    episode: int
    n: int  # its number in the episode, from 1 ...
    of: int  # ... to this
    task: str
    won: bool
    episode_return: float
    reward: float
    valid: bool  # is the response well formed?
    selected: bool  # Eq. 4
    rank: int | None  # among the candidates of its update; None: it did not compete
    candidates: int
    lambda_g: float  # Eq. 10
    prompt: str
    prompt_tokens: int
    response: list[str]  # a text per token
    separator: str
    obs: list[str]
    seen: list[Seen]  # one for each of the weights


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
    with progress_bar(len(steps), label, "row") as bar:
        # Batches have rows of similar lengths, in another order than the steps.
        for batch in micro_batches(policy, steps, everything, [True] * len(steps), micro_tokens):
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


def score_under(
    column: Weights, cfg: Config, steps: list[StoredRow], device: str
) -> list[Seen]:
    """Load the weights of a column and score; a function, so that one model is in memory."""
    precision = forward_precision(cfg.precision, device)
    policy = load_policy(column.folder, cfg.temperature, device, precision)
    return score(policy, steps, cfg.micro_tokens, column.label)


def page_data(run: OpenedRun, columns: list[Weights], samples: list[Sample]) -> dict:
    """All that the page shows: run, settings, weights, and the steps of all episodes in order."""
    steps = [step for sample in samples for e in sample.episodes for step in e.steps]
    device = join()
    scores = [score_under(column, run.cfg, steps, device) for column in columns]
    seen = zip(*scores, strict=True)  # of each step: that of each column
    tokenizer = load_tokenizer(str(run.checkpoint))  # that of all columns: see weights_of

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    shown = []
    for sample in samples:
        lambdas = {group.group: group.lambda_g for group in sample.groups}
        for e in sample.episodes:
            for n, step in enumerate(e.steps, start=1):
                shown.append(Shown(
                    update=sample.update, group=e.group, episode=e.trajectory, n=n, of=len(e.steps),
                    task=e.task, won=e.won, episode_return=e.episode_return, reward=step.reward,
                    valid=step.valid, selected=step.selected, rank=step.rank,
                    candidates=sample.candidates, lambda_g=lambdas[e.group],
                    prompt=text(step.prompt_ids), prompt_tokens=len(step.prompt_ids),
                    response=pieces(tokenizer, step.response_ids),
                    separator=text(step.separator_ids), obs=pieces(tokenizer, step.obs_ids),
                    seen=list(next(seen)),
                ))
    return dict(
        run=run.folder.resolve().name,
        settings={key: getattr(run.cfg, key) for key in SETTINGS},
        weights=[dict(label=column.label, detail=column.detail) for column in columns],
        steps=[asdict(step) for step in shown],
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
