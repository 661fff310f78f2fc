"""Whole runs of run_webshop.py in small shops: outputs, targets, the preset of the paper."""

from pathlib import Path

import pytest

from paw_min import train
from paw_min.config import Config
from paw_min.envs.webshop import BENCHMARK, Shop
from paw_min.model.policy import load_policy
from paw_min.rollout import rollout
from paw_min.running import runs
from paw_min.toy import default_model
from tests import helpers
from tests.helpers import ScriptByTurn

ROOT = Path(__file__).parent.parent
OFFICIAL = ROOT / "tests" / "data" / "webshop"  # an invented shop in the official format
SMALL = helpers.SMALL | dict(
    env="webshop", eval_split="test", updates=1, eval_tasks=3, max_prompt_tokens=1000, kl_coef=0.0
)


@pytest.fixture
def config(tmp_path, model, shop):
    def make(**settings) -> Config:
        return Config(**dict(data=shop, model=model, out=str(tmp_path)) | SMALL | settings)

    return make


def test_a_run_reports_score_and_success(config, tmp_path, capsys):
    train.train(config())
    before, after = runs.read_metrics(tmp_path / "r")
    assert before["eval_score"] == after["eval_score"] == 0.0 == before["eval_success"]
    assert after["rows"] == 12 and after["wm_loss"] > 0 and after["score"] == 0.0
    assert "held-out score: 0.0 before" in capsys.readouterr().out


@pytest.mark.slow
def test_the_papers_preset_on_official_files(model, tmp_path):
    """The prompts of Fig. 8, limits and penalties of A.1; only the sizes are reduced."""
    where = dict(model=model, data=OFFICIAL, out=tmp_path)
    train.train(helpers.paper_config("webshop", **where, human_goals=True))
    line = runs.read_metrics(tmp_path / "paper")[1]
    assert line["rows"] == 8 and "loss_kl" in line and line["wm_loss"] > 0


def test_rows_of_a_purchase(config, shop):
    """Reward 10 only for a score of 1. The last page is not a target."""
    policy = load_policy(default_model("webshop"))  # its tokenizer has the shop's words
    cfg = config(max_turns=8)
    tasks = BENCHMARK.load(cfg, shop)
    loaded = Shop.load(shop)
    task = next(t for t in tasks.train if len(loaded.goals[int(t)]["goal_options"]) == 2)
    goal = loaded.goals[int(task)]
    good = [f"search[{goal['name']}]", f"click[{goal['asin']}]"]
    good += [f"click[{value}]" for value in goal["goal_options"].values()]
    for chosen, won in ((good, True), (good[:-1], False)):
        commands = [*chosen, "click[buy now]"]
        script = ScriptByTurn(policy, [f"<think>x</think><action>{c}</action>" for c in commands])
        with tasks.make_pool(1) as pool:
            played = rollout(cfg, policy, script, pool, [task], [0], temperature=1.0, seed_key=(0,))
        (episode,) = played.episodes
        steps = episode.transitions
        assert [t.reward for t in steps] == [0.0] * len(chosen) + [10.0 * won]
        assert episode.won == won and (episode.score == 1.0) == won and episode.score > 0.5
        assert [bool(t.obs_ids) for t in steps] == [True] * len(chosen) + [False]
        assert all(t.valid for t in steps)
        target = policy.decode(steps[0].obs_ids)
        assert "back to search" in target and "instruction" not in target
