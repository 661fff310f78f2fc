"""Held-out learning curves: areas, plateaus and intervals, recomputed by hand.

python -m pytest tests/test_curves.py
"""

import json

import numpy as np
import pytest

from paw_min.base.errors import UserError
from research import curves

# Held-out success after updates 0, 2, 4, 6 by arm and seed, in hundredths.
HEIGHTS = {
    "GRPO": {0: [10, 20, 40, 60], 1: [10, 30, 50, 70], 2: [10, 20, 30, 40]},
    "GRPO w/ PaW": {0: [10, 22, 43, 61], 1: [10, 31, 51, 75], 2: [10, 20, 30, 34]},
}


def write_run(folder, heights: list[int], updates: int = 6, **changed) -> None:
    folder.mkdir()
    config = dict(env="search", seed=0, updates=updates, rho=0.2, select_ratio=0.75)
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"update": 0, "eval_success": heights[0] / 100}]
    for update in range(1, 7):
        line = dict(update=update, success=0.5, valid=1.0, grad_norm=2.0, entropy=0.3)
        line["clip_fraction"] = 0.1
        line["rows"] = 8
        if update == 3:
            line["valid"] = 0.9
        if update % 2 == 0:
            line["eval_success"] = heights[update // 2] / 100
        lines.append(line | changed)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


@pytest.fixture
def sweep(tmp_path):
    entries = []
    for arm, seeds in HEIGHTS.items():
        # The other arm clips three times as often.
        changed = {} if arm == "GRPO" else {"clip_fraction": 0.3}
        for seed, heights in seeds.items():
            folder = f"{arm.split()[-1]}{seed}"
            write_run(tmp_path / folder, heights, **changed)
            entries.append(dict(label=arm, seed=seed, folder=folder))
    path = tmp_path / "fair-search.json"
    path.write_text(json.dumps(entries))
    return path


def test_measures_by_hand(sweep):
    """The area leaves out the start; the plateau is the last two evaluations."""
    arms = curves.read(sweep, None).arms
    assert arms["GRPO"].area.values == pytest.approx([40, 50, 30])
    assert arms["GRPO"].plateau.values == pytest.approx([50, 60, 35])
    assert arms["GRPO"].area.difference is None
    paw = arms["GRPO w/ PaW"].area
    assert paw.values == pytest.approx([42, 157 / 3, 28])
    assert paw.difference == pytest.approx((2 + 7 / 3 - 2) / 3)
    # With three seeds, more than 2.5 % of the draws repeat one seed.
    assert paw.bootstrap == pytest.approx((-2, 7 / 3))
    trained = arms["GRPO w/ PaW"].training
    assert trained.clip_ratio == pytest.approx(3)
    assert trained.valid_lowest == pytest.approx(0.9)
    assert (trained.grad_norm_first, trained.entropy_last) == (2.0, 0.3)
    # The base is a choice.
    arms = curves.read(sweep, "GRPO w/ PaW").arms
    assert arms["GRPO"].area.difference == pytest.approx(-(2 + 7 / 3 - 2) / 3)
    assert arms["GRPO"].training.clip_ratio == pytest.approx(1 / 3)


def test_only_seeds_that_all_arms_have_finished(sweep, tmp_path):
    # Seed 1 of one arm has stopped before its last update, seed 0 has not begun.
    config = tmp_path / "PaW1" / "config.json"
    config.write_text(config.read_text().replace('"updates": 6', '"updates": 7'))
    (tmp_path / "GRPO0" / "config.json").unlink()
    setting = curves.read(sweep, None)
    assert setting.seeds == [2]
    assert setting.arms["GRPO"].area.values == pytest.approx([30])
    assert "| GRPO w/ PaW | -2.0 | -2.0 | -3.0 | -3.0 |" in curves.markdown(setting)
    (tmp_path / "GRPO2" / "config.json").unlink()
    with pytest.raises(UserError, match="no seed is finished in all arms"):
        curves.read(sweep, None)


def test_files(sweep, tmp_path, capsys):
    out = tmp_path / "out"
    # No math, and no error of matplotlib's.
    sweep.write_text(sweep.read_text().replace("GRPO w/ PaW", "$x^$"))
    curves.main([sweep], out, None, "updates")
    text = (out / "curves.md").read_text()
    assert text in capsys.readouterr().out + "\n"
    assert "| GRPO | 40.0, 40.0 (30.0 to 50.0) | 48.3, 50.0 (35.0 to 60.0) |" in text
    assert json.loads((out / "curves.json").read_text())[0]["seeds"] == [0, 1, 2]
    assert (out / "curves.png").stat().st_size > 5000


def test_only_updates_that_all_runs_have_evaluated(sweep, tmp_path):
    """Here a run was resumed with another --eval-every."""
    file = tmp_path / "PaW1" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[2]["eval_success"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    setting = curves.read(sweep, None)
    assert all(list(c) == [0, 4, 6] for arm in setting.arms.values() for c in arm.curves)
    assert setting.arms["GRPO"].area.values == pytest.approx([50, 60, 35])


def test_by_steps_counts_a_stage_before_the_run(tmp_path):
    """100 steps per update. The other arm took 200 steps before, and begins at 50 %."""
    write_run(tmp_path / "a", [10, 20, 40, 60], rows=100)
    write_run(tmp_path / "b", [50, 60, 60, 60], rows=100)
    entries = [
        dict(label="GRPO", seed=0, folder="a"),
        dict(label="stage", seed=0, folder="b", steps_before=200),
    ]
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(entries))
    arms = curves.read(path, None, "steps").arms
    assert max(arms["GRPO"].curves[0]) == max(arms["stage"].curves[0]) == 600  # the budget

    at = arms["stage"].curves[0]
    assert [at[0], at[150]] == [10, 10]  # the start of GRPO, during the stage
    assert at[300] == 55  # a half of the way from 50 to 60, 200 steps later
    assert at[600] == 60
    assert arms["GRPO"].curves[0][300] == 30
    assert list(at) == [round(37.5 * k) for k in range(17)]
    # 16 points: those at 38 to 188 have the height 10.
    expected = [10] * 5 + [np.interp(x, [200, 400], [50, 60]) for x in list(at)[6:]]
    assert arms["stage"].area.values == [pytest.approx(np.mean(expected))]
