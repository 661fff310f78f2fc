"""Word2World (arXiv 2512.18832): a language model in place of the environment, and its measures.

    python -m paw_min.world_models.word2world collect ENV --out FOLDER [--agents NAME ...]
    python -m paw_min.world_models.word2world train ENV --trajectories FILE ... --out FOLDER
    python -m paw_min.world_models.word2world fidelity ENV --world-model FOLDER --trajectories FILE
    python -m paw_min.world_models.word2world consistency ENV --world-model FOLDER
    python -m paw_min.world_models.word2world verify webshop --world-model FOLDER --budgets 0 2 4 10
    python -m paw_min.world_models.word2world imitate ENV --trajectories FILE ... [--wins N]

collect      episodes of agents on the training tasks, in the environment or a world model (sec. 4)
train        fit a world model to trajectories, from scratch or from a model (sec. 4, Table 7)
fidelity     single-step exact match on real prefixes (sec. 4, Table 1)
consistency  success in the environment, in the world model, and of the world model's actions
             replayed in the environment (sec. 4, Table 2); --ground: sec. 5.2
verify       a purchase is simulated before it is made (sec. 7.1, Table 4)
imitate      fit an agent to the responses of won trajectories (sec. 7.2, 7.3)

ENV: alfworld or webshop. Agents: the language model of --model, the rule-based `teacher` of the
generated data, a `random` player. All other flags are those of the run scripts: --model is the
agent, --eval-tasks the number of held-out tasks. Episodes have at most 50 steps.

Each command writes <command>.json to its folder when it is complete. A rerun skips what is there.
Scaling (sec. 6) is `train --limit N` and `train --width D`; coverage (sec. 5.3) is `--agents`.
results/word2world/README.md has a run of each. trajectories.py and dream.py have the deviations.
"""

import json
import re
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paw_min.config import Config, flag, parse_args
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Pool
from paw_min.experiments import presets_of
from paw_min.model.batches import TokenRow
from paw_min.model.policy import Policy, load_policy
from paw_min.running.console import say
from paw_min.running.distributed import join
from paw_min.running.errors import Parser, UserError, user_errors
from paw_min.running.evaluate import short
from paw_min.running.runs import reading, writing
from paw_min.running.seeds import generator
from paw_min.running.session import (
    find_tasks,
    forward_precision,
    start_model,
)
from paw_min.running.untrusted import open_ended, read_json
from paw_min.toy.standins import make_model, make_optimizers
from paw_min.world_models.dream import (
    DreamPool,
    Predict,
    VerifiedPool,
    WorldModel,
    word_tokenizer,
)
from paw_min.world_models.players import AGENTS, Play, open_agent
from paw_min.world_models.supervised import fit
from paw_min.world_models.trajectories import (
    MARKER,
    Recorder,
    Trajectory,
    decisions,
    is_solved,
    observation_of,
    read_trajectories,
    write_trajectories,
)

ENVS = ("alfworld", "webshop")
SLOTS = 64  # episodes at a time
WARM_UP = 10  # steps, Table 7

# ---- measures ----


def exact_match(predicted: str | None, target: str) -> bool:
    """Equal without outer white space, the marker included: state and reward are judged as one."""
    return predicted is not None and predicted.strip() == target.strip()


def rates(real: list[bool], dream: list[bool], replay: list[bool]) -> dict[str, float | None]:
    """Real, WM, W2R and CR (sec. 4), from the outcomes of the same episodes.

    real: won in the environment. dream: won in the world model, by its own marker. replay: were the
    dream's actions won in the environment? CR = W2R / Real may exceed 1. Pairwise CR (BehR, arXiv
    2604.13824): of the tasks that were won in Real, the share that is won in W2R.
    """
    if not real or not len(real) == len(dream) == len(replay):
        sizes = f"{len(real)}, {len(dream)} and {len(replay)}"
        raise ValueError(f"outcomes of {sizes} episodes: expected the same episodes, at least one.")
    found = {"real": share(real), "wm": share(dream), "w2r": share(replay)}
    found["cr"] = None
    found["pairwise_cr"] = None
    if any(real):
        found["cr"] = found["w2r"] / found["real"]
        found["pairwise_cr"] = share([w2r for won, w2r in zip(real, replay) if won])
    return found


