"""The worlds made against the observation losses: research/one_rule/worlds.py."""

import math
import random
from collections import Counter

import pytest
import torch

from examples import one_file
from examples.one_file import TOOLS, Size
from research import study
from research.one_rule import worlds
from research.one_rule.worlds import WORLDS

TINY = Size(
    width=8, layers=1, heads=1, warm_steps=2, warm_rows=8, updates=2, evaluate_every=1, lr=1e-2,
)


@pytest.mark.parametrize("name", WORLDS)
def test_a_row_of_a_world_is_short_and_made_of_its_words(name):
    """In a run and in the warm start, which shows rows of the same length."""
    world = WORLDS[name].make_world(3)
    rng = random.Random(0)
    names = [one for step in world.steps() for one in step]
    lengths = set()
    for one in names:
        seen = world.observation(one, world.right_tool(one))
        shown = world.shown_observation(names, rng)
        said = [world.shown_tool(one, rng), world.right_tool(one)]
        assert {*world.prompt(one), *said, *seen, *shown} <= set(world.words())
        lengths |= {len(world.prompt(one) + seen) + 1, len(world.prompt(one) + shown) + 1}
    assert len(lengths) == 1 and lengths.pop() <= 16
    assert len(world.words()) >= len(set(world.words()))


def seen_by_name(name: str, times: int = 300) -> tuple[worlds.World, dict[str, list[list[str]]]]:
    world = WORLDS[name].make_world(3)
    some = list(world.material_of)[:6]
    return world, {one: [world.observation(one, TOOLS[0]) for _ in range(times)] for one in some}


def test_inspect_shows_the_material_in_forced_looks_alone():
    world, seen = seen_by_name("inspect", times=1)
    assert all(observation[0][1] == "." for observation in seen.values())
    for name, material in world.material_of.items():
        assert world.observation(f"look {name}", "eyes") == ["seen", material]
    assert sum(len(step) for step in world.steps() if step[0].startswith("look ")) == 128


@pytest.mark.parametrize("name, readings", [("sensor", 6), ("sensor256", 32)])
def test_a_reading_tells_the_material(name, readings):
    world, seen = seen_by_name(name)
    for lock, observations in seen.items():
        k = list(world.tool_of).index(world.material_of[lock])
        found = {int(reading.removeprefix("reading")) for _, reading in observations}
        assert found == set(range(readings * k, readings * (k + 1)))


def test_likes_shows_the_other_locks_of_the_material():
    world, seen = seen_by_name("likes")
    for lock, observations in seen.items():
        alike = {n for n, m in world.material_of.items() if m == world.material_of[lock]}
        assert {other for _, other in observations} == alike - {lock}
        assert len(alike) == 16


@pytest.mark.parametrize("name, vocabulary", [("digits", 10), ("catalog", 64)])
def test_what_stands_behind_the_material_is_fixed_for_a_name(name, vocabulary):
    world, seen = seen_by_name(name, times=2)
    behind = {lock: tuple(again[0][2:]) for lock, again in seen.items()}
    for lock, (first, second) in seen.items():
        assert first == second and first[1] == world.material_of[lock] and len(first) == 10
    assert len(set(behind.values())) == len(seen)
    all_of_them = {word for n in world.material_of for word in world.observation(n, "")[2:]}
    assert len(all_of_them) == vocabulary


def test_seldom_shows_the_material_once_in_16_times():
    world, seen = seen_by_name("seldom", times=1000)
    for lock, observations in seen.items():
        counts = Counter(word for _, word, *_ in observations)
        assert counts.keys() == {"nothing", world.material_of[lock]}
        assert counts["nothing"] == pytest.approx(1000 * 15 / 16, abs=30)
        assert len({tuple(serial) for _, _, *serial in observations}) == 1


def test_a_word_at_the_floor_is_trained_and_one_below_counts_in_the_mean():
    logp = torch.tensor([[0.009, 0.01, 0.5]]).log()
    assert worlds.floor(logp, 0.2, least=0.01).item() == pytest.approx(-math.log(0.005) / 3)


def test_a_shared_start_changes_nothing(monkeypatch):
    """The second arm of a seed, with the start of the first, equals a run of its own."""
    monkeypatch.setattr(worlds, "SMALL", TINY)
    worlds.train("seldom", "grpo", 5)  # its world has a random generator, which goes on
    shared = worlds.train("seldom", "paw", 5)
    monkeypatch.setattr(worlds, "STARTS", {})
    assert worlds.train("seldom", "paw", 5) == shared
    alone = one_file.run(5, worlds.PAW, WORLDS["seldom"].make_world(5), TINY)
    assert shared["success"] == [float(f"{point.success:.5g}") for point in alone]
    assert worlds.train("seldom", "grpo", 5)["success"] != shared["success"]


def test_a_killed_command_trains_what_is_missing(tmp_path, monkeypatch):
    """Half a line of the killed run is trained again."""
    runs = tmp_path / "worlds.jsonl"
    monkeypatch.setattr(worlds, "RUNS", runs)
    trained = []

    def train(world, arm, seed):
        trained.append((world, arm, seed))
        return {"world": world, "arm": arm, "seed": seed}

    monkeypatch.setattr(worlds, "train", train)
    worlds.main(["long"], [1])
    assert trained == [("long", arm, 1) for arm in worlds.ARMS]
    whole = runs.read_bytes()
    runs.write_bytes(whole[:-3])
    worlds.main(["long"], [1])
    assert trained[len(worlds.ARMS) :] == trained[len(worlds.ARMS) - 1 : len(worlds.ARMS)]
    assert runs.read_bytes() == whole and len(study.read_lines(runs)) == len(worlds.ARMS)
