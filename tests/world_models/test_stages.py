"""Long commands of world_models: a rerun skips complete stages, and repeats one that was cut."""

import json
import re
from unittest.mock import DEFAULT, Mock

import pytest

import run_alfworld
from paw_min.base.errors import UserError
from paw_min.cli import parse_args
from paw_min.running.runs import newest_checkpoint
from tests.helpers import held_by_another_process, numbers
from world_models import rwml, supervised, word2world
from world_models.rwml import early_experience
from world_models.rwml import settings as rwml_settings
from world_models.rwml.stages import main as rwml_main
from world_models.rwml.triplets import DROPPED
from world_models.word2world import commands


def test_a_folder_in_use(tmp_path):
    out = ["alfworld", "--out", str(tmp_path)]
    with held_by_another_process(tmp_path):
        for main, words in ((word2world.main, ["collect", *out]), (rwml_main, out)):
            with pytest.raises(UserError, match="is in use by another process.*another --out"):
                main(words)


def cut_in(monkeypatch, owner, name: str, call: int, again) -> None:
    """Run `again`, which the given call of a function ends, as Ctrl-C does."""
    really = getattr(owner, name)
    calls = Mock(side_effect=[*[DEFAULT] * (call - 1), KeyboardInterrupt], wraps=really)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, calls)
        with pytest.raises(KeyboardInterrupt):
            again()


@pytest.mark.slow
def test_the_commands_of_word2world(model, tmp_path, monkeypatch):
    """Each in turn, on what the ones before it have written; train is cut, and repeated."""
    monkeypatch.setattr(commands, "SLOTS", 2)
    file = tmp_path / "collect" / "trajectories.json"
    agent = ["--model", model, "--max-response-tokens", 4, "--max-prompt-tokens", 200]
    dream = ["--world-model", tmp_path / "train", "--answer-tokens", 6]
    training = ["--trajectories", file, "--epochs", 2, "--batch", 2, "--lr", 1e-3]
    words = {
        "collect": ["--agents", "teacher", "random", "--episodes", 6, "--max-turns", 12],
        "train": [*training, "--width", 32],
        "fidelity": ["--trajectories", file, *dream],
        "consistency": [*agent, *dream, "--agents", "model", "teacher"],
        "verify": [*agent, *dream, "--agents", "teacher", "--budgets", 0, 2],
        "imitate": [*training, *agent],
    }

    def run(command: str, out: str) -> dict:
        small = ["--preset", "tiny", "--groups", 2, "--eval-tasks", 3]
        small += [] if command == "collect" else ["--max-turns", 6]
        line = [command, "webshop", *words[command], *small, "--out", tmp_path / out]
        return word2world.main([str(word) for word in line])

    assert run("collect", "collect")["won"]["teacher"] == 1.0
    whole = run("train", "train")
    cut_in(monkeypatch, supervised, "fit_step", 4, lambda: run("train", "again"))
    assert run("train", "again")["loss"] == whole["loss"]
    weights = [tmp_path / out / "model.safetensors" for out in ("train", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert run("fidelity", "f")["n"] == sum(len(t["messages"]) // 2 for t in json.loads(
        file.read_text()))
    assert run("consistency", "c")["teacher"]["n"] == 3
    assert run("verify", "v")["teacher, budget 2"]["checks"] > 0
    assert run("imitate", "i")["rows"] > 3
    with pytest.raises(UserError, match="has config.json already, and no imitate.json"):
        run("imitate", "train")
    # A rerun reads the result.
    monkeypatch.setitem(commands.FUNCTIONS, "train", None)
    assert run("train", "train") == whole


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rwml", "wm-sft", "early-experience"])
def test_rwml_is_cut_and_repeated(games_root, tmp_path, monkeypatch, capsys, method):
    smaller = dict(tries=2, max_turns=6, warm_epochs=2, sft_epochs=2, answer_tokens=40)
    monkeypatch.setattr(rwml_settings, "TINY", rwml_settings.TINY | smaller)
    monkeypatch.setattr(early_experience, "BRANCHES", 2)

    def run(name):
        once = ["--epochs", "1"] if method == "rwml" else []
        small = ["--tasks", "3", "--eval-tasks", "2", "--max-turns", "6", "--method", method]
        rwml_main(["alfworld", "--out", str(tmp_path / name), "--data", str(games_root), *small,
                   *once])

    run("once")
    # The warm start, the filter's tries, and the second step of training.
    last = (rwml, "update", 2) if method == "rwml" else (supervised, "fit_step", 2)
    for cut in ((supervised, "fit_step", 2), (rwml, "tries", 1), last):
        cut_in(monkeypatch, *cut, lambda: run("often"))
    run("often")
    once, often = tmp_path / "once", tmp_path / "often"
    for name in ("triplets.jsonl", "held_out.jsonl", "filter.json", "start/model.safetensors"):
        assert (once / name).read_bytes() == (often / name).read_bytes(), name
    lines = numbers(once / method)
    assert numbers(often / method) == lines
    trained = [newest_checkpoint(folder / method) for folder in (once, often)]
    first, other = (checkpoint / "model.safetensors" for checkpoint in trained)
    assert first.read_bytes() == other.read_bytes()
    # A rerun does nothing again, and names what follows: GRPO from the checkpoint (B.2).
    capsys.readouterr()
    run("often")
    assert numbers(often / method) == lines
    (command,) = re.findall("^python run_alfworld.py (.*)$", capsys.readouterr().out, re.M)
    cfg, _ = parse_args("alfworld", run_alfworld.PRESETS, "", command.split())
    assert cfg.model == str(trained[1]) and cfg.eval_tasks == 2
    assert cfg.algo == "grpo" and not cfg.paw
    assert cfg.name.endswith(f"-after-{method}")  # a run folder of its own
    for line in (lines[0], lines[-1]):
        assert {"eval_success", "eval_invalid", "held_out_exact", "held_out_cosine"} <= line.keys()
    record = json.loads((once / "collected.json").read_text())
    dropped = sum(record["counts"][name] for name in (*DROPPED, "too_long"))
    assert record["counts"]["steps"] == record["triplets"] + dropped > dropped + 10
    if method == "rwml":
        monkeypatch.setattr(rwml, "too_easy", lambda *_: [])
        with pytest.raises(UserError, match="triplets are easy, and none is drawn to stay"):
            run("easy")
