"""research/study.py: a file of runs, and arms compared over their seeds, by hand."""

import json
import sys

import pytest

from paw_min.base.errors import UserError
from research import study
from research.study import KEY, play, read_runs, train_missing
from tests.helpers import one_sentence

RUNS = {
    ("grpo", 3): {"success": [0.9, 0.1, 0.2]},
    ("grpo", 2): {"success": [0.9, 0.0, 0.4]},
    ("paw", 2): {"success": [0.0, 0.1, 0.5]},
    ("paw", 3): {"success": [0.0, 0.3, 0.2]},
    ("paw", 4): {"success": [0.0, 1.0, 1.0]},
}
JOBS = [("grpo", 1), ("paw", 1), ("grpo", 0), ("paw", 0)]


# ---- runs ----


def train(job: tuple[str, int]) -> dict:
    return dict(zip(KEY, job))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rerun_trains_what_the_file_lacks_in_the_order_of_the_jobs(tmp_path, workers):
    path = tmp_path / "runs.jsonl"
    first = json.dumps(train(("paw", 1)) | {"kept": True}) + "\n"
    path.write_text(first + '{"arm": "gr')  # as after a kill
    for _ in range(2):
        train_missing(path, JOBS, train, workers)
        assert path.read_text().startswith(first)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[1:] == [train(job) for job in JOBS if job != ("paw", 1)]


def test_a_finished_run_is_in_the_file_before_the_next_one_starts(tmp_path):
    """The one after it may fail, or the command be killed."""
    path = tmp_path / "runs.jsonl"

    def fail_at_the_third(job):
        if job == JOBS[2]:
            raise UserError("no")
        return train(job)

    with pytest.raises(UserError, match="no"):
        train_missing(path, JOBS, fail_at_the_third)
    assert list(read_runs(path)) == JOBS[:2]


def test_a_study_trains_the_arms_that_are_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    for argv, trained in (
        (["run", "--workers", "1", "--arms", "paw"], [JOBS[1], JOBS[3]]),
        (["run", "--workers", "1"], [JOBS[1], JOBS[3], JOBS[0], JOBS[2]]),
    ):
        monkeypatch.setattr(sys, "argv", ["study", *argv])
        study.command("A study.", path, JOBS, train, table=None)
        assert list(read_runs(path)) == trained


def test_a_study_whose_run_cannot_start_ends_in_a_sentence(tmp_path):
    with one_sentence(f"the run {tmp_path / 'r'} ended with exit code 1, see above"):
        play("examples.locks", ["--updates", "abc"], tmp_path / "r")


# ---- arms over their seeds ----


def test_measures_of_a_run():
    run = {"success": [0.5] + [0.0] * 9 + [0.25] * 10}
    assert (study.area(run), study.end(run)) == (pytest.approx(250 / 19), 25.0)
    assert study.training_area(run) == 15.0
    assert study.training_end({"success": [1.0, 0.0, *[0.5] * 9]}) == 45.0  # the last ten


def test_a_comparison_is_over_the_seeds_that_both_arms_have():
    assert study.seeds_of(RUNS, "paw", "grpo") == [2, 3]
    assert study.values_of(RUNS, "grpo", study.end) == [40.0, 20.0]
    assert study.gains(RUNS, "paw", "grpo", study.end) == [10.0, 0.0]
    # An arm that lacks a seed is not complete.
    whole = study.complete(RUNS, [2, 3, 4])
    assert whole == {key: run for key, run in RUNS.items() if key[0] == "paw"}


def test_the_cells_of_a_table():
    assert study.level(RUNS, "paw", study.end) == "56.7"  # 50, 20, 100
    assert study.level(RUNS, "ce", study.end) == "not run"
    pair = RUNS, "paw", "grpo", study.end
    # 10 and 0: mean 5, standard deviation 7.07, t(1) = 12.7.
    assert study.difference(*pair) == "+5.0 [-58.5, +68.5]"
    assert study.difference(*pair, least=3) == "+10.0, +0.0"
    assert study.above(*pair) == "1 of 2"  # level is not above


def test_curves_are_means_of_windows_in_percent():
    runs = {("paw", 1): {"success": [0.0, 0.5, 1.0, 1.0, 0.3]}, ("paw", 0): {"success": [0.1] * 5}}
    one = {"paw": [[pytest.approx(10.0)] * 5, [0.0, 50.0, 100.0, 100.0, 30.0]]}
    assert study.curves(runs, ["paw", "grpo"]) == one
    assert study.curves(runs, ["paw"], window=2) == {"paw": [[10.0, 10.0], [25.0, 100.0]]}
