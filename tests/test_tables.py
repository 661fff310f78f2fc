"""The tables of the pages are those of the recorded files, of which studies also draw pictures."""


import pytest

from research import tables
from research.hidden import study as hidden
from research.locks import study as locks
from research.locks import worlds

ROOT = tables.ROOT


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run python -m research.tables"


@pytest.mark.slow
@pytest.mark.parametrize("study, which, picture", [
    (hidden, ["-kl"], "curves-kl.png"), (locks, [], "curves.png"), (worlds, [], "worlds.png"),
])
def test_the_picture_of_the_runs(study, which, picture, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    study.draw(study.read_runs(), *which)
    assert (tmp_path / picture).stat().st_size > 5000
