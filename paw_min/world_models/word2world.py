"""Word2World (arXiv 2512.18832): a language model in place of the environment, and its measures.

    python -m paw_min.world_models.word2world collect ENV --out FOLDER [--agents NAME ...]
    python -m paw_min.world_models.word2world train ENV --trajectories FILE ... --out FOLDER
    python -m paw_min.world_models.word2world fidelity ENV --world-model FOLDER --trajectories FILE
    python -m paw_min.world_models.word2world consistency ENV --world-model FOLDER
    python -m paw_min.world_models.word2world verify webshop --world-model FOLDER --budgets 0 2 4 10
    python -m paw_min.world_models.word2world imitate ENV --trajectories FILE ... [--wins N]

In place of a trained --world-model FOLDER, any instruct model: --world-model NAME --shots 0, or
--shots 3 --examples FILE ... (prompted.py).

collect      episodes of agents on the training tasks, in the environment or a world model (sec. 4)
train        fit a world model to trajectories, from scratch or from a model (sec. 4, Table 7)
fidelity     single-step exact match on real prefixes (sec. 4, Table 1)
consistency  success in the environment, in the world model, and of the world model's actions
             replayed in the environment (sec. 4, Table 2); --ground: sec. 5.2
verify       a purchase is simulated before it is made (sec. 7.1, Table 4)
imitate      fit an agent to the responses of won trajectories (sec. 7.2, 7.3)

ENV: alfworld, webshop, textworld, or a module with an environment (examples.scienceworld). Agents:
the language model of --model, the rule-based `teacher` of the generated data, a `random` player.
All other flags are those of the run scripts: --model is the agent, --eval-tasks the number of
held-out tasks, --max-turns the most steps of an episode (50).

Each command writes <command>.json to its folder when it is complete, with `command`, the command
line, and `seconds`, the time since its last start. A rerun skips what is complete, also of a
command that was killed: what the models have said, the rule-based players' episodes, epochs of
training (running/stages.py). Scaling (sec. 6) and coverage of agents (sec. 5.3):
research/word2world/scaling.py; the README.md beside it has a run of each. trajectories.py and
this folder's README.md have the deviations.
"""

import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from paw_min.base.console import progress_bar, say
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import writing
from paw_min.config import Config
from paw_min.envs.interface import Pool, Tasks
from paw_min.metrics import mean
from paw_min.running.evaluate import short
from paw_min.running.runs import hold
from paw_min.running.session import find_tasks
from paw_min.running.stages import Pieces, digest, stage
from paw_min.running.tasks import data_digest
from paw_min.world_models.dream import DreamPool, Predict, VerifiedPool
from paw_min.world_models.players import Play, open_agent
from paw_min.world_models.prompted import load_prompted
from paw_min.world_models.training import imitate, load_world_model, train
from paw_min.world_models.trajectories import (
    Message,
    Recorder,
    Trajectory,
    is_solved,
    observation_of,
    read_trajectories,
    write_trajectories,
)
from paw_min.world_models.word2world_options import Word2WorldJob, parse
from paw_min.world_models.world_model import WorldModel

SLOTS = 64  # episodes at a time

# ---- measures ----


def exact_match(predicted: str | None, target: str) -> bool:
    """Equal without outer white space, the marker included: state and reward are judged as one."""
    return predicted is not None and predicted.strip() == target.strip()


def rates(real: list[bool], dream: list[bool], replay: list[bool]) -> dict[str, float | None]:
    """Real, WM, W2R and CR (sec. 4), from the outcomes of the same episodes.

    real: won in the environment. dream: won in the world model, by its own marker. replay: were the
    dream's actions won in the environment? CR = W2R / Real may exceed 1. Pairwise CR (BehR, arXiv
    2604.13824): of the tasks that were won in Real, the share that is won in W2R. Both are None
    where nothing is won in Real.
    """
    if not real or not len(real) == len(dream) == len(replay):
        sizes = f"{len(real)}, {len(dream)} and {len(replay)}"
        raise ValueError(f"outcomes of {sizes} episodes: expected the same episodes, at least one.")
    found = {"real": mean(real), "wm": mean(dream), "w2r": mean(replay)}
    found |= {"cr": None, "pairwise_cr": None}
    if any(real):
        found["cr"] = found["w2r"] / found["real"]
        found["pairwise_cr"] = mean([w2r for won, w2r in zip(real, replay) if won])
    return found


