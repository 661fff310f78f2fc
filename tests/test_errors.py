"""What a damaged file or an impossible command line ends in: one sentence that names what is wrong.

Each row of a table is a case. The damaged files of a run that resumes are in test_runs.py, those of
a model in test_policy.py, and the flags of the run scripts in test_config.py.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from paw_min.base import errors
from paw_min.inspect import __main__ as inspect
from paw_min.running import samples
from paw_min.running.config_json import read_config
from research.paper import sweep, table, transitions
from tests.helpers import ROOT, one_sentence
from world_models.word2world import settings as word2world_settings

INF = float("inf")


# ---- JSON files ----

EPISODE = {"task": "t", "task_type": "a", "won": True, "score": None, "failed": ""}
CONTENT = {  # of good files, besides those of a run
    "sweep.json": [{"label": "A", "seed": 0, "folder": "A-seed0"}],
    "evaluation.json": {"update": 4, "episodes": [EPISODE]},
}
READERS = {
    "config.json": read_config,
    "samples/000001.json": samples.read,
    "settings of an analysis": lambda path: transitions.arguments("", [str(path.parent)]),
    "settings of a table": lambda path: table.find([path.parent]),
    "sweep.json": lambda path: table.find([path]),
    "evaluation.json": table.played,
}
STEP = "episodes.0.steps.0"

# File, place of a value in it (see `changed`), another value, and a part of the sentence. Without
# such a part, the sentence names the place.
WRONG_VALUES = [
    ("config.json", "", [], "it is not a JSON object"),
    ("config.json", "nonsense", 1, "another version .* has nonsense"),
    ("config.json", "micro_tokens", 1.5, None),
    ("config.json", "micro_tokens", True, None),
    ("config.json", "rho", True, None),
    ("config.json", "paw", 1, None),
    ("samples/000001.json", "", [], "the whole"),
    ("samples/000001.json", "more", 1, None),
    ("samples/000001.json", "groups.0.lambda_g", INF, None),
    ("samples/000001.json", "episodes", [], "no episode, or an episode without steps"),
    ("samples/000001.json", "episodes.0.task", "\ud800", "the whole: Invalid JSON"),
    ("samples/000001.json", f"{STEP}.valid", 1, None),
    ("settings of an analysis", "nonsense", 1, "has nonsense"),
    ("settings of a table", "", {"env": "alfworld"}, "seed"),
    ("sweep.json", "0", {}, "0.label"),
    ("sweep.json", "0.seed", 1.5, None),
    ("evaluation.json", "episodes", [], "no episode, or all were lost"),
    ("evaluation.json", "episodes.0.failed", "it broke", "no episode, or all were lost"),
]


def changed(content, place: str, value):
    """JSON with another value at a place, such as episodes.0.won. Without a place: that value."""
    if not place:
        return value
    *parents, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    part = content
    for key in parents:
        part = part[key]
    part[last] = value
    return content


def good_file(name: str, run: Path, folder: Path) -> Path:
    """A copy of a file that READERS[name] accepts."""
    if name.startswith("settings"):
        name = "config.json"
    path = folder / Path(name).name
    if name in CONTENT:
        path.write_text(json.dumps(CONTENT[name]))
    else:
        path.write_bytes((run / name).read_bytes())
    return path


@pytest.mark.parametrize(
    "name, place, value, part", WRONG_VALUES, ids=[f"{row[0]} {row[1]}" for row in WRONG_VALUES]
)
def test_a_wrong_value_in_a_file(one_update, tmp_path, name, place, value, part):
    path = good_file(name, one_update, tmp_path)
    READERS[name](path)
    path.write_text(json.dumps(changed(json.loads(path.read_text()), place, value)))
    with one_sentence(part or place.replace(".", r"\.")) as error:
        READERS[name](path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff"])
def test_a_file_that_is_no_json(one_update, tmp_path, name, content):
    path = good_file(name, one_update, tmp_path)
    path.write_bytes(content)
    with one_sentence(f"{path} cannot be read"):
        READERS[name](path)


# ---- command lines ----


def play(argv: list[str]) -> None:
    transitions.play(transitions.arguments("", argv))


def plan(argv: list[str]) -> None:
    sweep.plan("table1", "alfworld", [0], "nowhere", argv)


def word2world(argv: list[str]) -> None:
    word2world_settings.parse("", argv)


WRONG_COMMANDS = [  # {run} is a run folder
    (inspect.main, "nowhere", "nowhere has no config.json: give a run folder"),
    (inspect.main, "{run} --out {run}/no/page.html", "page.html cannot be written"),
    (play, "webshp", "webshp is neither a run folder .* nor one of alfworld"),
    (play, "webshop --eval-only", "--eval-only is for the run scripts: omit it"),
    (plan, "--seed 3", "--seed after --: use the options before it."),
    # Every arm would be trained without PaW, under both names.
    (plan, "--no-paw", "'GRPO' and 'GRPO w/ PaW' are the same run"),
    (word2world, "verify alfworld --world-model w --out o", "verify is for webshop: alfworld has"),
    (word2world, "collect alfworld --out o --dry-run", "--dry-run is for the run scripts"),
]


@pytest.mark.parametrize("command, words, part", WRONG_COMMANDS)
def test_a_command_line_that_cannot_work(finished, command, words, part, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", bool)
    with one_sentence(part):
        command([word.format(run=finished) for word in words.split()])


# ---- ends ----


START = "from paw_min.base.errors import Parser, UserError, user_errors\nwith user_errors():\n    "


@pytest.mark.parametrize("code, end", [
    ("raise UserError('wrong')", "error: wrong\n"),
    ("raise KeyboardInterrupt", f"{errors.INTERRUPTED}\n"),
    ("raise OSError(28, 'No space left on device')",
     "error: No space left on device: free space, and rerun the same command\n"),
    ("open(300 * 'a')", f"error: '{199 * 'a'} cannot be used: File name too long\n"),
    # The output has been closed, as by `| head`.
    ("[print('x' * 999) for _ in range(999)]", ""), ("print('x')", ""),
    ("Parser().parse_args(['--help'])", ""),
])
def test_how_a_command_ends(code, end, tmp_path):
    (tmp_path / "script.py").write_text(START + code)
    command = f"set -o pipefail; {sys.executable} {tmp_path}/script.py | true"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, text=True, stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (1, end)


@pytest.mark.parametrize("name, folder", [
    ("hidden", "data/hidden/2"), ("locks", "data/locks"), ("boxes", "data/boxes"),
])
@pytest.mark.parametrize("flags, end", [
    ("--updates abc", "1"), ("--rho 2", "error: --rho 2.0 is out of range"), ("--dry-run", "0"),
    ("--model /nonexistent", "error: the folder /nonexistent does not"),
    ("--data bogus", "error: --data bogus"),
])
def test_an_example_is_checked_before_its_long_work(
    name, folder, flags, end, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"examples.{name}", run_name="__main__")
    assert str(stopped.value.code or 0).startswith(end) and not list(tmp_path.iterdir())
    assert (f"{folder} is not there: the first" in capsys.readouterr().out) == (end == "0")
