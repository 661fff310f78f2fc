"""A command that is killed and repeated gives what a command that was not killed gives.

The kill is real: SIGKILL, to a process that is somewhere in its work.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import run_alfworld
from paw_min.base.errors import UserError
from paw_min.config import parse_args
from paw_min.model.sampler import HFSampler
from paw_min.rows import TokenRow
from paw_min.running.runs import newest_checkpoint
from tests.helpers import held_by_another_process, make_policy, numbers, weights_of
from world_models import supervised, word2world
from world_models.pieces import Pieces, stage
from world_models.rwml import early_experience
from world_models.rwml import settings as rwml_settings
from world_models.rwml.stages import main as rwml_main
from world_models.rwml.triplets import DROPPED, read_triplets
from world_models.supervised import fit
from world_models.word2world import commands, players
from world_models.word2world.training import Together
from world_models.word2world.world_model import WorldModel

# ---- the pieces ----


def test_a_damaged_file_ends_where_it_is_damaged(tmp_path):
    pieces = Pieces(tmp_path / "x", {})
    for k in range(4):
        pieces.once(f"{k}", str, lambda k=k: f"caf\u00e9 {k}")
    path = tmp_path / "x" / "pieces"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 5  # the settings, too
    for damaged in (lines[4][:5], "\xff\n"):
        path.write_bytes("".join([*lines[:4], damaged]).encode("latin-1"))
        pieces = Pieces(tmp_path / "x", {})
        assert pieces.once("2", str, lambda: "new") == "caf\u00e9 2"
        assert pieces.once("3", str, lambda: "new") == "new"
        assert Pieces(tmp_path / "x", {}).once("3", str, lambda: "newer") == "new"


def test_parts_are_pieces(tmp_path):
    made = []

    def make(first, some):
        made.append(first)
        if first == 4:
            raise KeyboardInterrupt
        return [10 * one for one in some]

    items = list("abcde")
    with pytest.raises(KeyboardInterrupt):
        Pieces(tmp_path / "x", {}).parts("letters", items, 2, list[str], make)
    assert made == [0, 2, 4]
    again = Pieces(tmp_path / "x", {})
    found = again.parts("letters", items, 2, list[str], lambda first, some: [*some, str(first)])
    assert found == [["a" * 10, "b" * 10], ["c" * 10, "d" * 10], ["e", "4"]]


def test_pieces_of_others_are_refused(tmp_path):
    pieces = Pieces(tmp_path / "x", {"seed": 0, "lr": 0.1})
    pieces.once("letters", str, lambda: "these")
    with pytest.raises(UserError, match="x has the unfinished work of seed 0: repeat that, delete"):
        Pieces(tmp_path / "x", {"seed": 1, "lr": 0.1})


def test_a_stage_is_made_once_and_belongs_to_its_command(tmp_path):
    path = tmp_path / "r.json"
    line = {"command": "a b"}
    assert stage(path, line, lambda: {"x": 1}) == {"command": "a b", "x": 1}
    assert stage(path, line, lambda: {"x": 2})["x"] == 1
    with pytest.raises(UserError, match="r.json was made with command 'a b': repeat that, or cho"):
        stage(path, {"command": "a c"}, lambda: {"x": 2})


def test_no_file_of_others_is_written_over(tmp_path):
    (tmp_path / "model").mkdir()
    pieces = Pieces(tmp_path / "x", {})
    with pytest.raises(UserError, match="has a model already: choose another --out, or delete it"):
        pieces.refuse_to_overwrite(tmp_path / "model")
    pieces.refuse_to_overwrite(tmp_path / "other")
    pieces.once("k", int, lambda: 1)
    killed = Pieces(tmp_path / "x", {})  # the command that made it
    killed.refuse_to_overwrite(tmp_path / "model")


# ---- training ----


def rows():
    return [TokenRow([3, 4, k], [k + 4], []) for k in range(5, 10)]


def optimizer_of(policy, kind):
    parameters = list(policy.parameters())
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    return Together([torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [2, 8])
def test_training_goes_on_after_its_newest_epoch(tmp_path, monkeypatch, kind, stop):
    """It is interrupted after so many steps; an epoch has three."""
    real, steps = supervised.fit_step, []

    def step(*args):
        steps.append(args)
        if len(steps) == stop + 1:
            raise KeyboardInterrupt
        return real(*args)

    def train(policy, pieces=None):
        return fit(policy, optimizer_of(policy, kind), rows(), epochs=4, batch=2, warm_up=7,
                   micro_tokens=64, seed_key=(0,), pieces=pieces)

    expected = make_policy()
    losses = train(expected)
    monkeypatch.setattr(supervised, "fit_step", step)
    with pytest.raises(KeyboardInterrupt):
        train(make_policy(), Pieces(tmp_path / "x", {}))
    policy = make_policy()
    assert train(policy, Pieces(tmp_path / "x", {})) == losses
    assert len(steps) == stop + 1 + 12 - stop // 3 * 3
    assert torch.equal(weights_of(policy), weights_of(expected))


def test_training_that_is_not_finite_leaves_nothing_to_go_on_from(tmp_path):
    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e38)
    pieces = Pieces(tmp_path / "x", {})
    with pytest.raises(UserError, match="lower it"):
        fit(policy, optimizer, rows(), epochs=3, batch=5, warm_up=0, micro_tokens=64, seed_key=(0,),
            pieces=pieces)
    assert not pieces.folder.exists()


# ---- commands ----


def test_a_folder_in_use(tmp_path):
    out = ["alfworld", "--out", str(tmp_path)]
    with held_by_another_process(tmp_path):
        for main, words in ((word2world.main, ["collect", *out]), (rwml_main, out)):
            with pytest.raises(UserError, match="is in use by another process.*another --out"):
                main(words)


# What costs a model, or many steps of an environment.
WORK = (
    (HFSampler, "_generate"), (supervised, "fit_step"), (WorldModel, "answers"),
    (early_experience, "result_of"), (players.RulePlayer, "act"),
)


def in_a_process(main, argv, log: Path, kill_after: int = 0) -> int:
    """Run a command, and kill it after so many calls of WORK, if it lives so long -> its calls."""
    log.write_text("")
    child = os.fork()
    if child == 0:
        try:
            for owner, name in WORK:
                counted(owner, name, log)
            main(argv)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the parent's pytest must not go on here
            log.with_suffix(".error").write_text(f"{type(error)} {error}")
            os._exit(1)
    ended, status = 0, 0
    while not ended:
        if kill_after and log.stat().st_size >= kill_after:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), log.with_suffix(".error").read_text()
    assert kill_after or code == 0
    return log.stat().st_size


def counted(owner, name, log):
    """Each call of a function adds a byte to a file."""
    really = getattr(owner, name)

    def call(*args, **kwargs):
        with open(log, "a") as file:
            file.write(".")
        return really(*args, **kwargs)

    setattr(owner, name, call)


def killed_and_repeated(main, argv, tmp_path, seed: str, kills: int) -> None:
    """Both ways. The folder of argv(name) is `tmp_path / name`."""
    log = tmp_path / "calls.log"
    rng = random.Random(seed)
    once = in_a_process(main, argv("once"), log)
    for _ in range(kills):
        in_a_process(main, argv("often"), log, kill_after=max(1, int(once * rng.uniform(0.5, 0.9))))
    # Something was complete before the last kill.
    assert in_a_process(main, argv("often"), log) < once


def results(folder):
    """What word2world has written: texts, and weights as numbers."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found |= {name: weight.tolist() for name, weight in load_file(path).items()}
        elif path.stem in ("trajectories", *commands.FUNCTIONS):
            found[path.name] = json.loads(path.read_text())
            if isinstance(found[path.name], dict):
                del found[path.name]["seconds"], found[path.name]["command"]
    assert found
    return found


