"""Speed of ALFWorld games with the original packages and with paw_min.envs.alfworld.engine.

    python research/bench/engine.py [--games N] [--steps N] [--out FILE]

Both engines play the same small generated games with the same random admissible commands, in
separate processes that run one after the other. Times are CPU milliseconds of one process
(`time.process_time`), which depend less on the machine's load than wall time: mean, minimum and
maximum of the rounds. The texts of both engines are compared; a difference is an error. Takes about
a minute.

    first load    load(path) of a game that is new to this process
    load again    load(path) of a known game, after another game was loaded
    reset         start of the loaded game
    step, 1st     an admissible command in the first walk through a game, which parses its texts
    step, 2nd     the same in a second, different walk, as for the second member of a group
"""

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from time import process_time

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 2
FIGURES = ("first load", "load again", "reset", "step, 1st", "step, 2nd")
PACKAGES = ("textworld", "alfworld", "fast_downward_textworld")


def play(engine, steps, paths):
    """Play every game; returns {figure: mean CPU ms} and a hash of all texts."""
    import textworld

    request_infos = textworld.EnvInfos(won=True, admissible_commands=True)
    if engine == "stock":
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from textworld.envs import PddlEnv

        env = AlfredInfos(AlfredDemangler(PddlEnv(request_infos), shuffle=False))
    else:
        from paw_min.envs.alfworld.engine import make_env

        env = make_env(request_infos)
    seconds = {figure: [] for figure in FIGURES}
    texts = hashlib.sha256()

    def timed(figure, function, *arguments):
        start = process_time()
        result = function(*arguments)
        seconds[figure].append(process_time() - start)
        return result

    for path in paths:
        timed("first load", env.load, path)
    for seed, path in enumerate(paths):
        timed("load again", env.load, path)
        rng = random.Random(seed)
        for figure in ("step, 1st", "step, 2nd"):
            state = timed("reset", env.reset)
            for _ in range(steps):
                texts.update(f"{state.feedback}{state.admissible_commands}{state.won}".encode())
                state, _, _ = timed(figure, env.step, rng.choice(state.admissible_commands))
    return {figure: 1e3 * mean(seconds[figure]) for figure in FIGURES}, texts.hexdigest()


def play_in_subprocess(engine, steps, paths, folder):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ALFWORLD_DATA": folder}
    job = json.dumps([engine, steps, paths])
    result = subprocess.run([sys.executable, __file__, "--play"], input=job, env=environ, text=True,
                            stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--games", type=int, default=12, help="number of generated games")
    parser.add_argument("--steps", type=int, default=20, help="commands per walk")
    parser.add_argument("--out", default="research/bench/results/engine.json")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from paw_min.toy import alfworld_games as games

    runs = {"stock": [], "fast": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(path) for path in games.generate(folder, "train", args.games, 0)]
        for turn in range(ROUNDS):
            for engine, rounds in runs.items():
                print(f"round {turn + 1} of {ROUNDS}: {engine}", flush=True)
                rounds.append(play_in_subprocess(engine, args.steps, paths, folder))
    hashes = {digest for rounds in runs.values() for _, digest in rounds}
    if len(hashes) > 1:
        raise SystemExit("The texts of the two engines differ: see tests/test_engine.py.")

    rows = {}
    print(f"\n{'CPU-ms':12}{'original':>26}{'fast engine':>26}{'ratio':>8}")
    for figure in FIGURES:
        row = rows[figure] = {}
        for engine, rounds in runs.items():
            values = [figures[figure] for figures, _ in rounds]
            row[engine] = {key: round(f(values), 4)
                           for key, f in (("mean", mean), ("min", min), ("max", max))}
        row["ratio"] = round(row["stock"]["mean"] / row["fast"]["mean"], 1)
        cells = [f"{cell['mean']:.4g} ({cell['min']:.4g}-{cell['max']:.4g})".rjust(26)
                 for cell in (row["stock"], row["fast"])]
        print(f"{figure:12}{cells[0]}{cells[1]}{row['ratio']:>8}")
    report = {
        "command": f"python research/bench/engine.py --games {args.games} --steps {args.steps}",
        "unit": "CPU-ms, mean (min, max) of the rounds' means",
        "rounds": ROUNDS,
        "same_texts": True,
        "cpu_ms": rows,
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nWritten to {args.out}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--play"]:
        print(json.dumps(play(*json.load(sys.stdin))))
    else:
        main()
