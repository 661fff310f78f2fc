"""What an impossible command line ends in: one sentence that names what is wrong.

Each row of a table is a case. The flags of the run scripts are in test_config.py.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from paw_min.base import errors
from paw_min.cli import check_command, presets_of
from paw_min.page import __main__ as page
from research.paper import fig2c, prompting, sweep
from tests.helpers import ROOT, one_sentence, python
from world_models.word2world import settings as word2world_settings

# ---- command lines ----


def plan(argv: list[str]) -> None:
    sweep.plan("table1", "alfworld", [0], "nowhere", argv)


def word2world(argv: list[str]) -> None:
    word2world_settings.parse("", argv)


WRONG_COMMANDS = [  # {run} is a run folder
    (page.main, "nowhere", "nowhere has no checkpoint: give a run folder"),
    (page.main, "{run} --out {run}/no/page.html", "page.html cannot be written"),
    (fig2c.main, "webshp", "fig2c is for webshop, not for webshp: use it, or a run of it"),
    (prompting.main, "alfworld --endpoint host/v1", "--endpoint host/v1 must be http"),
    (prompting.main, "alfworld --agent reflexion --eval-repeats 2", "--eval-repeats 2: .*omit it"),
    (plan, "--seed 3", "--seed after --: use the options before it."),
    (plan, "--dry-run", "--dry-run is for the run scripts: omit it."),
    # Every arm would be trained without PaW, under both names.
    (plan, "--no-paw", "'GRPO' and 'GRPO w/ PaW' are the same run"),
    (word2world, "verify alfworld --world-model w --out o", "verify is for webshop: alfworld has"),
    (word2world, "collect alfworld --out o --dry-run", "--dry-run is for the run scripts"),
    # It would be ignored: a prompted world model reads up to 12,288 tokens.
    (word2world, "fidelity alfworld --context 9 --out o", "--context is for train, not for fid"),
]


@pytest.mark.parametrize("command, words, part", WRONG_COMMANDS)
def test_a_command_line_that_cannot_work(finished, command, words, part, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", bool)
    with one_sentence(part):
        command([word.format(run=finished) for word in words.split()])


# ---- ends ----


START = "from paw_min.base.errors import UserError, user_errors\nwith user_errors():\n    "


def ended(code: str, tmp_path: Path) -> str:
    """What is said at the end of a command with this code."""
    (tmp_path / "script.py").write_text(START + code)
    command = f"set -o pipefail; {sys.executable} {tmp_path}/script.py | true"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, text=True, stderr=subprocess.PIPE
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("code, end", [
    ("raise UserError('wrong')", "error: wrong"),
    ("raise KeyboardInterrupt", errors.INTERRUPTED),
    ("raise OSError(28, 'No space left on device')", "error: No space left on device.*"),
    ("raise RuntimeError('CUDA Error: out of memory\\nat cumem_allocator.cpp:62')",  # vLLM's
     "error: .*out of memory at cumem_allocator.cpp:62.*--micro-tokens or --vllm-memory.*"),
    ("open(300 * 'a')", "error: 'aaa.* File name too long"),
])
def test_an_error_ends_a_command_with_one_sentence(code, end, tmp_path):
    assert re.fullmatch(f"{end}\n", ended(code, tmp_path))


@pytest.mark.parametrize("code", ["[print('x' * 999) for _ in range(999)]", "print('x')"])
def test_a_command_ends_silently_where_its_output_has_been_closed(code, tmp_path):
    """As by `| head`."""
    assert ended(code, tmp_path) == ""


def test_a_terminal_without_all_characters():
    done = python("-m", "research.paper.table", "--help", env={"PYTHONIOENCODING": "ascii"})
    assert "usage: " in done.stdout


@pytest.mark.parametrize("name, folder", [
    ("hidden", "data/hidden/2"), ("locks", "data/locks"), ("boxes", "data/boxes"),
])
@pytest.mark.parametrize("flags, end", [
    ("--prompt paper", "error: --prompt paper is unknown: "), ("--updates abc", "1"),
    ("--rho 2", "error: --rho 2.0 is out of range"), ("--dry-run", "0"),
    ("--model /nonexistent", "error: the folder /nonexistent does not"),
    ("--data bogus", "error: --data bogus"), ("--sampler vllm", "error: --sampler vllm needs vllm"),
])
def test_an_example_is_checked_before_its_long_work(
    name, folder, flags, end, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *flags.split()])
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"examples.{name}", run_name="__main__")
    assert str(stopped.value.code or 0).startswith(end) and not Path("data").exists()
    assert (f"{folder} is not there: the first" in capsys.readouterr().out) == (end == "0")
    # Where the folder is there, the run itself makes the plan.
    presets = presets_of("alfworld")
    assert check_command("alfworld", presets, "", lambda cfg: tmp_path, ["--dry-run"])
