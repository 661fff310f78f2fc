"""WebShop: replays of official recordings, further rules, bad data, the agent, the tasks of a run.

tests/data/webshop has an invented shop of 86 rows and recordings of the official code on it
(Lucene, Flask, thefuzz, seed 0), for human and synthetic goals.
"""

import gzip
import json
import random
import re
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

import pytest

from paw_min.config import Config
from paw_min.envs.interface import Step
from paw_min.envs.webshop import BENCHMARK, Shop, WebShopEnv
from paw_min.envs.webshop import files as shop_files
from paw_min.envs.webshop import reward as shop_reward
from paw_min.envs.webshop.env import WebShopAgent
from paw_min.envs.webshop.goals import splits
from paw_min.envs.webshop.pages import clicked, read_action
from tests.shops import annotation, product

DATA = Path(__file__).parents[1] / "data" / "webshop"
KINDS = ["human", "synthetic"]


@lru_cache
def records(kind) -> dict[str, list[dict]]:
    """The lines of a recording by their type, and those of episodes in their order."""
    lines = defaultdict(list)
    with gzip.open(DATA / f"trace_{kind}.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            lines["episodes" if line["type"] in ("reset", "step") else line["type"]].append(line)
    return lines


@lru_cache
def oracle(kind):
    return Shop.load(DATA, human_goals=kind == "human", tagger=shop_reward.word_nouns)


# --- The recordings


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_equal_the_recorded_ones(kind):
    env = WebShopEnv(oracle(kind))
    counts = Counter()
    for record in records(kind)["episodes"]:
        if record["type"] == "reset":
            assert env.reset(record["session"]) == record["obs"]
            assert env.instruction_text == record["instruction_text"]
        else:
            expected = (record["obs"], record["reward"], record["done"], record["available"])
            assert env.step(record["action"]) == expected, record["action"]
            counts["bought"] += record["done"]
        shown = {"has_search_bar": env.has_search_bar, "clickables": env.clickables}
        assert shown == record["available"]
        counts[record["type"]] += 1
    expected = {"human": (80, 874, 61), "synthetic": (80, 715, 68)}[kind]
    assert (counts["reset"], counts["step"], counts["bought"]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_goals_prices_and_draws_equal_the_recorded_ones(kind):
    shop = oracle(kind)
    (record,) = records(kind)["goals"]
    assert shop.goals == record["goals"]
    assert [list(goal) for goal in shop.goals] == [list(goal) for goal in record["goals"]]
    assert {asin: product.price for asin, product in shop.products.items()} == record["prices"]
    assert len(records(kind)["random_idx"]) == 3
    for record in records(kind)["random_idx"]:
        rng = random.Random(record["seed"])
        assert [shop.draw(rng) for _ in record["draws"]] == record["draws"]


@pytest.mark.parametrize("kind", KINDS)
def test_searches_equal_the_recorded_ones(kind):
    shop = oracle(kind)
    searches = records(kind)["search"]
    assert len(searches) == {"human": 175, "synthetic": 131}[kind]
    for record in searches:
        assert shop.search(record["query"]) == record["asins"], record["query"]
        hits = shop._index.search(record["query"], 50)
        assert [round(score, 4) for _, score in hits] == record["scores"], record["query"]


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_equal_the_recorded_ones(kind):
    shop = oracle(kind)
    cases = records(kind)["reward_case"]
    assert len(cases) == 2000
    for case in cases:
        score = shop.reward(case["goal"], case["asin"], case["options"], case["price"])
        assert score == case["reward"], case


# --- Rules beyond the recordings


def write(folder, products, suffix=""):
    annotations = {product["asin"]: annotation() for product in products}
    for stem, content in [("items_shuffle", products), ("items_ins_v2", annotations)]:
        (folder / f"{stem}{suffix}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_actions_are_those_of_the_official_regex():
    rng = random.Random(0)
    for _ in range(3000):
        parts = ["search", "click", "[", "]", "a", "\n", " "]
        text = "".join(rng.choices(parts, k=rng.randrange(9)))
        match = re.match(r"(.+)\[(.+)\]", text)
        assert read_action(text) == (match.groups() if match else ("", "")), text
    assert read_action("search[" * 100_000).name == ""  # the regex takes hours


def test_an_option_is_clicked_as_a_tokenizer_can_write_it():
    options = ["cafe\u0301", "\uff08\u00bd\uff09", "(1\u20442) cup"]
    for written, option in (("caf\u00e9", 0), ("cafe\u0301", 0), ("\uff08\u00bd\uff09", 1),
                            ("(1\u20442)", 1), ("cafe", None)):
        found = clicked(f"click[{written}]", options)
        assert found == (None if option is None else options[option])


def test_search_forms(tmp_path):
    shop = Shop.load(write(tmp_path, [product(f"B{i:09}") for i in range(60)]))
    assert shop.search("<c>") == shop.search("<a> solid wood") == shop.search("nothing") == []
    drawn = shop.search("<r>")
    assert len(set(drawn)) == 50 and drawn == shop.search("<r>") != shop.search("<r> again")
    assert len(shop.search("bench")) == 50


# --- Goals


@pytest.mark.parametrize("n, test, evaluation", [(6910, 500, 1000), (12, 1, 2)])
def test_splits(n, test, evaluation):
    assert splits(n) == {
        "test": range(test),
        "eval": range(test, test + evaluation),
        "train": range(test + evaluation, n),
    }


def test_goals_do_not_depend_on_the_global_generator():
    before = oracle("synthetic").goals[:50]
    random.seed(5)
    state = random.getstate()
    shop = Shop.load(DATA)
    assert shop.goals[:50] == before and random.getstate() == state
    assert Shop.load(DATA, seed=1).goals[:50] != before


# --- Files


def test_a_chunk_can_end_anywhere(monkeypatch):
    monkeypatch.setattr(shop_files, "CHUNK", 1)
    path = DATA / "items_shuffle.json"
    assert list(shop_files._read_list(path, None)) == json.loads(path.read_bytes())


def test_full_or_small_files(tmp_path):
    write(tmp_path, [product(name="Full")])
    write(tmp_path, [product(name="Small")], suffix="_1000")

    def name(**choice):
        return Shop.load(tmp_path, **choice).products["B000000001"].name

    assert name() == name(n_products=1001) == "Full" and name(n_products=1000) == "Small"
    (tmp_path / "items_shuffle.json").unlink()
    assert name() == "Small"
    # reads the annotations of the same set, though both exist
    (tmp_path / "items_ins_v2.json").write_text("{}", encoding="utf-8")
    assert name() == "Small"


# --- The agent; test_run_scripts.py has its purchases


def test_the_agents_view():
    shop = oracle("synthetic")
    agent = WebShopAgent(shop)
    goal = shop.goal(1)
    step = agent.reset("1")
    assert step == Step("'Search'", task=goal["instruction_text"], task_type="fashion",
                        admissible=["search[<your query>]", "click[search]"], score=0.0)
    step = agent.step(f"search[{goal['query']}]")
    assert step.observation.startswith("'Back to Search' [SEP] 'Page 1 (Total results: ")
    assert goal["instruction_text"] not in step.observation
    assert step.admissible[:2] == ["click[back to search]", "click[next >]"]
    assert agent.step("no command") == step


# --- The tasks of a run


@pytest.mark.parametrize("human, n_goals", [(False, 788), (True, 97)])
def test_load_splits_the_goals(human, n_goals):
    cfg = Config(env="webshop", eval_split="test", human_goals=human)
    tasks = BENCHMARK.load(cfg, str(DATA))
    parts = splits(n_goals)
    assert tasks.train == [str(i) for i in parts["train"]]
    assert tasks.held_out == [str(i) for i in parts["test"]]
    with tasks.make_pool(2) as pool:
        pool.reset(1, tasks.train[0])
        slot, step = pool.recv()
        assert (pool.n_envs, slot) == (2, 1)
    assert step.task == oracle(KINDS[not human]).goal(parts["train"][0])["instruction_text"]