def shares(keys: list, hits: list[bool]) -> dict[str, dict[str, float]]:
    """Exact match and number of steps for each key."""
    by_key = {}
    for key, hit in zip(keys, hits, strict=True):
        by_key.setdefault(key, []).append(hit)
    ordered = sorted(by_key.items())
    return {str(key): {"em": mean(hits), "n": len(hits)} for key, hits in ordered}


def measure_fidelity(
    answers: Callable[[Trajectory], list[str | None]], trajectories: list[Trajectory]
) -> dict:
    """Exact match of single steps, over the turns of all trajectories, and by kind of step.

    answers: those to each command, after the real chat before it. em_observation: without the list
    of available actions, as in Word2World's ALFWorld. A kind is the first word of the command.
    """
    predicted = []
    with progress_bar(len(trajectories), "fidelity", "trajectory") as bar:
        for trajectory in trajectories:
            predicted += answers(trajectory)
            bar.update()
    targets = [answer for t in trajectories for answer in t.answers]
    commands = [c for t in trajectories for c in t.commands[: len(t.answers)]]
    turns = [k for t in trajectories for k in range(1, len(t.answers) + 1)]
    if not targets:
        raise UserError("the trajectories have no answer to predict: collect others.")
    hits = []
    observed = []
    for answer, target in zip(predicted, targets, strict=True):
        hits.append(exact_match(answer, target))
        shown = None if answer is None else observation_of(answer)
        observed.append(exact_match(shown, observation_of(target)))
    kinds = [re.match(r"\w*", command)[0] for command in commands]
    return {
        "em": mean(hits),
        "n": len(hits),
        "em_observation": mean(observed),
        "by_kind": shares(kinds, hits),
        "by_turn": shares(turns, hits),
        "by_success": shares([is_solved(target) for target in targets], hits),
    }


def measure_consistency(
    env: str, predict: Predict, make_pool: Callable[[int], Pool], tasks: list[str], play: Play,
    ground: bool = False,
) -> dict:
    """`rates` of one agent on one list of tasks, and its episodes; one that breaks is a failure."""
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
        })
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


def open_world_model(job: Word2WorldJob, evaluated: list[str]) -> WorldModel:
    """The trained or prompted world model of --world-model. evaluated: the tasks of the measure."""
    chosen = job.settings
    if not chosen.shots:
        return load_world_model(Path(chosen.world_model), job.cfg, chosen.answer_tokens)
    return load_prompted(
        chosen.world_model, job.cfg, int(chosen.shots), chosen.examples, set(evaluated),
        chosen.answer_tokens,
    )


def collect(job: Word2WorldJob) -> dict:
    """Play the training tasks in turn; all episodes are kept, won or not.

    confirmed: in a world model, the share of an agent's wins that the same actions win in the
    environment; without an agent that wins nothing.
    """
    cfg = job.cfg
    settings = job.settings
    tasks = find_tasks(cfg)
    source = tasks.train if settings.split == "train" else tasks.held_out
    chosen = [source[k % len(source)] for k in range(settings.episodes or len(source))]
    agents = settings.agents
    if len(chosen) < len(agents):
        raise UserError(f"--episodes {len(chosen)} for {len(agents)} agents: use more.")
    pieces = job.pieces()
    pieces.check_data(data_digest(tasks))
    found = []
    won = {}
    confirmed = {}
    for number, name in enumerate(agents):
        mine = chosen[number :: len(agents)]
        with open_agent(cfg, name, settings.slips, pieces) as play:
            slots = min(SLOTS, len(mine))
            if settings.world_model:
                # Training tasks may be those of the examples.
                evaluated = chosen if settings.split == "held_out" else []
                predict = stored(pieces, open_world_model(job, evaluated).predict)
                pool = DreamPool(cfg.env, predict, tasks.make_pool(1), slots, settings.ground)
            else:
                pool = tasks.make_pool(slots)
            with closing(pool):
                if name == "model" or settings.world_model:  # what models say is stored
                    played = play(Recorder(cfg.env, pool), mine)
                else:
                    played = play_in_parts(pieces, name, cfg.env, pool, play, mine)
        won[name] = mean([t.won for t in played])
        say(f"{name}: {len(played)} episodes, {won[name]:.4f} won")
        if settings.world_model and any(t.won for t in played):
            with closing(tasks.make_pool(1)) as pool:
                confirmed[name] = mean(replay_actions(pool, [t for t in played if t.won]))
        found += played
    write_trajectories(job.out / "trajectories.json", found)
    return {
        "episodes": len(found),
        "turns": sum(len(t.answers) for t in found),
        "failed": sum(bool(t.failed) for t in found),
        "won": won,
        "confirmed": confirmed,
    }


