"""LEARN.md, the notebook and the board are those of one_file.py."""

import json
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from examples import one_file, three_worlds
from research import tables
from research.board import __main__ as board
from tests.helpers import ROOT, one_sentence

SOURCE = Path(one_file.__file__).read_text()
PAGE = (ROOT / "LEARN.md").read_text()
SHORT = one_file.Size(warm_steps=2, warm_rows=8, updates=3, evaluate_every=1)


def arms_of(command: str, monkeypatch) -> list[one_file.Arm]:
    """What a command of one_file.py trains."""
    seen = []

    def record(seed, arm, size, name):
        seen.append(arm)
        return [one_file.Evaluation(0, 0.0, 0.0, 0.0)] * 2

    monkeypatch.setattr(one_file, "run", record)
    monkeypatch.setattr(one_file, "draw", lambda *_: None)
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    one_file.main()
    monkeypatch.undo()
    return seen


def numbers(run, arm) -> list[float]:
    world = one_file.make_world(0, names=8)
    points = run(3, arm, world, SHORT)
    return [value for point in points for value in (point.success, point.material)]


def test_a_step_of_the_ladder_is_that_of_the_board(monkeypatch):
    """The flags beside its name train what its numbers are of."""
    for _, flags, entry in tables.LADDER:
        arm, functions = board.load(board.FOLDER / f"{entry}.py")
        found = arms_of(f"python examples/one_file.py {flags} --seeds 0 --kl 0", monkeypatch)
        assert found == [arm] and not functions


def test_the_commands_of_the_exercises_are_accepted(monkeypatch):
    commands = re.findall(r"^    (python examples/one_file.py.*)$", PAGE, flags=re.M)
    assert commands and all(arms_of(command, monkeypatch) for command in commands)


def test_the_change_of_an_exercise(tmp_path):
    line = next(line for line in SOURCE.splitlines() if line.startswith("MATERIALS = "))
    file = tmp_path / "one_file.py"
    file.write_text(SOURCE.replace(line, f"{line}[:4]"))
    names = runpy.run_path(str(file))
    assert len(set(names["make_world"](0).material_of.values())) == 4


