"""The figures: which runs they average, and that they name and limit what they draw."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from examples import one_file
from paw_min.running import plot
from research.paper import figures as paper
from tests.helpers import ROOT, python

CONFIG = dict(method="paw", paw=True, wm_loss="cmae", wm_target="next", alpha=0.75,
              lambda_g="adaptive")


@pytest.fixture
def figures(monkeypatch):
    """Those that a test has saved."""
    saved = []
    savefig = Figure.savefig

    def save(figure, *args, **options):
        saved.append(figure)
        savefig(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    return lambda: saved


def make_run(folder, seed: int, success: float, **settings):
    folder.mkdir(parents=True)
    config = CONFIG | dict(name=folder.name, out=str(folder.parent), seed=seed) | settings
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        dict(update=k, success=success, eval_success=success, valid=1 - 0.003 * k) for k in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def panel(figures, title: str):
    return [a for f in figures() for a in f.axes if a.get_title() == title][0]


def in_legend(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_runs_that_differ_in_more_than_the_seed_have_no_mean(tmp_path, figures):
    """The console proposes to draw a run and its baseline."""
    ours = make_run(tmp_path / "a/run-paw", 0, 0.8)
    baseline = make_run(tmp_path / "a/run", 0, 0.2, paw=False)
    plot.draw([ours, baseline], tmp_path)
    lines = panel(figures, "held-out success").lines
    assert [list(line.get_ydata()) for line in lines] == [[0.8, 0.8], [0.2, 0.2]]
    assert [line.get_color() for line in lines] == [plot.COLORS[m].color for m in ("paw", "grpo")]
    assert in_legend(figures()[0]) == ["run-paw", "run"]  # no paths


def test_seeds_have_a_mean_with_a_name(tmp_path, figures):
    runs = [make_run(tmp_path / f"{k}/run-seed{k}", k, 0.2 * k) for k in (1, 2)]
    runs.append(make_run(tmp_path / "run-seed3", 3, 0.6, rho=0.2))  # older ones lack this default
    plot.draw(runs, tmp_path)
    lines = panel(figures, "held-out success").lines
    assert [line.get_ydata()[0] for line in lines] == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert in_legend(figures()[0]) == ["run: mean of 3 runs (thin: each)"]
    low, high = panel(figures, "well-formed responses (fraction)").get_ylim()
    assert low < 0 and high > 1  # 0.997 is not a cliff


def test_no_curve_lies_on_the_frame(tmp_path, figures):
    """Episodes of constant length, an entropy of 0."""
    folder = make_run(tmp_path / "run", 0, 1.0)
    lines = [dict(update=k, length=2.0, entropy=0.0) for k in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot.draw([folder])
    for title, value in (("episode length (steps)", 2.0), ("action entropy (nats per token)", 0.0)):
        low, high = panel(figures, title).get_ylim()
        margin = 0.02 * (high - low)
        assert low + margin < 0 <= value < high - margin


def test_runs_of_one_name_are_told_apart(tmp_path, figures):
    runs = [make_run(tmp_path / folder / "run", 0, 0.5, rho=rho)
            for folder, rho in (("a", 0.1), ("b", 0.2))]
    plot.draw(runs, tmp_path)
    assert in_legend(figures()[0]) == ["a/run", "b/run"]
    first, second = panel(figures, "held-out success").lines
    assert first.get_color() != second.get_color()


def test_a_band_of_success_ends_at_0_and_1(figures):
    """Mean and deviation by hand: 0.95 and 0.1 at the second update."""
    axis = Figure().subplots()
    values = np.array([[0.0, 1.0], [0.05, 0.8], [0.0, 1.0], [0.0, 1.0]])
    paper.draw_bands(axis, paper.Curves([1, 2], values), plot.COLORS["paw"], (0, 1))
    (band,) = axis.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == (0, 1)
    assert 0.85 in ends.round(6)
    assert list(axis.lines[0].get_ydata()) == pytest.approx([0.0125, 0.95])


def test_a_method_has_one_color_and_one_name(tmp_path, figures):
    points = [one_file.Evaluation(k, 0.016, 0.1, 0.0) for k in range(2)]
    one_file.draw(dict.fromkeys(("grpo", "paw", "placebo"), [points]), tmp_path / "one_file.png")
    drawn = [(line.get_label(), line.get_color()) for line in figures()[0].axes[0].lines]
    assert drawn == [plot.COLORS[arm] for arm in ("grpo", "paw", "placebo")]
    known, one, other = paper.styles_of(["GRPO w/ PaW", "unknown", "another"])
    assert known == plot.COLORS["paw"] and len({known.color, one.color, other.color}) == 3


def test_a_notebook_keeps_its_backend(tmp_path):
    """pdf stands for the notebook's own; figures drawn with another one would not be shown."""
    python("-c", """
import matplotlib
matplotlib.use("pdf")
import paw_min.train
from examples import one_file
one_file.draw({"paw": [[one_file.Evaluation(0, 0.0, 0.0, 0.0)]]}, "one_file.png")
assert matplotlib.get_backend() == "pdf", matplotlib.get_backend()
""", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert (tmp_path / "one_file.png").read_bytes().startswith(b"\x89PNG")
