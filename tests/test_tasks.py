"""Drawing the tasks of updates and panels."""

import random
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from paw_min.config import Config
from paw_min.envs.interface import Tasks
from paw_min.running.session import find_tasks
from paw_min.running.tasks import data_digest, draw_groups, panel
from tests.retrieval import write_corpus

KINDS = ("clean", "cool", "heat", "look", "pick", "pick_two")


def test_groups_come_from_seed_and_update_alone():
    tasks = [f"g{i:02}" for i in range(12)]
    state = random.getstate()
    updates = [draw_groups(tasks, 4, seed=1, update=u) for u in range(9)]
    assert random.getstate() == state  # no global generator
    assert updates[5] == draw_groups(tasks, 4, 1, 5) == ["g02", "g08", "g07", "g04"]  # pinned
    for first in (0, 3, 6):  # each pass has every task once
        assert sorted(chain(*updates[first:first + 3])) == tasks
    assert len(set(map(tuple, updates))) == 9
    assert draw_groups(tasks, 4, seed=2, update=0) != updates[0]


def test_groups_of_an_update_are_different_tasks_though_passes_do_not_divide():
    tasks = [f"g{i:02}" for i in range(12)]
    drawn = [draw_groups(tasks, 5, 0, u) for u in range(200)]
    assert all(len(set(update)) == 5 for update in drawn)
    assert min(Counter(chain(*drawn)).values()) > 50  # of 83 on average: none is left out
    for wrong in (0, 13):
        with pytest.raises(ValueError, match=f"--groups {wrong} .* with 12 training tasks: choose"):
            draw_groups(tasks, wrong, 0, 0)


def test_panel_is_fixed_balanced_and_without_repeats():
    tasks = sorted(f"{t}/{i:02}" for t in KINDS for i in range(20))
    chosen = panel(tasks, 30, seed=0)
    assert chosen == panel(tasks, 30, seed=0) == sorted(set(chosen))
    assert Counter(g.split("/")[0] for g in chosen) == dict.fromkeys(KINDS, 5)
    assert panel(tasks, 30, seed=1) != chosen
    for wrong in (0, 121):
        with pytest.raises(ValueError, match=f"panel of {wrong} from 120 tasks"):
            panel(tasks, wrong, seed=0)


QUESTION = '{"question": "q", "golden_answers": ["a"], "data_source": "nq"}\n'


@pytest.mark.parametrize("env, split, others", [
    ("alfworld", "valid_seen", ("valid_unseen", "manifest.json")),
    ("webshop", "test", ("trace",)),
    ("search", "test", ("dev",)),
    ("textworld", "valid_seen", ("valid_unseen",)),
])
def test_data_are_known_by_the_content_of_all_their_files(env, split, others, tmp_path, games_root):
    """Wherever they lie; files of other splits do not count."""
    data = tmp_path / "data"
    if env == "alfworld":
        shutil.copytree(games_root, data)
    if env == "webshop":
        shutil.copytree(Path(__file__).parent / "data/webshop", data)
    if env == "search":
        data.mkdir()
        write_corpus(data / "corpus.jsonl")
        for name in ("train", "test", "dev"):
            (data / f"{name}.jsonl").write_text(QUESTION)
    if env == "textworld":
        for name in ("train", "valid_seen", "valid_unseen"):
            (data / name).mkdir(parents=True)
            for end in ("z8", "json"):
                (data / name / f"game.{end}").write_text("{}")

    def digest(folder: Path) -> str:
        cfg = dict(env=env, data=str(folder), eval_split=split, eval_tasks=0, groups=1)
        return data_digest(find_tasks(Config(**cfg, human_goals=env == "webshop")))

    before = digest(data)
    elsewhere = Path(shutil.copytree(data, tmp_path / "elsewhere"))
    assert digest(elsewhere) == before
    files = [path for path in sorted(elsewhere.rglob("*")) if path.is_file()]
    for path in random.Random(0).sample(files, min(len(files), 8)):
        with open(path, "a") as file:
            file.write("\n")
        is_other = any(name in str(path.relative_to(elsewhere)) for name in others)
        assert (digest(elsewhere) == before) == is_other, path
        shutil.copy(data / path.relative_to(elsewhere), path)


def test_data_without_files_are_known_by_the_names_of_tasks():
    digest = data_digest(Tasks(["a"], ["b"], None))
    assert digest == data_digest(Tasks(["a"], ["b"], None))
    assert digest != data_digest(Tasks(["a"], ["c"], None))
