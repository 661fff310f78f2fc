"""The numbers of WALKTHROUGH.md are those of one update, made again here."""

import re
from pathlib import Path

import pytest

from paw_min.toy import alfworld_games
from research.walkthrough import measure as walkthrough

RECORDED = Path(__file__).parent.parent / "research/walkthrough/tables.txt"
NUMBER = r"-?\d[\d.]*(?:e-\d+)?"


@pytest.mark.slow
def test_the_update_gives_the_recorded_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # generates the games
    monkeypatch.setattr(alfworld_games, "verify", lambda *_: None)  # test_games.py plays some
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    ours = walkthrough.tables(walkthrough.measure())
    theirs = RECORDED.read_text().strip()
    assert re.sub(NUMBER, "#", ours) == re.sub(NUMBER, "#", theirs)
    found, recorded = ([float(n.rstrip(".")) for n in re.findall(NUMBER, text)]
                       for text in (ours, theirs))
    assert len(recorded) > 200
    assert found == pytest.approx(recorded, rel=1e-2, abs=2e-4)
