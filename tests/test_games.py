"""Generated games and the expert that plays them."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.toy import alfworld_games as games
from paw_min.toy.alfworld_games import ALFWORLD, TASKS
from world_models.teachers.alfworld import Expert

SPLITS = ("train", "valid_seen", "valid_unseen")


@pytest.fixture(scope="module")
def env():
    return AlfworldEnv()


def sample(split, n, seed=0):
    return [games.make_game(split, i, seed) for i in range(n)]


def digest():
    """Hash of the problems and walkthroughs of 60 games per split, without alfworld's texts."""
    text = [games.write_problem(g) + str(games.solve(g)) for s in SPLITS for g in sample(s, 60)]
    return hashlib.sha256("".join(text).encode()).hexdigest()


def test_bytes_are_pinned():
    assert (games.VERSION, digest()[:32]) == (2, "ae3e5f4fe745798c8164a139942f11db"), (
        "the games have changed: increment games.VERSION and update this digest")


def test_an_interrupted_generation_leaves_no_folder(tmp_path, monkeypatch):
    """--dry-run, which generates nothing, would have to complete it."""
    verify = games.verify

    def verify_train(env, content):
        if (tmp_path / "data").exists() or list(tmp_path.glob("**/train")):
            raise KeyboardInterrupt
        verify(env, content)

    monkeypatch.setattr(games, "GENERATED", {"train": 1, "valid_seen": 1})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(games, "verify", verify_train)
        games.generate(tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert len(list_games(games.generate(tmp_path / "data"), "valid_seen")) == 1


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


def test_walkthroughs_win_and_files_are_as_published(games_root, env):
    types = Counter()
    for split in SPLITS:
        for path in map(Path, list_games(games_root, split)):
            game = json.loads(path.read_bytes())
            traj = json.loads(path.with_name("traj_data.json").read_bytes())
            params = traj["pddl_params"]
            assert path.parent.parent.name == "-".join([
                traj["task_type"], params["object_target"], "None",
                params["parent_target"] or params["toggle_target"],
                str(traj["scene"]["scene_num"])])
            env.reset(path)
            rewards = [env.step(command).reward for command in game["walkthrough"]]
            assert rewards == [0.0] * (len(rewards) - 1) + [10.0]
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
