"""Every command that runs a model, on a GPU that is not there (fake_gpu.py), beside a CPU.

    python -m pytest tests/test_device.py

The numbers must be equal to the last digit. fake_gpu.py lists what this cannot reach.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import device_jobs, fake_gpu
from tests.helpers import numbers

pytestmark = pytest.mark.slow

JOBS = "tests/device_jobs.py"
SMALL = "--groups 2 --eval-tasks 2 --max-turns 3 --precision fp32"
SIZES = f"{SMALL} --group-size 2 --updates 1 --mini-batch 4 --lr 1e-3"
ALFWORLD = f"run_alfworld.py {SIZES}"
SEARCH = f"run_search.py {SIZES}"
RWML = f"{JOBS} rwml alfworld --out rwml --tasks 2 {SMALL} --max-turns 8"
WORD2WORLD = "-m paw_min.world_models.word2world"
CHATS = "--trajectories chats/trajectories.json"
DREAM = f"--world-model dream --answer-tokens 8 {SMALL}"

# Rollout, update, evaluation, checkpoint. The numbers of NAME are in runs/NAME/metrics.jsonl.
RUNS = {
    "grpo": f"{ALFWORLD} --conflict-every 1",
    "gigpo": f"run_webshop.py {SIZES} --algo gigpo --ref-offload",
    "rloo": f"{SEARCH} --algo rloo --mini-batch 0 --select-ratio 1",
    "ppo": f"{SEARCH} --algo ppo",
    "lora": f"{SEARCH} --lora-rank 4",
    "lora-checkpointing": f"{SEARCH} --lora-rank 4 --algo ppo --grad-checkpointing",
    "steps": f"{SEARCH} --wm-steps 2 --dedup --wm-separator turn",
    "tapo": f"{SEARCH} --preset tiny tapo --wm-every 1",
    "printed-entropy": f"{SEARCH} --select-entropy sampled --kl-coef 0",
    "baseline": f"{SEARCH} --no-paw --grad-checkpointing",
    "bf16": f"{SEARCH} --precision bf16",
    "bf16-lora": f"{SEARCH} --precision bf16 --lora-rank 4",
}
# name: (command, the file with its numbers), in the order in which they run
COMMANDS = {
    name: (f"{command} --name {name}", f"runs/{name}/metrics.jsonl")
    for name, command in RUNS.items()
}
COMMANDS |= {
    "eval-only": (f"{RUNS['grpo']} --name grpo --eval-only", "runs/grpo/evaluation-only.json"),
    "resume": (f"{RUNS['grpo']} --name grpo --updates 2", "runs/grpo/metrics.jsonl"),
    "ppo-resume": (f"{RUNS['ppo']} --name ppo --updates 2", "runs/ppo/metrics.jsonl"),
    "lora-resume": (f"{RUNS['lora']} --name lora --updates 2", "runs/lora/metrics.jsonl"),
    # Before RL.
    "rwml": (f"{RWML} --epochs 1", "rwml/rwml/metrics.jsonl"),
    "wm-sft": (f"{RWML} --method wm-sft", "rwml/wm-sft/metrics.jsonl"),
    "early-experience": (
        f"{RWML} --method early-experience", "rwml/early-experience/metrics.jsonl",
    ),
    # In place of the environment.
    "collect": (
        f"{WORD2WORLD} collect webshop --agents model teacher --episodes 4 --out chats {SMALL} "
        "--max-turns 8",
        "chats/trajectories.json",
    ),
    "train": (
        f"{WORD2WORLD} train webshop {CHATS} --out dream --epochs 1 --batch 2 --width 32 {SMALL}",
        "dream/train.json",
    ),
    "train-start": (
        f"{WORD2WORLD} train webshop {CHATS} --out tuned --epochs 1 --batch 2 --context 2000 "
        f"--start runs/gigpo/checkpoint-000001 {SMALL}",
        "tuned/train.json",
    ),
    "fidelity": (
        f"{WORD2WORLD} fidelity webshop {CHATS} --out fidelity {DREAM}", "fidelity/fidelity.json",
    ),
    "consistency": (
        f"{WORD2WORLD} consistency webshop --out consistency {DREAM}",
        "consistency/consistency.json",
    ),
    "verify": (
        f"{WORD2WORLD} verify webshop --budgets 0 2 --out verify {DREAM}", "verify/verify.json",
    ),
    "imitate": (
        f"{WORD2WORLD} imitate webshop {CHATS} --epochs 1 --batch 4 --out agent {SMALL}",
        "agent/imitate.json",
    ),
    # Analyses.
    "inspect": ("-m paw_min.inspect runs/grpo --against runs/grpo --out page.html", "page.html"),
    "knowledge": ("-m research.knowledge runs/grpo --out knowledge.json", "knowledge.json"),
    "kept": ("-m research.paper.kept runs/grpo --out study", "study/kept-alfworld.json"),
    "fig2ab": ("-m research.paper.fig2ab runs/grpo --out study", "study/fig2ab-alfworld.json"),
    "fig2c": ("-m research.paper.fig2c runs/grpo --out study", "study/fig2c-alfworld.json"),
    "teach": (
        "-m research.teach.measure alfworld --losses ce cmae-0.2 --epochs 1 --episodes 8 "
        "--group-size 2 --eval-tasks 2 --max-turns 3 --precision fp32 --out study",
        "study/teach-alfworld.json",
    ),
    "starts": (
        f"-m research.starts.measure alfworld --group-size 2 {SMALL} --out study",
        "study/starts.json",
    ),
    "lookahead": (
        f"-m research.lookahead.measure alfworld --models a=runs/grpo --k 2 --replays 4 {SMALL} "
        "--eval-temperature 1 --out study",
        "study/lookahead-alfworld.json",
    ),
    "prompting": (
        "-m research.paper.prompting alfworld --agent react --eval-tasks 1 --max-turns 2 "
        "--precision fp32 --name react",
        "runs/react/evaluation.json",
    ),
}
PLANTED = {
    error.__name__: f"{JOBS} {error.__name__} {SIZES} --algo ppo --name {error.__name__}"
    for error in device_jobs.PLANTED
}


@pytest.fixture(scope="module")
def folders(games_root, tmp_path_factory) -> dict[str, Path]:
    """The folders of the same commands on the CPU and on the fake GPU, which run side by side."""
    root = tmp_path_factory.mktemp("device")
    library = fake_gpu.build(root)
    commands = {name: command for name, (command, _) in COMMANDS.items()}
    (root / "cpu.json").write_text(json.dumps(commands))
    (root / "gpu.json").write_text(json.dumps(commands | PLANTED | {"rules": f"{JOBS} rules"}))
    environment = os.environ | {"ALFWORLD_DATA": str(games_root)}
    processes = []
    for device, *words in (["cpu"], ["gpu", library]):
        (root / device).mkdir()
        command = [sys.executable, fake_gpu.__file__, root / f"{device}.json", *words]
        with open(root / f"{device}.log", "w") as log:
            process = subprocess.Popen(
                command, cwd=root / device, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        processes.append(process)
    for process in processes:
        assert process.wait(timeout=800) == 0, (root / "gpu.log").read_text()[-2000:]
    return {"cpu": root / "cpu", "gpu": root / "gpu"}


def error(folder: Path, name: str) -> str:
    """The error with which a command ended, if it did."""
    path = folder / f"{name}.error"
    return path.read_text() if path.exists() else ""


def numbers_of(path: Path):
    """The content of a command's file, without times."""
    if path.name == "metrics.jsonl":
        return numbers(path.parent)
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            found.pop("seconds", None)
        return found
    return path.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_gpu_gives_the_numbers_of_a_cpu(folders, name):
    _, file = COMMANDS[name]
    for folder in folders.values():
        assert not error(folder, name)
    ours = numbers_of(folders["gpu"] / file)
    assert ours and ours == numbers_of(folders["cpu"] / file)


def test_the_fake_gpu_refuses_what_a_gpu_refuses(folders):
    assert not error(folders["gpu"], "rules")


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found(folders, name):
    assert "expected all tensors on cuda:0, but" in error(folders["gpu"], name)
