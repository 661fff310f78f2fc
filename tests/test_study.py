"""research/study.py: a file of runs, and arms compared over their seeds, by hand."""

import json

import pytest

from research import study

RUNS = {
    ("grpo", 3): {"success": [0.9, 0.1, 0.2]},
    ("grpo", 2): {"success": [0.9, 0.0, 0.4]},
    ("paw", 2): {"success": [0.0, 0.1, 0.5]},
    ("paw", 3): {"success": [0.0, 0.3, 0.2]},
    ("paw", 4): {"success": [0.0, 1.0, 1.0]},
}


def test_a_file_has_its_runs_by_world(tmp_path):
    """Half a line, as a kill leaves it, is cut off."""
    path, other = tmp_path / "runs.jsonl", tmp_path / "other.jsonl"
    runs = [
        {"arm": "paw", "seed": 1},
        {"arm": "paw, shown", "seed": 1},
        {"world": "serials", "arm": "ce, alpha 1", "seed": 2},
    ]
    whole = "".join(json.dumps(run) + "\n" for run in runs)
    path.write_text(whole + '{"arm": "gr')
    other.write_text('{"arm": "echo", "seed": 1}\n')
    assert study.read_runs(path, other) == {
        "": {("paw", 1): runs[0], ("echo", 1): {"arm": "echo", "seed": 1}},
        "shown": {("paw", 1): runs[1]},
        "serials": {("ce, alpha 1", 2): runs[2]},
    }
    assert path.read_text() == whole
    assert study.read_runs(tmp_path / "missing.jsonl") == {}


def test_measures_of_a_run():
    """Evaluations begin before training; the updates of a run with `held_out` do not."""
    evaluated = {"success": [0.5] + [0.0] * 9 + [0.25] * 10}
    assert (study.area(evaluated), study.end(evaluated)) == (pytest.approx(250 / 19), 25.0)
    trained = evaluated | {"held_out": [0.0, 1.0]}
    assert (study.area(trained), study.end(trained)) == (15.0, 25.0)
    trained["success"] = [1.0, 0.0, *[0.5] * 9]
    assert study.end(trained) == 45.0  # the last ten
    assert study.main_measure(evaluated | {"world": "serials"}) == study.area(evaluated)
    assert study.main_measure(evaluated | {"world": "polish"}) == 25.0


def test_a_comparison_is_over_the_seeds_that_both_arms_have():
    assert study.seeds_of(RUNS, "paw", "grpo") == [2, 3]
    assert study.values_of(RUNS, "grpo", study.end) == [40.0, 20.0]
    assert study.gains(RUNS, "paw", "grpo", study.end) == [10.0, 0.0]


def test_the_cells_of_a_table():
    assert study.level(RUNS, "paw", study.end) == "56.7"  # 50, 20, 100
    assert study.level(RUNS, "ce", study.end) == "-"
    assert study.difference(RUNS, "paw", "ce", study.end) == "-"
    pair = "paw", "grpo", study.end
    assert study.difference(RUNS, *pair) == "+10.0, +0.0"  # too few for an interval
    assert study.above(RUNS, *pair) == "1 of 2"  # level is not above
    # The same twice: mean 5, standard deviation 5.77, t(3) = 3.182.
    more = RUNS | {(arm, seed + 10): run for (arm, seed), run in RUNS.items()}
    assert study.difference(more, *pair) == "+5.0 [-4.2, +14.2]"
    assert study.difference(more, "paw", "paw", study.end) == ""
