"""The generator of shops, the teacher for WebShop, and its demonstrations."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from paw_min.envs.interface import Context, Turn
from paw_min.envs.webshop import Shop
from paw_min.envs.webshop.env import WebShopAgent
from paw_min.toy import default_data
from paw_min.toy import webshop_shops as shops
from paw_min.toy import webshop_teacher as teacher
from paw_min.toy.webshop_teacher import Shopper, demonstrations

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


def words(text):
    """Split like the tokenizer of the stand-in."""
    return re.findall(r"\w+|[^\w\s]+", text.lower())


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


# --- what is in a shop -----------------------------------------------------------------------


def test_products_have_the_official_form(records):
    products, goals, humans = records
    assert len({p["asin"] for p in products}) == 100
    kinds = {kind.name: kind for kind in shops.KINDS}
    assert Counter(p["query"] for p in products) == dict.fromkeys(kinds, 5)
    assert len({p["category"] for p in products}) == 5
    for p in products:
        kind, goal = kinds[p["query"]], goals[p["asin"]]
        assert re.fullmatch("B0[0-9A-Z]{8}", p["asin"]) and p["images"]
        brand, title = p["name"].split(" ", 1)
        assert re.fullmatch(r"[A-Z]{4,}\d*", brand)
        assert not re.search("[A-Z]{4}", title)  # it would look like a brand
        assert 5 <= len(p["name"].split()) <= 7
        assert title.lower() == " ".join([*goal["attributes"][:2], kind.name])
        assert p["product_category"].split(" › ")[-1].lower() == kind.name
        assert set(goal["instruction_attributes"]) <= set(goal["attributes"]) <= set(
            kind.attributes)
        assert goal["instruction"] in (
            None, f"Find me {', '.join(goal['instruction_attributes'])} {kind.name}")
        for name, values in (p["customization_options"] or {}).items():
            assert values is None or 3 <= len(values) <= 5
            assert values is None or {v["value"].lower() for v in values} <= set(
                shops.OPTIONS[name.lower()])
    assert len(humans) == 33
    for asin, (human,) in humans.items():
        assert human["asin"] == asin
        assert all(value in human["instruction"] for value in human["instruction_options"])
        assert len(human["options"]) == len(human["instruction_options"])


def test_every_oddity_of_the_official_data_occurs(records):
    products, goals, humans = records
    options = [p["customization_options"] for p in products]
    assert None in options and any(o and None in o.values() for o in options)
    pricing = [p["pricing"] for p in products]
    assert {"", None} & set(pricing) and "$1,099.99" in pricing
    assert sum(bool(re.fullmatch(r"\$\d+\.\d\d", p or "")) for p in pricing) > 90
    assert any(re.fullmatch(r"\$[\d.]+\$[\d.]+", p or "") for p in pricing)
    assert any(re.fullmatch(r"\$[\d.]+ - \$[\d.]+", p or "") for p in pricing)
    assert any(p["full_description"] == "" for p in products)
    assert any(isinstance(p["small_description"], str) for p in products)
    assert any(goal["instruction"] is None for goal in goals.values())
    assert any(human[0]["instruction_attributes"] == [] for human in humans.values())


def test_option_values_are_unambiguous(shop):
    buttons = {"buy now", "< prev", "next >", "description", "features", "reviews", "search",
               "back to search", "attributes"}
    for kind in shops.KINDS:
        values = [value for group in kind.groups for value in shops.OPTIONS[group]]
        assert len(values) == len(set(values)) and not buttons & set(values)
        assert all(re.fullmatch(r"\w+( \w+)*(/\w+)?", value) for value in values)


def test_every_kind_has_several_products(shop):
    asked = {}
    for goal in shop.goals:
        asked.setdefault(goal["query"], set()).add(goal["asin"])
    assert sum(len(asins) >= 3 for asins in asked.values()) == len(asked) == 20


# --- the shop as the environment sees it -----------------------------------------------------


def test_default_shop_is_small_enough_for_a_word_level_model(shop, folder):
    agent, seen = WebShopAgent(shop), Counter()
    rng, lengths = random.Random(0), []
    for task in rng.sample(range(len(shop.goals)), 300):
        for step, *_ in play(agent, str(task), slips=0.3, seed=task):
            seen.update(words(step.observation + " ".join([step.task, *step.admissible])))
            lengths.append(len(words(step.observation)))
    asins = {asin.lower() for asin in json.loads((folder / shops.FILES[1]).read_text())}
    assert 1000 <= len(shop.goals) <= 1500
    assert len(set(seen) - asins) < 600
    assert max(lengths) < 350


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


def test_a_good_query_finds_the_product_among_the_first(shop):
    ranks = Counter()
    for goal in shop.goals:
        query = " ".join(goal["attributes"] + [goal["query"]])
        ranks[shop.search(query).index(goal["asin"])] += 1
    assert max(ranks) < 10
    assert ranks[0] < 0.9 * len(shop.goals)  # the first result is not always right


# --- the teacher -----------------------------------------------------------------------------


def play(agent, task, slips=0.0, seed=0, limit=15):
    """The teacher's episode: [(step, its command, command executed)], and the last step."""
    rng = random.Random(seed)
    step, steps, history = agent.reset(task), [], []
    shopper = Shopper(step.task)
    while not step.done and len(steps) < limit:
        command, _ = shopper.act(Context(step.task, step.observation, step.admissible, history))
        assert command in step.admissible or command.startswith("search[")
        slip = rng.random() < slips
        executed = teacher._slip(rng, shopper.words, step.admissible) if slip else command
        steps.append((step, command, executed))
        history = [*history, Turn(step.observation, executed)]
        step = agent.step(executed)
    return [*steps, (step, None, None)]


