"""Generated data of search and WebShop, to the byte: folders, and what rule-based teachers show.

test_games.py has ALFWorld's.
"""

import errno
import hashlib
import json
from pathlib import Path

import pytest

from paw_min.base.errors import UserError
from paw_min.toy import default_model, search_world, webshop_shops
from tests.helpers import python
from world_models import teachers
from world_models.teachers.search import Scholar

SMALL = {"n_entities": 500, "n_train": 80, "n_test": 20}
FILES = ["corpus.jsonl", "manifest.json", "test.jsonl", "train.jsonl"]


def digest(folder, files=FILES):
    content = b"".join((folder / name).read_bytes() for name in files)
    return hashlib.sha256(content).hexdigest()


# ---- folders ----


def test_a_shop_does_not_depend_on_the_hash_seed(tmp_path):
    code = "from paw_min.toy import webshop_shops; import sys; webshop_shops.generate(sys.argv[1])"
    python("-c", code, tmp_path / "shop", env={"PYTHONHASHSEED": "1"})
    found = digest(tmp_path / "shop", webshop_shops.FILES)
    assert found == digest(webshop_shops.generate(tmp_path / "other"), webshop_shops.FILES)
    assert (webshop_shops.VERSION, found[:32]) == (1, "beb1d214d4d68caf622379d457f2484f"), (
        "the shop has changed: increase its VERSION, then write the new digest here")


def test_same_arguments_same_bytes(tmp_path):
    first, second = (search_world.generate(tmp_path / name, **SMALL) for name in ("a", "b"))
    assert digest(first) == digest(second)
    assert sorted(path.name for path in first.iterdir()) == FILES
    # These bytes may change only with VERSION: results of different machines are compared.
    assert digest(first)[:16] == "c2416f5b9e3b62cd"
    assert digest(search_world.generate(tmp_path / "c", **SMALL, seed=1)) != digest(first)
    assert digest(search_world.generate(tmp_path / "default"))[:16] == "f8ac5a9767466f7b"


def test_a_finished_folder_is_reused_and_another_is_refused(tmp_path):
    folder = search_world.generate(tmp_path / "a", **SMALL)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert search_world.generate(folder, **SMALL) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(UserError, match="a has seed 0, not 1: delete it to have the data"):
        search_world.generate(folder, **SMALL, seed=1)
    (folder / "test.jsonl").unlink()
    with pytest.raises(UserError, match="a has no test.jsonl: delete it"):
        search_world.generate(folder, **SMALL)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match="a has no manifest.json of generated data"):
        search_world.generate(folder, **SMALL)


def test_a_folder_appears_when_it_is_complete(tmp_path, monkeypatch):
    write = Path.write_bytes

    def fail(path, content):
        write(path, content[:10])
        if path.name == "test.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        with pytest.raises(OSError, match="No space"):
            search_world.generate(tmp_path / "a", **SMALL)
    assert not (tmp_path / "a").exists()
    assert digest(search_world.generate(tmp_path / "a", **SMALL))[:16] == "c2416f5b9e3b62cd"


# ---- teachers ----


@pytest.mark.slow
@pytest.mark.parametrize("env", ["webshop", "search"])
def test_the_demonstrations_are_those_of_the_stand_ins(env, tmp_path, monkeypatch):
    """Steps, slips and haste. test_train.py trains on ALFWorld's, too."""
    monkeypatch.chdir(tmp_path)
    tasks = teachers.TEACHERS[env].training_tasks()[:12]
    rows = teachers.demonstrations(env, tasks, seed=0)
    record = json.loads((Path(default_model(env)) / "record.json").read_text())
    found = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert found == record["demonstrations"]


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match="understands the questions of .*search_world only"):
        Scholar("Where was the dog of Oka Unk born?")
