"""Generated games and the expert that plays them."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from paw_min.envs.alfworld import list_games
from paw_min.toy import DATA, default_data
from paw_min.toy import alfworld_games as games
from paw_min.toy.alfworld_games import ALFWORLD, TASKS
from world_models.teachers.alfworld import Expert

SPLITS = ("train", "valid_seen", "valid_unseen")


def sample(split, n, seed=0):
    return [games.make_game(split, i, seed) for i in range(n)]


def test_bytes_are_pinned():
    """Problems and walkthroughs of 60 games per split, without alfworld's texts."""
    text = [games.write_problem(g) + str(games.solve(g)) for s in SPLITS for g in sample(s, 60)]
    found = hashlib.sha256("".join(text).encode()).hexdigest()[:32]
    assert (games.VERSION, found) == (2, "ae3e5f4fe745798c8164a139942f11db"), (
        "the games have changed: increment games.VERSION and update this digest")


def test_an_interrupted_generation_leaves_no_folder(tmp_path, monkeypatch):
    """--dry-run, which generates nothing, would have to complete it."""
    verified = []

    def verify(env, content):
        if verified:
            raise KeyboardInterrupt
        verified.append(content)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(games, "GENERATED", {"train": 1, "valid_seen": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(games, "verify", verify)
        default_data("alfworld")
    assert not Path(DATA, "alfworld").exists()
    assert len(list_games(default_data("alfworld"), "valid_seen")) == 1


def test_splits_share_no_goals_and_rooms_depend_on_the_scene():
    def goals(split):
        return {(g.scene, g.task, g.target, g.goal) for g in sample(split, 600)}

    train, seen, unseen = map(goals, SPLITS)
    assert not train & seen
    assert {g[0] for g in train} == {g[0] for g in seen} == set(range(6, 30))
    assert {g[0] for g in unseen} == set(range(6))
    rooms = {}
    for game in sample("train", 60) + sample("valid_seen", 60, seed=5):
        assert rooms.setdefault(game.scene, game.room) == game.room


def test_files_are_as_published(games_root):
    """Their generation has played each walkthrough (`verify`)."""
    types = Counter()
    for path in [Path(game) for split in SPLITS for game in list_games(games_root, split)]:
        traj = json.loads(path.with_name("traj_data.json").read_bytes())
        params = traj["pddl_params"]
        goal = params["parent_target"] or params["toggle_target"]
        words = [traj["task_type"], params["object_target"], "None", goal]
        assert path.parts[-3] == "-".join([*words, str(traj["scene"]["scene_num"])])
        types[traj["task_type"]] += 1
    assert types == dict.fromkeys(TASKS, 4)


# --- the expert ------------------------------------------------------------------------------


def test_expert_reads_every_goal_template_of_alfworld():
    for task, verb in TASKS.items():
        for template in ALFWORLD.goals[task]["templates"]:
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
