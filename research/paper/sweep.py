"""Run the arms of a table or figure on several seeds, one at a time per GPU, or per idle core.

    python -m research.paper.sweep table1 --env alfworld [--seeds 0 1 2] [-- FLAGS]

FLAGS go to every run, such as `--preset paper --data DIR`. Each run is a process of run_<env>.py;
its output is in <run folder>.log. Rerun the same command to resume: finished runs are kept. Runs
are named after their flags, so what several grids contain is trained once. OUT/GRID-ENV.json lists
them for `table` and `figures`.
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

from paw_min.base.console import progress_bar
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import writing
from paw_min.config import Config, parse_args
from paw_min.envs.benchmarks import NAMES, presets_of
from paw_min.running.config_json import differences, read_config
from paw_min.running.runs import newest_checkpoint, read_metrics, updates_done
from research.paper.grids import GRIDS
from research.paper.table import Entry

ROOT = Path(__file__).parents[2]  # has the run scripts
OURS = {"--seed", "--name", "--out", "--dry-run", "--eval-only"}  # FLAGS may not have them.


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
        """Updates so far; -1 before the evaluation of update 0."""
        lines = read_metrics(self.folder)
        if not lines:
            return -1
        updates = min(lines[-1]["update"], self.cfg.updates)
        # Metrics are ahead of a checkpoint that could not be written. A finished run may have none.
        checkpoint = newest_checkpoint(self.folder)
        if checkpoint:
            updates = min(updates, updates_done(checkpoint))
        return updates


def plan(grid: str, env: str, seeds: list[int], out: str, extra: list[str]) -> list[Job]:
    """All runs, first those of the first seed; UserError if settings or folders do not fit."""
    taken = OURS & {word.partition("=")[0] for word in extra}
    if taken:
        raise UserError(f"{' '.join(sorted(taken))} after --: use the options before it.")
    presets = presets_of(env)
    size = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    size.add_argument("--preset", nargs="+", default=list(presets)[:1])
    sizes = size.parse_known_args(extra)[0].preset
    base, _ = parse_args(env, presets, "", extra)
    values = {"size": " ".join(sizes), "episodes": base.groups * base.group_size}
    jobs = []
    for seed in seeds:
        for arm in GRIDS[grid]:
            own = arm.flags.format(**values).split()
            flags = [*extra, *own, "--seed", str(seed), "--out", out]
            cfg, _ = parse_args(env, presets, "", flags)
            job = Job(arm.label, flags, cfg)
            if job.done() >= 0:
                check_settings(job)
            jobs.append(job)
    by_folder = {}
    for job in jobs:
        other = by_folder.setdefault(job.folder, job)
        if other is not job:
            raise UserError(f"with the flags after --, {other.label!r} and {job.label!r} are the "
                            "same run: leave out those that the arms differ in.")
    return jobs


def check_settings(job: Job) -> None:
    """UserError if the folder of a job belongs to a run with other settings."""
    if changed := differences(read_config(job.folder / "config.json"), job.cfg):
        raise UserError(f"{job.folder} belongs to a run with {', '.join(changed)}: "
                        "repeat those settings, or choose another --out.")


def slots(jobs: int | None) -> list[str]:
    """One entry per run at a time: the GPU that it sees, or "" on a CPU."""
    n_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus))))
    gpus = visible.split(",")[:n_gpus]
    if gpus:
        return [gpus[k % n_gpus] for k in range(jobs or n_gpus)]
    idle = int(len(os.sched_getaffinity(0)) - os.getloadavg()[0] + 0.5)  # cores
    return [""] * (jobs or max(1, idle))


def start(job: Job, gpu: str) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if gpu:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    with writing(str(job.log)), open(job.log, "w") as log:
        return subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,  # Ctrl-C reaches the sweep only, which passes it on
        )


def progress(jobs: list[Job]) -> int:
    return sum(max(0, job.done()) for job in jobs)


def run_all(jobs: list[Job], free: list[str]) -> list[str]:
    """Run what is not finished -> one sentence per failed run. free: see slots; it is used up."""
    waiting = [job for job in jobs if job.done() < job.cfg.updates]
    running = {}  # process -> its job and GPU
    failures = []
    bar = progress_bar(sum(job.cfg.updates for job in jobs), "sweep", "update")
    bar.initial = progress(jobs)  # tqdm computes the time left from the others
    try:
        while waiting or running:
            while waiting and free:
                job, gpu = waiting.pop(0), free.pop()
                running[start(job, gpu)] = job, gpu
            time.sleep(1)
            for process in [process for process in running if process.poll() is not None]:
                job, gpu = running.pop(process)
                free.append(gpu)
                lines = job.log.read_text(errors="replace").strip().splitlines() or ["no output"]
                result = [line for line in lines if line.startswith("held-out success:")]
                bar.write(f"{job}: {(result or lines)[-1]}")
                if process.returncode:
                    code = f"exit code {process.returncode}"
                    failures.append(f"{job}: {code}: {lines[-1]} ({job.log})")
            bar.n = progress(jobs)
            bar.refresh()
    finally:
        bar.close()
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


def main(argv: list[str]) -> None:
    cut = argv.index("--") if "--" in argv else len(argv)
    own = argv[:cut]
    extra = argv[cut + 1 :]
    usage = "%(prog)s GRID --env ENV [options] [-- FLAGS]"
    parser = Parser(usage=usage, description=__doc__)
    add = parser.add_argument
    add("grid", choices=list(GRIDS), help="a name of grids.py")
    add("--env", choices=NAMES, required=True)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    add("--jobs", type=int, help="runs at a time (default: one per GPU, or per idle core)")
    add("--out", default="runs", help="folder of the run folders (default: runs)")
    add("--dry-run", action="store_true", help="check model and data of every arm, and exit")
    args = parser.parse_args(own)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs} is out of range: it must be at least 1.")
    jobs = plan(args.grid, args.env, list(dict.fromkeys(args.seeds)), args.out, extra)
    for job in jobs:
        print(f"{max(0, job.done()):4d} of {job.cfg.updates} updates  {job.folder}  {job}")
    if args.dry_run:
        jobs = jobs[: len(GRIDS[args.grid])]  # one seed: all use the same data
        failures = dry_run(jobs)
    else:
        path = Path(args.out) / f"{args.grid}-{args.env}.json"
        entries = [asdict(Entry(job.label, job.cfg.seed, job.cfg.name)) for job in jobs]
        with writing(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
        free = slots(args.jobs)
        print(f"{len(free)} at a time; output: {args.out}/<run>.log", flush=True)
        failures = run_all(jobs, free)
        print(f"table: python -m research.paper.table {shlex.quote(str(path))}")
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} runs failed.\n" + "\n".join(failures))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # even where a shell started us with & or nohup
        signal.signal(number, signal.default_int_handler)
    with user_errors():
        main(sys.argv[1:])
