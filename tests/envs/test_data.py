"""The stored games and questions of the tiny presets, and the teachers that play them."""

import hashlib
import importlib
import json
import random
import re
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.envs.alfworld import engine, list_games
from paw_min.toy import GAMES, default_data, default_model
from world_models import teachers
from world_models.teachers.alfworld import Expert

VERBS = {
    "pick_and_place_simple": None,
    "look_at_obj_in_light": None,
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": None,
}


def test_splits_share_no_goals_and_rooms_depend_on_the_scene():
    goals = defaultdict(list)  # split -> (scene, goal) of each game
    rooms = defaultdict(set)
    with tarfile.open(GAMES) as archive:
        for file in archive:
            _, split, name, trial, kind = file.name.split("/")
            content = json.load(archive.extractfile(file))
            scene = int(name.rpartition("-")[2])
            if kind == "traj_data.json":
                assert content["scene"]["scene_num"] == scene and content["task_type"] in VERBS
                goals[split].append(name)
            else:
                room = re.findall(r"\(receptacleType (\w+)", content["pddl_problem"])
                rooms[scene].add(tuple(sorted(room)))
    assert {s: len(g) for s, g in goals.items()} == {
        "train": 400, "valid_seen": 120, "valid_unseen": 60}
    assert not set(goals["train"]) & set(goals["valid_seen"])
    scenes = {s: {int(name.rpartition("-")[2]) for name in names} for s, names in goals.items()}
    assert scenes["train"] == scenes["valid_seen"] == set(range(6, 30))
    assert scenes["valid_unseen"] == set(range(6))
    assert set(map(len, rooms.values())) == {1}


def test_games_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = default_data("alfworld")
    games = list_games(folder, "valid_unseen")
    assert len(games) == 60
    tmp_path.joinpath(games[0]).unlink()
    assert default_data("alfworld") == folder and len(list_games(folder, "valid_unseen")) == 59


def test_no_fact_behind_a_test_question_is_behind_a_training_question():
    """Two parts of the passages without a common name: the questions begin in different ones."""
    folder = Path(default_data("search"))
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    passages = {row["contents"].split('"')[1]: row["contents"] for row in rows}
    part = dict.fromkeys(passages)

    def spread(name: str, split: str) -> None:
        names = [name]
        while names:
            name = names.pop()
            if part[name] is None:
                part[name] = split
                names += [other for other in passages if other in passages[name]]
            assert part[name] == split

    for split in ("train", "test"):
        for line in (folder / f"{split}.jsonl").read_text().splitlines():
            row = json.loads(line)
            named = [name for name in passages if name in row["question"]]
            assert len(named) == 1
            spread(named[0], split)
            assert part[row["golden_answers"][0]] == split


def test_an_environment_without_data_says_so():
    with pytest.raises(UserError, match="chess has no data of its own: give --data"):
        default_data("chess")


@pytest.mark.slow
def test_the_demonstrations_are_those_of_the_stand_in():
    """Steps, slips and haste. test_train.py trains on ALFWorld's, too."""
    tasks = teachers.TEACHERS["webshop"].training_tasks()[:12]
    rows = teachers.demonstrations("webshop", tasks, seed=0)
    record = json.loads((Path(default_model("webshop")) / "record.json").read_text())
    found = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert found == record["demonstrations"]


def test_expert_reads_every_goal_template_of_alfworld():
    engine.alfworld_demangler()  # imports alfworld without its side effects
    goals = importlib.import_module("alfworld.gen.goal_library").gdict
    for task, verb in VERBS.items():
        for template in goals[task]["templates"]:
            text = template.format(obj="egg", recep="shelf", toggle="desklamp")
            first = f"you see a shelf 1.\n\nYour task is to: {text}."
            expert = Expert(first, random.Random(0))
            assert (expert.target, expert.verb) == ("egg", verb), text
            if task == "look_at_obj_in_light":
                assert (expert.goal, expert.lamp) == (None, "desklamp"), text
            else:
                assert (expert.goal, expert.lamp) == ("shelf", None), text
    with pytest.raises(ValueError, match="boil an egg"):
        Expert("Your task is to: boil an egg.", random.Random(0))
