"""The tables of the pages are those of the recorded files."""

import json

import pytest

from research import front_figure, tables

ROOT = tables.ROOT


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_are_those_of_the_files(page):
    text = page.read_text()
    assert tables.with_new_tables(text) == text, "run python -m research.tables"


@pytest.fixture
def fill(tmp_path, monkeypatch):
    """A table with its numbers, of runs that succeed in this share of their episodes, in percent.

    PaW is 10 points above GRPO on four seeds, and 20 on seed 5; ECHO has seed 5 alone.
    """
    success = {"grpo": [20] * 5, "paw": [30] * 4 + [40], "echo 0.05": [None] * 4 + [70]}
    runs = [
        {"world": world, "arm": arm, "seed": seed, "success": [0.9, percent / 100, more / 100]}
        for world, more in (("plain", 50), ("polish", 90))
        for arm, values in success.items()
        for seed, percent in enumerate(values, start=1) if percent is not None
    ]
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))

    def filled(header: str, *rows: str, world: str = "plain") -> list[str]:
        lines = [header, header, *rows]
        page = f"<!-- table: runs.jsonl {world} -->\n" + "\n".join(lines) + "\n<!-- end -->"
        return tables.with_new_tables(page).splitlines()[3:-1]

    return filled


def test_a_row_is_an_arm_or_a_difference_and_a_column_a_measure(fill):
    assert fill(
        "| arm | seeds | mean of the curve | at the end | minus GRPO |",
        "| grpo | | | | old |", "| PaW | | | | |", "| ECHO | | | | |",
    ) == [
        "| grpo | 5 | 35.0 | 50.0 |  |",
        "| PaW | 5 | 41.0 | 50.0 | +6.0 [+3.2, +8.8] |",  # 5 four times, and 10
        "| ECHO | 1 | 60.0 | 50.0 | +25.0 |",  # no interval
    ]
    assert fill(
        "| difference | seeds | mean | above on |",
        "| PaW - GRPO | | | |", "| PaW - GRPO, seeds 2 to 4 | | | |", "| ce - GRPO | | | |",
    ) == [
        "| PaW - GRPO | 5 | +6.0 [+3.2, +8.8] | 5 of 5 |",
        "| PaW - GRPO, seeds 2 to 4 | 3 | +5.0, +5.0, +5.0 | 3 of 3 |",
        "| ce - GRPO | 0 | - | 0 of 0 |",
    ]


def test_a_row_or_a_column_may_be_a_world(fill):
    """In `polish`, the end counts, which is the same for all."""
    assert fill(
        "| comparison | plain | polish |", "| paw | | |", "| paw - grpo | | |", world=""
    ) == ["| paw | 41.0 | 90.0 |", "| paw - grpo | +6.0 [+3.2, +8.8] | +0.0 [+0.0, +0.0] |"]
    assert fill("| world | GRPO | PaW - GRPO |", "| plain | | |", world="") == [
        "| plain | 35.0 | +6.0 [+3.2, +8.8] |"
    ]
    assert fill(
        "| comparison | world | expected | difference |",
        "| paw - grpo | plain | above 0 | |", world="",
    ) == ["| paw - grpo | plain | above 0 | +6.0 [+3.2, +8.8] |"]


def test_the_best_loss_of_a_world_is_bold(tmp_path, monkeypatch):
    """Means are over the seeds that all losses with at least six have; a placebo is no loss."""
    success = {
        "grpo": range(10, 17), "paw": range(20, 27), "ce 0.05": range(20, 26), "probable": [99] * 5,
        "echo placebo": [100] * 7,
    }
    lines = [
        {"arm": f"{arm}-kl", "seed": seed, "success": [0.0, percent / 100]}
        for arm, values in success.items() for seed, percent in enumerate(values)
    ]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "WORLDS", (("fog", "a lie", ("runs.jsonl",), "", "-kl"),))
    *_, line = tables.losses().splitlines()
    assert line == "| fog | a lie | 6 | 12.5 | **22.5** | **22.5** | - | - | - | - |"


def test_updates_to_80_percent(tmp_path, monkeypatch):
    """With four seeds, half of them are two; a seed without one of the arms does not count."""
    success = {
        "grpo": [[0.1, 0.2, 0.3], [0.1, 0.9, 0.2], [0.0, 0.1, 0.79], [0.0, 0.8, 0.8]],
        "paw": [[0.9, 0.9, 0.9], [0.1, 0.2, 0.9], [0.1, 0.2, 0.8], [0.8, 0.2, 0.1]],
        "placebo": [[0.0, 0.0, 0.7]] * 4,
        "echo": [[0.0, 0.8, 0.9]] * 5,
    }
    lines = [
        json.dumps({"arm": arm, "seed": seed, "update": [0, 25, 50], "success": curve})
        for arm, curves in success.items() for seed, curve in enumerate(curves)
    ]
    (tmp_path / "runs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    side = ("here", tmp_path / "runs.jsonl", tuple(success))
    monkeypatch.setattr(front_figure, "SIDES", [side])
    rows = front_figure.reached_table().splitlines()[2:]
    assert rows == [
        "| GRPO | 25 (2 of 4 seeds) |", "| PaW | 0 (4 of 4 seeds) |",
        "| placebo | not in 200 (0 of 4 seeds) |", "| ECHO | 25 (4 of 4 seeds) |",
    ]
