"""The world of locks as an environment of the package: it is that of one_file, and it trains."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import pytest

from examples import locks
from examples.one_file import R_MAX, TOOLS, Size, make_world
from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.interface import Context, Turn
from paw_min.rows import TokenRow, flatten
from paw_min.running import runs
from tests.helpers import plain_logp
from world_models import word2world


def test_an_episode_is_that_of_one_file():
    world = make_world(7)
    right = [world.right_tool("lock3"), world.right_tool("lock5")]
    wrong = next(tool for tool in TOOLS if tool not in right)
    for tools in product([right[0], wrong], [right[1], wrong, "no tool"]):
        environment = locks.Locks(world)
        step = environment.reset("lock3 lock5")
        context = Context(step.task, step.observation, step.admissible)
        assert (step.observation, step.admissible) == ("", TOOLS)
        for turn, (name, tool) in enumerate(zip(["lock3", "lock5"], tools)):
            assert locks.prompt(context, 0).split() == world.prompt(name)
            step = environment.step(tool)
            assert step.observation.split() == world.observation(name, tool)
            assert step.done == (turn == 1)
            context.history.append(Turn(context.observation, tool))
        won = list(tools) == right
        assert (step.won, step.reward) == (won, R_MAX * won)


def test_the_warm_start_shows_no_fact(monkeypatch, tmp_path):
    """Responses are random tools, and observations those of other locks and tools."""
    collate = Mock(wraps=locks.collate)
    monkeypatch.setattr(locks, "collate", collate)
    locks.warm_start(tmp_path / "start", seed=7, size=Size(warm_steps=2))
    world = make_world(7)
    policy = locks.start_policy(world, 7)
    seen = [row for call in collate.call_args_list for row in call.args[0]]
    true = 0
    for row in seen:
        name, tool = policy.decode(row.prompt_ids).split()[1], policy.decode(row.response_ids)
        assert name in world.material_of and tool in TOOLS
        true += policy.decode(row.obs_ids).split()[1] == world.material_of[name]
    assert 0.05 < true / len(seen) < 0.2  # by chance: 1 of 8


def test_the_warm_start_teaches_responses_and_observations():
    """To each of one row: after it, both are likely."""
    world = make_world(7)
    policy = locks.start_policy(world, 7)
    words = " ".join(world.prompt("lock3")), "saw", "shut glass"
    row = TokenRow(policy.encode_chat(words[0]), policy.encode_response(words[1]),
                   policy.encode(words[2]))
    locks.train_on_random_rows(policy, lambda: row, steps=30, n_rows=2, lr=3e-3)
    assert plain_logp(policy, row).exp().min() > 0.9


def test_the_arms_may_start_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "START", tmp_path / "data" / "locks")
    trained = []

    def warm_start(folder):
        trained.append(folder)
        time.sleep(0.2)
        folder.mkdir()

    monkeypatch.setattr(locks, "warm_start", warm_start)
    with ThreadPoolExecutor() as arms:
        for arm in [arms.submit(locks.prepare) for _ in range(3)]:
            arm.result()
    assert len(trained) == 1 and locks.START.exists()


@pytest.fixture
def settings(tmp_path) -> dict:
    """Of a small run on a start model that is hardly trained."""
    locks.warm_start(tmp_path / "start", size=Size(warm_steps=2))
    return locks.PRESETS["tiny"] | dict(
        env="locks", name="r", out=str(tmp_path), model=str(tmp_path / "start"), seed=7,
        updates=1, groups=2, group_size=4, mini_batch=8, eval_tasks=4, lr=1e-2,
    )


def test_a_run(tmp_path, monkeypatch, settings):
    """Each row has the tokens of one_file."""
    played = Mock(wraps=flatten)
    monkeypatch.setattr(train, "flatten", played)
    train.train(Config(**settings))
    line = runs.read_metrics(tmp_path / "r")[1]
    assert line["rows"] == 16 and line["wm_loss"] > 0 and line["grad_norm"] > 0

    world = make_world(7)
    policy = locks.start_policy(world, 7)
    for row in flatten(*played.call_args.args).tokens:
        words = policy.tokenizer.convert_ids_to_tokens(row.prompt_ids + row.response_ids)
        name = words[2]
        assert words[:5] == ["<user>", *world.prompt(name), "<agent>"]
        if locks.parse(row.command).valid:  # one tool
            assert words[5:] == [row.command, "<end>"]
        said = policy.tokenizer.convert_ids_to_tokens(row.obs_ids)
        assert said == world.observation(name, row.command)
        assert row.separator_ids == []


class Renamed(locks.Locks):
    """What was a bone lock is a zorro lock."""

    def seen(self, name, tool):
        return super().seen(name, tool).replace("bone", "zorro")


def test_a_word_that_the_model_does_not_have_is_named(monkeypatch, settings):
    """As where the world was edited, and the start model is the old one."""
    # Another test may have put another copy of the module there.
    ours = replace(locks.BENCHMARKS["locks"], load=locks.load)
    monkeypatch.setitem(locks.BENCHMARKS, "locks", ours)
    monkeypatch.setattr(locks, "Locks", Renamed)
    with pytest.raises(UserError, match="^the model has no token for 'zorro': if its world has"):
        train.train(Config(**settings | {"eval_tasks": 20}))


@pytest.mark.slow
def test_word2world_plays_in_an_environment_from_outside(tmp_path):
    """By the name of its module: a world model from two episodes answers in its place."""

    def run(command: str, *flags: str) -> dict:
        words = [command, "examples.locks", "--agents", "random", "--max-turns", "2"]
        return word2world.main([*words, *flags, "--out", str(tmp_path / command)])

    assert run("collect", "--episodes", "2")["turns"] == 4
    episodes = ["--trajectories", str(tmp_path / "collect" / "trajectories.json")]
    run("train", *episodes, "--width", "32", "--epochs", "1", "--batch", "2")
    trained = ["--world-model", str(tmp_path / "train"), "--answer-tokens", "8"]
    assert run("fidelity", *episodes, *trained)["n"] == 4
    assert run("consistency", *trained, "--eval-tasks", "1")["random"]["n"] == 1


@pytest.mark.parametrize("env, named", [
    ("locks", "such as examples.locks"), ("no.such", "no.such"),
    ("examples.locks", "the teacher reads generated tasks only, not 'lock"),
])
def test_word2world_names_what_it_cannot_play_in(env, named, tmp_path):
    with pytest.raises(UserError, match=named):
        word2world.main(["collect", env, "--agents", "teacher", "--out", str(tmp_path)])
