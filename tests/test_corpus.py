"""The generated world of search QA: its bytes, and what can happen to a generated folder.

test_scholar.py plays its questions: the teacher answers more than 99 % of them.

    python -m pytest tests/test_corpus.py
"""

import errno
import hashlib
import os
import shutil

import pytest

from paw_min.toy import search_world

SMALL = {"n_entities": 500, "n_train": 80, "n_test": 20}
FILES = ["corpus.jsonl", "manifest.json", "test.jsonl", "train.jsonl"]


def digest(folder):
    assert sorted(path.name for path in folder.iterdir()) == FILES
    content = b"".join((folder / name).read_bytes() for name in FILES)
    return hashlib.sha256(content).hexdigest()


def test_same_arguments_same_bytes(tmp_path):
    (tmp_path / "b").mkdir()  # an empty folder is filled
    first, second = (search_world.generate(tmp_path / name, **SMALL) for name in ("a", "b"))
    assert digest(first) == digest(second)
    # These bytes may change only with VERSION: results of different machines are compared.
    assert digest(first)[:16] == "c2416f5b9e3b62cd"
    assert digest(search_world.generate(tmp_path / "c", **SMALL, seed=1)) != digest(first)
    assert digest(search_world.generate(tmp_path / "default"))[:16] == "f8ac5a9767466f7b"


def test_a_finished_folder_is_reused_and_another_is_refused(tmp_path):
    folder = search_world.generate(tmp_path / "a", **SMALL)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert search_world.generate(folder, **SMALL) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match="another folder or delete this one"):
        search_world.generate(folder, **SMALL, seed=1)
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match="another folder or delete this one"):
        search_world.generate(folder, **SMALL)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text("notes")
    with pytest.raises(ValueError, match="holds something else"):
        search_world.generate(foreign, **SMALL)


def test_an_interrupted_call_leaves_no_folder_and_the_next_completes_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            search_world.generate(tmp_path / "a", **SMALL)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"a.partial-{os.getpid()}").mkdir()  # left by a process that was killed
    (tmp_path / f"a.partial-{os.getpid()}" / "rest").write_text("")
    assert digest(search_world.generate(tmp_path / "a", **SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_another_process_may_make_the_same_folder_first(tmp_path, monkeypatch):
    replace = os.replace

    def late(source, target):
        shutil.copytree(source, target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    folder = search_world.generate(tmp_path / "a", **SMALL)
    assert digest(folder)[:16] == "c2416f5b9e3b62cd"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"n_entities": 499}, "n_entities is 499"),
        ({"n_train": 81}, "n_train 81"),
        ({"n_train": 5000}, "2500 questions of one source .* only [0-9]+: choose"),
    ],
)
def test_wrong_numbers_are_named_and_nothing_is_written(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        search_world.generate(tmp_path / "a", **(SMALL | wrong))
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(tmp_path, monkeypatch, capsys):
    argv = f"search_world --out {tmp_path}/a --n-entities 500 --n-train 80 --n-test 20 --seed 0"
    monkeypatch.setattr("sys.argv", argv.split())
    search_world.main()
    assert "500 passages, 80 training and 20 test questions" in capsys.readouterr().out
    assert digest(tmp_path / "a")[:16] == "c2416f5b9e3b62cd"
