"""Generated games and the expert that plays them: pytest tests/test_games.py  (~20 s)

test_train.py compares the expert's demonstrations, mistakes included, with recorded digests.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("alfworld")
pytest.importorskip("textworld")

from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.interface import Context
from paw_min.toy import alfworld_games as games
from paw_min.toy.alfworld_games import ABLE, ALFWORLD, TASKS, Size
from paw_min.toy.alfworld_teacher import MAX_STEPS, Expert, kind

ROOT = Path(__file__).resolve().parents[1]
SPLITS = ("train", "valid_seen", "valid_unseen")
SMALL = Size()


@pytest.fixture(scope="module")
def env():
    return AlfworldEnv()


def sample(split, n, seed=0, size=SMALL, world="home"):
    return [games.make_game(split, i, seed, size, world) for i in range(n)]


def digest():
    """Hash of the problems and walkthroughs of 60 games per split, without alfworld's texts."""
    text = [games.write_problem(g) + str(games.solve(g)) for s in SPLITS for g in sample(s, 60)]
    return hashlib.sha256("".join(text).encode()).hexdigest()


# --- the same games everywhere ---------------------------------------------------------------


def test_bytes_are_pinned():
    assert (games.VERSION, digest()[:32]) == (2, "ae3e5f4fe745798c8164a139942f11db"), (
        "the games have changed: increment games.VERSION and update this digest")


@pytest.mark.slow
def test_bytes_on_disk_do_not_depend_on_hash_seed_or_n(games_root, tmp_path):
    code = ("import sys; from paw_min.toy import alfworld_games as games; "
            "games.generate(sys.argv[1], 'train', 3, seed=0)")
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, timeout=120,
                   env={**os.environ, "PYTHONHASHSEED": "1"})
    made = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert sorted(p.name for p in made) == ["game.tw-pddl"] * 3 + ["traj_data.json"] * 3
    for path in made:
        assert path.read_bytes() == (games_root / path.relative_to(tmp_path)).read_bytes()
        assert b"\r" not in path.read_bytes()


def test_seed_split_and_size_change_the_games():
    first = games.write_problem(sample("train", 1)[0])
    for other in (sample("train", 1, seed=1), sample("valid_seen", 1),
                  sample("train", 1, size=Size((7, 8), (5, 7)))):
        assert games.write_problem(other[0]) != first


# --- what is in a game -----------------------------------------------------------------------


@pytest.mark.parametrize("world", ["home", "changed", "rules"])
def test_large_games_obey_alfworlds_tables(world):
    """Other sizes and worlds than those of the pinned bytes."""
    size = Size((14, 21), (10, 20))
    tools = ("pick_clean", "pick_heat", "pick_cool")
    for game in sample("train", 60, size=size, world=world):
        room, things = game["room"], game["things"]
        assert world != "rules" or game["task"].startswith(tools)
        assert 14 <= len(room) <= 21 and 10 <= len(things) - 1 <= 20
        movable = [t for t in things if t.kind != "DeskLamp"]
        assert len(movable) == len(things) - 1
        assert all(t.kind in ALFWORLD.fits[t.inside.kind] for t in movable)
        wanted = [t for t in things if t.kind == game["target"]]
        assert len(wanted) >= 1 + (game["task"] == "pick_two_obj_and_place")
        assert all(t.inside.kind != game["goal"] for t in wanted)
        verb = TASKS[game["task"]]
        assert not verb or game["target"] in ALFWORLD.can[ABLE[verb]]
        assert len({t.name for t in room + things}) == len(room + things)


def test_names_are_those_of_the_demangler():
    from alfworld.agents.utils.misc import Demangler

    class Info:
        def __init__(self, id):
            self.id = id

    for game in sample("train", 30, size=Size((18, 21), (20, 20))):
        ids = {games._mangle(t.id).lower(): t.name for t in game["room"] + game["things"]}
        demangler = Demangler(game_infos={id: Info(id) for id in ids})
        assert {id: demangler.demangle_alfred_name(id) for id in ids} == ids


def test_the_changed_world_has_other_tools_and_can_be_won(tmp_path):
    assert games.write_domain("home") == ALFWORLD.domain
    paths = games.generate(tmp_path, "train", 12, seed=0, world="changed")  # plays each walkthrough
    env, tried = AlfworldEnv(), set()
    for path in paths:
        content = json.loads(Path(path).read_bytes())
        step = env.reset(path)
        for command in content["walkthrough"]:
            if found := re.match(r"(clean|heat|cool) (.+) with (.+) 1", command):
                tried.add((found[1], found[3]))
                old = games.TOOLS["home"][found[1]].lower()
                assert command in step.admissible
                assert f"{found[1]} {found[2]} with {old} 1" not in step.admissible
            step = env.step(command)
        assert step.won
    assert tried == {("clean", "microwave"), ("heat", "fridge"), ("cool", "sinkbasin")}
    with pytest.raises(ValueError, match="'world': 'changed'}, but .*'world': 'home'"):
        games.generate(tmp_path, "train", 6, seed=0)


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


@pytest.mark.slow
def test_two_processes_generate_the_same_split_at_the_same_time(tmp_path):
    code = """if True:
        import sys
        from paw_min.toy import alfworld_games as games
        print("ready", flush=True)
        sys.stdin.readline()
        games.generate(sys.argv[1], "train", 4, seed=0)
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120) and process.returncode for process in processes] == [
        0, 0]
    games.generate(tmp_path / "alone", "train", 4, seed=0)
    trees = [{p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
             for folder in (tmp_path / "json_2.1.1", tmp_path / "alone" / "json_2.1.1")]
    assert trees[0] == trees[1] and len(trees[0]) == 4 * 2 + 1


@pytest.mark.parametrize("content", ["", "[1]", "5", "[" * 100_000, '{"games": 5}'])
def test_a_damaged_manifest_is_an_error(tmp_path, content):
    manifest = tmp_path / "json_2.1.1" / "train" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content)
    with pytest.raises(ValueError, match="with a damaged manifest.json, but .*delete this folder"):
        games.generate(tmp_path, "train", 3, seed=0)


def test_other_parameters_and_foreign_folders_are_errors(games_root, tmp_path):
    for n, seed, world in ((13, 0, "home"), (12, 1, "home"), (12, 0, "changed")):
        with pytest.raises(ValueError, match="games generated with .* was requested; choose anot"):
            games.generate(games_root, "train", n, seed, world)
    (tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-Mug-None-Desk-301").mkdir(
        parents=True)
    with pytest.raises(ValueError, match="from another source"):
        games.generate(tmp_path, "train", 1, seed=0)
    with pytest.raises(ValueError, match="'test'.*valid_unseen"):
        games.generate(tmp_path, "test", 1, seed=0)
    with pytest.raises(ValueError, match="n is 0"):
        games.generate(tmp_path, "valid_seen", 0, seed=0)


def test_a_walkthrough_must_win_with_its_last_command(games_root, env, tmp_path):
    game = json.loads(Path(list_games(games_root, "train")[0]).read_bytes())
    for commands in (game["walkthrough"][:-1], [*game["walkthrough"], "look"], []):
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
    for split in SPLITS:
        for path in list_games(games_root, split):
            commands, won = play(env, path, limit=MAX_STEPS)
            assert won, (path, commands)
            assert play(env, path, seed=1)[0] == commands


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_expert_wins_in_spite_of_random_commands(games_root, env, noise):
    for seed, path in enumerate(list_games(games_root, "train")):
        assert play(env, path, seed, noise)[1], path


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