def play_in_parts(
    pieces: Pieces, name: str, env: str, pool: Pool, play: Play, tasks: list[str]
) -> list[Trajectory]:
    """Episodes by rules in the environment; those of SLOTS tasks are a piece."""
    found = []
    for first in range(0, len(tasks), SLOTS):
        part = tasks[first : first + SLOTS]
        by_rules = partial(play, Recorder(env, pool), part, first)
        found += pieces.once(f"{name} from {first}", list[Trajectory], by_rules)
    return found


def stored(pieces: Pieces, predict: Predict) -> Predict:
    """The same world model; its answers are pieces."""

    def read_or_predict(chats: list[list[Message]]) -> list[str | None]:
        return pieces.once(f"chats {digest(chats)}", list[str | None], partial(predict, chats))

    return read_or_predict


def fidelity(job: Word2WorldJob) -> dict:
    trajectories = read_trajectories(job.cfg.env, job.settings.trajectories)
    world_model = open_world_model(job, [trajectory.task for trajectory in trajectories])
    pieces = job.pieces()

    def answers(trajectory: Trajectory) -> list[str | None]:
        key = f"answers {digest(trajectory)}"
        return pieces.once(key, list[str | None], partial(world_model.answers, trajectory))

    return measure_fidelity(answers, trajectories)


def held_out(cfg: Config, tasks: Tasks) -> list[str]:
    """One entry per episode."""
    return [task for task in tasks.held_out for _ in range(cfg.eval_repeats)]


def consistency(job: Word2WorldJob) -> dict[str, dict]:
    """Real, WM and W2R of each agent on one list of held-out episodes."""
    cfg = job.cfg
    tasks = find_tasks(cfg)
    chosen = held_out(cfg, tasks)
    pieces = job.pieces()
    pieces.check_data(data_digest(tasks))
    found = {}
    for name in job.settings.agents:
        with open_agent(cfg, name, job.settings.slips, pieces) as play:
            predict = open_world_model(job, chosen).predict
            found[name] = measure_consistency(
                cfg.env, stored(pieces, predict), tasks.make_pool, chosen, play,
                job.settings.ground,
            )
        shown = ", ".join(f"{key} {found[name][key]:.4f}" for key in ("real", "wm", "w2r"))
        say(f"{name}: {shown}")
    return found


def verify(job: Word2WorldJob) -> dict[str, dict]:
    """Success in the environment for each agent and budget of simulated purchases."""
    cfg = job.cfg
    tasks = find_tasks(cfg)
    chosen = held_out(cfg, tasks)
    pieces = job.pieces()
    pieces.check_data(data_digest(tasks))
    found = {}
    for name in job.settings.agents:
        with open_agent(cfg, name, job.settings.slips, pieces) as play:
            predict = stored(pieces, open_world_model(job, chosen).predict)
            for budget in job.settings.budgets:
                pool = tasks.make_pool(min(SLOTS, len(chosen)))
                with closing(VerifiedPool(cfg.env, pool, predict, budget)) as verified:
                    won = [t.won for t in play(verified, chosen)]
                found[f"{name}, budget {budget}"] = {
                    "won": mean(won), "n": len(won),
                    "checks": verified.checks, "vetoes": verified.vetoes,
                }
                say(f"{name}, budget {budget}: {mean(won):.4f} won")
    return found


# ---- the command line ----

FUNCTIONS = {  # of word2world_options.COMMANDS
    "collect": collect, "train": train, "fidelity": fidelity, "consistency": consistency,
    "verify": verify, "imitate": imitate,
}
# What a command writes besides its JSON file, and never over the file of another command.
OUTPUTS = {"collect": "trajectories.json", "train": "config.json", "imitate": "config.json"}


def main(argv: list[str] | None = None) -> dict:
    """Run a command, or read what it has written -> its result."""
    job = parse(__doc__, sys.argv[1:] if argv is None else argv)

    def make() -> dict:
        job.pieces().claim(job.out / OUTPUTS.get(job.command, f"{job.command}.json"))
        say(f"{job.command} {job.cfg.env}: to {job.out}")
        began = time.perf_counter()
        found = FUNCTIONS[job.command](job)
        return found | {"seconds": round(time.perf_counter() - began, 1)}

    with writing(f"the folder {job.out}"):
        job.out.mkdir(parents=True, exist_ok=True)
        lock = hold(job.out, "--out")
    found = stage(job.out / f"{job.command}.json", {"command": job.line}, make)
    job.pieces().remove()
    lock.release()
    say(summary(found))
    return found


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
