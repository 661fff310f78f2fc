"""The tables of the pages are those of the recorded files."""


import pytest

from research import tables

ROOT = tables.ROOT


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run python -m research.tables"
