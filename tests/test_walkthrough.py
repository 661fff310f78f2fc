"""WALKTHROUGH.md: its numbers are those of one update, made again here.

    python -m pytest tests/test_walkthrough.py
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paw_min import balance
from research.walkthrough import measure as walkthrough
from research.walkthrough.measure import Group, Report, Shown, Token

ROOT = Path(__file__).parent.parent


def recorded() -> Report:
    stored = json.loads((ROOT / "research/walkthrough/walkthrough.json").read_text())
    stored["groups"] = [Group(**group) for group in stored["groups"]]
    for shown in stored["shown"]:
        shown["observation"] = [Token(**token) for token in shown["observation"]]
    stored["shown"] = [Shown(**shown) for shown in stored["shown"]]
    return Report(**stored)


def test_the_page_has_the_recorded_numbers():
    page = (ROOT / "WALKTHROUGH.md").read_text()
    report = recorded()
    for line in walkthrough.tables(report).splitlines():
        assert line in page
    for name in ("grad_norm_rl", "grad_norm_wm", "grad_cosine", "grad_norm", "loss_pg", "loss_wm"):
        assert f"| {report.metrics[name]:.4f} |" in page
    for text in (
        f"| {100 * report.metrics['wm_clipped_tokens']:.1f} % |",
        f"{report.metrics['grad_norm_wm'] / report.metrics['grad_norm_rl']:.1f} times as large",
        f"goes from {report.p_before:.3f} to {report.p_after:.3f}",
        f"that is selected is {report.threshold:.4f} nats",
        f"p of `nothing` is {report.shown[2].observation[0].before:.0e}",
        f"⌈0.75 · {report.rows}⌉ = {sum(group.selected for group in report.groups)}",
    ):
        assert text in " ".join(page.split())


def test_the_numbers_fit_the_equations():
    report = recorded()
    means = [sum(group.returns) / len(group.returns) for group in report.groups]
    for group, mean in zip(report.groups, means):
        assert group.lambda_g == pytest.approx(float(balance.wm_weight(mean, 10.0)))
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
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)

    def numbers(value) -> list:
        """All leaves of nested lists and dictionaries, in order."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            return [leaf for item in value for leaf in numbers(item)]
        return [value]

    ours = numbers(asdict(walkthrough.measure()))
    theirs = numbers(asdict(recorded()))
    assert len(ours) == len(theirs) > 200
    for a, b in zip(ours, theirs):
        if isinstance(b, float):
            assert a == pytest.approx(b, rel=1e-2, abs=1e-4)
        else:
            assert a == b
