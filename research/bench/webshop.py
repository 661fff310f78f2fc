"""WebShop benchmark: time per step, and the load time and memory of a shop.

    python research/bench/webshop.py [--steps N] [--quick] [--out FILE]

Steps: CPU milliseconds of one process (`time.process_time`) in an invented shop of 1,000 products,
under a random policy that searches words of the instruction, clicks, buys and sends no-ops. Each
kind of step is compared with the official environment on a comparable machine (RECORDED). Those
times were recorded once, with other products and as wall time on two shared cores, so the ratios
are accurate to a factor of two.

Shops: load time, resident memory, and the time of a search for a goal's attributes, for 1,000 and
100,000 invented products, with 0 and 128 environments. Each row is measured in a fresh process. The
invented shop has a small vocabulary, so it takes less memory and its searches are slower than with
real texts. Needs Linux (/proc). Takes a minute, with --quick seconds; --quick writes a file only
with --out.
"""

import argparse
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
from time import perf_counter, process_time

ROOT = Path(__file__).resolve().parents[2]
# ms per step of the official code (princeton-nlp/WebShop 64fa2a5, text mode, 1,003 products, two
# shared cores, +-50 %): minimum and maximum of several recordings
RECORDED = {"search": (30, 36), "click": (20, 29), "buy": (12, 16), "no-op": (6, 8)}
N_ENVS = 128
PACKAGES = ("numpy", "nltk", "rapidfuzz")


def random_action(env, rng):
    """Draw (kind, action); one action in ten is a no-op."""
    if rng.random() < 0.1:
        return "no-op", "click[no such thing]"
    if env.has_search_bar:
        words = env.instruction_text.split()[1:]  # without "Instruction:"
        return "search", f"search[{' '.join(rng.choices(words, k=rng.randint(2, 5)))}]"
    choice = rng.choice(env.clickables)
    return "buy" if choice == "buy now" else "click", f"click[{choice}]"


def walk(env, rng, steps, goals):
    """Play random episodes; return {kind of step or "reset": list of CPU seconds}."""
    seconds = {kind: [] for kind in ("reset", *RECORDED)}
    done = True
    turn = 0
    for _ in range(steps):
        if done or turn == 15:
            goal = rng.randrange(goals)
            turn = 0
            start = process_time()
            env.reset(goal)
            seconds["reset"].append(process_time() - start)
        kind, action = random_action(env, rng)
        start = process_time()
        _, _, done, _ = env.step(action)
        seconds[kind].append(process_time() - start)
        turn += 1
    return seconds


def measure_steps(folder, steps):
    """Return {kind: {"ms", "n"}}, measured after a short walk that warms the caches."""
    from paw_min.envs.webshop import Shop, WebShopEnv

    shop = Shop.load(folder)
    rng = random.Random(0)
    env = WebShopEnv(shop)
    walk(env, rng, steps // 10, shop.n_goals)
    seconds = walk(env, rng, steps, shop.n_goals)
    return {kind: {"ms": 1e3 * mean(values), "n": len(values)} for kind, values in seconds.items()}


def megabytes(field):
    """VmRSS (resident) or VmHWM (peak resident) memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def measure_shop(folder, n_envs):
    """Load time and memory of this fresh process; each environment takes five steps."""
    import nltk.stem.porter  # noqa: F401 - BM25 imports it on first use; not part of the load time

    from paw_min.envs.webshop import Shop, WebShopEnv

    before = megabytes("VmRSS")
    wall = perf_counter()
    cpu = process_time()
    shop = Shop.load(folder)
    row = {"load_s": perf_counter() - wall, "load_cpu_s": process_time() - cpu,
           "goals": shop.n_goals, "imports_mb": before, "loaded_mb": megabytes("VmRSS")}
    rng = random.Random(0)
    envs = [WebShopEnv(shop) for _ in range(n_envs)]
    for env in envs:
        walk(env, rng, 5, shop.n_goals)
    row |= {"envs": n_envs, "resident_mb": megabytes("VmRSS"), "peak_mb": megabytes("VmHWM")}
    start = process_time()
    for _ in range(20):
        shop.search(" ".join(shop.goal(rng.randrange(shop.n_goals))["attributes"]))
    return row | {"search_cpu_ms": 1e3 * (process_time() - start) / 20}


def in_subprocess(job, *arguments):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, __file__, "--job", job, *map(str, arguments)],
                            env=environ, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="timed steps (default 20000; with --quick 500)")
    parser.add_argument("--quick", action="store_true", help="few steps; 200 and 2,000 products")
    parser.add_argument("--out", help="default results/webshop.json; with --quick, none")
    args = parser.parse_args()
    steps = args.steps or (500 if args.quick else 20_000)
    sizes = (200, 2_000) if args.quick else (1_000, 100_000)
    out = args.out or (None if args.quick else "research/bench/results/webshop.json")
    sys.path.insert(0, str(ROOT))
    from paw_min.toy import webshop_shops

    with tempfile.TemporaryDirectory() as temporary:
        folders = {n: webshop_shops.generate(Path(temporary) / str(n), n, seed=0) for n in sizes}
        figures = in_subprocess("steps", folders[sizes[0]], steps)
        rows = []
        for n in sizes:
            for n_envs in (0, N_ENVS):
                rows.append({"products": n} | in_subprocess("shop", folders[n], n_envs))

    # All steps together: the recorded times are weighted by the steps of our random policy.
    count = sum(figures[kind]["n"] for kind in RECORDED)
    figures["all steps"] = {"ms": sum(figures[k]["ms"] * figures[k]["n"] for k in RECORDED) / count,
                            "n": count}
    recorded = RECORDED | {"all steps": tuple(
        sum(RECORDED[k][end] * figures[k]["n"] for k in RECORDED) / count for end in (0, 1))}
    title = f"{sizes[0]:,} products"
    print(f"\n{title:14}{'ours, CPU-ms':>20}{'steps':>8}{'recorded, ms':>16}{'ratio':>16}")
    for kind, figure in figures.items():
        line = f"{kind:14}{figure['ms']:>20.4f}{figure['n']:>8}"
        if kind in recorded:
            figure["recorded_ms"] = [round(ms, 1) for ms in recorded[kind]]
            figure["ratio"] = [round(ms / figure["ms"]) for ms in recorded[kind]]
            line += "".join(f"{low:g} - {high:g}".rjust(16)
                            for low, high in (figure["recorded_ms"], figure["ratio"]))
        print(line)
        figure["ms"] = round(figure["ms"], 5)
    columns = ("products", "goals", "envs", "load_s", "imports_mb", "loaded_mb", "resident_mb",
               "peak_mb", "search_cpu_ms")
    print("\n" + "".join(column.rjust(14) for column in columns))
    for row in rows:
        row |= {key: round(value, 2) for key, value in row.items() if isinstance(value, float)}
        print("".join(f"{row[column]:,}".rjust(14) for column in columns))

    if out:
        report = {
            "command": f"python research/bench/webshop.py --steps {steps}"
            + " --quick" * args.quick,
            "steps": {"unit": "CPU-ms, mean", "products": sizes[0], "figures": figures},
            "recorded": "official code on a comparable machine, wall time, not side by side",
            "shops": rows,
            "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES}},
        }
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nWritten to {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job, folder, number = sys.argv[2:]
        print(json.dumps({"steps": measure_steps, "shop": measure_shop}[job](folder, int(number))))
    else:
        main()
