"""The tables of the pages are those of the recorded files, and these are those of the archives.

python -m pytest tests/test_tables.py
"""

import json
import os
import re
import subprocess
import sys
import tarfile

import pytest

from paw_min.base.errors import UserError
from research import tables
from research.paper.sweep import plan

ROOT = tables.ROOT
PAGES = [
    pytest.param(page, id=name, marks=[pytest.mark.slow] if "small" in name else [])
    for page in tables.pages()
    for name in [page.relative_to(ROOT).as_posix()]
]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run python -m research.tables"


@pytest.mark.slow
@pytest.mark.parametrize("study", ["study", "fair", "comparison", "lookahead"])
def test_the_command_of_a_page_makes_its_tables_from_the_raw_data(study, tmp_path):
    """The one with --out research/STUDY that trains nothing, in the unpacked archive if any."""
    folder = ROOT / "research" / study
    script = r"python -m research\.(?:curves|study\.analyze|lookahead\.seeds) "
    (command,) = re.findall(rf"^ *({script}.*) --out research/{study}$",
                            (folder / "README.md").read_text(), re.M)
    place = ROOT
    if (folder / "runs.tar.xz").exists():
        place = tmp_path / "runs"
        with tarfile.open(folder / "runs.tar.xz") as archive:
            archive.extractall(place, filter="data")
    out = tmp_path / "out"
    command = f"{sys.executable} {command.removeprefix('python ')} --out {out}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, shell=True, check=True, cwd=place, env=environment)
    found = [file for file in out.iterdir() if file.suffix != ".png"]
    assert {file.suffix for file in found} == {".md", ".json"}
    for file in found:
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name


def test_the_arms_of_research_fair_are_those_of_the_grid(tmp_path):
    """The archived runs are the arms' own: a sweep in this folder has nothing left to run."""
    with tarfile.open(ROOT / "research/fair/runs.tar.xz") as archive:
        members = [m for m in archive if m.name.startswith("search/")]
        archive.extractall(tmp_path, members, filter="data")
    jobs = plan("fair", "search", [0, 1, 2], str(tmp_path / "search"), ["--preset", "open"])
    entries = json.loads((tmp_path / "search" / "fair-search.json").read_text())
    archived = {(entry["label"], entry["seed"], entry["folder"]) for entry in entries}
    assert archived == {(job.label, job.cfg.seed, job.folder.name) for job in jobs}
    assert all(job.done() == job.cfg.updates for job in jobs)


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
