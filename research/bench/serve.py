"""The OpenEnv server: steps per second over WebSocket, beside the same steps in process.

    python research/bench/serve.py [--seconds N] [--out FILE]

A client sends an admissible command as soon as it has the answer, and resets after 15 steps or at
the end of an episode; which command depends on the episode and the step. The server and the
clients, one or sixteen of them in one event loop, are two processes with one thread each. In
process, the pool of a run plays the same. Wall time.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from openenv.core import GenericEnvClient

from paw_min import toy
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.running.serve import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "research/bench/results/serve.json"
TURNS = 15
TASKS = 16  # played once before the time counts: loading a game takes longer than playing it
SEARCH = "<search>Who founded the town?</search>"


def choose(env: str, admissible: list[str], n: int) -> str:
    if env == "search":
        return SEARCH
    return admissible[n % len(admissible)].replace("<your query>", "red shirt")


def in_process(env: str, seconds: float) -> float:
    """Steps per second of the pool of a run, in this process."""
    tasks = BENCHMARKS[env].load(Config(env=env, **SETTINGS[env]), toy.default_data(env))
    pool = tasks.make_pool(1)

    def episode(n: int) -> int:
        pool.reset(0, tasks.train[n % TASKS])
        step = pool.recv().step
        for turn in range(TURNS):
            pool.step(0, choose(env, step.admissible, n + turn))
            step = pool.recv().step
            if step.done:
                break
        return turn + 1

    for n in range(TASKS):
        episode(n)
    n_steps = 0
    n = 0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        n_steps += episode(n)
        n += 1
    return n_steps / (time.perf_counter() - start)


async def play(env: str, url: str, first: int, end: float) -> int:
    """Steps of one session until the time `end`."""
    n_steps = 0
    episode = first
    async with GenericEnvClient(base_url=url) as session:
        while time.perf_counter() < end:
            result = await session.reset(seed=episode % TASKS, split="train")
            for turn in range(TURNS):
                command = choose(env, result.observation["admissible"], episode + turn)
                result = await session.step({"command": command})
                n_steps += 1
                if result.done:
                    break
            episode += 1
    return n_steps


async def over(env: str, url: str, sessions: int, seconds: float) -> float:
    """Steps per second of this many sessions together."""
    start = time.perf_counter()
    end = start + seconds
    played = await asyncio.gather(*(play(env, url, n, end) for n in range(sessions)))
    return sum(played) / (time.perf_counter() - start)


def measure(env: str, seconds: float) -> dict[str, float]:
    result = {"in process": in_process(env, seconds)}
    command = [sys.executable, "-m", "paw_min.running.serve", env, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split()[2].rstrip(":")
        asyncio.run(over(env, url, TASKS, seconds))  # loads the tasks
        for sessions in (1, 16):
            speed = asyncio.run(over(env, url, sessions, seconds))
            result[f"sessions {sessions}"] = speed
    finally:
        server.kill()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="per number")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    command = f"python research/bench/serve.py --seconds {args.seconds:g}"
    report = {"command": command, "steps_per_s": {}}
    for env in SETTINGS:
        report["steps_per_s"][env] = measure(env, args.seconds)
        print(env, report["steps_per_s"][env], flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
