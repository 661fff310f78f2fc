"""Whole runs of run_search.py: default data, published layouts, a server that dies, bad input."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

import run_search
from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.search.questions import load_questions
from paw_min.model.policy import load_policy
from paw_min.retrieval import client as search_client
from paw_min.running import runs, session
from paw_min.toy import default_data, default_model, search_world
from tests import helpers
from tests.helpers import ScriptByTurn, numbers
from tests.retrieval import serving, started, wait_for

SMALL = helpers.SMALL | dict(
    env="search", eval_split="test", updates=1, eval_tasks=4, max_turns=2,
    max_prompt_tokens=600, kl_coef=0.0, history_length=4,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("world") / "w"
    return str(search_world.generate(folder, n_entities=500, n_train=40, n_test=20, seed=5))


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


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_which_then_resumes(config, world, tmp_path, monkeypatch):
    """The run stops with one sentence; resumed with a new server, it has the same numbers."""
    monkeypatch.setattr(search_client, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(search_client, "START", 0.1)
    timeout, _ = search_client.SearchClient.__init__.__defaults__
    monkeypatch.setattr(search_client.SearchClient.__init__, "__defaults__", (timeout, 0.1))
    standin = default_model("search")
    corpus = f"{world}/corpus.jsonl"
    policy = load_policy(standin)
    responses = ["<search>x y</search>", "<answer>z</answer>"]
    monkeypatch.setattr(session, "HFSampler", lambda: ScriptByTurn(policy, responses))
    for owner, name in ((session, "start"), (train, "panel"), (train, "sync")):
        monkeypatch.setattr(owner, f"check_{name}", lambda *args: 0.0)  # nothing is sampled
    monkeypatch.setattr(train, "draw", lambda folders: None)  # slow, and not what is tested
    with serving("--corpus", corpus) as (url, process):
        settings = dict(updates=2, retriever=url, model=standin)
        train.train(config(name="whole", **settings))
        train.train(config(name="cut", **settings | {"updates": 1}))
        run_update = train.run_update

        def dying(*args):
            process.kill()
            process.wait()
            return run_update(*args)

        with monkeypatch.context() as patch:
            patch.setattr(train, "run_update", dying)
            with pytest.raises(UserError, match="was not available for .* rerun the same"):
                train.train(config(name="cut", **settings))
    port = url.rsplit(":", 1)[1].split("/")[0]
    with started("--corpus", corpus, "--port", port) as process:
        wait_for(process, "ready after")
        train.train(config(name="cut", **settings))
    whole = numbers(tmp_path / "whole")
    cut = numbers(tmp_path / "cut")
    assert whole[1]["wm_loss"] > 0 and len(cut) == 3 and whole[2] == cut[2]


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
    """The prompts of Fig. 9 and the settings of A.1; only the sizes are reduced."""
    where = dict(model=model, data=published(tmp_path), retriever=world, out=tmp_path)
    train.train(helpers.paper_config(run_search, "search", **where, eval_tasks=0))
    before, after = runs.read_metrics(tmp_path / "paper")
    assert {f"eval_success/{s}" for s in ("nq", "hotpotqa", "bamboogle")} <= set(before)
    assert after["rows"] == 8 and "loss_kl" in after


def test_default_data(tmp_path, monkeypatch):
    """Generated in the current folder on first use."""
    monkeypatch.chdir(tmp_path)
    folder = default_data("search")
    assert len(load_questions(folder, "train")) == 2000
    assert session.described_data(Config(env="search")) == "data/search (generated)"
