"""Whole runs of WebShop and search: outputs, targets, the paper's preset on published files."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from paw_min import train
from paw_min.cli import parse_args
from paw_min.config import Config
from paw_min.envs.benchmarks import presets_of
from paw_min.envs.webshop import BENCHMARK, Shop
from paw_min.model.loading import load_policy
from paw_min.rollout import rollout
from paw_min.running import runs
from paw_min.toy import default_data, default_model
from tests.helpers import SMALL, Script, argv
from tests.retrieval import serving

OFFICIAL = Path(__file__).parents[1] / "data" / "webshop"  # an invented shop in the official format
PAPER = dict(  # a run with the preset `paper`, cut down in its sizes only
    name="paper", updates=1, groups=2, group_size=2, max_turns=2, eval_tasks=2, micro_tokens=4096,
    sampler="transformers", mini_batch=4, max_response_tokens=4,
)


def paper_config(env: str, **settings) -> Config:
    """The preset `paper` of a run script, with the sizes PAPER and these settings."""
    flags = ["--preset", "paper", *argv(PAPER | settings)]
    return parse_args(env, presets_of(env), "", flags)[0]


# ---- WebShop ----


@pytest.mark.slow
def test_the_papers_preset_on_official_files(model, tmp_path, capsys):
    """The prompts of Fig. 8, limits and penalties of A.1; only the sizes are reduced."""
    where = dict(model=model, data=OFFICIAL, out=tmp_path)
    train.train(paper_config("webshop", **where, human_goals=True))
    before, after = runs.read_metrics(tmp_path / "paper")
    assert before["eval_score"] == after["score"] == 0.0
    assert after["rows"] == 8 and "loss_kl" in after and after["wm_loss"] > 0
    assert "held-out score: 0.0 before" in capsys.readouterr().out


def test_rows_of_a_purchase():
    """Reward 10 only for a score of 1. The last page is not a target."""
    policy = load_policy(default_model("webshop"))  # its tokenizer has the shop's words
    settings = dict(env="webshop", eval_split="test", max_turns=8, max_prompt_tokens=1000)
    cfg = Config(**SMALL | settings)
    tasks = BENCHMARK.load(cfg, default_data("webshop"))
    loaded = Shop.load(default_data("webshop"))
    task = next(t for t in tasks.train if len(loaded.goals[int(t)]["goal_options"]) == 2)
    goal = loaded.goals[int(task)]
    good = [f"search[{goal['name']}]", f"click[{goal['asin']}]"]
    good += [f"click[{value}]" for value in goal["goal_options"].values()]
    for chosen, won in ((good, True), (good[:-1], False)):
        commands = [*chosen, "click[buy now]"]
        script = Script(policy, [f"<think>x</think><action>{c}</action>" for c in commands])
        with tasks.make_pool(1) as pool:
            played = rollout(cfg, policy, script, pool, [task], (0,))
        (episode,) = played.episodes
        steps = episode.transitions
        assert [t.reward for t in steps] == [0.0] * len(chosen) + [10.0 * won]
        assert episode.won == won and (episode.score == 1.0) == won and episode.score > 0.5
        assert [bool(t.obs_ids) for t in steps] == [True] * len(chosen) + [False]
        assert all(t.valid for t in steps)
        target = policy.decode(steps[0].obs_ids)
        assert "back to search" in target and "instruction" not in target


# ---- search ----


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
def test_the_papers_preset_on_published_files(model, tmp_path):
    """With a server; the prompts of Fig. 9 and the settings of A.1; only the sizes are reduced."""
    where = dict(model=model, data=published(tmp_path), out=tmp_path, eval_tasks=0)
    with serving("--corpus", f"{default_data('search')}/corpus.jsonl") as url:
        train.train(paper_config("search", **where, retriever=url))
    before, after = runs.read_metrics(tmp_path / "paper")
    assert {f"eval_success/{s}" for s in ("nq", "hotpotqa", "bamboogle")} <= set(before)
    assert after["rows"] == 8 and "loss_kl" in after
    # No readable command, so no observation, and no target.
    assert after["valid"] == after["selected"] == 0 and "wm_loss" not in after
