"""Finding, listing and playing ALFWorld games."""

import codecs
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paw_min import train
from paw_min.cli import parse_args
from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.alfworld.env import find_data
from paw_min.envs.benchmarks import presets_of
from paw_min.running import plan
from tests.helpers import one_sentence


@pytest.fixture
def data(games_root, tmp_path):
    """A copy of the games that a test may change."""
    shutil.copytree(games_root, tmp_path / "data")
    return tmp_path / "data"


def copy_game(path, folder):
    """Copy a game's trial into another trial folder of the split; returns the new game's path."""
    new = Path(path).parents[2] / folder
    shutil.copytree(Path(path).parent, new)
    return new / "game.tw-pddl"


# --- where the games are ---------------------------------------------------------------------


def test_data_is_found_from_either_folder_and_from_the_environment(data, monkeypatch):
    inner = data / "json_2.1.1"
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    for preset, expected in (("paper", inner), ("tiny", None)):  # tiny's stand-in has its own
        cfg, _ = parse_args("alfworld", presets_of("alfworld"), "", ["--preset", preset])
        assert (find_data(cfg.data) if cfg.data else None) == expected
    assert find_data(data) == find_data(str(inner)) == inner


# --- which games there are -------------------------------------------------------------------


def stock_list(folder):
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    config = {"dataset": {"data_path": str(folder), "num_train_games": 0},
              "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]}}
    return AlfredTWEnv(config).game_files


def test_games_are_those_of_alfredtwenv_sorted(data):
    games = list_games(data, "train")
    slashed = [Path(g).as_posix() for g in games]
    assert slashed == sorted(slashed) and len(games) == 12

    def change(path, **values):
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))

    change(copy_game(games[0], "a-unsolvable/t"), solvable=False)
    change(copy_game(games[0], "a-unknown/t"), solvable=None)
    change(copy_game(games[0], "a-movable-recep/t"))
    change(copy_game(games[0], "pick_and_place_simple-AppleSliced-None-Desk-7/t"))
    change(copy_game(games[0], "a-type/t").with_name("traj_data.json"), task_type="pick_three")
    os.remove(copy_game(games[0], "a-draft/t"))
    os.remove(copy_game(games[0], "a-no-traj/t").with_name("traj_data.json"))
    good = copy_game(games[0], "a/deeper/nesting/t")
    assert list_games(data, "train") == [str(good), *games]
    assert sorted(stock_list(data / "json_2.1.1" / "train")) == sorted([str(good), *games])


@pytest.mark.parametrize("folder, sentence", [
    ("nowhere", "nowhere' does not exist; .*alfworld-download"),
    (".", "has no json_2.1.1"),
    ("empty", "train has 0 games"),  # AlfredTWEnv hangs
])
def test_missing_data(tmp_path, folder, sentence):
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with one_sentence(sentence, FileNotFoundError):
        list_games(tmp_path / folder, "train")


@pytest.mark.parametrize("name, content", [
    ("game.tw-pddl", b"[" * 100_000),
    ("game.tw-pddl", b'{"grammar": "\\uD800"}'),
    ("traj_data.json", b"[1, 2]"),
])
def test_broken_json_is_named(data, name, content):
    path = Path(list_games(data, "train")[5]).with_name(name)
    path.write_bytes(content)
    with one_sentence(re.escape(str(path)) + " cannot be read .*: delete", ValueError):
        list_games(data, "train")


@pytest.mark.parametrize("key, old, new, sentence", [
    ("grammar", '"move {o} to {r}"', '"put {o} in/on {r}"', "before alfworld 0.4 .*-download -f`"),
    ("grammar", None, None, "has no text grammar: .*-download -f`"),
    ("pddl_problem", None, ["(define)"], "has no text pddl_problem"),
])
def test_games_that_cannot_be_played_are_refused_by_plan_and_start(
    key, old, new, sentence, data, config
):
    path = Path(list_games(data, "valid_seen")[3])
    game = json.loads(path.read_bytes())
    game[key] = game[key].replace(old, new) if old else new
    path.write_text(json.dumps(game))
    for run in (plan.dry_run, train.train):
        with one_sentence(re.escape(str(path)) + f".*{sentence}"):
            run(config(data=str(data)))


def test_a_game_with_a_byte_order_mark(data):
    path = Path(list_games(data, "train")[0])
    expected = AlfworldEnv().reset(str(path))
    for file in (path, path.with_name("traj_data.json")):
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert list_games(data, "train")[0] == str(path)
    assert AlfworldEnv().reset(str(path)) == expected


# --- playing ---------------------------------------------------------------------------------


def test_steps_of_a_game(games_root):
    env = AlfworldEnv()
    path = next(g for g in list_games(games_root, "train") if "heat" in g)
    first = env.reset(path)
    assert re.fullmatch(r"-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room\. "
                        r"Looking quickly around you, you see .*\.\n\n"
                        r"Your task is to: put a hot \w+ in \w+\.", first.observation)
    assert first.task == first.observation[first.observation.index("put a hot"):]
    assert first.task_type == "pick_heat_then_place_in_recep"
    assert "help" not in first.admissible and "look" in first.admissible
    assert first.admissible == sorted(first.admissible)
    assert (first.reward, first.done, first.won, first.score) == (0.0, False, False, None)

    step = env.step("dance")
    assert step == replace(first, observation="Nothing happens.")
    *commands, last = json.loads(Path(path).read_bytes())["walkthrough"]
    for command in commands:
        assert command in step.admissible
        step = env.step(command)
        assert (step.reward, step.done, step.won) == (0.0, False, False)
    step = env.step(last)
    assert (step.reward, step.done, step.won) == (10.0, True, True)
    assert step.observation.startswith("You move the ") and step.task == first.task