FLAGS = ["--preset", "tiny", "--groups", "2", "--max-turns", "6", "--eval-tasks", "3"]
TRAINING = ["--epochs", 3, "--batch", 2, "--lr", 1e-3]


@pytest.fixture(scope="module")
def worlds(games_root, shop, tmp_path_factory):
    """Trajectories and a world model of each of the two environments, in folders of their names."""
    root = tmp_path_factory.mktemp("worlds")
    data = {"alfworld": str(games_root), "webshop": shop}
    for env in data:
        file = root / env / "trajectories.json"
        run = [env, "--data", data[env], *FLAGS[:-4], "--max-turns", "20"]
        word2world.main(["collect", *run, "--agents", "teacher", "--episodes", "4", "--out",
                         str(file.parent)])
        word2world.main(["train", *run, "--trajectories", str(file), "--width", "32", "--epochs",
                         "2", "--batch", "2", "--out", str(root / f"{env}-wm")])
    return root, data


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["collect", "train", "fidelity", "consistency", "verify", "imitate"]
)
def test_word2world_is_killed_and_repeated(worlds, model, tmp_path, monkeypatch, command):
    monkeypatch.setattr(commands, "SLOTS", 2)
    root, data = worlds
    env = "webshop" if command == "verify" else "alfworld"
    file = root / env / "trajectories.json"
    agent = ["--model", model, "--max-response-tokens", 4]
    dream = ["--world-model", root / f"{env}-wm", "--answer-tokens", 6]
    words = {
        "collect": [*agent, "--agents", "model", "teacher", "--episodes", 4],
        "train": ["--trajectories", file, "--start", model, "--context", 300, "--limit", 3,
                  *TRAINING],
        "fidelity": ["--trajectories", file, *dream],
        "consistency": [*agent, *dream, "--agents", "model", "teacher"],
        "verify": [*agent, *dream, "--agents", "model", "teacher", "--budgets", 0, 2],
        "imitate": ["--trajectories", file, *agent, *TRAINING],
    }[command]
    words = [command, env, "--data", data[env], *words, *FLAGS]
    words += ["--max-prompt-tokens", 200] if "--model" in words else []

    def argv(name):
        return [str(word) for word in (*words, "--out", tmp_path / name)]

    killed_and_repeated(word2world.main, argv, tmp_path, command, kills=1)
    assert results(tmp_path / "once") == results(tmp_path / "often")
    assert not list((tmp_path / "often").glob("*.unfinished"))
    # A rerun reads the result.
    monkeypatch.setitem(commands.FUNCTIONS, command, None)
    assert word2world.main(argv("once"))["seconds"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rwml", "early-experience"])
def test_rwml_is_killed_and_repeated(games_root, tmp_path, monkeypatch, capsys, method):
    smaller = dict(tries=2, max_turns=6, warm_epochs=2, sft_epochs=2, answer_tokens=40)
    monkeypatch.setattr(rwml_settings, "TINY", rwml_settings.TINY | smaller)
    monkeypatch.setattr(early_experience, "BRANCHES", 2)
    encoder = rwml_settings.load_encoder("minilm", "cpu")  # not again in each process
    monkeypatch.setattr(rwml_settings, "load_encoder", lambda name, device: encoder)

    def argv(name):
        once = ["--epochs", "1"] if method == "rwml" else []
        small = ["--tasks", "3", "--eval-tasks", "2", "--max-turns", "6", "--method", method]
        return ["alfworld", "--out", str(tmp_path / name), "--data", str(games_root), *small, *once]

    killed_and_repeated(rwml_main, argv, tmp_path, method, kills=2)
    folders = [tmp_path / "once", tmp_path / "often"]
    for name in ("triplets.jsonl", "held_out.jsonl", "filter.json", "start/model.safetensors"):
        first, other = ((folder / name).read_bytes() for folder in folders)
        assert first == other, name
    first, other = (numbers(folder / method) for folder in folders)
    assert first == other
    first, other = (newest_checkpoint(folder / method) for folder in folders)
    assert first.name == other.name
    assert (first / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert not list(folders[1].rglob("*.unfinished"))
    if method == "rwml":
        check_the_folder_of_rwml(folders[0], first, argv("once"), capsys)


def check_the_folder_of_rwml(out, checkpoint, flags, capsys):
    """Triplets and numbers of each update; a rerun does nothing again, and names what follows."""
    record = json.loads((out / "collected.json").read_text())
    assert len(read_triplets(out / "triplets.jsonl")) == record["triplets"] > 10
    counts = record["counts"]
    dropped = sum(counts[name] for name in (*DROPPED, "too_long"))
    assert counts["steps"] == record["triplets"] + dropped
    lines = numbers(out / "rwml")
    for line in lines[1:]:
        assert {"reward", "spread", "exact", "cosine", "ref_kl", "grad_norm"} <= line.keys()
    for line in (lines[0], lines[-1]):
        names = {"eval_success", "eval_invalid", "held_out_exact", "held_out_cosine"}
        assert names <= line.keys()
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.json*")}
    assert len(times) == 4
    capsys.readouterr()
    rwml_main(flags)
    assert times == {path: path.stat().st_mtime_ns for path in out.glob("*.json*")}
    assert numbers(out / "rwml") == lines
    (command,) = re.findall("^python run_alfworld.py (.*)$", capsys.readouterr().out, re.M)
    cfg, _ = parse_args("alfworld", run_alfworld.PRESETS, "", command.split())
    assert cfg.model == str(checkpoint) and cfg.eval_tasks == 2
