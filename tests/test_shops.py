"""The generator of shops, and the teacher for WebShop.

test_train.py compares the teacher's demonstrations, mistakes included, with recorded digests.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paw_min.envs.interface import Context, Turn
from paw_min.envs.webshop import Shop
from paw_min.envs.webshop.env import WebShopAgent
from paw_min.toy import webshop_shops as shops
from paw_min.toy import webshop_teacher as teacher
from paw_min.toy.webshop_teacher import Shopper

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The default shop."""
    return shops.generate(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def records(folder):
    return [json.loads((folder / name).read_text()) for name in shops.FILES]


@pytest.fixture(scope="module")
def shop(folder):
    return Shop.load(folder)


def digest(folder):
    return hashlib.sha256(b"".join((folder / n).read_bytes() for n in shops.FILES)).hexdigest()


# --- the same shop everywhere ----------------------------------------------------------------


def test_bytes_are_pinned_and_do_not_depend_on_the_hash_seed(folder, tmp_path):
    code = "from paw_min.toy import webshop_shops; webshop_shops.main()"
    subprocess.run([sys.executable, "-c", code, "--out", tmp_path / "shop", "--products", "100"],
                   cwd=ROOT, check=True, timeout=60, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert digest(tmp_path / "shop") == digest(folder)
    assert (shops.VERSION, digest(folder)[:32]) == (1, "beb1d214d4d68caf622379d457f2484f"), (
        "the shop has changed: increase shops.VERSION, then write the new digest here")


def test_a_smaller_shop_is_a_prefix_and_a_seed_changes_everything(records, tmp_path):
    small = json.loads((shops.generate(tmp_path / "a", 10) / shops.FILES[0]).read_text())
    other = json.loads((shops.generate(tmp_path / "b", 10, seed=1) / shops.FILES[0]).read_text())
    assert small == records[0][:10]
    assert not {p["asin"] for p in small} & {p["asin"] for p in other}
    assert all(a["name"] != b["name"] for a, b in zip(small, other))


def test_a_shop_is_generated_once(tmp_path):
    """What else can happen to a generated folder: tests/test_corpus.py."""
    folder = shops.generate(tmp_path / "deep" / "shop", 30)
    times = [(folder / n).stat().st_mtime_ns for n in shops.FILES]
    assert shops.generate(folder, 30) == folder
    assert [(folder / n).stat().st_mtime_ns for n in shops.FILES] == times  # found, not regenerated
    assert sorted(p.name for p in folder.iterdir()) == sorted([*shops.FILES, "manifest.json"])


def test_asins_are_unique(tmp_path, monkeypatch):
    monkeypatch.setattr(shops.string, "ascii_uppercase", "")
    monkeypatch.setattr(shops.string, "digits", "01")  # 256 asins are left
    goals = (shops.generate(tmp_path, 200) / shops.FILES[1]).read_text()
    assert len(set(re.findall(r"B0[01]{8}", goals))) == 200


def test_another_shop_in_the_folder_is_an_error(tmp_path):
    folder = shops.generate(tmp_path / "shop", 10)
    for arguments in ((11, 0), (10, 1)):
        with pytest.raises(ValueError, match="'n_products': 10.*delete"):
            shops.generate(folder, *arguments)
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="holds something else"):
        shops.generate(folder, 10)
    with pytest.raises(ValueError, match="n_products is 0; choose 1"):
        shops.generate(tmp_path / "none", 0)
    assert not (tmp_path / "none").exists()


# --- the shop as the environment sees it -----------------------------------------------------


def test_every_goal_is_won_by_its_product_with_its_options_and_by_no_less(shop):
    for i, goal in enumerate(shop.goals):
        options = goal["goal_options"]
        assert shop.reward(i, goal["asin"], options) == 1.0
        for group in options:
            rest = {name: value for name, value in options.items() if name != group}
            assert shop.reward(i, goal["asin"], rest) < 1.0
            for value in shops.OPTIONS[group]:
                value = value.replace("/", " | ")
                if value != options[group]:
                    assert shop.reward(i, goal["asin"], options | {group: value}) < 1.0


def test_human_goals_are_won_by_their_product(tmp_path):
    shop = Shop.load(shops.generate(tmp_path, 400), human_goals=True)
    assert 125 <= len(shop.goals) < 133  # every third product, minus those without attributes
    assert {goal["query"] for goal in shop.goals} == {kind.name for kind in shops.KINDS}
    for i, goal in enumerate(shop.goals):
        offered = [v for values in shop.products[goal["asin"]].options.values() for v in values]
        assert set(goal["goal_options"]) <= set(offered)
        assert shop.reward(i, goal["asin"], dict(enumerate(goal["goal_options"]))) == 1.0
    assert any("cork | leather" in goal["goal_options"] for goal in shop.goals)


# --- the teacher -----------------------------------------------------------------------------


def play(agent, task, rng=None, limit=15):
    """The teacher's commands, with slips if there is a generator; whether it won."""
    step, history = agent.reset(task), []
    shopper = Shopper(step.task)
    while not step.done and len(history) < limit:
        context = Context(step.task, step.observation, step.admissible, history)
        command, thought, _ = shopper.act(context)
        assert command in step.admissible or command.startswith("search[")
        assert 2 <= len(thought.split()) <= 4
        if rng:
            command = shopper.slip(context, command, rng) or command
        history = [*history, Turn(step.observation, command)]
        step = agent.step(command)
    return [turn.command for turn in history], step.won


def test_teacher_wins_in_a_few_steps(shop):
    agent = WebShopAgent(shop)
    episodes = [play(agent, str(i), limit=8) for i in range(len(shop.goals))]
    assert sum(won for _, won in episodes) > 0.97 * len(episodes)
    assert sum(len(commands) for commands, _ in episodes) < 5.8 * len(episodes)


@pytest.mark.parametrize("slips, limit, share", [(0.2, 15, 0.9), (0.4, 100, 0.99)])
def test_teacher_recovers_from_slips(shop, monkeypatch, slips, limit, share):
    monkeypatch.setattr(teacher, "SLIPS", slips)
    agent = WebShopAgent(shop)
    tasks = range(0, len(shop.goals), 4)
    episodes = [play(agent, str(i), random.Random(i), limit) for i in tasks]
    assert sum(won for _, won in episodes) > share * len(episodes)


def test_teacher_compares_words_and_the_lower_price():
    shopper = Shopper("Find me vegan herbal tea, and price lower than 20.00 dollars")
    for title, tag, fits in (("KASMIRO Herbal Vegan Tea", "$20.0 to $25.99", True),
                             ("KASMIRO Vegan Herbal Tea", "$20.49 to $25.99", False),
                             ("VELTOR Herbal Tea", "$9.99", False)):
        assert shopper._fits(title, tag) == fits


def test_teacher_reads_every_form_of_a_synthetic_instruction():
    for text, words_, options, limit in (
        ("Find me soft touch makeup brush", "soft touch makeup brush", {}, float("inf")),
        ("Find me rich face cream, and price lower than 40.00 dollars", "rich face cream", {}, 40),
        ("Find me rich face cream with scent: rose petal", "rich face cream",
         {"scent": "rose petal"}, float("inf")),
        ("Find me loud speaker with style name: with remote, and color: a | b, and price lower "
         "than 90.00 dollars", "loud speaker", {"style name": "with remote", "color": "a | b"}, 90),
    ):
        shopper = Shopper(text)
        assert (" ".join(shopper.words), shopper.options, shopper.limit) == (words_, options, limit)
    with pytest.raises(ValueError, match="cannot read 'i need some tea'; give it a synthetic"):
        Shopper("i need some tea")


def test_the_training_tasks_are_those_of_the_default_shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert teacher.training_tasks() == [str(i) for i in range(312, 1250)]
