"""Run the arms of a table or figure on several seeds, one at a time per GPU, or per idle core.

    python -m research.paper.sweep table1 --env alfworld [--seeds 0 1 2] [--arms LABEL] [-- FLAGS]

FLAGS go to every run, such as `--preset paper --data DIR`. Each run is a process of run_<env>.py;
its output is in <run folder>.log. Rerun the same command to resume: finished runs are kept. Runs
are named after their flags, so what several grids contain is trained once. OUT/GRID-ENV.json lists
them for `table` and `figures`. --dry-run has the plan of every arm, and what all of them need.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paw_min.base.console import say, wall_time
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import expanded, writing
from paw_min.base.flags import Parser
from paw_min.cli import parse_config
from paw_min.config import Config
from paw_min.envs.benchmarks import NAMES, presets_of
from paw_min.running import memory
from paw_min.running.runs import newest_checkpoint, read_metrics, updates_done
from paw_min.running.session import start_model
from research.paper.grids import GRIDS
from research.paper.table import Entry

ROOT = Path(__file__).parents[2]  # has the run scripts
OURS = {"--seed", "--name", "--out"}  # FLAGS may not have them.


@dataclass
class Job:
    """One run: an arm with a seed."""

    label: str
    flags: list[str]
    cfg: Config

    def __str__(self) -> str:
        return f"{self.label}, seed {self.cfg.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.cfg.out) / self.cfg.name

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(ROOT / f"run_{self.cfg.env}.py"), *self.flags]

    def done(self) -> int:
        """Updates so far."""
        lines = read_metrics(self.folder)
        updates = min(lines[-1]["update"], self.cfg.updates) if lines else 0
        # Metrics are ahead of a checkpoint that could not be written. A finished run may have none.
        checkpoint = newest_checkpoint(self.folder)
        return min(updates, updates_done(checkpoint)) if checkpoint else updates


def plan(
    grid: str, env: str, seeds: list[int], out: str, extra: list[str], arms: list[str] | None = None
) -> list[Job]:
    """All runs, first those of the first seed. arms: labels; default: all of the grid."""
    if taken := OURS & {word.partition("=")[0] for word in extra}:
        raise UserError(f"{' '.join(sorted(taken))} after --: use the options before it.")
    labels = [arm.label for arm in GRIDS[grid]]
    if unknown := set(arms or ()) - set(labels):
        raise UserError(f"--arms {', '.join(sorted(unknown))}: {grid} has {', '.join(labels)}.")
    presets = presets_of(env)
    size = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    size.add_argument("--preset", nargs="+", default=list(presets)[:1])
    sizes = size.parse_known_args(extra)[0].preset
    base = parse_config(env, presets, "", extra)
    values = {"size": " ".join(sizes), "episodes": base.groups * base.group_size}
    by_folder = {}
    for seed in seeds:
        for arm in GRIDS[grid]:
            if arms and arm.label not in arms:
                continue
            own = arm.flags.format(**values).split()
            flags = [*extra, *own, "--seed", str(seed), "--out", out]
            job = Job(arm.label, flags, parse_config(env, presets, "", flags))
            other = by_folder.setdefault(job.folder, job)
            if other is not job:
                raise UserError(f"with the flags after --, {other.label!r} and {job.label!r} are "
                                "the same run: leave out those that the arms differ in.")
    return list(by_folder.values())


def slots(jobs: int | None) -> list[str]:
    """One entry per run at a time: the GPU that it sees, or "" on a CPU."""
    n_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus))))
    gpus = visible.split(",")[:n_gpus]
    if gpus:
        return [gpus[k % n_gpus] for k in range(jobs or n_gpus)]
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    idle = int(cores - os.getloadavg()[0] + 0.5)
    return [""] * (jobs or max(1, idle))


def start(job: Job, gpu: str) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if gpu:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    with writing(str(job.log)), open(job.log, "w", encoding="utf-8") as log:
        return subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,  # Ctrl-C reaches the sweep only, which passes it on
        )


def run_all(jobs: list[Job], free: list[str]) -> list[str]:
    """Run what is not finished -> one sentence per failed run. free: see slots; it is used up."""
    waiting = [job for job in jobs if job.done() < job.cfg.updates]
    running = {}  # process -> its job and GPU
    failures = []
    try:
        while waiting or running:
            while waiting and free:
                job, gpu = waiting.pop(0), free.pop()
                running[start(job, gpu)] = job, gpu
            time.sleep(1)
            for process in [process for process in running if process.poll() is not None]:
                job, gpu = running.pop(process)
                free.append(gpu)
                lines = job.log.read_text("utf-8", "replace").strip().splitlines() or ["no output"]
                result = [line for line in lines if line.startswith("held-out success:")]
                say(f"{job}: {(result or lines)[-1]} ({len(waiting) + len(running)} runs left)")
                if process.returncode:
                    code = f"exit code {process.returncode}"
                    failures.append(f"{job}: {code}: {lines[-1]} ({job.log})")
    finally:
        stop(list(running))
    return failures


def stop(processes: list[subprocess.Popen], patience_s: float = 20.0) -> None:
    """Interrupt each run, so that it ends its own processes; kill what does not end."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def dry_run(jobs: list[Job]) -> list[str]:
    """Check model and data with the run script's --dry-run -> one sentence per failed check."""
    failures = []
    for job in jobs:
        result = subprocess.run([*job.command, "--dry-run"], capture_output=True, text=True)
        print(f"\n{job}\n{result.stdout}{result.stderr}", end="", flush=True)
        if result.returncode:
            failures.append(f"{job}: {result.stderr.strip()}")
    return failures


