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

ENV: alfworld, webshop or textworld. Agents: the language model of --model, the rule-based `teacher`
of the generated data, a `random` player. All other flags are those of the run scripts: --model is
the agent, --eval-tasks the number of held-out tasks. Episodes have at most 50 steps.

Each command writes <command>.json to its folder when it is complete. A rerun skips what is there.
Scaling (sec. 6) and coverage of agents (sec. 5.3): scaling.py.
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

from paw_min.config import Config
from paw_min.envs.interface import Pool, Tasks
from paw_min.running.console import say
from paw_min.running.errors import UserError, user_errors
from paw_min.running.evaluate import short
from paw_min.running.runs import reading, replace_text, writing
from paw_min.running.session import find_tasks
from paw_min.running.untrusted import read_json
from paw_min.world_models.dream import DreamPool, Predict, VerifiedPool
from paw_min.world_models.options import parse
from paw_min.world_models.players import Play, open_agent
from paw_min.world_models.training import imitate, load_world_model, train
from paw_min.world_models.trajectories import (
    Recorder,
    Trajectory,
    is_solved,
    observation_of,
    read_trajectories,
    write_trajectories,
)

SLOTS = 64  # episodes at a time

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
                predict = load_world_model(args.world_model, cfg, args.answer_tokens).predict
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


def fidelity(args: Namespace, cfg: Config) -> dict:
    trajectories = read_trajectories(args.trajectories)
    world_model = load_world_model(args.world_model, cfg, args.answer_tokens)
    return measure_fidelity(world_model.answers, trajectories)


def held_out(cfg: Config, tasks: Tasks) -> list[str]:
    """One entry per episode."""
    return [task for task in tasks.held_out for _ in range(cfg.eval_repeats)]


def consistency(args: Namespace, cfg: Config) -> dict:
    """Real, WM and W2R of each agent on one list of held-out episodes."""
    tasks = find_tasks(cfg)
    chosen = held_out(cfg, tasks)
    found = {}
    for name in args.agents:
        with open_agent(cfg, name, args.slips) as play:
            predict = load_world_model(args.world_model, cfg, args.answer_tokens).predict
            found[name] = measure_consistency(
                cfg.env, predict, tasks.make_pool, chosen, play, args.ground
            )
    return found


def verify(args: Namespace, cfg: Config) -> dict:
    """Success in the environment for each budget of simulated purchases."""
    tasks = find_tasks(cfg)
    chosen = held_out(cfg, tasks)
    found = {}
    for name in args.agents:
        with open_agent(cfg, name, args.slips) as play:
            predict = load_world_model(args.world_model, cfg, args.answer_tokens).predict
            for budget in args.budgets:
                pool = tasks.make_pool(min(SLOTS, len(chosen)))
                with closing(VerifiedPool(cfg.env, pool, predict, budget)) as verified:
                    won = [t.won for t in play(verified, chosen)]
                    counts = {"checks": verified.checks, "vetoes": verified.vetoes}
                found[f"{name}, budget {budget}"] = {"won": share(won), "n": len(won)} | counts
    return found


# ---- the command line ----

FUNCTIONS = {
    "collect": collect, "train": train, "fidelity": fidelity, "consistency": consistency,
    "verify": verify, "imitate": imitate,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, cfg = parse(__doc__, argv)
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
        found = {"command": line} | FUNCTIONS[args.command](args, cfg)
        found["seconds"] = round(time.perf_counter() - began, 1)
        replace_text(path, json.dumps(found, indent=1) + "\n")
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
