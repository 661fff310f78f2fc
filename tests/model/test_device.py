"""Training and world models on a GPU that is not there (fake_gpu.py), beside a CPU.

The numbers must be equal to the last digit. fake_gpu.py lists what this cannot reach.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paw_min.model.loading import load_policy
from paw_min.toy import default_model
from tests import fake_gpu
from tests.helpers import numbers

pytestmark = pytest.mark.slow

SMALL = "--groups 2 --eval-tasks 1 --max-turns 2 --precision fp32"
SIZES = f"{SMALL} --group-size 2 --updates 1 --mini-batch 4 --lr 1e-3"
SEARCH = f"run_search.py {SIZES}"
# The stand-in models have four layers. One is enough where no reward is needed.
QUICK = "--max-response-tokens 8 --model ../"
WEBSHOP = f"{QUICK}webshop"
SHOP = f"run_webshop.py {SIZES} {WEBSHOP}"
WORD2WORLD = "-m world_models.word2world"
CHATS = "--trajectories chats/trajectories.json"
DREAM = f"--world-model dream --answer-tokens 4 {SMALL}"

# Rollout, update, evaluation, checkpoint. The numbers of NAME are in runs/NAME/metrics.jsonl.
RUNS = {
    "grpo": f"-m examples.probable search {SIZES}",
    "gigpo": f"{SHOP} --algo gigpo",
    "ppo": f"{SEARCH} --algo ppo {QUICK}search",
    "lora": f"{SEARCH} --lora-rank 4 --grad-checkpointing --precision bf16 {QUICK}search",
}
# name: (command, the file with its numbers), in the order in which they run
COMMANDS = {
    name: (f"{command} --name {name}", f"runs/{name}/metrics.jsonl")
    for name, command in RUNS.items()
}
COMMANDS |= {
    "ppo-resume": (f"{RUNS['ppo']} --name ppo --updates 2", "runs/ppo/metrics.jsonl"),
    "lora-resume": (f"{RUNS['lora']} --name lora --updates 2", "runs/lora/metrics.jsonl"),
    # Word2World.
    "collect": (
        f"{WORD2WORLD} collect webshop --agents model teacher --episodes 2 --out chats {SMALL} "
        f"--max-turns 5 {WEBSHOP}",
        "chats/trajectories.json",
    ),
    "train": (
        f"{WORD2WORLD} train webshop {CHATS} --out dream --epochs 1 --batch 2 --width 32 {SMALL}",
        "dream/train.json",
    ),
    "fidelity": (
        f"{WORD2WORLD} fidelity webshop {CHATS} --out fidelity {DREAM}", "fidelity/fidelity.json",
    ),
    "page": ("-m paw_min.page runs/grpo --against runs/grpo --out page.html", "page.html"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folders of the same commands on the CPU and on the fake GPU, which run side by side."""
    root = tmp_path_factory.mktemp("device")
    library = fake_gpu.build(root)
    for env in ("webshop", "search"):
        policy = load_policy(default_model(env))
        policy.model.model.layers = policy.model.model.layers[:1]
        policy.model.config.num_hidden_layers = 1
        policy.model.config.layer_types = policy.model.config.layer_types[:1]
        policy.save(root / env)
    commands = {name: command for name, (command, _) in COMMANDS.items()}
    (root / "cpu.json").write_text(json.dumps(commands))
    (root / "gpu.json").write_text(json.dumps(commands | {"rules": "tests/gpu_rules.py"}))
    processes = []
    for device, *words in (["cpu"], ["gpu", library]):
        (root / device).mkdir()
        command = [sys.executable, fake_gpu.__file__, root / f"{device}.json", *words]
        with open(root / f"{device}.log", "w") as log:
            process = subprocess.Popen(
                command, cwd=root / device, stdout=log, stderr=subprocess.STDOUT
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


def test_a_gpu_refuses_and_rounds_as_it_should(folders):
    assert not error(folders["gpu"], "rules")
