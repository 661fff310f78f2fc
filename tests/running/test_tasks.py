"""Drawing the tasks of updates and panels."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace

import pytest

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Tasks
from paw_min.running.session import find_tasks
from paw_min.running.tasks import draw_groups, panel

KINDS = ("clean", "cool", "heat", "look", "pick", "pick_two")
TASKS = [f"g{i:02}" for i in range(12)]


def test_groups_come_from_seed_and_update_alone():
    updates = [draw_groups(TASKS, 4, seed=1, update=u) for u in range(9)]
    assert updates[5] == draw_groups(TASKS, 4, 1, 5) == ["g02", "g08", "g07", "g04"]  # pinned
    for first in (0, 3, 6):  # each pass has every task once
        assert sorted(chain(*updates[first:first + 3])) == TASKS
    assert draw_groups(TASKS, 4, seed=2, update=0) != updates[0]


def test_groups_of_an_update_are_different_tasks_though_passes_do_not_divide():
    drawn = [draw_groups(TASKS, 5, 0, u) for u in range(200)]
    assert all(len(set(update)) == 5 for update in drawn)
    assert min(Counter(chain(*drawn)).values()) > 50  # of 83 on average: none is left out
    for wrong in (0, 13):
        with pytest.raises(ValueError, match=f"--groups {wrong} .* with 12 training tasks: choose"):
            draw_groups(TASKS, wrong, 0, 0)


def test_panel_is_fixed_balanced_and_without_repeats():
    tasks = sorted(f"{t}/{i:02}" for t in KINDS for i in range(20))
    chosen = panel(tasks, 30)
    assert chosen == panel(tasks, 30) == sorted(set(chosen))
    assert chosen[:4] == ["clean/01", "clean/06", "clean/10", "clean/14"]  # pinned
    assert Counter(g.split("/")[0] for g in chosen) == dict.fromkeys(KINDS, 5)
    assert panel(tasks, 0) == panel(tasks, 121) == tasks


def test_a_held_out_split_without_tasks_is_one_sentence(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "own", SimpleNamespace(
        load=lambda cfg, data: Tasks(["a", "b"], [], make_pool=None)
    ))
    with pytest.raises(UserError, match="^the held-out split has no tasks: choose another"):
        find_tasks(Config(env="own", data="d", groups=1))
