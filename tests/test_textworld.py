"""TextWorld's own games: generated, played and won; Word2World in them.

Compiling a game takes seconds, so that the tests that play are slow. Facts and the policy need
its .json only.
"""

import json
from dataclasses import replace

import pytest
import textworld

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.textworld import TextworldEnv, list_games
from paw_min.envs.textworld.env import NO_EFFECT, text_of
from paw_min.running.session import find_tasks
from paw_min.toy import default_model
from paw_min.toy.textworld_games import GENERATED, generate
from paw_min.world_models import word2world
from paw_min.world_models.word2world import settings as word2world_settings
from paw_min.world_models.word2world.trajectories import initial_context, to_text

SMALL = GENERATED["train"]
SIZES = {"train": 2, "valid_seen": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data folder with three games."""
    folder = tmp_path_factory.mktemp("textworld")
    for name, n in SIZES.items():
        for k in range(n):
            generate(folder / name, GENERATED[name], GENERATED[name].first_seed + k)
    return folder


# --- without the interpreter -----------------------------------------------------------------


def test_the_text_of_an_answer():
    first = "$$ \n$$ \nFind it!\n\n-= Den =-\nA den.  \n\n\nA box.\n\n>       -= Den =-0/1"
    assert text_of(first, "Find it!") == "Find it!\n-= Den =-\nA den.\nA box."
    assert text_of("\nTaken.\n\n\n>   -= Den =-0/2", "Find it!") == "Taken."
    end = "\nYou win.\n\n   *** The End ***\n\nYou scored 1, in 7 turns.\n> -= Den =-1/7"
    assert text_of(end, "Find it!") == "You win."


def test_unusable_data_are_one_sentence(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.z8").touch()  # without its .json
    with pytest.raises(UserError, match="train has no game"):
        find_tasks(Config(env="textworld", data=str(tmp_path)))
    with pytest.raises(UserError, match="no stand-in model textworld: give one with --model"):
        default_model("textworld")


# --- with it ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_is_the_same_game_and_its_walkthrough_wins(root, tmp_path, monkeypatch):
    games = list_games(root, "train")
    again = generate(tmp_path, SMALL, SMALL.first_seed)
    name = games[0].replace(".z8", ".json")
    assert again.with_suffix(".json").read_bytes() == open(name, "rb").read()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".z8"]
    monkeypatch.setattr(textworld, "make", None)  # what exists is not made again
    assert generate(tmp_path, SMALL, SMALL.first_seed) == again

    env = TextworldEnv()
    fresh = TextworldEnv()
    fresh.reset(games[1])  # another game before
    for game, other in ((games[0], str(again)), (games[1], games[1])):
        commands = textworld.Game.load(game.replace(".z8", ".json")).metadata["walkthrough"]
        steps = [env.reset(game)]
        assert steps[0] == fresh.reset(other)
        assert steps[0].observation.startswith(steps[0].task)
        # As released: the first observation alone, without a hidden state.
        assert initial_context("textworld", game, steps[0]) == to_text(steps[0])
        for command in ("dance", *commands):
            assert command == "dance" or command in steps[-1].admissible
            steps.append(env.step(command))
            assert steps[-1] == fresh.step(command)
        assert steps[1].observation and steps[1].admissible == steps[0].admissible
        assert [s.won for s in steps] == [s.done for s in steps] == [False] * 5 + [True]
        assert [s.reward for s in steps] == [0.0] * 5 + [10.0]
        shown = "".join(s.observation for s in steps)
        assert "$$" not in shown and "***" not in shown and "0/1" not in shown


@pytest.mark.slow
def test_only_admissible_commands_reach_the_interpreter(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    game = list_games(root, "train")[0]
    commands = textworld.Game.load(game.replace(".z8", ".json")).metadata["walkthrough"]
    env = TextworldEnv()
    first = env.reset(game)
    chained = ". ".join(commands)
    for command in (chained, "save", "script", "restore", "look. look", "look\nlook", ""):
        assert env.step(command) == replace(first, observation=NO_EFFECT)
    assert not list(tmp_path.iterdir())  # `save` and `script` write files
    steps = [env.step(command.upper()) for command in commands]  # names may have capitals
    assert [s.won for s in steps] == [False] * 3 + [True]


@pytest.mark.slow
def test_word2world_in_textworld(root, tmp_path):
    out = tmp_path / "data"
    words = ["collect", "textworld", "--out", str(out), "--data", str(root)]
    assert word2world_settings.parse("", words).cfg.prompt == "compact"
    small = ["--agents", "teacher", "random", "--episodes", "4", "--groups", "2"]
    word2world.main([*words, *small, "--max-turns", "8"])
    found = json.loads((out / "collect.json").read_text())
    assert found["episodes"] == 4 and found["failed"] == 0 and found["won"]["teacher"] == 1.0
