"""Sweeps in real processes, the statistics of the tables by hand, and the figures."""

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from paw_min.base.errors import UserError
from paw_min.running import memory, runs
from paw_min.running.session import start_model
from research.paper import figures, sweep, table
from research.paper.grids import GRIDS, Arm
from research.stats import mean_of
from tests.helpers import SMALL, argv

# --- grids and plans -------------------------------------------------------------------------


@pytest.mark.parametrize("env, size", [("alfworld", "paper"), ("search", "tiny")])
def test_every_arm_is_a_run_of_its_own_with_the_same_episodes(env, size, tmp_path):
    for grid, arms in GRIDS.items():
        extra = [] if size == "tiny" else ["--preset", size, "--data", "d"]
        jobs = sweep.plan(grid, env, [0, 1], str(tmp_path), extra)
        assert [j.cfg.seed for j in jobs] == [0] * len(arms) + [1] * len(arms)
        assert len({j.folder for j in jobs}) == len(jobs), grid
        assert len({j.cfg.groups * j.cfg.group_size for j in jobs}) == 1, grid
        assert len({j.cfg.lr for j in jobs}) == 1, grid
        assert len({(j.cfg.max_turns, j.cfg.prompt) for j in jobs}) == 1, grid
        for job in jobs:
            if job.label.removesuffix(" w/ PaW") in ("GRPO", "GiGPO", "PPO", "RLOO"):
                assert job.cfg.algo == job.label.removesuffix(" w/ PaW").lower()
                assert job.cfg.paw == job.label.endswith("w/ PaW")


def test_settings_of_the_arms(tmp_path):
    def cfg(grid, label, *extra):
        jobs = sweep.plan(grid, "webshop", [0], str(tmp_path), list(extra))
        return next(job.cfg for job in jobs if job.label == label)

    for extra in ((), ("--preset", "paper", "--data", "d")):
        echo = cfg("neighbors", "ECHO", *extra)
        assert (echo.wm_loss, echo.alpha, echo.wm_scale) == ("ce", 1.0, 0.05)
        assert echo.max_turns == (15 if extra else 8)
    ppo = cfg("table3-algorithms", "PPO w/ PaW", "--groups", "3", "--group-size", "5")
    assert (ppo.groups, ppo.group_size) == (15, 1)
    assert cfg("table4", "w/o Ada. Coef.").lambda_g == "constant"
    assert [cfg("fig6-rho", f"ρ = {r:g}").rho for r in (0.1, 0.4, 1)] == [0.1, 0.4, 1.0]
    # What several grids need is one run.
    same = [("table1", "GRPO w/ PaW"), ("table4", "GRPO w/ PaW"), ("fig6-alpha", "α = 0.75"),
            ("fig6-rho", "ρ = 0.2")]
    assert len({cfg(*arm).name for arm in same}) == 1


def test_arms_are_chosen_by_their_labels(tmp_path):
    """As the pair of GRPO and PaW, which is a grid of its own."""
    def labels(grid, arms=None):
        jobs = sweep.plan(grid, "alfworld", [0, 1], str(tmp_path), [], arms)
        return [str(job) for job in jobs]

    assert labels("table1", ["GRPO w/ PaW", "GRPO"]) == labels("pair") == [
        "GRPO, seed 0", "GRPO w/ PaW, seed 0", "GRPO, seed 1", "GRPO w/ PaW, seed 1",
    ]
    with pytest.raises(UserError, match="^--arms PaW: pair has GRPO, GRPO w/ PaW"):
        labels("pair", ["PaW"])


def test_the_plan_has_what_all_runs_need(tmp_path, monkeypatch, capsys):
    """Each arm is checked with one seed: all seeds use the same data."""
    check = Mock(return_value=[])
    monkeypatch.setattr(sweep, "dry_run", check)
    jobs = sweep.plan("pair", "alfworld", [0, 1, 2], str(tmp_path), [])
    seconds = {"seconds_rollout": 1500.0, "seconds_env": 9.0, "seconds_update": 300.0}
    write_run(jobs[0].folder, [{"update": 0}, {"update": 1} | seconds], {}, [])
    left = 6 * jobs[0].cfg.updates - 1
    hours = left * 1800 / 3600 / 2
    needs = memory.of_folder(jobs[0].cfg, start_model(jobs[0].cfg), "bf16")
    disk = memory.gb((6 + 2) * needs.checkpoint)  # two runs write their second one
    sweep.main(f"pair --env alfworld --jobs 2 --out {tmp_path} --dry-run".split())
    (checked,) = check.call_args.args
    assert [str(job) for job in checked] == ["GRPO, seed 0", "GRPO w/ PaW, seed 0"]
    assert (
        f"total     6 runs, 2 at a time, {left} updates left: {hours:.1f} hours at 1800 s per "
        f"update; {disk} GB of disk"
    ) in capsys.readouterr().out


