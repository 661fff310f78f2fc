"""Generated games and the expert that plays them: pytest tests/test_games.py

test_train.py compares the expert's demonstrations, mistakes included, with recorded digests.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.interface import Context
from paw_min.toy import alfworld_games as games
from paw_min.toy.alfworld_games import ALFWORLD, TASKS
from paw_min.toy.alfworld_teacher import MAX_STEPS, Expert, kind

ROOT = Path(__file__).resolve().parents[1]
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


# --- the same games everywhere ---------------------------------------------------------------


def test_bytes_are_pinned():
    assert (games.VERSION, digest()[:32]) == (2, "ae3e5f4fe745798c8164a139942f11db"), (
        "the games have changed: increment games.VERSION and update this digest")


@pytest.mark.slow
def test_two_processes_generate_the_same_split_at_the_same_time(games_root, tmp_path):
    """The bytes are those of any other process: they depend neither on n nor on the hash seed."""
    code = """if True:
        import sys
        from paw_min.toy import alfworld_games as games
        print("ready", flush=True)
        sys.stdin.readline()
        games.generate(sys.argv[1], "train", 3, seed=0)
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         env={**os.environ, "PYTHONHASHSEED": seed}) for seed in "12"]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    made = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert sorted(p.name for p in made) == ["game.tw-pddl"] * 3 + ["traj_data.json"] * 3
    for path in made:
        assert path.read_bytes() == (games_root / path.relative_to(tmp_path)).read_bytes()
        assert b"\r" not in path.read_bytes()


# --- what is in a game -----------------------------------------------------------------------


def test_splits_share_no_goals_and_rooms_depend_on_the_scene():
    def goals(split):
        return {(g["scene"], g["task"], g["target"], g["goal"]) for g in sample(split, 600)}

    train, seen, unseen = goals("train"), goals("valid_seen"), goals("valid_unseen")
    assert not train & seen
    assert {g[0] for g in train} == {g[0] for g in seen} == set(range(6, 30))
    assert {g[0] for g in unseen} == set(range(6))
    rooms = {}
    for game in sample("train", 60) + sample("valid_seen", 60, seed=5):
        assert rooms.setdefault(game["scene"], game["room"]) == game["room"]


# --- generated, verified, resumed ------------------------------------------------------------


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
            assert sorted(os.listdir(path.parent)) == ["game.tw-pddl", "traj_data.json"]
            env.reset(path)
            rewards = [env.step(command).reward for command in game["walkthrough"]]
            assert rewards == [0.0] * (len(rewards) - 1) + [10.0]
            types[traj["task_type"]] += 1
    assert types == dict.fromkeys(TASKS, 4)


def test_the_same_call_completes_an_interrupted_one(games_root, tmp_path, monkeypatch):
    verified, real = [], games.verify

    def verify(env, path, content):
        if len(verified) == 2:
            raise KeyboardInterrupt
        real(env, path, content)
        verified.append(path.parent.name)

    monkeypatch.setattr(games, "verify", verify)
    with pytest.raises(KeyboardInterrupt):
        games.generate(tmp_path, "train", 4, seed=0)
    assert len(list(tmp_path.rglob("game.tw-pddl"))) == 2  # the verified ones
    monkeypatch.setattr(games, "verify", lambda *game: real(*game) or verified.append(game))
    paths = games.generate(tmp_path, "train", 4, seed=0)
    assert len(verified) == 4  # two before, two now
    assert paths == sorted(map(str, tmp_path.rglob("game.tw-pddl")))
    for path in map(Path, paths):
        assert path.read_bytes() == (games_root / path.relative_to(tmp_path)).read_bytes()

    monkeypatch.setattr(games, "make_game", None)  # a complete split is returned unread
    assert games.generate(tmp_path, "train", 4, seed=0) == paths
    monkeypatch.undo()
    content = Path(paths[1]).read_bytes()
    os.remove(paths[1])
    assert games.generate(tmp_path, "train", 4, seed=0) == paths
    assert Path(paths[1]).read_bytes() == content


def test_other_parameters_and_foreign_folders_are_errors(games_root, tmp_path):
    for n, seed in ((13, 0), (12, 1)):
        with pytest.raises(ValueError, match="games generated with .* was requested; choose anot"):
            games.generate(games_root, "train", n, seed)
    (tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-Mug-None-Desk-301").mkdir(
        parents=True)
    with pytest.raises(ValueError, match="from another source"):
        games.generate(tmp_path, "train", 1, seed=0)
    (tmp_path / "json_2.1.1" / "train" / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="with a damaged manifest.json, but .*delete this folder"):
        games.generate(tmp_path, "train", 1, seed=0)


def test_a_walkthrough_must_win_with_its_last_command(games_root, env, tmp_path):
    game = json.loads(Path(list_games(games_root, "train")[0]).read_bytes())
    for commands in (game["walkthrough"][:-1], [*game["walkthrough"], "look"]):
        path = tmp_path / "game.tw-pddl"
        with pytest.raises(RuntimeError, match="game.tw-pddl: .*does not win with its last"):
            games.verify(env.engine, path, {**game, "walkthrough": commands})


# --- the expert ------------------------------------------------------------------------------


def play(env, path, seed=0, noise=0.0, limit=200):
    """The expert's commands in one game, some replaced by random ones; and whether it won."""
    rng, commands = random.Random(seed), []
    step = env.reset(path)
    expert = Expert(step.observation, random.Random(seed))
    while not step.won and len(commands) < limit:
        context = Context(step.task, step.observation, step.admissible)
        command, thought, _ = expert.act(context)
        assert command in step.admissible and 2 <= len(thought.split()) <= 4
        if rng.random() < noise:
            command = expert.doubtful(context, rng)
        commands.append(command)
        step = env.step(command)
    return commands, step.won


def test_expert_wins_every_game_in_25_steps_and_is_deterministic(games_root, env):
    for path in list_games(games_root, "train"):
        commands, won = play(env, path, limit=MAX_STEPS)
        assert won, (path, commands)
        assert play(env, path, seed=1)[0] == commands


def test_expert_wins_in_spite_of_random_commands(games_root, env):
    for seed, path in enumerate(list_games(games_root, "train")):
        assert play(env, path, seed, noise=0.6)[1], path


def test_expert_reads_every_goal_template_of_alfworld():
    for task, verb in TASKS.items():
        for template in ALFWORLD.goals[task]["templates"]:
            text = template.format(obj="egg", recep="shelf", toggle="desklamp")
            first = f"you see a shelf 1.\n\nYour task is to: {text}."
            expert = Expert(first, random.Random(0))
            lamp = task == "look_at_obj_in_light"
            assert (expert.target, expert.goal, expert.lamp, expert.verb) == (
                "egg", None if lamp else "shelf", "desklamp" if lamp else None, verb), text
    with pytest.raises(ValueError, match="boil an egg"):
        Expert("Your task is to: boil an egg.", random.Random(0))
    assert kind("countertop 12") == "countertop"
