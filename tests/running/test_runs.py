"""Run folders: two processes in one, a full disk at every write, damaged files."""

import importlib
import json
import os
import resource
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from paw_min import cli, train
from paw_min.base import distributed, files
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS, presets_of
from paw_min.envs.interface import Benchmark
from paw_min.model.batches import collate
from paw_min.rows import TokenRow
from paw_min.running import runs, session
from paw_min.running.config_json import differences
from tests.helpers import change, held_by_another_process, make_policy, one_sentence


@pytest.fixture
def policy():
    """A policy and its optimizer, with moments."""
    policy = make_policy("qwen3")
    optimizer = torch.optim.AdamW(policy.parameters())
    sum((p**2).sum() for p in policy.parameters()).backward()
    optimizer.step()
    return policy, optimizer


def restore(run: runs.Run, policy, optimizer) -> int:
    """As session.open_session does."""
    checkpoint = run.checkpoint()
    done = runs.updates_done(checkpoint) if checkpoint else 0
    run.load(policy, optimizer)
    run.begin(done)
    return done


# ---- two processes ----


def test_a_folder_that_another_process_holds(config, tmp_path):
    """It is free after a kill -9 of that process."""
    folder = tmp_path / "r"
    folder.mkdir()
    sentence = f"{folder} is in use by another process: wait for it, or choose another --name"
    with held_by_another_process(folder):
        with pytest.raises(UserError, match=f"^{sentence}$"):
            runs.Run(config())
        assert [path.name for path in folder.iterdir()] == ["lock"]
    runs.Run(config())


@pytest.mark.parametrize("recompute, rank", [(True, 0), (True, 4), (False, 0)])
def test_gradient_checkpointing_is_on_where_it_is_asked_for(config, recompute, rank):
    """transformers leaves it off outside of training mode, without a word. Adapters train, too."""
    passes = []
    with session.open_session(config(grad_checkpointing=recompute, lora_rank=rank)) as s:
        layer = s.policy.model.get_decoder().layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_: passes.append(1))
        batch = collate([TokenRow([3, 9, 10], [5, 6], [])], [False], s.policy.pad_id)
        s.policy(batch)[0].sum().backward()
        trained = layer.mlp.up_proj.lora_B["default"] if rank else layer.mlp.up_proj
    assert len(passes) == 1 + recompute
    assert trained.weight.grad.any()


def test_ranks_that_see_different_checkpoints_are_refused(config, monkeypatch):
    """As where machines do not share the folder; the other rank is played here."""
    monkeypatch.setattr(distributed, "all_gather", lambda items: [*items, "checkpoint-000001"])
    with pytest.raises(UserError, match="^the ranks see different checkpoints in "):
        with session.open_session(config()):
            pass


# ---- writing ----


