"""One page to look at a run: stored transitions, token by token, before and after training.

    python -m paw_min.page RUN [--against RUN] [--out FILE]

Each token of a response has its entropy (the quantity of Eq. 4), each token of a next observation
its p: under the start model, under RUN's newest checkpoint, and under that of another run. The
transitions are those that training stored (running/episodes.py), with the selection (Eq. 4) and
lambda_g (Eq. 10) of training. The page is one HTML file without server or network. Its template,
page.html, has a slider: which tokens would teach with another rho (Eq. 7)?

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
from paw_min.model.batches import micro_batches
from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.running.config_json import read_config
from paw_min.running.episodes import StoredUpdate, read
from paw_min.running.runs import newest_checkpoint, updates_done
from paw_min.running.session import forward_precision, start_model

TEMPLATE = Path(__file__).with_name("page.html")
SETTINGS = ("env", "method", "algo", "paw", "rho", "wm_loss", "wm_target")
UPDATES = 4  # how many are shown, spread over training


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


def trained(label: str, folder: Path) -> Weights:
    """The newest weights of a run; UserError if there are none."""
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint: give a run folder, such as runs/NAME, that "
                        "has saved one (--save-every).")
    n = updates_done(checkpoint)
    detail = f"{folder.resolve().name}, {n} update{'s' * (n != 1)}"
    return Weights(label, detail, str(checkpoint))


def choose_files(folder: Path, done: int) -> list[Path]:
    """The files of UPDATES updates, from the first to the last that a checkpoint has seen."""
    files = sorted((folder / "samples").glob("[0-9]" * 6 + ".json"))
    files = [file for file in files if int(file.stem) <= done]
    n = min(UPDATES, len(files))
    # n positions at equal distances from the first file to the last.
    return [files[k * (len(files) - 1) // max(1, n - 1)] for k in range(n)]


@torch.no_grad()
def score(
    policy: Policy, rows: list[TokenRow], micro_tokens: int, label: str = "score"
) -> list[Seen]:
    """One pass over h_t, a_t and o_{t+1} of each row, by the functions of training."""
    seen = [None] * len(rows)
    everything = list(range(len(rows)))
    with progress_bar(len(rows), label, "row") as bar:
        # Batches have rows of similar lengths, in another order than `rows`.
        for batch in micro_batches(policy, rows, everything, [True] * len(rows), micro_tokens):
            logp, entropy = policy(batch)  # (B, S), (B, S)
            for b, i in enumerate(batch.index):
                n = len(rows[i].response_ids)
                first = n + len(rows[i].separator_ids)  # column of the observation
                p = logp[b, first : first + len(rows[i].obs_ids)].exp().tolist()
                # Six significant digits: enough to compare with rho as training does.
                p = [float(f"{x:.6g}") for x in p]
                for k in rows[i].context_positions:
                    p[k] = None
                seen[i] = Seen([round(x, 4) for x in entropy[b, :n].tolist()], p)
            bar.update(len(batch.index))
    return seen


def score_under(
    weights: Weights, cfg: Config, rows: list[TokenRow], device: str
) -> list[Seen]:
    """Load these weights and score; a function, so that one model at a time is in memory."""
    precision = forward_precision(cfg.precision, device)
    policy = load_policy(weights.folder, cfg.temperature, device, precision)
    return score(policy, rows, cfg.micro_tokens, weights.label)


def text_of(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text of each token; joined, they are the text of all.

    A character of several tokens, or bytes that are no character, belong to the last of them.
    """
    whole = text_of(tokenizer, ids)
    parts = []
    shown = 0  # characters of `whole` in `parts`
    for end in range(1, len(ids) + 1):
        # The text up to a part of a character is no beginning of the whole: it ends with U+FFFD.
        so_far = text_of(tokenizer, ids[:end])
        known = len(so_far) if whole.startswith(so_far) else shown
        parts.append(whole[shown:known])
        shown = known
    return parts


def page_data(
    name: str, cfg: Config, columns: list[Weights], stored: list[StoredUpdate], tokenizer
) -> dict:
    """All that the page shows, as page.html reads it: the steps of all episodes in order."""
    rows = [step for update in stored for e in update.episodes for step in e.steps]
    device = join()
    scores = [score_under(weights, cfg, rows, device) for weights in columns]
    seen = zip(*scores, strict=True)  # per row, its scores in all columns
    steps = []
    for update in stored:
        for e in update.episodes:
            for n, row in enumerate(e.steps, start=1):
                steps.append(dict(
                    update=update.update, group=e.group, episode=e.trajectory,
                    n=n, of=len(e.steps),  # the n-th step of its episode
                    asked=e.asked or e.task, task=e.task, won=e.won,
                    episode_return=e.episode_return, reward=row.reward,
                    valid=row.valid,  # is the response well formed?
                    selected=row.selected, rank=row.rank, candidates=update.candidates,  # Eq. 4
                    lambda_g=e.lambda_g,
                    prompt=text_of(tokenizer, row.prompt_ids), prompt_tokens=len(row.prompt_ids),
                    response=pieces(tokenizer, row.response_ids),
                    separator=text_of(tokenizer, row.separator_ids),
                    obs=pieces(tokenizer, row.obs_ids),
                    seen=[asdict(one) for one in next(seen)],
                ))
    return dict(
        run=name,
        settings={key: getattr(cfg, key) for key in SETTINGS},
        weights=[dict(label=one.label, detail=one.detail) for one in columns],
        steps=steps,
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
    parser.add_argument("--out", type=Path, help="file to write (RUN/page.html)")
    args = parser.parse_args(argv)
    after = trained("after", args.run)
    cfg = read_config(args.run / "config.json")
    columns = [Weights("before", "start model", start_model(cfg)), after]
    tokenizer = load_tokenizer(after.folder)
    if args.against:
        columns.append(trained("against", args.against))
        if load_tokenizer(columns[-1].folder).get_vocab() != tokenizer.get_vocab():
            raise UserError(f"{args.against} has another tokenizer than {args.run}, so it cannot "
                            "score the stored tokens: compare runs of one model.")
    out = args.out or args.run / "page.html"
    check_writable(out)
    files = choose_files(args.run, updates_done(Path(after.folder)))
    if not files:
        raise UserError(f"{args.run} has stored no transitions in samples/: give a run of RL.")
    stored = [read(file) for file in files]
    data = page_data(args.run.resolve().name, cfg, columns, stored, tokenizer)
    replace_text(out, render(data))
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB): {len(data['steps'])} transitions")


if __name__ == "__main__":
    with user_errors():
        main()
