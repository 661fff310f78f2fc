"""Word2World (arXiv 2512.18832): a language model in place of the environment, and its measures.

    python -m world_models.word2world collect ENV [--agents NAME ...]
    python -m world_models.word2world train ENV --trajectories FILE ...
    python -m world_models.word2world fidelity ENV --world-model FOLDER --trajectories FILE
    python -m world_models.word2world consistency ENV --world-model FOLDER
    python -m world_models.word2world verify webshop --world-model FOLDER --budgets 0 2 4 10
    python -m world_models.word2world imitate ENV --trajectories FILE ... [--wins N]

Each needs --out FOLDER. In place of a trained --world-model FOLDER, any instruct model:
--world-model NAME --shots 0, or --shots 3 --examples FILE ... (prompted.py).

collect      episodes of agents on the training tasks (sec. 4)
train        fit a world model to trajectories, from scratch or from a model (sec. 4, Table 7)
fidelity     single-step exact match on real prefixes (sec. 4, Table 1)
consistency  success in the environment, in the world model, and of the world model's actions
             replayed in the environment (sec. 4, Table 2)
verify       a purchase is simulated before it is made (sec. 7.1, Table 4)
imitate      fit an agent to the responses of won trajectories (sec. 7.2, 7.3)

ENV: alfworld, webshop, or a module with an environment (examples.locks). Agents:
the language model of --model, the rule-based `teacher` of the generated data, a `random` player.
All other flags are those of the run scripts: --model is the agent, --eval-tasks the number of
held-out tasks, --max-turns the most steps of an episode (50).

Each command writes <command>.json to that folder when it is complete, with `command`, the command
line, and `seconds`. A rerun skips a complete command (world_models/stage.py). trajectories.py and
this folder's README.md have the deviations.
"""

import sys
import time
from contextlib import closing
from pathlib import Path

from paw_min.base.console import say
from paw_min.base.errors import UserError
from paw_min.base.files import writing
from paw_min.config import Config
from paw_min.envs.interface import Pool, Tasks
from paw_min.metrics import mean
from paw_min.running.runs import lock_folder
from paw_min.running.session import find_tasks
from world_models.stage import run_stage
from world_models.word2world.dream import VerifiedPool
from world_models.word2world.measures import (
    SLOTS,
    measure_consistency,
    measure_fidelity,
)
from world_models.word2world.players import open_agent
from world_models.word2world.prompted import load_prompted
from world_models.word2world.settings import Word2WorldJob, parse
from world_models.word2world.training import imitate, load_world_model, train
from world_models.word2world.trajectories import read_trajectories, write_trajectories
from world_models.word2world.world_model import WorldModel

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
    """Play the training tasks in turn; all episodes are kept, won or not."""
    cfg = job.cfg
    settings = job.settings
    tasks = find_tasks(job.cfg)
    source = tasks.train if settings.split == "train" else tasks.held_out
    chosen = [source[k % len(source)] for k in range(settings.episodes or len(source))]
    agents = settings.agents
    if len(chosen) < len(agents):
        raise UserError(f"--episodes {len(chosen)} for {len(agents)} agents: use more.")
    found = []
    won = {}
    for number, name in enumerate(agents):
        mine = chosen[number :: len(agents)]
        with (
            open_agent(cfg, name, settings.slips) as play,
            closing(tasks.make_pool(min(SLOTS, len(mine)))) as pool,
        ):
            played = play(pool, mine, name)
        won[name] = mean([t.won for t in played])
        say(f"{name}: {len(played)} episodes, {won[name]:.4f} won")
        found += played
    write_trajectories(job.out / "trajectories.json", found)
    return {
        "episodes": len(found),
        "turns": sum(len(t.answers) for t in found),
        "failed": sum(bool(t.failed) for t in found),
        "won": won,
    }


def fidelity(job: Word2WorldJob) -> dict:
    trajectories = read_trajectories(job.settings.trajectories)
    world_model = open_world_model(job, [trajectory.task for trajectory in trajectories])
    return measure_fidelity(world_model.answers, trajectories)


def held_out(cfg: Config, tasks: Tasks) -> list[str]:
    """One entry per episode."""
    return [task for task in tasks.held_out for _ in range(cfg.eval_repeats)]


def consistency(job: Word2WorldJob) -> dict[str, dict]:
    """Real, WM and W2R of each agent on one list of held-out episodes."""
    cfg = job.cfg
    tasks = find_tasks(job.cfg)
    chosen = held_out(cfg, tasks)
    predict = open_world_model(job, chosen).predict
    found = {}
    for name in job.settings.agents:
        with open_agent(cfg, name, job.settings.slips) as play:

            def play_in(where: str, pool: Pool, tasks: list[str], name=name, play=play):
                return play(pool, tasks, f"{name}, {where}")

            found[name] = measure_consistency(cfg.env, predict, tasks.make_pool, chosen, play_in)
        shown = ", ".join(f"{key} {found[name][key]:.4f}" for key in ("real", "wm", "w2r"))
        say(f"{name}: {shown}")
    return found


def verify(job: Word2WorldJob) -> dict[str, dict]:
    """Success in the environment for each agent and budget of simulated purchases."""
    cfg = job.cfg
    tasks = find_tasks(job.cfg)
    chosen = held_out(cfg, tasks)
    predict = open_world_model(job, chosen).predict
    found = {}
    for name in job.settings.agents:
        with open_agent(cfg, name, job.settings.slips) as play:
            for budget in job.settings.budgets:
                what = f"{name}, budget {budget}"
                real = tasks.make_pool(min(SLOTS, len(chosen)))
                with closing(VerifiedPool(cfg.env, real, predict, budget)) as pool:
                    won = [t.won for t in play(pool, chosen, what)]
                found[what] = {
                    "won": mean(won), "n": len(won), "checks": pool.checks, "vetoes": pool.vetoes,
                }
                say(f"{what}: {mean(won):.4f} won")
    return found


# ---- the command line ----

FUNCTIONS = {  # one for each of settings.COMMANDS
    "collect": collect, "train": train, "fidelity": fidelity, "consistency": consistency,
    "verify": verify, "imitate": imitate,
}
# What a command writes besides its JSON file, and never over the file of another command.
OUTPUTS = {
    "collect": ("trajectories.json",), "train": ("config.json",), "imitate": ("config.json",),
}


def main(argv: list[str] | None = None) -> dict:
    """Run a command, or read what it has written -> its result."""
    job = parse(__doc__, sys.argv[1:] if argv is None else argv)

    def make() -> dict:
        say(f"{job.command} {job.cfg.env}: to {job.out}")
        began = time.perf_counter()
        found = FUNCTIONS[job.command](job)
        return found | {"seconds": round(time.perf_counter() - began, 1)}

    with writing(f"the folder {job.out}"):
        job.out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(job.out, "--out")
    path = job.out / f"{job.command}.json"
    found = run_stage(path, {"command": job.line}, OUTPUTS.get(job.command, ()), make)
    lock.release()
    numbers = [f"{name} {x:.4f}" for name, x in found.items() if isinstance(x, float)]
    say(f"{path}: {', '.join(numbers)}")
    return found
