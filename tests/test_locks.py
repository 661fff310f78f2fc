"""research/locks: its arms. (test_tables.py has its tables and pictures.)"""

from dataclasses import replace

import pytest

from examples import one_file
from research import one_file_runs
from research.locks import study, worlds


@pytest.mark.parametrize("name", ["inverse", "tapo", "world model alone"])
def test_an_arm_replaces_what_it_says_and_puts_it_back(monkeypatch, name):
    own = (study.one_file.top_alpha, study.one_file.learn, study.one_file.clipped_surrogate)
    seen = []
    used = {"inverse": "top_alpha", "tapo": "learn", "world model alone": "clipped_surrogate"}[name]

    def run(seed, arm, world, size):
        seen.append(getattr(study.one_file, used))
        return [one_file.Evaluation(0, 0.123456, 0.5, 0.0)]

    monkeypatch.setattr(study.one_file, "run", run)
    line = {"arm": name, "seed": 3, "update": [0], "success": [0.12346], "material": [0.5]}
    assert study.train((name, 3)) == line | {"noise": [0]}
    assert len(seen) == 1 and seen[0] not in own
    assert (study.one_file.top_alpha, study.one_file.learn, study.one_file.clipped_surrogate) == own


@pytest.mark.slow
@pytest.mark.parametrize("world", ["serials", "fresh"])
def test_a_shared_warm_start_changes_no_number(world, monkeypatch):
    """Also where the world draws random words in the warm start."""
    setting = worlds.SETTINGS[world]
    size = replace(setting.lesson.size, warm_steps=3, updates=2, evaluate_every=1)
    lesson = replace(setting.lesson, size=size, names=16)
    monkeypatch.setitem(worlds.SETTINGS, world, replace(setting, lesson=lesson))
    monkeypatch.setattr(one_file_runs, "STARTS", {})
    lines = [worlds.train((world, "paw", 3)) for _ in range(2)]
    own = one_file.run(3, setting.arms["paw"], lesson.make_world(3), size)
    assert lines[0] == lines[1]
    assert lines[1]["success"] == pytest.approx([point.success for point in own], rel=1e-4)
    assert lines[1]["noise"] == pytest.approx([point.noise for point in own], rel=1e-4)
