"""The tables of the pages are those of the recorded files.

python -m pytest tests/test_tables.py
"""

import re

import pytest

from paw_min.base.errors import UserError
from research import tables

ROOT = tables.ROOT


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run python -m research.tables"


def test_a_page_is_rewritten_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: runs_rise -->\nold\n<!-- end -->\nafter\n")
    with pytest.raises(UserError, match="run python -m research.tables"):
        tables.main([page], check=True)
    assert "old" in page.read_text()
    tables.main([page], check=False)
    before, shown, after = re.split("<!-- .* -->\n", page.read_text())
    assert (before, after) == ("before\n", "after\n")
    assert shown == tables.runs_rise() + "\n"
    tables.main([page], check=True)


def test_a_marker_without_an_end():
    with pytest.raises(UserError, match="no <!-- end -->"):
        tables.filled("<!-- table: runs_rise -->\n\n<!-- table: runs_rise -->\n<!-- end -->")
