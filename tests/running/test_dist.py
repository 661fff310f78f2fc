"""Several processes do what one does: real torchrun, gloo, FSDP2; a killed rank, two launchers."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from paw_min.base import distributed
from paw_min.model.loading import load_policy
from paw_min.running import runs
from paw_min.toy import default_model
from tests import helpers
from tests.dist_jobs import CASES, PPO_CASES, ppo_updated, resume, uninterrupted, updated
from tests.helpers import ROOT, argv, python

pytestmark = pytest.mark.slow
RUNNING = (ROOT / "RUNNING.md").read_text()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = dict(
    groups=3, group_size=2, updates=1, eval_every=1, eval_tasks=4, max_turns=3, mini_batch=6,
    micro_tokens=1500, max_response_tokens=4, max_prompt_tokens=1000, name="r", kl_coef=0.01,
    lr=1e-4,
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(n: int, *script) -> subprocess.Popen:
    """torchrun with n processes."""
    flags = ["--nproc-per-node", n, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    return launch([*TORCHRUN, *flags, *script])


def launch(command: list) -> subprocess.Popen:
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 300.0) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


# ---- the same rows ----


@pytest.fixture(scope="module")
def alone() -> dict:
    return {name: updated(settings) for name, settings in CASES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Results of the jobs, and a run of three updates: on three ranks, in one process, on two."""
    out = tmp_path_factory.mktemp("dist")
    finish(start(3, "-m", "tests.dist_jobs", "policy", out))
    resume(str(out))
    finish(start(2, "-m", "tests.dist_jobs", "ppo", out))
    return out


@pytest.fixture(scope="module")
def together(folder) -> dict:
    """The same on three ranks."""
    return torch.load(folder / "policy.pt")


@pytest.mark.parametrize("how", ["replicated", "sharded"])
@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in case])
def test_gradients_and_weights_are_those_of_one_process(alone, together, how, case):
    """Uneven rows, fewer rows than ranks, reference, entropy, tied head, LoRA: fp32 rounding."""
    one = alone[case]
    several = together[how][case]
    for name, gradient in one["gradients"].items():
        torch.testing.assert_close(several["gradients"][name], gradient, atol=2e-6, rtol=1e-5)
    for name, weight in one["weights"].items():  # lr is 1e-3: a step of Adam
        torch.testing.assert_close(several["weights"][name], weight, atol=3e-5, rtol=0)
    for name, weight in one["merged"].items():  # what vLLM gets
        torch.testing.assert_close(several["merged"][name], weight, atol=6e-5, rtol=0)
    same = {k: v for k, v in one["metrics"].items() if k != "tokens_forward"}  # padding differs
    assert {k: several["metrics"][k] for k in same} == pytest.approx(same, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("how", ["replicated", "sharded"])
@pytest.mark.parametrize("case", [case for case in CASES if "bf16" in case])
def test_bf16_passes_over_fp32_weights(together, how, case):
    """bf16 rounds by 0.4 % at each step of a pass; what is trained is kept and updated in fp32."""
    exact = updated(CASES[case] | {"precision": "fp32"})
    rounded = together[how][case]
    for name, gradient in exact["gradients"].items():
        distance = (rounded["gradients"][name] - gradient).norm() / gradient.norm()
        assert 1e-3 < distance < 0.15, name
        assert rounded["weights"][name].dtype == rounded["gradients"][name].dtype == torch.float32


@pytest.mark.parametrize("case", PPO_CASES)
def test_two_ranks_give_the_same_critic(folder, case):
    results = torch.load(folder / "ppo.pt")
    alone = ppo_updated(PPO_CASES[case])
    assert sum("value" in name for name in alone["metrics"]) == 2
    for how in ("replicated", "sharded"):
        for key, value in alone["metrics"].items():
            found = results[how][case]["metrics"][key]
            assert found == pytest.approx(value, abs=1e-4), (how, key)
        for name, weight in alone["weights"].items():
            found = results[how][case]["weights"][name]
            torch.testing.assert_close(found, weight, atol=1e-5, rtol=0)


def test_a_checkpoint_fits_any_number_of_ranks(folder):
    """FSDP2 on three ranks, one process, FSDP2 on two: one update each."""
    expected = uninterrupted(3)
    saved = load_policy(str(runs.newest_checkpoint(folder / "r")))
    for name, weight in saved.named_parameters():  # three updates at a learning rate of 1e-3
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=0)


