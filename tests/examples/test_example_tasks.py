"""The tasks of the examples: training and held-out ones differ, and the seed decides them."""

import json

import pytest

from examples import boxes, hidden, locks
from paw_min.config import Config


@pytest.mark.parametrize("example, data", [
    (boxes, "shuffled"), (boxes, "natural"), (locks, "one_file.py"),
])
def test_held_out_tasks_are_not_trained_on_and_the_seed_draws_all(example, data):
    one, again, other = (example.load(Config(seed=seed), data) for seed in (1, 1, 2))
    assert (one.train, one.held_out) == (again.train, again.held_out)
    assert len(set(one.train)) == example.TRAIN and len(set(one.held_out)) == example.HELD_OUT
    assert not set(one.train) & set(one.held_out)
    assert set(one.train) != set(other.train) and set(one.held_out) != set(other.held_out)


def test_the_games_of_hidden_are_those_of_its_seed_and_have_one_grammar(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "ROUNDS", 1)  # fewer files
    written = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        hidden.write_games(tmp_path / name, seed)
        tasks = hidden.load(Config(env="hidden"), str(tmp_path / name))
        assert (len(tasks.train), len(tasks.held_out)) == (64, 32)
        games = [[open(path).read() for path in part] for part in (tasks.train, tasks.held_out)]
        assert not set(games[0]) & set(games[1])
        assert len({json.loads(game)["grammar"] for part in games for game in part}) == 1
        written[name] = games
    assert written["a"] == written["b"] != written["c"]
