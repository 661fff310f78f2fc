"""Fault tolerance: kill -9 at random moments, hundreds of times; the results must not change.

    python bench/soak.py [--minutes 30] [--seed 0]

Two runs of the tiny presets, shortened: ALFWorld with two worker processes, and search with a local
retrieval server, which is killed and restarted now and then, too. Each is run once without
interruption, and then under kill -9 after random delays, resumed until its end, again and again
until the time is over. At the end of every run its metrics.jsonl must have each update exactly
once, and the same sums as the uninterrupted run.

Workers and servers answer in an order that depends on timing, which changes the last bits of the
logits (rollout.py). Counts must be equal, other sums to 0.1 %.

Writes bench/results/soak.json.
"""

import argparse
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paw_min.running.runs import read_metrics
from paw_min.toy import default_data

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--groups=2", "--group-size=4", "--updates=4", "--eval-every=2", "--eval-tasks=8"]
TIMED = ("seconds", "generator_idle", "env_wait", "sampler_gap", "memory_gb", "tokens_forward")


def sums(folder: Path) -> dict[str, float]:
    lines = read_metrics(folder)
    if [m["update"] for m in lines] != list(range(5)):
        raise SystemExit(f"{folder}: updates {[m['update'] for m in lines]}")
    names = sorted({k for m in lines for k in m if not k.startswith(TIMED)})
    return {name: sum(m.get(name, 0) for m in lines) for name in names}


def same(one: dict, other: dict) -> bool:
    exact = ("update", "rows", "tokens_generated", "tokens_trained", "success", "failed")
    return one.keys() == other.keys() and all(
        one[k] == other[k] if k in exact else abs(one[k] - other[k]) <= 1e-3 * abs(one[k]) + 1e-5
        for k in one
    )


class Server:
    """Our retrieval server on a fixed port, so that a restart is found again."""

    def __init__(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.start()

    def start(self):
        corpus = ROOT / default_data("search") / "corpus.jsonl"
        command = ["-m", "paw_min.retrieval.server", "--corpus", corpus, "--port", self.port]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    def restart(self):
        self.process.kill()
        self.process.wait()
        self.start()


def run(command: list[str], delay: float | None) -> int | None:
    """The exit code, or None if it was killed after `delay` seconds."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {errors.decode()[-2000:]}")
    return process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit")
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/soak.json")
    args = parser.parse_args()
    rng, folder, server = random.Random(args.seed), Path(tempfile.mkdtemp()), Server()
    scripts = {
        "alfworld": ["run_alfworld.py", "--workers=2", "--max-turns=6"],
        "search": ["run_search.py", f"--retriever=http://127.0.0.1:{server.port}"],
    }
    result = {"kills": 0, "server_restarts": 0, "runs": 0, "runs_with_equal_sums": 0}
    expected, seconds = {}, {}
    try:
        for name, script in scripts.items():
            start = time.monotonic()
            run([sys.executable, *script, *SHORT, f"--out={folder}", f"--name={name}"], None)
            seconds[name], expected[name] = time.monotonic() - start, sums(folder / name)
        deadline = time.monotonic() + 60 * args.minutes
        while time.monotonic() < deadline:
            name = list(scripts)[result["runs"] % 2]
            command = [sys.executable, *scripts[name], *SHORT, f"--out={folder}", "--name=cut"]
            while run(command, rng.uniform(0.0, seconds[name])) is None:
                result["kills"] += 1
                if name == "search" and rng.random() < 0.2:
                    server.restart()
                    result["server_restarts"] += 1
            result["runs"] += 1
            result["runs_with_equal_sums"] += same(expected[name], sums(folder / "cut"))
            print(result, flush=True)
            shutil.rmtree(folder / "cut")
    finally:
        server.process.kill()
        shutil.rmtree(folder)
    command = f"python bench/soak.py --minutes {args.minutes:g}"
    args.out.write_text(json.dumps({"command": command} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