def share(outcomes: list[bool]) -> float:
    return sum(outcomes) / len(outcomes)


def shares(keys: list, hits: list[bool]) -> dict[str, dict[str, float]]:
    """Share and number of hits for each key."""
    by_key = {}
    for key, hit in zip(keys, hits, strict=True):
        by_key.setdefault(key, []).append(hit)
    ordered = sorted(by_key.items())
    return {str(key): {"em": share(hits), "n": len(hits)} for key, hits in ordered}


def measure_fidelity(
    answers: Callable[[Trajectory], list[str | None]], trajectories: list[Trajectory]
) -> dict:
    """Exact match of single steps. answers: those to each command, after the real chat before."""
    predicted = []
    for trajectory in trajectories:
        predicted += answers(trajectory)
    targets = [answer for t in trajectories for answer in t.answers]
    commands = [c for t in trajectories for c in t.commands[: len(t.answers)]]
    turns = [k for t in trajectories for k in range(1, len(t.answers) + 1)]
    if not targets:
        raise UserError("the trajectories have no answer to predict: collect others.")
    hits = []
    observed = []  # without the list of available actions, as Word2World's ALFWorld has it
    for answer, target in zip(predicted, targets, strict=True):
        hits.append(exact_match(answer, target))
        shown = None if answer is None else observation_of(answer)
        observed.append(exact_match(shown, observation_of(target)))
    kinds = [re.match(r"\w*", command)[0] for command in commands]
    return {
        "em": share(hits),  # over the turns of all trajectories
        "n": len(hits),
        "em_observation": share(observed),
        "by_kind": shares(kinds, hits),  # the first word of the action
        "by_turn": shares(turns, hits),  # from 1
        "by_success": shares([is_solved(target) for target in targets], hits),
    }


def measure_consistency(
    env: str, predict: Predict, make_pool: Callable[[int], Pool], tasks: list[str], play: Play,
    ground: bool = False,
) -> dict:  # fmt: skip
    """Real, WM and W2R of one agent, on one list of tasks; a lost episode is a failure."""
    slots = min(SLOTS, len(tasks))
    with closing(Recorder(env, make_pool(slots))) as pool:
        real = play(pool, tasks)
    with closing(Recorder(env, DreamPool(env, predict, make_pool(1), slots, ground))) as pool:
        dream = play(pool, tasks)
    with closing(make_pool(1)) as pool:
        replayed = replay_actions(pool, dream)
    episodes = []
    for r, d, w2r in zip(real, dream, replayed, strict=True):
        episodes.append({
            "task": short(r.task), "real": r.won, "wm": d.won, "w2r": w2r,
            "real_steps": len(r.answers), "wm_steps": len(d.answers),
            "failed": r.failed or d.failed,
        })  # fmt: skip
    outcome = rates([r.won for r in real], [d.won for d in dream], replayed)
    return outcome | {"n": len(episodes), "episodes": episodes}


def replay_actions(pool: Pool, trajectories: list[Trajectory]) -> list[bool]:
    """W2R: is the task solved by these actions? All are replayed, up to the first `done`."""
    solved = []
    for trajectory in trajectories:
        pool.reset(0, trajectory.task)
        step = pool.recv().step
        for command in trajectory.commands:
            if step.done:
                break
            pool.step(0, command)
            step = pool.recv().step
        # A broken environment ends with `failed`: an error counts as a failure.
        solved.append(step.done and step.won and not step.failed)
    return solved


# ---- commands ----


