"""Whole runs of run_alfworld.py on the real engine: outputs, switches, resuming, bad input.

The model is random and tiny, the games are the generated ones: nothing here is about learning.
"""

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import run_alfworld
from paw_min import cli, train
from paw_min.base import console
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.benchmarks import presets_of
from paw_min.running import plan, plot, runs, session
from paw_min.running.evaluate import short
from paw_min.running.tasks import draw_groups
from paw_min.toy import default_model
from paw_min.update import NonFinite
from tests.helpers import argv, make_policy, numbers, one_sentence
from world_models import teachers


def test_a_run_leaves_everything_behind(config, tmp_path, capsys):
    cfg = config()
    train.train(cfg)
    folder = tmp_path / "r"
    assert json.loads((folder / "config.json").read_text()) == asdict(cfg)
    lines = runs.read_metrics(folder)
    assert [line["update"] for line in lines] == [0, 1, 2, 3]
    assert ["eval_success" in line for line in lines] == [True, False, True, True]
    expected = {
        "success", "no_variance", "entropy", "ratio", "clip_fraction", "ref_kl", "grad_norm",
        "lambda", "wm_loss", "loss_wm", "loss_pg", "wm_clipped_tokens", "selected", "sampler_gap",
        "tokens_trained", "memory_gb", "seconds_sync", "tokens_per_s_update",
    }
    assert expected <= set(lines[1])
    assert any(key.startswith("eval_success/") for key in lines[0])
    tasks = draw_groups(session.find_tasks(cfg).train, cfg.groups, cfg.seed, 0)
    played = json.loads((folder / "samples" / "000001.json").read_text())["episodes"]
    assert {episode["task"] for episode in played} == set(map(short, tasks))
    assert all((folder / name).exists() for name in plot.FIGURES)
    assert "Your task is to:" in (folder / "episodes.md").read_text()
    (checkpoint,) = folder.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-000003"
    AutoTokenizer.from_pretrained(checkpoint)
    after = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    before = AutoModelForCausalLM.from_pretrained(cfg.model).state_dict()
    assert any(not torch.equal(before[k], after[k]) for k in after)
    out = capsys.readouterr().out
    assert lines[1]["responses_cut"] > 0
    assert console.cut_line(lines[1]) in out and "eval_responses_cut" in lines[2]
    assert "held-out success: 0.000 before, 0.000 after 3 updates" in out

    # The same command again has nothing left to do, and says so with the same numbers.
    train.train(cfg)
    assert runs.read_metrics(folder) == lines
    assert "all 3 updates were done before: nothing is trained" in capsys.readouterr().out
    # More updates resume from there.
    train.train(config(updates=4))
    out = capsys.readouterr().out
    assert "\nresumed after update 3; the lines up to there ran before\n" in out
    assert "nothing is trained" not in out
    assert runs.read_metrics(folder)[:4] == lines


def meddle(folder: Path) -> None:
    """What an environment with a model of its own may do."""
    os.chdir(folder)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    meddle.mode = torch.inference_mode()
    meddle.mode.__enter__()