@contextmanager
def disk_of(n_bytes: int):
    """No file can grow beyond n_bytes: every library meets a real error of the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("path, sentence", [
    ("r/config.json", "config.json is of another program, or of .* has model_type"),  # a model's
    ("r", "/r cannot be written .*fix the path"),
    (".", "/r cannot be written .*fix the path"),
])
def test_a_folder_that_cannot_be_a_runs(config, tmp_path, path, sentence):
    file = tmp_path / "out" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"model_type": "qwen2"}')
    with one_sentence(sentence):
        train.train(config(out=str(tmp_path / "out")))
    assert file.read_text() == '{"model_type": "qwen2"}'


def test_a_run_deletes_only_what_is_its_own(config, policy, tmp_path):
    """As with --out ~ --name Downloads, also where the start then fails."""
    names = ("a.partial", "b/checkpoint-000009.partial", "checkpoint-0000009")
    others = [tmp_path / "r" / name for name in names]
    for path in others:
        path.mkdir(parents=True)
    run = runs.Run(config())
    restore(run, *policy)
    run.save(*policy, 1)
    own = tmp_path / "r" / "checkpoint-000002.partial"
    own.mkdir()  # as after a kill
    run = runs.Run(config())
    assert restore(run, *policy) == 1
    assert all(path.is_dir() for path in others) and not own.exists()


@pytest.mark.parametrize("name, n_bytes", [
    ("config.json", 0), ("metrics.jsonl", 0),
    # The disk is full in config.json, its first file, and in trainer.pt (160 KB), its last.
    ("checkpoint-000002", 0), ("checkpoint-000002", 100_000),
])
def test_a_full_disk_is_one_sentence_and_loses_nothing(finished, config, policy, name, n_bytes):
    run = runs.Run(config())
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    write = {
        "config.json": run.write_settings,
        "metrics.jsonl": lambda: run.log({"update": 2, "success": 0.5}),
        "checkpoint-000002": lambda: run.save(*policy, 2),
    }[name]
    with one_sentence(f"{name} cannot be written.*free space"):
        with disk_of(n_bytes):
            write()
    after = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert after == before
    write()  # space again


class Killed(BaseException):
    """No exception handler of a run catches it, as none catches a kill -9."""


def half_removed(folder: Path) -> None:
    (folder / "trainer.pt").unlink()
    raise Killed


@pytest.mark.parametrize(
    "module, name, kill",
    [
        (torch, "save", Killed), (files, "flush", Killed), (os, "replace", Killed),
        (runs, "remove", half_removed),
    ],
    ids=["write", "flush", "rename", "remove the older one"],
)
def test_a_save_that_is_killed_at_a_file_operation_loses_nothing(
    finished, config, policy, monkeypatch, module, name, kill
):
    run = runs.Run(config())
    with monkeypatch.context() as patch:
        patch.setattr(module, name, Mock(side_effect=kill))
        with pytest.raises(Killed):
            run.save(*policy, 9)
    again = runs.Run(config())
    restore(again, *policy)
    good = again.checkpoint()
    assert good.name == ("checkpoint-000009" if name == "remove" else "checkpoint-000001")
    torch.load(good / "trainer.pt", weights_only=True)
    AutoModelForCausalLM.from_pretrained(good)
    assert list(finished.glob("checkpoint-*")) == [good]


# ---- what is in a folder ----


class Bomb:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_no_code_of_a_checkpoint_runs(finished, config):
    path = finished / "checkpoint-000001" / "trainer.pt"
    torch.save({"done": Bomb()}, path)
    with one_sentence(str(path)) as error:
        train.train(config(updates=2))
    assert "weights_only" not in str(error.value)


def test_a_kill_before_the_first_checkpoint_may_be_followed_by_another_interval(
    finished, config, policy
):
    shutil.rmtree(finished / "checkpoint-000001")  # as if the run had --save-every 2
    path = finished / "config.json"
    change(path, save_every=2)
    change(finished / "sources.json", other="of the first line")
    with open(finished / "metrics.jsonl", "a") as file:
        file.write('{"update": 2}\n{"update": 3, "succ')
    assert restore(runs.Run(config(save_every=1)), *policy) == 0
    assert [line["update"] for line in runs.read_metrics(finished)] == [0]
    assert json.loads(path.read_text())["save_every"] == 1
    assert "other" in json.loads((finished / "sources.json").read_text())


def test_ctrl_c_says_where_the_same_command_continues(finished, monkeypatch):
    monkeypatch.setattr(train, "train", Mock(side_effect=KeyboardInterrupt))
    for words, end in (
        ("--name r", "the same command continues after update 1"),
        ("--name r --eval-only", "rerun the same command"),
        ("--name new", "the same command continues at update 0, since no checkpoint"),
    ):
        argv = [*words.split(), "--out", str(finished.parent)]
        with pytest.raises(SystemExit, match=f"^interrupted: {end}"):
            cli.main("alfworld", presets_of("alfworld"), "", argv=argv)


@pytest.mark.parametrize("end, kept", [
    ('{"update": 1, "success": 0.5}', [0, 1]),  # a copy or an editor has cut the newline off
    ('{"update": 1, "succ', [0]), ('{"update": 1}\n', [0, 1]), ("", [0]),
])
def test_a_last_line_of_metrics_is_kept_if_it_is_whole(end, kept, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n' + end)
    assert [line["update"] for line in runs.read_metrics(tmp_path)] == kept


def test_metrics_are_not_dropped_because_checkpoints_were_deleted(finished, config, policy):
    shutil.rmtree(finished / "checkpoint-000001")
    with open(finished / "metrics.jsonl", "a") as file:
        file.write('{"update": 2}\n')
    with one_sentence("r has metrics, but no checkpoint: use another --name.$"):
        restore(runs.Run(config()), *policy)
    assert len(runs.read_metrics(finished)) == 3


def test_a_run_belongs_to_its_settings(finished, config):
    with one_sentence("belongs to a run with.*--paw True, --rho 0.2.*another --name"):
        runs.Run(config(paw=False, rho=0.3))


def test_a_run_whose_sources_have_changed_says_so(finished, config, policy, monkeypatch, capsys):
    """Those of the package, and of the program, which has the method of a fork; each resume."""
    program = finished.parent / "own.py"
    program.write_text("1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
    stored = finished / "sources.json"
    stored.write_text(json.dumps(runs.source_digests("alfworld")))
    restore(runs.Run(config()), *policy)
    assert not capsys.readouterr().out
    program.write_text("2")
    change(stored, **{"paw_min/balance.py": "of another version", "gone.py": "1"})
    digests = json.loads(stored.read_text())
    del digests["paw_min/select.py"]  # as if it were new
    stored.write_text(json.dumps(digests))
    for _ in range(2):
        restore(runs.Run(config()), *policy)
        said = capsys.readouterr().out
        assert said.startswith("changed since the run began: ") and said.count("\n") == 1
        assert "own.py, gone.py, paw_min/balance.py, paw_min/select.py; use another" in said


def test_the_sources_of_a_run(tmp_path, monkeypatch):
    """All of the package, and the environment's module with the modules beside it that it uses.

    As examples/locks.py, beside examples/boxes.py.
    """
    texts = {"own_world": "import own_helper\ndef load(cfg, data): ...\n", "own_helper": "",
             "not_used": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)  # of an earlier run of this test
    monkeypatch.syspath_prepend(tmp_path)
    load = importlib.import_module("own_world").load
    monkeypatch.setitem(BENCHMARKS, "own", Benchmark(load, {}, lambda response: None))
    digests = runs.source_digests("own")
    assert {"paw_min/train.py", "paw_min/envs/search/env.py"} <= digests.keys()
    ours = {Path(name).name for name in digests if "paw_min/" not in name}
    assert {"own_world.py", "own_helper.py"} <= ours and "not_used.py" not in ours
    assert "own_helper.py" not in {Path(name).name for name in runs.source_digests("alfworld")}
    (tmp_path / "own_helper.py").write_text("FACT = 1\n")
    assert digests != runs.source_digests("own")


@pytest.mark.parametrize("settings, changed, refused", [
    (dict(paw=False), dict(wm_scale=0.005, rho=0.3), []),
    (dict(paw=False), dict(paw=True, rho=0.3), ["--paw False", "--rho 0.2"]),
    (dict(data="a"), dict(data="b"), ["--data 'a'"]),
    # The limit of prompts is free where none is cut, as far as is known.
    ({}, dict(max_prompt_tokens=900), []),
    ({}, dict(updates=9, eval_every=1, eval_repeats=3, workers=2), []),
    (dict(env="search"), dict(max_prompt_tokens=900), ["--max-prompt-tokens 2048"]),
    (dict(method="tapo"), dict(max_prompt_tokens=900), ["--max-prompt-tokens 2048"]),
    # A server may move; another corpus may have other passages.
    (dict(retriever="http://a:1"), dict(retriever="http://b:2/retrieve"), []),
    (dict(retriever="http://me:pw@a:1"), dict(retriever=""), ["--retriever 'http://***@a:1'"]),
    (dict(retriever="c.jsonl"), dict(retriever="http://a:1"), ["--retriever 'c.jsonl'"]),
])
def test_settings_that_change_no_number_are_free(settings, changed, refused):
    cfg = Config(**settings)
    assert differences(cfg, replace(cfg, **changed)) == refused


# ---- NaN ----


def test_weights_that_are_not_finite_are_never_saved(finished, config, policy):
    run = runs.Run(config())
    with torch.no_grad():
        list(policy[0].parameters())[-1].view(-1)[-1] = float("inf")
    with pytest.raises(UserError, match="update 2 made weights NaN or infinite; not saved: lower"):
        run.save(*policy, 2)
    assert [path.name for path in finished.glob("checkpoint*")] == ["checkpoint-000001"]
