"""Whole runs of run_webshop.py in small shops: outputs, targets, both kinds of goals, bad input."""

import json
from pathlib import Path

import pytest
import torch

import run_webshop
from paw_min import runs, train
from paw_min.config import Config, UserError, check, parse_args
from paw_min.envs.webshop import BENCHMARK, Shop
from paw_min.model.policy import load_policy
from paw_min.rollout import rollout
from paw_min.toy import default_data, default_model, standins, webshop_shops, webshop_teacher
from tests.test_policy import make_policy
from tests.test_run_search import Script
from tests.test_train import numbers

ROOT = Path(__file__).parent.parent
OFFICIAL = ROOT / "tests" / "data" / "webshop"  # an invented shop in the official format
SMALL = dict(
    env="webshop", train_split="train", eval_split="test", groups=2, group_size=2, updates=1,
    eval_tasks=3, max_turns=3, micro_tokens=1024, mini_batch=4, max_response_tokens=4,
    prompt="compact", max_prompt_tokens=1000, lr=1e-3, name="r", kl_coef=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_policy("qwen3").save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> str:
    return str(webshop_shops.generate(tmp_path_factory.mktemp("shop") / "s", 30, seed=0))


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
    assert after["obs_tokens_cut"] == 0
    out = capsys.readouterr().out
    assert "held-out success: 0.000 before" in out and "held-out score: 0.0 before" in out
    assert (tmp_path / "r" / "curves.png").exists()
    assert "'Search'" in (tmp_path / "r" / "episodes.md").read_text()


@pytest.mark.parametrize("human", [False, True])
def test_the_papers_preset_on_official_files(model, tmp_path, human):
    """The prompts of Fig. 8, limits and penalties of A.1; only the sizes are reduced."""
    small = {"model": model, "data": OFFICIAL, "out": tmp_path, "name": "paper", "updates": 1,
             "groups": 2, "group-size": 2, "max-turns": 2, "eval-tasks": 2, "micro-tokens": 4096,
             "sampler": "transformers", "mini-batch": 4, "max-response-tokens": 4}  # fmt: skip
    argv = ["--preset", "paper"] + ["--human-goals"] * human
    for key, value in small.items():
        argv += [f"--{key}", str(value)]
    cfg, _ = parse_args("webshop", run_webshop.PRESETS, "", argv)
    train.train(cfg)
    line = runs.read_metrics(tmp_path / "paper")[1]
    assert line["rows"] == 8 and line["loss_kl"] >= 0 and line["wm_loss"] > 0


def test_rows_of_a_purchase(config, shop):
    """Reward 10 only for a score of 1. The last page is not a target."""
    policy = load_policy(default_model("webshop"))  # its tokenizer has the shop's words
    cfg = config(max_turns=8)
    tasks = BENCHMARK.load(cfg, shop)
    assert not set(tasks.train) & set(tasks.held_out)
    loaded = Shop.load(shop)
    task = next(t for t in tasks.train if len(loaded.goals[int(t)]["goal_options"]) == 2)
    goal = loaded.goals[int(task)]
    good = [f"search[{goal['name']}]", f"click[{goal['asin']}]"]
    good += [f"click[{value}]" for value in goal["goal_options"].values()]
    for commands, won in ((good, True), (good[:-1], False)):
        commands = [*commands, "click[buy now]"]
        script = Script(policy, [f"<think>x</think><action>{c}</action>" for c in commands])
        with tasks.make_pool(1) as pool:
            (episode,) = rollout(
                cfg, policy, script, pool, [task], [0], temperature=1.0, seed_key=(0,)
            ).episodes
        assert [t.reward for t in episode.transitions] == [0.0] * len(commands[1:]) + [10.0 * won]
        assert episode.won == won and (episode.score == 1.0) == won and episode.score > 0.5
        assert [len(t.obs_ids) > 0 for t in episode.transitions] == [True] * len(good[:-1]) + (
            [True] * won + [False]
        )
        assert all(t.valid for t in episode.transitions)
        target = policy.decode(episode.transitions[0].obs_ids)
        assert "back to search" in target and "instruction" not in target


def test_worker_processes_give_the_same_numbers(config, tmp_path):
    lines = []
    for workers in (0, 2):
        train.train(config(name=f"workers{workers}", workers=workers))
        lines.append(numbers(tmp_path / f"workers{workers}")[1])
    # Batches depend on which environment answers first, and rounding depends on the batch.
    assert lines[0] == pytest.approx(lines[1], abs=1e-4, rel=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(data="no/such/folder"), "no/such/folder"),
        (dict(eval_split="valid_seen"), "--eval-split valid_seen is not a split of WebShop; use"),
        (dict(groups=99999), "n_groups is 99999 with"),
        (dict(max_prompt_tokens=8), "a prompt of .* tokens exceeds max_prompt_tokens=8"),
    ],
)
def test_bad_input_is_one_sentence(config, settings, message):
    with pytest.raises(UserError, match=message) as error:
        train.train(config(**settings))
    assert "\n" not in str(error.value)


def test_presets_are_the_papers():
    cfg, _ = parse_args("webshop", run_webshop.PRESETS, "", ["--preset", "paper"])
    a1 = dict(
        max_prompt_tokens=4096, max_response_tokens=512, max_turns=15, lr=1e-6, r_max=10.0,
        invalid_penalty=0.1, group_size=8, groups=16, step_weight=1.0, gamma=0.95, normalize="std",
        temperature=1.0, eval_temperature=0.4, mini_batch=64, history_length=2, select_ratio=0.75,
        rho=0.2, wm_loss="cmae", wm_weight="adaptive", paw=True, prompt="paper", human_goals=False,
    )  # fmt: skip
    assert {key: getattr(cfg, key) for key in a1} == a1
    for preset in run_webshop.PRESETS.values():
        check(Config(**{"env": "webshop"} | preset))


def test_the_stand_in_is_what_its_command_makes(tmp_path, monkeypatch):
    """Training it takes minutes; a miniature on 12 goals gives the recorded numbers."""
    monkeypatch.chdir(tmp_path)  # the default shop is generated here
    folder = Path(default_model("webshop"))
    record = json.loads((folder / "record.json").read_text())
    tasks = webshop_teacher.training_tasks()[:12]
    tokenizer = load_policy(str(folder)).tokenizer
    torch.manual_seed(5)  # the global generator does not matter
    again = standins.miniature("webshop", tasks, tokenizer, seed=0)
    assert again["demonstrations"] == record["miniature"]["demonstrations"]
    assert again["loss"] == pytest.approx(record["miniature"]["loss"], rel=1e-4)
    assert len(record["loss"]) == -(-standins.LESSONS["webshop"].steps // 100)


def test_the_stand_in_has_the_words_of_the_shop(tmp_path, monkeypatch):
    """No command has an unknown word, and its tokens decode to the same command."""
    monkeypatch.chdir(tmp_path)
    policy = load_policy(default_model("webshop"))
    loaded = Shop.load(default_data("webshop"))
    commands = ["search[tangle proof heavy duty power cord]", "click[buy now]", "click[< prev]"]
    commands += [f"click[{asin.lower()}]" for asin in loaded.products]
    commands += [f"click[{v}]" for p in loaded.products.values() for o in p.options.values()
                 for v in o]  # fmt: skip
    for command in commands:
        ids = policy.encode(f"<think>x y</think><action>{command}</action>")
        assert BENCHMARK.parse(policy.decode(ids)) == (command, True)
        assert policy.tokenizer.unk_token_id not in policy.encode(command)
