"""The numbers of WALKTHROUGH.md are those of one update, made again here."""

from dataclasses import asdict
from pathlib import Path

import pytest

from paw_min import balance
from paw_min.toy import alfworld_games
from research.walkthrough import measure as walkthrough

RECORDED = Path(__file__).parent.parent / "research/walkthrough/walkthrough.json"


def test_the_numbers_fit_the_equations():
    report = walkthrough.read(RECORDED)
    means = [sum(group.returns) / len(group.returns) for group in report.groups]
    for group, mean in zip(report.groups, means):
        assert group.lambda_g == pytest.approx(float(balance.lambda_g(mean, 10.0)))
    for shown in report.shown:
        group = report.groups[shown.group]
        weight = shown.selected * group.lambda_g / (len(report.groups) * group.selected)
        assert shown.row_weight == pytest.approx(weight)
        assert shown.selected == (shown.entropy >= report.threshold)
        kept = [1 - token.before for token in shown.observation if token.counted]
        assert shown.loss == pytest.approx(sum(kept) / len(shown.observation), abs=1e-4)
        assert [token.counted for token in shown.observation] == [
            token.before <= 0.2 for token in shown.observation
        ]
    assert report.shown[2].advantage == 0.0  # all returns of its group are equal


@pytest.mark.slow
def test_the_update_gives_the_recorded_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # generates the games
    monkeypatch.setattr(alfworld_games, "verify", lambda *_: None)  # test_games.py plays some
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)

    def numbers(value) -> list:
        """All leaves of nested lists and dictionaries, in order."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            return [leaf for item in value for leaf in numbers(item)]
        return [value]

    ours = numbers(asdict(walkthrough.measure()))
    theirs = numbers(asdict(walkthrough.read(RECORDED)))
    assert len(ours) == len(theirs) > 200
    for a, b in zip(ours, theirs):
        if isinstance(b, float):
            assert a == pytest.approx(b, rel=1e-2, abs=1e-4)
        else:
            assert a == b
