"""examples/hidden.py: the hidden property decides, observations show it, prompts do not."""

import json

import pytest

from examples import hidden
from paw_min.envs.interface import Context, Turn

SEED = 1
WORLD = hidden.make_world(SEED)
KINDS = [hidden.KINDS[3], hidden.KINDS[70]]


@pytest.fixture(scope="module")
def env():
    return hidden.Env()


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    trial = tmp_path_factory.mktemp("hidden") / "train" / "pair" / "0"
    trial.mkdir(parents=True)
    (trial / "traj_data.json").write_text(json.dumps({"task_type": "clean_two"}))
    content = hidden.make_game(WORLD, tuple(KINDS))
    (trial / "game.tw-pddl").write_text(json.dumps(content))
    return trial / "game.tw-pddl"


def wrong(kind: str) -> str:
    """A receptacle that does not clean this kind."""
    return next(r for r in hidden.RECEPTACLES if r != WORLD.cleaner(kind))


@pytest.mark.parametrize("right", [(True, True), (True, False), (False, True), (False, False)])
def test_only_the_right_receptacles_win_and_all_observations_show_the_material(env, game, right):
    step = env.reset(str(game))
    context = Context(step.task, step.observation, step.admissible)
    for kind, is_right in zip(KINDS, right):
        assert hidden.prompt(context, 0) == f"clean {kind.lower()} 1 with"
        receptacle = WORLD.cleaner(kind) if is_right else wrong(kind)
        step = env.step(receptacle.lower())
        outcome = "Clean" if is_right else "Dirty"
        assert step.observation == f"{outcome} {WORLD.material_of[kind]}."
        context.history.append(Turn(context.observation, receptacle))
        context.observation = step.observation
        context.admissible = step.admissible
    assert step.done  # nothing is left to do
    assert (step.won, step.reward) == (all(right), 10.0 * all(right))
    # One try decides: what has been tried cannot be cleaned.
    assert step.won or not any(command.startswith("clean ") for command in step.admissible)


def test_a_wrong_word_is_no_try(env, game):
    env.reset(str(game))
    assert env.step("clay").observation.strip() == "Nothing happens."
    step = env.step(WORLD.cleaner(KINDS[0]).lower())
    assert step.observation.startswith("Clean ")


def test_worlds():
    """Each material is that of 16 kinds, each receptacle cleans one, and seeds differ."""
    materials = list(WORLD.material_of.values())
    assert {materials.count(material) for material in hidden.MATERIALS} == {16}
    assert sorted(WORLD.cleaner_of.values()) == sorted(hidden.RECEPTACLES)
    assert WORLD == hidden.make_world(SEED) != hidden.make_world(SEED + 1)
    kinds = [kind for pair in hidden.make_pairs(SEED)["train"] for kind in pair]
    assert {kinds.count(kind) for kind in hidden.KINDS} == {hidden.ROUNDS}