def test_one_run_per_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweep.slots(2) == ["", ""]  # there is none
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert sweep.slots(None) == ["0", "1"] and sweep.slots(3) == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert sweep.slots(None) == ["3", "5"]


# --- a sweep in real processes ---------------------------------------------------------------


@pytest.fixture
def interruptible():
    """A shell may have started pytest with & or nohup, so that it ignores Ctrl-C."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.slow
def test_a_sweep_is_interrupted_fails_resumes_and_becomes_a_table(
    tmp_path, monkeypatch, model, games_root, capsys, interruptible
):
    small = SMALL | dict(data=games_root, model=model, updates=2, eval_every=0)
    flags = argv({k: v for k, v in small.items() if k not in ("name", "kl_coef")})
    arms = [Arm("GRPO", "--no-paw"), Arm("GRPO w/ PaW"), Arm("bad", f"--model {tmp_path}/nowhere")]
    monkeypatch.setitem(sweep.GRIDS, "three", arms)
    folder = sweep.plan("three", "alfworld", [0], str(tmp_path / "s"), flags)[0].folder
    started, start = [], sweep.start
    monkeypatch.setattr(sweep, "start", lambda *a: started.append(start(*a)) or started[-1])

    def run(jobs):
        own = f"three --env alfworld --seeds 0 --jobs {jobs} --out {tmp_path}/s --".split()
        sweep.main([*own, *flags])

    # Ctrl-C ends the run as well.
    def interrupt():
        while not runs.read_metrics(folder):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(jobs=1)
    (process,) = started
    assert process.poll() == 1 and "the same command continues" in Path(f"{folder}.log").read_text()
    first = runs.read_metrics(folder)
    assert len(first) < 3

    # It resumes; one run fails, another goes on.
    with pytest.raises(UserError, match=r"1 of 3 runs failed.\nbad, seed 0: exit code 1: error: "):
        run(jobs=3)
    lines = runs.read_metrics(folder)
    assert lines[0] == first[0] and [line["update"] for line in lines] == [0, 1, 2]
    assert "GRPO, seed 0: held-out success: 0.000 before" in capsys.readouterr().out
    del arms[2]
    run(jobs=1)  # nothing is left to start
    assert len(started) == 4 and "   2 of 2 updates" in capsys.readouterr().out

    path = tmp_path / "s" / "three-alfworld.json"
    assert [e["label"] for e in json.loads(path.read_text())] == ["GRPO", "GRPO w/ PaW"]
    table.main([path], None)
    text = capsys.readouterr().out
    assert f"{100 * lines[-1]['eval_success']:.1f} |" in text and "2000 draws of tasks." in text
    figures.bands(path, ["eval_success", "memory_gb"], None)
    figures.overhead(folder, folder, None)
    pngs = capsys.readouterr().out.split("\n")
    assert Path(pngs[0]).read_bytes().startswith(b"\x89PNG")


# --- tables ----------------------------------------------------------------------------------


def write_run(folder: Path, lines: list[dict], settings: dict, episodes: list[dict]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = {"update": lines[-1]["update"], "episodes": episodes}
    (folder / "evaluation.json").write_text(json.dumps(outcome))


def won(**tasks) -> list[dict]:
    """Episodes of the type in the first letter: won(a1=[1, 0]) are two of task a1."""
    return [
        {"task": task, "task_type": task[0], "won": bool(w), "score": None}
        for task, outcomes in tasks.items()
        for w in outcomes
    ]


def test_columns_by_hand():
    episodes = won(b1=[1, 0], b2=[1, 1], a1=[0, 0])  # two episodes per task
    search = table.columns("search", episodes)
    assert list(search) == ["a", "b", "Avg."]
    assert [mean_of(c) for c in search.values()] == [0.0, 75.0, 37.5]  # unweighted
    kinds = {"a": "pick_two_obj_and_place", "b": "look_at_obj_in_light"}
    games = [e | {"task_type": kinds[e["task_type"]]} for e in episodes]
    assert {n: mean_of(c) for n, c in table.columns("alfworld", games).items()} == {
        "Look": 75.0, "Pick2": 0.0, "All": 50.0}
    shop = table.columns("webshop", [e | {"score": 0.5 + 0.5 * e["won"]} for e in episodes])
    assert {name: mean_of(c) for name, c in shop.items()} == {"Score": 75.0, "Success": 50.0}


def sweep_file(root: Path) -> Path:
    """Arms A and B with seeds 0 and 1: 25, 50 and 75, 75 % of four tasks."""
    entries = []
    for (label, seed), k in zip(itertools.product("AB", (0, 1)), (1, 2, 3, 3)):
        name = f"{label}-seed{seed}"
        lines = [{"update": 0, "eval_success": 0.0},
                 {"update": 4, "eval_success": k / 4, "eval_success/a": k / 4, "loss": seed + k,
                  "seconds_rollout": 1.0, "seconds_old_pass": 0.5, "seconds_update": 1.0 * k,
                  "memory_gb": 1.0 * k}]
        tasks = won(**{f"a{i}": [i < k] for i in range(4)})
        settings = dict(env="alfworld", seed=seed, updates=4, rho=0.2 if label == "A" else 0.4,
                      alpha=0.75)
        write_run(root / name, lines, settings, tasks)
        entries.append({"label": label, "seed": seed, "folder": name})
    (root / "s.json").write_text(json.dumps(entries))
    return root / "s.json"


def test_markdown(tmp_path, capsys):
    table.main([sweep_file(tmp_path / "e")], tmp_path / "t.md")
    text = capsys.readouterr().out
    assert (tmp_path / "t.md").read_text() == text.rstrip() + "\n"
    assert "| method | a | All |" in text and "| difference to A | a | All |" in text
    assert "| A | 37.5 ± 17.7 | 37.5 ± 17.7 |" in text and "| B | 75.0 ± 0.0 |" in text
    assert "over 2 seeds" in text and "2000 draws of seeds and tasks" in text
    # B wins a1 and a2 of seed 0, and a2 of seed 1, which A loses: 0 tasks of four to all of them.
    assert "| B | +37.5 [+0.0, +87.5] |" in text

    # Run folders. An unfinished one is named.
    sweep_file(tmp_path / "m")
    folders = [tmp_path / "m" / f"{label}-seed{seed}" for label in "AB" for seed in (0, 1)]
    file = folders[0] / "config.json"
    file.write_text(file.read_text().replace('"updates": 4', '"updates": 5'))
    table.main(folders, None)
    text = capsys.readouterr().out
    assert "| B | +37.5 [+0.0, +87.5] |" in text
    assert f"Not finished: {folders[0]}, 4 of 5 updates." in text
    with pytest.raises(UserError, match="'A', seed 0, is both"):
        table.main([folders[0], tmp_path / "e" / "A-seed0"], None)


def test_lost_episodes_do_not_count():
    one, two, lost = won(a1=[1], a2=[0], a3=[0])
    episodes = [one, lost | {"failed": "it broke"}, two | {"failed": ""}]
    assert table.columns("alfworld", episodes)["All"] == {"": {"a1": 100.0, "a2": 0.0}}


# --- figures ---------------------------------------------------------------------------------


def test_curves_over_seeds_by_hand():
    lines = [{0: 1.0, 2: 5.0, 3: 0.0}, {2: 5.0, 0: 3.0}, {}]
    runs = [[{"update": k, "x": x} for k, x in run.items()] + [{"update": 9}] for run in lines]
    updates, values = figures.stacked(runs, "x")
    assert (updates, values.tolist()) == ([0, 2], [[1.0, 5.0], [3.0, 5.0]])
    assert figures.stacked(runs, "y").updates == []


def test_figures_from_the_command_line(tmp_path, monkeypatch, capsys):
    path = sweep_file(tmp_path / "s")
    monkeypatch.setattr(sys, "argv", ["figures", "sensitivity", str(path)])
    figures.main()
    assert Path(capsys.readouterr().out.strip()) == path.with_suffix(".png")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_overhead_by_hand(tmp_path, capsys):
    sweep_file(tmp_path / "s")
    figures.overhead(tmp_path / "s/A-seed1", tmp_path / "s/B-seed0", tmp_path / "o.png")
    text = capsys.readouterr().out
    assert "| s, update | 2.00 | 3.00 | +50.0 % |" in text
    assert "| s, all | 3.50 | 4.50 | +28.6 % |" in text
    assert "| GB, memory peak | 2.00 | 3.00 | +50.0 % |" in text
