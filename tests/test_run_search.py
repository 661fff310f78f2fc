"""Whole runs of run_search.py: each data set is reported; published files."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from paw_min import train
from paw_min.config import Config
from paw_min.running import runs
from tests import helpers
from tests.retrieval import serving

SMALL = helpers.SMALL | dict(
    env="search", eval_split="test", updates=1, eval_tasks=4, max_turns=2,
    max_prompt_tokens=600, kl_coef=0.0, history_length=4,
)


@pytest.fixture
def config(tmp_path, model, world):
    def make(**settings) -> Config:
        return Config(**dict(data=world, model=model, out=str(tmp_path)) | SMALL | settings)

    return make


def test_a_run_reports_each_data_set(config, tmp_path):
    train.train(config())
    before, after = runs.read_metrics(tmp_path / "r")
    assert {"eval_success/single", "eval_success/two_hop"} <= set(before)
    assert after["valid"] == 0 and after["rows"] == 8  # two turns, no readable command
    assert after["selected"] == 0 and "wm_loss" not in after  # no observation, no target


def published(folder: Path) -> Path:
    """Two parquet files with verl-agent's columns."""
    for split, sources in (("train", ["nq"]), ("test", ["nq", "hotpotqa", "bamboogle"])):
        rows = [
            {"question": f"who is number {n}?", "golden_answers": [str(n)], "data_source": source}
            for source in sources
            for n in range(6)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


@pytest.mark.slow
def test_the_papers_preset_on_published_files(model, tmp_path, world):
    """With a server; the prompts of Fig. 9 and the settings of A.1; only the sizes are reduced."""
    where = dict(model=model, data=published(tmp_path), out=tmp_path, eval_tasks=0)
    with serving("--corpus", f"{world}/corpus.jsonl") as url:
        train.train(helpers.paper_config("search", **where, retriever=url))
    before, after = runs.read_metrics(tmp_path / "paper")
    assert {f"eval_success/{s}" for s in ("nq", "hotpotqa", "bamboogle")} <= set(before)
    assert after["rows"] == 8 and "loss_kl" in after