def test_teacher_wins_in_a_few_steps(shop):
    agent = WebShopAgent(shop)
    episodes = [play(agent, str(i), limit=8) for i in range(len(shop.goals))]
    assert sum(episode[-1][0].won for episode in episodes) > 0.97 * len(episodes)
    assert sum(len(episode) - 1 for episode in episodes) < 5.8 * len(episodes)
    first = sum(episode[1][1] == episode[1][0].admissible[2] for episode in episodes)
    assert 0.6 < first / len(episodes) < 0.9  # the first result is not always right


def test_teacher_recovers_from_slips(shop):
    agent = WebShopAgent(shop)
    for slips, limit, share in ((0.2, 15, 0.9), (0.4, 100, 0.99)):
        episodes = [play(agent, str(i), slips, i, limit) for i in range(0, len(shop.goals), 4)]
        assert sum(episode[-1][0].won for episode in episodes) > share * len(episodes)
    commands = repr([[command for *_, command in episode] for episode in episodes])
    assert hashlib.sha256(commands.encode()).hexdigest()[:12] == "eb2ffb5989d3"


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


# --- demonstrations --------------------------------------------------------------------------


def render(context):
    commands = " ".join(turn.command for turn in context.history)
    return f"{context.task}\n{commands}\n{context.observation}\n{context.admissible}"


def demonstrate(shop, haste, seed=0, episodes=1):
    return demonstrations([str(i) for i in range(0, len(shop.goals), 25)], seed, haste,
                          episodes, render, shop)


def test_demonstrations_are_well_formed_and_repeatable(shop):
    rows = demonstrate(shop, 0.0)
    assert demonstrate(shop, 0.0) == rows != demonstrate(shop, 0.0, seed=1)
    assert 1.6 < len(demonstrate(shop, 0.0, episodes=2)) / len(rows) < 2.4
    for prompt, response, _ in rows:
        thought, command = re.fullmatch(r"<think>(.+)</think><action>(.+)</action>",
                                        response).groups()
        assert 2 <= len(thought.split()) <= 4
        assert f"'{command}'" in prompt or command.startswith("search[")
    unknown = sum(o == "" and "buy now" not in r for _, r, o in rows) / len(rows)
    assert 0.1 < unknown < 0.3  # slips


def test_demonstrated_responses_follow_from_what_a_prompt_shows(shop):
    rows = demonstrations([str(i) for i in range(0, len(shop.goals), 25)], 0, 0.0, 1,
                          lambda c: replace(c, history=list(c.history)), shop)
    turn = 0
    for context, response, _ in rows:
        turn = turn + 1 if context.history else 0
        assert len(context.history) == turn
        context.history = [Turn("", command) for _, command in context.history[-3:]]
        command, thought = Shopper(context.task).act(context)
        assert response == f"<think>{thought}</think><action>{command}</action>"


def test_the_default_shop_is_used(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert teacher.training_tasks() == [str(i) for i in range(312, 1250)]
    assert demonstrations(["3"], 0, 0.0, 1, render) == demonstrations(
        ["3"], 0, 0.0, 1, render, Shop.load(default_data("webshop")))
    assert digest(tmp_path / "data" / "webshop") == digest(shops.generate(tmp_path / "again"))


def test_haste_buys_before_all_options_are_chosen(shop):
    def early(rows):
        """Share of purchases that contradict the thought."""
        bought = [r for _, r, _ in rows if "<action>click[buy now]" in r]
        return sum("<think>buy " not in r for r in bought) / len(bought)

    assert early(demonstrate(shop, 0.0)) == 0.0
    assert 0.4 < early(demonstrate(shop, 0.35)) < 0.9
    assert early(demonstrate(shop, 1.0)) > 0.9


def test_haste_clicks_the_first_result(shop):
    rows = [(p.split("\n")[3], r) for p, r, _ in demonstrate(shop, 1.0) if "<think>pick " in r]
    for admissible, response in rows:
        first = re.search(r"click\[b0\w{8}\]", admissible)[0]
        assert response.endswith(f"<action>{first}</action>")