# ---- whole runs ----


@pytest.fixture(scope="module")
def script(model) -> list[str]:
    """run_webshop.py with a tiny random model; without --out."""
    return ["run_webshop.py", *argv(SMALL | dict(model=model))]


def numbers(folder: Path) -> list[dict]:
    """metrics.jsonl without times and padding, which differ between ranks."""
    lines = helpers.numbers(folder)
    return [{k: v for k, v in line.items() if k != "tokens_forward"} for line in lines]


def same(ours: list[dict], theirs: list[dict]) -> bool:
    return len(ours) == len(theirs) and all(
        a == pytest.approx(b, rel=1e-3, abs=1e-5) for a, b in zip(ours, theirs)
    )


def test_vllm_on_sharded_ranks(script, tmp_path):
    """LoRA: draws, rows and weights of one unsharded rank with an engine."""
    tiny = f"--model={default_model('webshop')}"  # the engine needs heads of 32
    flags = [*script, tiny, "--sampler=vllm", "--groups=2", "--max-response-tokens=6",
             "--lora-rank=4", "--eval-tasks=2", "--updates=2"]
    python(*flags, f"--out={tmp_path / 'one'}")
    finish(start(2, *flags, "--shard", f"--out={tmp_path / 'two'}"))
    one = numbers(tmp_path / "one" / "r")
    two = numbers(tmp_path / "two" / "r")
    assert [line.pop("sampler_gap") < 1e-5 for line in one[1:] + two[1:]] == [True] * 4
    assert same(two, one)


def test_two_launchers_are_one_run(script, tmp_path):
    """The commands of RUNNING.md for two nodes, with small sizes and both nodes on this machine.

    Three groups on two ranks.
    """
    shown = re.findall(r"^ {4}(torchrun --nnodes 2 .*?) *#.*$", RUNNING, re.M)
    here = {"HOST": "127.0.0.1", "29500": str(free_port()), "4": "1", "SHARED": str(tmp_path)}
    nodes = []
    for line in shown:
        flags = [here.get(word, word) for word in shlex.split(line)]
        cut = flags.index("run_alfworld.py")  # ... --preset paper --data DIR --out SHARED
        assert flags[cut + 1 : -2] == ["--preset", "paper", "--data", "DIR"]
        nodes.append(launch([*TORCHRUN, *flags[1:cut], *script, *flags[-2:]]))
    outputs = [finish(node) for node in nodes]
    assert len(outputs) == 2
    assert "2 ranks" in outputs[0] and "2 ranks" not in outputs[1]  # one voice
    assert outputs[0].count("held-out success") == 1
    python(*script, f"--out={tmp_path / 'one'}")
    assert same(numbers(tmp_path / "r"), numbers(tmp_path / "one" / "r"))


def test_a_killed_rank_ends_the_run_with_a_sentence(script, tmp_path):
    """Rank 0, which speaks for all."""
    process = start(2, *script, "--updates=100000", f"--out={tmp_path}")
    metrics = tmp_path / "r" / "metrics.jsonl"
    limit = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    # torchrun starts rank 0 first, so it has the lowest number.
    children = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    next(child for child in children if "run_webshop" in " ".join(child.cmdline())).kill()
    output = finish(process, code=1)
    assert "another rank exited" in output
    assert "rerun the same command to resume" in output
    assert json.loads(metrics.read_text().splitlines()[-1])["update"] >= 2


@pytest.mark.parametrize("variable, threads", [("", 1), ("2", 2)])
def test_the_threads_of_a_process(variable, threads):
    code = ("import torch; from paw_min.base.distributed import limit_threads; limit_threads(); "
            "print(torch.get_num_threads())")
    done = python("-c", code, env={"OMP_NUM_THREADS": variable, "MKL_NUM_THREADS": variable})
    assert done.stdout == f"{threads}\n"


def test_a_rank_that_a_cluster_has_named_is_none_of_torchrun(monkeypatch):
    """It reports its errors. Of torchrun's ranks, which meet the same error, the first does."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert distributed.with_rank("wrong") == "wrong"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert distributed.with_rank("wrong") == ""
