"""The numbers of WALKTHROUGH.md fit the equations, and its rollout is made again here.

    python -m pytest tests/test_walkthrough.py
"""

from pathlib import Path

import pytest

from paw_min import balance
from paw_min.config import parse_args
from paw_min.model.policy import load_policy
from paw_min.rows import flatten
from paw_min.running.presets import presets_of
from paw_min.running.session import start_model
from paw_min.update import prepare
from research.paper.transitions import observation_logps
from research.walkthrough import measure as walkthrough

RECORDED = Path(__file__).parent.parent / "research/walkthrough/walkthrough.json"


def test_the_numbers_fit_the_equations():
    report = walkthrough.read(RECORDED)
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
def test_the_rollout_gives_the_recorded_numbers(tmp_path, monkeypatch):
    """Up to the weights of the rows. The step after it takes a minute, and is not made again."""
    monkeypatch.chdir(tmp_path)  # generates the games
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    report = walkthrough.read(RECORDED)
    cfg, _ = parse_args("alfworld", presets_of("alfworld"), "", [])
    policy = load_policy(start_model(cfg))
    episodes = walkthrough.play(cfg, policy)
    rows = prepare(cfg, policy, policy, flatten(episodes))
    assert len(rows.tokens) == report.rows
    assert [walkthrough.describe(rows, episodes, g) for g in (0, 1)] == report.groups
    assert rows.entropy[rows.selected].min().item() == pytest.approx(report.threshold, rel=1e-2)
    for shown in report.shown:
        i = walkthrough.row_of(rows, shown.trajectory, shown.turn)
        assert policy.decode(rows.tokens[i].prompt_ids) == shown.prompt
        assert bool(rows.selected[i]) == shown.selected
        weights = [rows.entropy[i].item(), rows.advantage[i].item(), rows.row_weight[i].item()]
        recorded = [shown.entropy, shown.advantage, shown.row_weight]
        assert weights == pytest.approx(recorded, rel=1e-2, abs=1e-4)
        (logp,) = observation_logps(cfg, policy, [rows.tokens[i]])
        before = [token.before for token in shown.observation]
        assert logp.exp().tolist() == pytest.approx(before, rel=1e-2, abs=1e-4)
