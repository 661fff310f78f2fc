"""What policies know about their world, and how they fail: finished runs compared.

    python -m research.knowledge runs/study-alfworld.json ... | RUN ... [--out FILE.json]

World knowledge. The runs' start model plays held-out tasks, once and at the training temperature.
Each run's last weights, and the start model's, then score the same transitions:

    p       mean probability of a token of o_{t+1}, given h_t, a_t and the tokens before it
    easy    share of these tokens with p > rho, which Eq. 7 leaves out
    exact   share of transitions whose whole o_{t+1} is the greedy continuation of (h_t, a_t)
    branch  mean p of the tokens that decide between the outcomes of a state (outcomes.py)
    auc     does the model know which actions have no effect? 0.5: chance (outcomes.py)

Failures. The weights play the evaluation panel. Counted are, as shares of the steps:

    nothing    the environment answers "Nothing happens." (ALFWorld)
    repeated   a command that this episode has already tried on the same observation
    tool       cleaning, heating or cooling that the task does not ask for (ALFWorld)

With --out, every report is written at once, and the same command resumes. Not in the paper.
"""

import hashlib
import json
from collections import defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from paw_min.base import distributed
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import check_writable, reading, replace_text
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.metrics import mean
from paw_min.model.policy import load_policy
from paw_min.model.sampler import HFSampler
from paw_min.rows import Episode
from paw_min.running.evaluate import evaluate
from paw_min.running.runs import newest_checkpoint
from paw_min.running.session import PANEL_SLOTS, find_tasks, forward_precision, start_model
from paw_min.running.untrusted import exact, read_config, read_json
from research import outcomes
from research.lookahead.samplers import predicts_text
from research.paper.table import Entry, find
from research.paper.transitions import TextRow, observation_logps, text_rows

TRANSITIONS = 400  # scored with each policy


@exact
@dataclass
class Report:
    """What one policy knows, and how it fails; see the top of the file."""

    label: str  # arm, or "start model"
    seed: int
    checkpoint: str  # the last two folders of its path: "RUN/checkpoint-000008"
    success: float
    p: float
    easy: float
    exact: float
    nothing: float
    repeated: float
    tool: float
    branch: float | None
    auc: float | None
    weights: str = ""  # their digest; of a start model and in older files: ""


def digest(checkpoint: Path) -> str:
    """Of the weights: a folder elsewhere may have the same name, as a run of a changed fork."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with reading(path), open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def report(cfg: Config, entry: Entry, weights: str, rows: list[TextRow]) -> tuple[Report, list]:
    """Report on these weights, and the rows that were scored.

    rows: the transitions to score; if empty, up to TRANSITIONS of those just played.
    """
    device = distributed.join(cfg.device)
    policy = load_policy(weights, cfg.temperature, device, forward_precision(cfg, device))
    tasks = find_tasks(cfg)
    with closing(tasks.make_pool(min(PANEL_SLOTS, len(tasks.held_out)))) as pool:
        played = evaluate(cfg, policy, HFSampler(), pool, tasks.held_out)
    episodes = [episode for episode in played.episodes if not episode.failed]
    if not rows:
        rows = sample(text_rows(cfg, episodes))
    if not rows:
        raise UserError(f"{weights} met no observation to score: use more --eval-tasks.")
    tokens = [row.tokens for row in rows]
    logps = observation_logps(cfg, policy, tokens)
    p = torch.cat(logps).exp()  # (tokens,)
    known = outcomes.measure(cfg, policy, rows)
    nothing, repeated, tool = failures(cfg, episodes)
    found = Report(
        label=entry.label,
        seed=entry.seed,
        checkpoint="/".join(Path(weights).parts[-2:]),
        success=played.metrics["eval_success"],
        p=p.mean().item(),
        easy=(p > cfg.rho).float().mean().item(),
        exact=mean(predicts_text(cfg, policy, tokens)),
        nothing=nothing,
        repeated=repeated,
        tool=tool,
        branch=known.p_branch,
        auc=known.auc,
    )
    return found, rows


def sample(rows: list[TextRow]) -> list[TextRow]:
    """At most TRANSITIONS with a next observation, at equal distances in the order of play."""
    found = [row for row in rows if row.tokens.obs_ids]
    step = max(1, -(-len(found) // TRANSITIONS))  # rounded up
    return found[::step]


def failures(cfg: Config, episodes: list[Episode]) -> tuple[float, float, float]:
    """Shares of the steps: no effect, repeated, wrong tool."""
    parse = BENCHMARKS[cfg.env].parse
    steps = 0
    nothing = 0
    repeated = 0
    tool = 0
    for episode in episodes:
        tried = set()
        for observation, response, next_observation in episode.log:
            command = parse(response).text
            steps += 1
            nothing += next_observation.startswith("Nothing happens")
            repeated += (observation, command) in tried
            tried.add((observation, command))
            verb = command.split(" ")[0]
            tool += verb in ("clean", "heat", "cool") and verb not in episode.task_type
    return nothing / steps, repeated / steps, tool / steps


def main(paths: list[Path], out: Path | None) -> None:
    by_start = defaultdict(list)  # runs that share their start and tasks
    for entry in find(paths):
        cfg = read_config(Path(entry.folder) / "config.json")
        by_start[cfg.env, cfg.model, cfg.data].append((entry, cfg))
    stored = []
    if out:
        check_writable(out)
    if out and out.exists():
        stored = [asdict(known) for known in read_json(out, list[Report])]
    reports = []

    def add(new: dict) -> None:
        reports.append(new)
        print(new, flush=True)
        if out:
            replace_text(out, json.dumps(reports, indent=1) + "\n")

    for runs in by_start.values():
        entry, cfg = runs[0]
        # Sampled as in training, so that the transitions are those that training meets.
        first = replace(cfg, eval_temperature=cfg.temperature, eval_repeats=1)
        start = Entry("start model", 0, "")
        _, rows = report(first, start, start_model(cfg), [])
        new, _ = report(replace(cfg, eval_repeats=1), start, start_model(cfg), rows)
        print(f"{cfg.env}: {len(rows)} transitions of {start_model(cfg)}")
        if asdict(new) not in stored:  # other transitions: what was measured is not comparable
            stored = []
        add(asdict(new))
        measured = {known["weights"]: known for known in stored}
        for entry, cfg in runs:
            weights = newest_checkpoint(entry.folder)
            if weights is None:
                raise UserError(f"{entry.folder} has no checkpoint: train the run first.")
            own = {"label": entry.label, "seed": entry.seed, "weights": digest(weights)}
            found = measured.get(own["weights"])
            if not found:
                new, _ = report(replace(cfg, eval_repeats=1), entry, str(weights), rows)
                found = asdict(new)
            add(found | own)


if __name__ == "__main__":
    with user_errors():
        parser = Parser(description=__doc__)
        parser.add_argument("paths", nargs="+", type=Path, help="sweep files or run folders")
        parser.add_argument("--out", type=Path, help="JSON file to write")
        args = parser.parse_args()
        main(args.paths, args.out)