def collect(args: Namespace, cfg: Config) -> dict:
    """Play the training tasks in turn; all episodes are kept, won or not."""
    tasks = find_tasks(cfg)
    source = tasks.train if args.split == "train" else tasks.held_out
    chosen = [source[k % len(source)] for k in range(args.episodes or len(source))]
    if len(chosen) < len(args.agents):
        raise UserError(f"--episodes {len(chosen)} for {len(args.agents)} agents: use more.")
    found = []
    won = {}
    for number, name in enumerate(args.agents):
        mine = chosen[number :: len(args.agents)]
        with open_agent(cfg, name, args.slips) as play:
            slots = min(SLOTS, len(mine))
            if args.world_model:
                predict = load_world_model(args, cfg).predict
                pool = DreamPool(cfg.env, predict, tasks.make_pool(1), slots, args.ground)
            else:
                pool = tasks.make_pool(slots)
            with closing(Recorder(cfg.env, pool)) as recorder:
                played = play(recorder, mine)
        won[name] = share([t.won for t in played])
        found += played
    write_trajectories(args.out / "trajectories.json", found)
    return {
        "episodes": len(found),
        "turns": sum(len(t.answers) for t in found),
        "failed": sum(bool(t.failed) for t in found),
        "won": won,
    }


def train(args: Namespace, cfg: Config) -> dict:
    """Fit a world model to all answers of the trajectories; failures count like successes."""
    trajectories = read_trajectories(args.trajectories)
    generator("limit", cfg.seed).shuffle(trajectories)
    trajectories = trajectories[: args.limit or None]
    device = join(cfg.device)
    precision = forward_precision(cfg, device)
    if args.start:
        policy = load_policy(args.start, device=device, precision=precision)
    else:
        texts = [m["content"] for t in trajectories for m in t.messages]
        tokenizer = word_tokenizer(texts)
        model = make_model(tokenizer, cfg.seed, args.width, args.context).to(device)
        policy = Policy(model, tokenizer, precision=precision)
    world_model = WorldModel(policy, args.context)
    rows = [row for row in map(world_model.row, trajectories) if row]
    if not rows:
        raise UserError(f"no answer fits into --context {args.context}: raise it.")
    found = {"marker": MARKER, "context": args.context, "trajectories": len(rows)}
    return found | fit_and_save(args, cfg, policy, rows)


def fidelity(args: Namespace, cfg: Config) -> dict:
    trajectories = read_trajectories(args.trajectories)
    return measure_fidelity(load_world_model(args, cfg).answers, trajectories)


def consistency(args: Namespace, cfg: Config) -> dict:
    """Real, WM and W2R of each agent on one list of held-out episodes."""
    tasks = find_tasks(cfg)
    chosen = [task for task in tasks.held_out for _ in range(cfg.eval_repeats)]
    found = {}
    for name in args.agents:
        with open_agent(cfg, name, args.slips) as play:
            predict = load_world_model(args, cfg).predict
            found[name] = measure_consistency(
                cfg.env, predict, tasks.make_pool, chosen, play, args.ground
            )
    return found


def verify(args: Namespace, cfg: Config) -> dict:
    """Success in the environment for each budget of simulated purchases."""
    tasks = find_tasks(cfg)
    chosen = [task for task in tasks.held_out for _ in range(cfg.eval_repeats)]
    found = {}
    for name in args.agents:
        with open_agent(cfg, name, args.slips) as play:
            predict = load_world_model(args, cfg).predict
            for budget in args.budgets:
                pool = tasks.make_pool(min(SLOTS, len(chosen)))
                with closing(VerifiedPool(cfg.env, pool, predict, budget)) as verified:
                    won = [t.won for t in play(verified, chosen)]
                    counts = {"checks": verified.checks, "vetoes": verified.vetoes}
                found[f"{name}, budget {budget}"] = {"won": share(won), "n": len(won)} | counts
    return found