def test_the_cells_of_the_notebook_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = SimpleNamespace(Image=lambda name, width: Path(name).stat().st_size)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(one_file, "run", partial(one_file.run, size=SHORT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(one_file.MATERIALS), one_file.clipped_mae
    names = {"__name__": "notebook"}
    for cell in json.loads((ROOT / "examples/one_file.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert list(names["curves"]) == ["grpo", "paw", "placebo"]
    # An exercise leaves the module as it was.
    assert (one_file.MATERIALS, one_file.clipped_mae) == before


def test_the_notebook_has_the_output_of_the_command():
    """A page on GitHub shows the stored outputs: those of research/locks/default.txt."""
    cells = json.loads((ROOT / "examples/one_file.ipynb").read_text())["cells"]
    (cell,) = [cell for cell in cells if "one_file.draw(" in "".join(cell["source"])]
    printed = "".join(text for output in cell["outputs"] for text in output["text"])
    stored = (ROOT / "research/locks/default.txt").read_text().split("\n\n")[1]
    assert printed.splitlines() == stored.splitlines() and len(printed.splitlines()) == 54
    shown = cells[cells.index(cell) + 1]["outputs"]
    assert "image/png" in shown[0]["data"]


# ---- the board ----


@pytest.fixture
def tiny_board(tmp_path, monkeypatch):
    """Two worlds of 8 names, two seeds, and a folder of its own with PaW, far below, in it."""
    lessons = {
        name: three_worlds.Lesson(board.WORLDS[name].world, {}, SHORT, names=8)
        for name in ("plain", "serials")
    }
    monkeypatch.setattr(board, "WORLDS", lessons)
    monkeypatch.setattr(board, "SEEDS", range(2))
    monkeypatch.setattr(board, "FOLDER", tmp_path / "board")
    monkeypatch.setattr(board, "RESULTS", tmp_path / "board" / "results.jsonl")
    board.FOLDER.mkdir()
    board.RESULTS.write_text('{"entry": "paw", "plain": [-1.0, -1.0], "serials": [-2.0, -2.0]}\n')
    return tmp_path


def enter(path: Path, text: str, monkeypatch) -> None:
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["board.py", str(path)])
    board.main()


def test_a_function_takes_the_place_of_that_of_one_file(tiny_board, monkeypatch):
    """An own `hard_tokens` that keeps all is rho = 1."""
    arm, function, paw = (board.FOLDER / f"{name}.py" for name in ("arm", "function", "paw"))
    enter(arm, "from examples.one_file import Arm\n\nARM = Arm(rho=1.0)\n", monkeypatch)
    enter(function, "def hard_tokens(logp, rho):\n    return logp * 0 + 1\n", monkeypatch)
    enter(paw, "", monkeypatch)
    assert list(board.read_results()) == ["paw", "arm", "function"]
    assert board.play(arm, "serials", 0) == board.play(function, "serials", 0)
    assert board.play(arm, "serials", 0) != board.play(paw, "serials", 0)


def test_a_file_from_elsewhere_is_shown_and_not_written_down(tiny_board, monkeypatch, capsys):
    before = board.RESULTS.read_text()
    text = "from examples.one_file import Arm\n\nARM = Arm(scale=0.0)\n"
    enter(tiny_board / "mine.py", text, monkeypatch)
    assert board.RESULTS.read_text() == before
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["| mine", "| paw"]  # the best first
    assert rows[0][-1].startswith("+") and rows[1][1:] == ["-1.5", "-1.0", "-2.0", " |"]


ARM = "from examples.one_file import Arm\nARM = Arm({})\n"


def test_the_signal_of_eq_4_can_be_another(tiny_board, monkeypatch):
    """A margin in place of the entropy: `top_alpha` ranks what it returns."""
    path = tiny_board / "margin.py"
    path.write_text("def action_entropy(logp):\n    two = logp.exp().topk(2).values\n"
                    "    return two[:, 1] - two[:, 0]\n")
    seen = []
    monkeypatch.setattr(one_file, "top_alpha",
                        lambda signal, alpha: seen.append(signal) or signal > signal.median())
    board.check(path)
    board.play(path, "plain", 0)
    assert len(seen) == SHORT.updates and all(-1 <= one.min() and one.max() <= 0 for one in seen)


@pytest.mark.parametrize("lines, part", [
    ('{"entry": "paw", "plain": [1.0, 2.0], "serials": [1.0, 2.0]}\n{"entry": "x", "pla',
     "line 2 of .*results.jsonl cannot be read .*: restore or remove it"),
    ('{"entry": "x", "plain": [1.0, 2.0], "serials": [1.0, 2.0]}\n', "has no entry paw"),
    ('{"entry": "paw", "plain": [1.0, 2.0]}\n', "line 1 of .*results.jsonl cannot be read"),
    ('{"entry": "paw", "plain": [1.0], "serials": [1.0, 2.0]}\n', "line 1 of .* cannot be read"),
    ("7\n", "line 1 of .*results.jsonl cannot be read"),
])
def test_damaged_results_are_one_sentence_before_a_world_is_played(
    tiny_board, monkeypatch, lines, part
):
    monkeypatch.setattr(board, "play", Mock(side_effect=AssertionError("a world was played")))
    board.RESULTS.write_text(lines)
    with one_sentence(part):
        enter(tiny_board / "mine.py", "def mae(logp):\n    return logp\n", monkeypatch)


LEARN = "def learn(model, optimizer, rollout, advantage, weight, arm):\n    {}\n"


@pytest.mark.parametrize("text, part", [
    (LEARN.format("\n    weight.nothing()"), r"mine.py, in the world plain: Attr.*\(line 3\)$"),
    ("def learn(model):\n    pass\n", "plain: TypeError: learn.* takes 1 positional"),
    # After its shape was checked.
    ("def top_alpha(entropy, alpha):\n    assert len(entropy) == 8\n    return entropy > 3\n",
     r"plain: AssertionError: .*\(line 2\)$"),
])
def test_an_entry_that_raises_in_a_world_is_one_sentence_with_its_line(
    tiny_board, monkeypatch, text, part
):
    with one_sentence(part):
        enter(tiny_board / "mine.py", text, monkeypatch)


@pytest.mark.parametrize("text, part", [
    ("", "has no ARM and none of these functions"),
    (ARM.format("loss='mae'"), "an Arm of examples.one_file, with the loss cmae or ce"),
    ("ARM = dict(alpha=1.0)\n", "ARM is {'alpha': 1.0}; it must be an Arm"),
    (ARM.format("loss='ce'") + "def mae(logp):\n    return 1 - logp\n", "its MAE would not be"),
    ("def clipped_mae(logp, rho):\n    return logp\n", r"clipped_mae returns the shape \(8, 3\)"),
    ("def lambda_g(returns):\n    return 1 / 0\n", "lambda_g raises ZeroDivisionError"),
    ("import no_such_package\n", "mine.py cannot be run: ModuleNotFoundError"),
    (ARM.format("alpha=2.0"), "alpha=2.0.* alpha and rho above 0 and at most 1"),
    (ARM.format("scale=float('nan')"), "scale=nan.* finite scale and kl"),
    (ARM.format("lambda_g='Constant'"), "lambda_g='Constant'.* lambda_g adaptive or constant"),
    (ARM.format("rho=0.5") + "def cliped_mae(logp, rho):\n    return logp\n",
     "nothing reads cliped_mae;"),
])
def test_an_entry_that_cannot_work_or_would_be_ignored(tiny_board, monkeypatch, text, part):
    monkeypatch.setattr(board, "play", Mock(side_effect=AssertionError("a world was played")))
    with one_sentence(part):
        enter(tiny_board / "mine.py", text, monkeypatch)
    with one_sentence("the board has an entry paw; give the file another name"):
        enter(tiny_board / "paw.py", "def mae(logp):\n    return logp\n", monkeypatch)


def test_the_board_has_all_of_its_files():
    files = {path.stem for path in board.FOLDER.glob("*.py")} - {"__main__"}
    results = board.read_results()
    assert set(results) == files
    for found in results.values():
        assert list(found) == list(board.WORLDS)
        assert {len(values) for values in found.values()} == {len(board.SEEDS)}
