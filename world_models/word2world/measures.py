"""What a world model is measured by (Word2World, arXiv 2512.18832, sec. 4).

    exact_match, measure_fidelity    single steps on real prefixes                        Table 1
    rates, measure_consistency       success in the environment, in the world model, and  Table 2
                                     of the world model's actions in the environment
"""

from collections.abc import Callable
from contextlib import closing

from paw_min.base.console import progress_bar
from paw_min.base.errors import UserError
from paw_min.envs.interface import Pool
from paw_min.metrics import mean
from paw_min.running.evaluate import short
from world_models.word2world.dream import DreamPool, Predict
from world_models.word2world.trajectories import Trajectory, observation_of

SLOTS = 64  # episodes at a time


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
    found = {"real": mean(real), "wm": mean(dream), "w2r": mean(replay)}
    found |= {"cr": None, "pairwise_cr": None}
    if any(real):
        found["cr"] = found["w2r"] / found["real"]
        found["pairwise_cr"] = mean([w2r for won, w2r in zip(real, replay, strict=True) if won])
    return found


def measure_fidelity(
    answers: Callable[[Trajectory], list[str | None]], trajectories: list[Trajectory]
) -> dict[str, float]:
    """Exact match of single steps, over the turns of all trajectories.

    answers: those to each command, after the real chat before it. em_observation: without the list
    of available actions, as in Word2World's ALFWorld.
    """
    predicted = []
    with progress_bar(len(trajectories), "fidelity", "trajectory") as bar:
        for trajectory in trajectories:
            predicted += answers(trajectory)
            bar.update()
    targets = [answer for t in trajectories for answer in t.answers]
    if not targets:
        raise UserError("the trajectories have no answer to predict: collect others.")
    hits = []
    observed = []
    for answer, target in zip(predicted, targets, strict=True):
        hits.append(exact_match(answer, target))
        shown = None if answer is None else observation_of(answer)
        observed.append(exact_match(shown, observation_of(target)))
    return {"em": mean(hits), "n": len(hits), "em_observation": mean(observed)}


def measure_consistency(
    env: str, predict: Predict, make_pool: Callable[[int], Pool], tasks: list[str],
    play: Callable[[str, Pool, list[str]], list[Trajectory]],
) -> dict:
    """`rates` of one agent on one list of tasks, and its episodes; one that breaks is a failure.

    play: ("real" or "dream", a pool, the tasks) -> an episode per task.
    """
    slots = min(SLOTS, len(tasks))
    with closing(make_pool(slots)) as pool:
        real = play("real", pool, tasks)
    with closing(DreamPool(env, predict, make_pool(1), slots)) as pool:
        dream = play("dream", pool, tasks)
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