def imitate(args: Namespace, cfg: Config) -> dict:
    """Fit the agent --model to thoughts and commands of won trajectories."""
    won = [t for t in read_trajectories(args.trajectories) if t.won]
    if len(won) < max(1, args.wins):
        raise UserError(f"--trajectories has {len(won)} won episodes: collect more.")
    won = won[: args.wins or None]
    device = join(cfg.device)
    policy = load_policy(start_model(cfg), device=device, precision=forward_precision(cfg, device))
    prompt = BENCHMARKS[cfg.env].prompts[cfg.prompt]
    rows = []
    for trajectory in won:
        for context, response in decisions(trajectory):
            prompt_ids = policy.encode_chat(prompt(context, cfg.history_length))
            response_ids = [*policy.encode(response), policy.eos_ids[0]]
            rows.append(TokenRow(prompt_ids, response_ids, []))
    return {"trajectories": len(won)} | fit_and_save(args, cfg, policy, rows)


# ---- what the commands share ----


def fit_and_save(args: Namespace, cfg: Config, policy: Policy, rows: list[TokenRow]) -> dict:
    """Full fine-tuning with the schedule of Table 7; write the model -> what happened."""
    policy.train()
    if cfg.grad_checkpointing:
        policy.model.gradient_checkpointing_enable()
    if args.command == "train" and not args.start:
        optimizer = Together(make_optimizers(policy.model, args.lr))
    else:
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    losses = fit(
        policy, optimizer, rows, epochs=args.epochs, batch=args.batch, warm_up=WARM_UP,
        micro_tokens=cfg.micro_tokens, seed_key=("word2world", cfg.seed),
    )  # fmt: skip
    with writing(str(args.out)):
        policy.save(args.out)
    tenth = max(1, len(losses) // 10)
    parts = [losses[i : i + tenth] for i in range(0, len(losses), tenth)]
    means = [sum(part) / len(part) for part in parts]
    return {
        "rows": len(rows),
        "parameters": policy.model.num_parameters(),
        "steps": len(losses),
        "loss": [round(mean, 4) for mean in means],  # nats per token, of each tenth of the steps
    }


class Together:
    """Several optimizers as one. From scratch, Muon needs half the steps that AdamW needs."""

    def __init__(self, rates: dict[torch.optim.Optimizer, float]):
        self.optimizers = list(rates)
        self.param_groups = []
        for optimizer, rate in rates.items():
            optimizer.param_groups[0]["lr"] = rate
            self.param_groups += optimizer.param_groups

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@open_ended
@dataclass
class TrainRecord:
    """What train.json says about a world model."""

    marker: str
    context: int


def load_world_model(args: Namespace, cfg: Config) -> WorldModel:
    path = args.world_model / "train.json"
    if not path.is_file():
        raise UserError(f"{args.world_model} is no world model (no train.json): give the folder of "
                        "a complete `word2world train`.")
    record = read_json(path, TrainRecord)
    if record.context < 1:
        raise UserError(f"{path} has the context {record.context}: train the world model again.")
    if record.marker != MARKER:
        raise UserError(f"{path} has the marker {record.marker!r}, expected {MARKER!r}: train the "
                        "world model again.")
    device = join(cfg.device)
    policy = load_policy(
        str(args.world_model), device=device, precision=forward_precision(cfg, device)
    )
    return WorldModel(policy, record.context, args.answer_tokens)


# ---- the command line ----

COMMANDS = {
    "collect": collect, "train": train, "fidelity": fidelity, "consistency": consistency,
    "verify": verify, "imitate": imitate,
}  # fmt: skip


def parse(argv: list[str]) -> tuple[Namespace, Config]:
    """The flags of a command, and the settings of the benchmark."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("env", choices=ENVS)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--agents", nargs="+", choices=AGENTS, default=["model"], help="who plays (model)")
    add("--slips", type=float, default=0.0, help="share of the teacher's steps that are random (0)")
    add("--split", choices=("train", "held_out"), default="train", help="of collect (train)")
    add("--episodes", type=int, default=0, help="of collect; 0: one per task (0)")
    add("--world-model", type=Path, help="folder of a trained one; collect: play in it")
    add("--ground", action="store_true", help="webshop: the first results of a search are real")
    add("--answer-tokens", type=int, default=512, help="longest answer (512)")
    add("--budgets", type=int, nargs="+", default=[0, 2, 4, 10], help="of verify (0 2 4 10)")
    add("--trajectories", type=Path, nargs="+", help="files of collect")
    add("--start", default="", help="model that train starts from (default: from scratch)")
    add("--limit", type=int, default=0, help="train on N trajectories; 0: all (0)")
    add("--width", type=int, default=128, help="of a model from scratch, times 32 (128)")
    add("--context", type=int, default=12288, help="tokens of a chat (12288)")
    add("--wins", type=int, default=0, help="won trajectories that imitate uses; 0: all (0)")
    add("--epochs", type=int, default=5, help="of training (5)")
    add("--batch", type=int, default=128, help="trajectories, or steps, per gradient step (128)")
    add("--lr", type=float, default=1e-5, help="learning rate (1e-5)")
    args, flags = parser.parse_known_args(argv)
    cfg, _ = parse_args(args.env, presets_of(args.env), __doc__, ["--max-turns", "50", *flags])
    check(args)
    # A dream may have pages that are longer than any real one.
    return args, replace(cfg, prompt_overflow="cut")


def check(args: Namespace) -> None:
    """UserError for flags that cannot work together, or are out of range."""
    needs = {
        "train": "trajectories", "imitate": "trajectories", "fidelity": "trajectories",
        "consistency": "world_model", "verify": "world_model",
    }  # fmt: skip
    needed = [needs[args.command]] if args.command in needs else []
    if args.command == "fidelity":
        needed.append("world_model")
    for name in needed:
        if not getattr(args, name):
            raise UserError(f"{args.command} needs {flag(name)}: add it.")
    for name in ("episodes", "limit", "wins"):
        if getattr(args, name) < 0:
            raise UserError(f"{flag(name)} {getattr(args, name)} is out of range: 0 or more.")
    for name in ("answer_tokens", "context", "epochs", "batch"):
        if getattr(args, name) < 1:
            raise UserError(f"{flag(name)} {getattr(args, name)} is out of range: 1 or more.")
    if min(args.budgets) < 0:
        raise UserError(f"--budgets {min(args.budgets)} is out of range: 0 or more.")
    if not 0 <= args.slips <= 1:
        raise UserError(f"--slips {args.slips} is out of range: 0 to 1.")
    if not 0 < args.lr <= 1:
        raise UserError(f"--lr {args.lr} is out of range: above 0, at most 1.")
    if args.width < 32 or args.width % 32:
        raise UserError(f"--width {args.width} is not a multiple of 32: use 64, 128 and so on.")
    if args.env != "webshop" and (args.ground or args.command == "verify"):
        what = "verify" if args.command == "verify" else "--ground"
        raise UserError(f"{what} is for webshop: ALFWorld has no search, and no purchase.")
    if args.ground and not args.world_model:
        raise UserError("--ground needs --world-model: without one, all pages are real.")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, cfg = parse(argv)
    line = shlex.join(["word2world", *argv])
    path = args.out / f"{args.command}.json"
    if path.is_file():
        found = read_json(path, dict)
        with reading(path):
            stored = found["command"]
        if stored != line:
            raise UserError(f"{path} is the result of `{stored}`: choose another --out.")
    else:
        if args.command in ("train", "imitate") and (args.out / "config.json").exists():
            raise UserError(f"{args.out} has a model already: choose another --out, or delete it.")
        with writing(f"the folder {args.out}"):
            args.out.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        found = {"command": line} | COMMANDS[args.command](args, cfg)
        found["seconds"] = round(time.perf_counter() - began, 1)
        with writing(str(path)):
            partial_file = path.with_suffix(".partial")
            partial_file.unlink(missing_ok=True)  # a link would be followed
            partial_file.write_text(json.dumps(found, indent=1) + "\n")
            partial_file.replace(path)
    say(summary(found))


def summary(found: dict, indent: str = "") -> str:
    """The numbers of a result, without the lists of episodes."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", summary(value, indent + "  ")]
        elif key != "episodes" or isinstance(value, int):
            shown = f"{value:.4f}" if isinstance(value, float) else value
            lines.append(f"{indent}{key:16s} {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    with user_errors():
        main()