def test_what_an_environment_sets_in_our_process_changes_nothing(config, tmp_path, monkeypatch):
    train.train(config(updates=1, name="plain"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for method in ("reset", "step"):
        def meddling(env, text, own=getattr(AlfworldEnv, method)):
            meddle(tmp_path / "elsewhere")
            return own(env, text)

        monkeypatch.setattr(AlfworldEnv, method, meddling)
    train.train(config(updates=1, name="r", out="runs"))
    assert Path.cwd().name == "elsewhere"
    assert numbers(tmp_path / "runs" / "r") == numbers(tmp_path / "plain")
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled() and torch.zeros(1).device.type == "cpu"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("seeded", [True, False])
def test_members_of_a_group_that_see_other_rooms_are_named(
    seeded, config, tmp_path, monkeypatch, capsys
):
    def reset(env, task, own=AlfworldEnv.reset, other=iter("abcdefgh")):
        step = own(env, task)
        return step if seeded else replace(step, observation=step.observation + next(other))

    monkeypatch.setattr(AlfworldEnv, "reset", reset)
    train.train(config(updates=1, eval_tasks=1))
    said = capsys.readouterr().out
    assert said.count("in 2 of 2 groups, the first observations differ") == (not seeded)


@pytest.mark.parametrize("word, unknown", [("town", False), ("zyzzyva", True)])
def test_a_stand_in_with_other_data_says_how_many_words_it_does_not_know(
    word, unknown, tmp_path, capsys
):
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [json.dumps({"question": f"{word} ?", "golden_answers": ["a"]})] * 3
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(rows))
    corpus = {"id": "0", "contents": '"a"\nb'}
    (tmp_path / "data" / "corpus.jsonl").write_text(json.dumps(corpus))
    words = ["--data", str(tmp_path / "data"), "--groups", "2", "--dry-run"]
    cfg, _ = cli.parse_args("search", presets_of("search"), "", words)
    plan.dry_run(cfg)
    assert ("as <unk>" in capsys.readouterr().out) == unknown


def train_in_child(cfg):
    """Train in a child. If it is killed with the lock that tqdm shares, all processes hang."""
    tqdm.set_lock(threading.RLock())
    train.train(cfg)


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_bit_for_bit(config, tmp_path):
    """kill -9 at new lines of metrics, at once and a little later; then a run to the end."""
    train.train(config(updates=6, name="whole"))
    folder = tmp_path / "cut"
    cfg = config(updates=6, name="cut")
    kills = 0
    for delay in (0.0, 0.05, None):  # seconds after a line has appeared
        seen = len(runs.read_metrics(folder))
        process = multiprocessing.get_context("fork").Process(target=train_in_child, args=(cfg,))
        process.start()
        while delay is not None and process.is_alive():
            # Later lines are dropped on resuming, so wait for the file to grow again.
            if len(runs.read_metrics(folder)) > max(seen, kills):
                time.sleep(delay)
                process.kill()
                break
            time.sleep(0.01)
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills == 2 and process.exitcode == 0
    assert numbers(folder) == numbers(tmp_path / "whole")
    (a,) = (tmp_path / "whole").glob("checkpoint-*/model.safetensors")
    (b,) = folder.glob("checkpoint-*/model.safetensors")
    assert a.read_bytes() == b.read_bytes()


def test_evaluations_change_no_number_of_the_training(config, tmp_path):
    """So a world may be evaluated more often than in its stored runs."""
    lines = {}
    for every in (1, 0):
        train.train(config(name=f"every{every}", eval_every=every))
        lines[every] = [{key: value for key, value in line.items() if not key.startswith("eval_")}
                        for line in numbers(tmp_path / f"every{every}")]
    assert lines[1] == lines[0]


def test_lost_episodes_are_neither_trained_on_nor_counted(config, finished, monkeypatch, capsys):
    """One of four in update 2, all in update 3."""
    rollout = train.rollout
    lost = [1, 4]

    def losing(*args, **options):
        played = rollout(*args, **options)
        for episode in played.episodes[: lost.pop(0)]:
            episode.failed = "its worker died"
        return played

    prepare = Mock(wraps=train.prepare)
    monkeypatch.setattr(train, "rollout", losing)
    monkeypatch.setattr(train, "prepare", prepare)
    with pytest.raises(UserError, match="every episode of the rollout failed; the reasons are pri"):
        train.train(config(updates=3))
    (_, _, _, rows, update), _ = prepare.call_args
    assert update == 2  # the key of the placebo's draw
    assert set(rows.trajectory) == {1, 2, 3}
    assert capsys.readouterr().out.count("episode discarded: its worker died") == 5
    line = runs.read_metrics(finished)[2]
    assert (line["failed"], line["rows"]) == (1, 9)


def test_a_nan_loss_ends_the_run(config, finished, tmp_path, monkeypatch):
    """The message names the weights to continue with: a checkpoint only where there is one."""
    broken = Mock(side_effect=NonFinite("the loss became nan (pg nan)"))
    monkeypatch.setattr(train.update, "optimize", broken)
    checkpoint = finished / "checkpoint-000001"
    for name, update, start in (("new", 1, "the start model"), ("r", 2, checkpoint)):
        text = rf"update {update}: the loss became nan \(pg nan\): lower --lr"
        with pytest.raises(UserError, match=f"^{text} .* --model set to {start}.$"):
            train.train(config(name=name, updates=2))
    assert not list(tmp_path.glob("new/checkpoint*"))
    assert list(finished.glob("checkpoint*")) == [checkpoint]


def test_eval_only_of_the_start_model(config, capsys, tmp_path):
    settings = {k: v for k, v in vars(config()).items() if v != getattr(Config, k)}
    cli.main("alfworld", run_alfworld.PRESETS, "", argv=[*argv(settings), "--eval-only"])
    out = capsys.readouterr().out
    assert "eval_success" in out and "weights: the start model " in out
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_eval_only_of_a_trained_run(config, finished, capsys):
    """Of its checkpoint, even if a killed run has logged a later update; in files of its own."""
    with open(finished / "metrics.jsonl", "a") as file:
        file.write('{"update": 2, "success": 0.0}\n')
    before = {path: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    train.train(config(updates=9, eval_repeats=2), eval_only=True)
    assert {path: path.read_bytes() for path in before} == before
    assert f"weights: {finished}/checkpoint-000001\n" in capsys.readouterr().out
    files = (finished / name for name in ("evaluation.json", "evaluation-only.json"))
    trained, evaluated = (json.loads(file.read_text()) for file in files)
    assert evaluated["update"] == 1
    assert len(evaluated["episodes"]) == 2 * len(trained["episodes"])


@pytest.mark.slow
def test_pictures_of_two_runs(finished, tmp_path, monkeypatch):
    """The command, on run folders with odd names."""
    other = tmp_path / "$x^$"  # no math, and no error of matplotlib's
    shutil.copytree(finished, other)
    words = ["plot", str(finished), str(other), "--out", str(tmp_path / "compared")]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(plot.__file__, run_name="__main__")
    for name in ("curves.png", "paw.png"):
        assert (tmp_path / "compared" / name).read_bytes().startswith(b"\x89PNG")


def test_a_model_with_too_few_positions_is_refused(config, tmp_path):
    """A prompt and its response must fit; observations may be far shorter than their limit."""
    make_policy("qwen3", max_position_embeddings=64).save(tmp_path / "short")
    short = dict(model=str(tmp_path / "short"), max_prompt_tokens=60)
    for start in (train.train, plan.dry_run):
        with one_sentence("short has 64 positions: .* together 65"):
            start(config(**short, max_response_tokens=5))
    with session.open_session(config(**short, max_response_tokens=4)):
        pass


@pytest.mark.slow
def test_the_stand_in_is_what_its_command_makes(games_root):
    """The whole remake takes minutes; its miniature on 12 tasks repeats what was recorded."""
    folder = Path(default_model("alfworld"))
    record = json.loads((folder / "record.json").read_text())
    tasks = sorted(list_games(games_root, "train"), key=lambda game: Path(game).parent.name)
    torch.manual_seed(5)  # nobody else's generator matters
    again = teachers.miniature("alfworld", tasks, AutoTokenizer.from_pretrained(folder), seed=0)
    assert again["demonstrations"] == record["demonstrations"]
    assert again["loss"] == pytest.approx(record["loss"], rel=1e-4)
