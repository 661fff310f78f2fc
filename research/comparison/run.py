"""Ways to use next observations, compared at equal numbers of environment steps.

    python -m research.comparison.run alfworld --seed 0 --out runs/comparison -- FLAGS

    GRPO, PaW                        no stage before RL
    RWML, then GRPO or PaW           world_models/rwml.py; its two placebos, then GRPO
    format, then GRPO                only the format warm start that RWML's stages begin with
    WM-SFT, then GRPO                the same triplets, cross entropy
    early experience, then GRPO      other commands in the states of the rule-based teacher, then
                                     imitation of the teacher
    imitation, then GRPO             only that imitation
    ActObs, then GRPO                the warm start of toy/standins.py, with observations as targets

FLAGS go to every command, such as `--preset open --updates 16`. One run after another: start one
command per core, each with its own seed. Rerun the same command to resume. OUT/comparison-ENV.json
lists the runs of all seeds, with the environment steps that a stage took before RL:

    python -m research.curves OUT/comparison-ENV.json --by steps --out FOLDER

What a stage executed counts as steps. What only repeats a prefix, to reach a state again, does not.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from paw_min.base.console import say
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.base.files import expanded, reading, replace_text, writing
from paw_min.config import parse_args
from paw_min.running.presets import SCRIPTS, presets_of
from paw_min.running.runs import newest_checkpoint, read_metrics
from paw_min.running.untrusted import read_json
from paw_min.world_models.rwml_options import EXPERT
from research.paper.sweep import OURS, Job, check_settings, refuse, run_all
from research.paper.table import Entry


@dataclass(frozen=True)
class Arm:
    label: str
    stage: str = ""  # before RL: a key of STAGES, "actobs", or nothing
    paw: bool = False


ARMS = [
    Arm("GRPO"),
    Arm("GRPO w/ PaW", paw=True),
    Arm("RWML, then GRPO", "rwml"),
    Arm("RWML, then PaW", "rwml", paw=True),
    Arm("WM-SFT, then GRPO", "wm-sft"),
    Arm("early experience, then GRPO", "early-experience"),
    Arm("imitation, then GRPO", "imitation"),
    Arm("ActObs, then GRPO", "actobs"),
    Arm("format, then GRPO", "format"),
    Arm("placebo of RWML: coin", "rwml-coin"),
    Arm("placebo of RWML: shuffled", "rwml-shuffled"),
]

# Not for FLAGS. --paw and its opposite tell the arms apart.
TAKEN = OURS | {"--paw", "--no-paw"}

STAGES = {  # of rwml.py -> its flags
    "rwml": [],
    "wm-sft": ["--method", "wm-sft"],
    "early-experience": ["--method", "early-experience"],
    "imitation": ["--method", "imitation"],
    "format": [],  # its start model is made before the method's
    "rwml-coin": ["--reward", "coin"],
    "rwml-shuffled": ["--target", "shuffled"],
}


@dataclass
class Begun:
    """What RL starts from."""

    model: str  # "": the preset's
    steps: int  # of the environment, before RL


def run_stage(stage: str, env: str, seed: int, out: Path, flags: list[str]) -> Begun:
    """Train the start model of a stage, or what is missing of it."""
    log = out / f"{env}-{stage}-seed{seed}.log"
    module = [sys.executable, "-m"]
    if stage == "actobs":
        # The demonstrations and steps of the open start model, with another loss; no seed.
        model = out / f"{env}-actobs-start-seed{seed}"
        if not (model / "record.json").is_file():  # written last
            name = f"{env}-open"
            standins = [*module, "paw_min.toy.standins", name, "--warm-start", "actobs"]
            call([*standins, "--out", str(model)], log)
        return Begun(str(model), 0)
    folder = out / f"{env}-world-seed{seed}"
    # Also if there is a checkpoint: it may be of an interrupted stage, or have other flags. rwml.py
    # resumes, checks the settings, and trains nothing twice.
    rwml = [*module, "paw_min.world_models.rwml", env, "--out", str(folder)]
    call([*rwml, *STAGES[stage], *flags, "--seed", str(seed)], log)
    with reading(folder / "collected.json") as path:
        steps = json.loads(path.read_text())["counts"]["steps"]
    if stage == "format":
        return Begun(str(folder / "start"), steps)
    if stage in EXPERT:
        with reading(folder / stage / "metrics.jsonl"):
            steps += int(read_metrics(folder / stage)[-1]["branch_steps"])
    return Begun(str(newest_checkpoint(folder / stage)), steps)


def call(command: list[str], log: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with writing(str(log)), open(log, "w") as file:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=environment,
        ).returncode
    if code:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise UserError(f"exit code {code}: {lines[-1]} ({log})")


def job_of(arm: Arm, begun: Begun, env: str, seed: int, out: Path, flags: list[str]) -> Job:
    """The run of RL after the stage. Without one, it has the name that `sweep` gives it."""
    own = [*flags, "--seed", str(seed), "--out", str(out)]
    if not arm.paw:
        own.append("--no-paw")
    if arm.stage:
        method = "paw" if arm.paw else "grpo"
        own += ["--model", begun.model, "--name", f"{env}-{arm.stage}-{method}-seed{seed}"]
    cfg, _ = parse_args(env, presets_of(env), "", own)
    job = Job(arm.label, own, cfg)
    if job.done() >= 0:
        check_settings(job)
    return job


def record(path: Path, entry: Entry) -> None:
    """Add a run to the list, which commands with other seeds write, too."""
    with FileLock(path.with_suffix(".lock")):
        others = [e for e in recorded(path) if (e.label, e.seed) != (entry.label, entry.seed)]
        labels = [arm.label for arm in ARMS]
        found = sorted([*others, entry], key=lambda e: (e.seed, labels.index(e.label)))
        text = json.dumps([asdict(e) for e in found], indent=1, ensure_ascii=False)
        replace_text(path, text + "\n")


def recorded(path: Path) -> list[Entry]:
    """The list of runs so far; UserError unless it is one of this program."""
    entries = read_json(path, list[Entry]) if path.is_file() else []
    unknown = {entry.label for entry in entries} - {arm.label for arm in ARMS}
    if unknown:
        raise UserError(f"{path} has the unknown arm {min(unknown)!r:.300}: use another --out.")
    return entries


def main(env: str, seed: int, out: Path, flags: list[str]) -> None:
    refuse(flags, TAKEN)
    cfg, _ = parse_args(env, presets_of(env), "", flags)
    if cfg.model != "open":
        raise UserError("ActObs needs the start model `open`: add --preset open after --.")
    with writing(str(out)):
        out.mkdir(parents=True, exist_ok=True)
    recorded(out / f"comparison-{env}.json")  # refused before an arm is trained, if it is damaged
    arms = ARMS
    if env == "search":  # it has no list of commands
        arms = [arm for arm in ARMS if arm.stage != "early-experience"]
    for arm in arms:
        begun = Begun("", 0)
        if arm.stage:
            begun = run_stage(arm.stage, env, seed, out, flags)
        job = job_of(arm, begun, env, seed, out, flags)
        failures = run_all([job], [""])
        if failures:
            raise UserError(failures[0])
        entry = Entry(arm.label, seed, job.cfg.name, begun.steps)
        record(out / f"comparison-{env}.json", entry)
        say(f"{job}: {job.cfg.updates} updates after {begun.steps} environment steps")


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    usage = "%(prog)s ENV [--seed N] --out FOLDER [-- FLAGS]"
    parser = Parser(usage=usage, description=__doc__)
    parser.add_argument("env", choices=SCRIPTS, metavar="ENV", help="a benchmark")
    parser.add_argument("--seed", type=int, default=0, help="of every run (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run folders")
    with user_errors():
        args = parser.parse_args(sys.argv[1:cut])
        main(args.env, args.seed, expanded(args.out), sys.argv[cut + 1 :])