def totals(jobs: list[Job], at_a_time: int) -> str:
    """What all runs need together: updates, hours, disk, CPU memory."""
    left = sum(job.cfg.updates - job.done() for job in jobs)
    measured = [wall_time(line) for job in jobs for line in read_metrics(job.folder)[1:]]
    hours = f"{left} x s / {at_a_time} / 3600 hours, s being the seconds of an update"
    if measured:
        seconds = sum(measured) / len(measured)
        hours = f"{left * seconds / at_a_time / 3600:.1f} hours at {seconds:.0f} s per update"
    needs = [memory.of_folder(job.cfg, start_model(job.cfg), "bf16") for job in jobs]
    most = max(need.checkpoint for need in needs)
    disk = sum(need.checkpoint for need in needs) + at_a_time * most  # one is being written
    host = at_a_time * max(memory.beside_gpus(need, 1) for need in needs)
    return (f"total     {len(jobs)} runs, {at_a_time} at a time, {left} updates left: {hours}; "
            f"{memory.gb(disk)} GB of disk, with GPUs {memory.gb(host)} GB of CPU memory"
            f"{memory.workers(jobs[0].cfg, at_a_time)}")


def main(argv: list[str]) -> None:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(usage="%(prog)s GRID --env ENV [options] [-- FLAGS]", description=__doc__)
    add = parser.add_argument
    add("grid", choices=list(GRIDS), help="a name of grids.py")
    add("--env", choices=NAMES, required=True)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    add("--arms", nargs="+", help="labels of the grid's arms (default: all)")
    add("--jobs", type=int, help="runs at a time (default: one per GPU, or per idle core)")
    add("--out", default="runs", help="folder of the run folders (default: runs)")
    add("--dry-run", action="store_true", help="check model and data of every arm, and exit")
    args = parser.parse_args(argv[:cut])
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} is out of range: it must be at least 1.")
    args.out = str(expanded(args.out))
    seeds = list(dict.fromkeys(args.seeds))
    jobs = plan(args.grid, args.env, seeds, args.out, argv[cut + 1 :], args.arms)
    for job in jobs:
        print(f"{job.done():4d} of {job.cfg.updates} updates  {job.folder}  {job}")
    free = slots(args.jobs)
    tried = jobs
    if args.dry_run:
        tried = jobs[: len(jobs) // len(seeds)]  # one seed: all use the same data
        failures = dry_run(tried)
        if not failures:
            print(f"\n{totals(jobs, min(len(free), len(jobs)))}")
    else:
        path = Path(args.out) / f"{args.grid}-{args.env}.json"
        entries = [asdict(Entry(job.label, job.cfg.seed, job.cfg.name)) for job in jobs]
        with writing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
            path.write_text(text, encoding="utf-8")
        print(f"{len(free)} at a time; output: {args.out}/<run>.log", flush=True)
        failures = run_all(jobs, free)
        print(f"table: python -m research.paper.table {shlex.quote(str(path))}")
    if failures:
        raise UserError(f"{len(failures)} of {len(tried)} runs failed.\n" + "\n".join(failures))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # even where a shell started us with & or nohup
        signal.signal(number, signal.default_int_handler)
    with user_errors():
        main(sys.argv[1:])
