"""WebShop (Yao et al., 2022): its pages as text, its clicks, and the agent's view of both.

What it computes: `WebShopEnv` plays one goal after another in a `Shop` and answers as the official
environment does in text mode; tests replay recordings of it. `WebShopAgent` wraps it for training
as the code base that PaW builds on does.

Source: the official `web_agent_text_env.py` and its page templates; for the agent verl-agent. The
official environment renders each page as HTML and parses that three times per step, which takes
nearly all of its time. Here a page is the list of its visible texts from the start.

Rules of the official environment that surprise:

- A search is allowed on every page. A click counts only if the page has it; anything else, and
  everything that is no `name[argument]`, changes nothing.
- The chosen options are shown nowhere: clicking one returns the same page.
- "Next >" has no last page, and an option called like a button ("buy now") is that button.
- Nothing ends after a purchase: one may search and buy again, and is paid again.

Deviations: goals out of range are refused, and `<r>` searches repeat (see `shop.py`). The agent is
stopped after its first purchase, and sees "" then: the official last page prints the score, and an
observation that a world model is trained on must not. An empty one is no target.
"""

import json
import random
import re
from functools import lru_cache, partial
from numbers import Integral
from pathlib import Path

from paw_min.envs import shops
from paw_min.envs.pool import EnvPool
from paw_min.envs.shop import Shop
from paw_min.envs.shop_goals import splits

__all__ = ["Shop", "WebShopAgent", "WebShopEnv", "load_shop", "make_agent", "splits"]

PAGE_SIZE = 10  # products per page of results
WIN_REWARD = 10.0  # verl-agent; in the step that wins, else 0
BUTTONS = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
SUB_PAGES = ("description", "features", "reviews", "attributes")
_ACTION = re.compile(r"(.+)\[(.+)\]")  # greedy, anchored at the start alone: as official
_DONE_PAGE = (  # "instuction" is official
    "Thank you for shopping with us!|Your code:|None|(Paste it in your MTurk interface.)|Purchased|"
    "asin|{asin}|options|{options}|attrs|None|category|None|query|None|product category|None|"
    "Target|asin|options|attrs|price upper|instuction text|category|product category|query|Goal|"
    "None|Reward|Your score (min 0.0, max 1.0)|{score}|Reward Details|None"
).split("|")


def _visible(text: str) -> list[str]:
    """A text of the shop as it appears on a page: stripped, or not at all if there is none.

    HTML habits: blank text with a line break in it vanishes, other blank text leaves an empty part.
    """
    if not text.strip(" \t\n\r\f"):
        return [] if "\n" in text or not text else [""]
    return [text.strip()]


class WebShopEnv:
    """One shopper. These hold for the page shown, after `reset` and each `step`:

    clickables, has_search_bar: what can be done there. instruction_text: "Instruction: " and the
    instruction. parts: the visible texts. head: how many of them stand up to and including the
    instruction (0 on the last page, which has none).
    """

    def __init__(self, shop: Shop, seed: int = 0):
        self.shop = shop
        self.clickables = None  # no page yet
        self._rng = random.Random(seed)  # for goals that are not named

    def reset(self, goal_index=None) -> str:
        """Start with the goal of that index; for None and all that is no int one is drawn."""
        if not isinstance(goal_index, Integral):
            goal_index = self.shop.draw(self._rng)
        self.goal_index, self.goal = int(goal_index), self.shop.goal(int(goal_index))
        self.instruction_text = "Instruction: " + self.goal["instruction_text"]
        self._instruction = ["Instruction:", *_visible(self.goal["instruction_text"])]
        return self._show_index()

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Returns (text, score, done, info); the score is the official one, 0.0 before a purchase.

        info: clickables (list[str], lower case) and has_search_bar (bool) of the page shown.
        """
        if self.clickables is None:
            raise RuntimeError("step before the first reset; call reset first.")
        score, done = 0.0, False
        match = _ACTION.match(action)
        name, argument = match.groups() if match else ("", "")
        argument = argument.lower()
        if name == "search":
            self._results = self.shop.search(argument)
            self._show_results(1)
        elif name == "click" and argument in self.clickables and argument != "search":
            if argument == "buy now":
                score, done = self._buy(), True
            else:
                self._click(argument)
        info = {"clickables": list(self.clickables), "has_search_bar": self.has_search_bar}
        return self.text, score, done, info

    def _click(self, name: str):
        if name == "back to search":
            self._show_index()
        elif self._page == "results":
            if name in ("next >", "< prev"):
                self._show_results(self._number + (1 if name == "next >" else -1))
            else:
                self._product = self.shop.products[self._asins[name]]
                self._show_item()
        elif name == "< prev":
            if self._page == "sub":
                self._show_item()
            else:
                self._show_results(self._number)
        elif name in SUB_PAGES:
            self._show_sub_page(name)
        else:  # an option: the page stays as it is; of two groups that share a value, the last
            group = [g for g, values in self._product.options.items() if name in values][-1]
            self._options[group] = name

    def _buy(self) -> float:
        product, options = self._product, self._options
        score = self.shop.reward(self.goal_index, product.asin, options)
        # Flask's JSON for HTML: these four are escaped, and so is all that is not ASCII.
        shown = json.dumps(options, sort_keys=True)
        for char in "<>&'":
            shown = shown.replace(char, f"\\u{ord(char):04x}")
        values = {"{asin}": product.asin, "{options}": shown, "{score}": str(score)}
        self._show("done", [], [values.get(part, part) for part in _DONE_PAGE], [])
        return score

    # Pages. Results forget product and options, and no other way leads to the next product.

    def _show(self, page: str, head: list, body: list, clickables: list) -> str:
        self._page, self.has_search_bar, self.clickables = page, page == "index", clickables
        self.head, self.parts = len(head), head + body
        self.text = " [SEP] ".join(self.parts)
        return self.text

    def _show_index(self) -> str:
        return self._show("index", ["WebShop", *self._instruction], ["Search"], ["search"])

    def _show_results(self, number: int):
        self._number, self._product, self._options = number, None, {}
        shown = self._results[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        self._asins = {asin.lower(): asin for asin in shown}
        turn = ["< Prev", "Next >"] if number > 1 else ["Next >"]
        body = ["Back to Search", f"Page {number} (Total results: {len(self._results)})", *turn]
        for product in map(self.shop.products.get, shown):
            body += [product.asin, *_visible(product.name), product.price_tag]
        clickables = ["back to search", *map(str.lower, turn), *self._asins]
        self._show("results", self._instruction, body, clickables)

    def _show_item(self):
        product, body = self._product, ["Back to Search", "< Prev"]
        for group, values in product.options.items():
            body += [part for text in (group, *values) for part in _visible(text)]
        body += [*_visible(product.name), f"Price: {product.price_tag}", "Rating: N.A.",
                 "Description", "Features", "Reviews", "Buy Now"]
        values = [value for values in product.options.values() for value in values]
        self._show("item", self._instruction, body, list(dict.fromkeys(BUTTONS + values)))

    def _show_sub_page(self, name: str):
        product = self._product
        texts = {  # the templates put a space before a bullet and an attribute; no shop has reviews
            "description": [product.description],
            "features": [f" {bullet}" for bullet in product.bullets],
            "reviews": [],
            "attributes": [*(f" {attribute}" for attribute in product.attributes),
                           product.category, product.query, product.product_category],
        }[name]
        body = ["Back to Search", "< Prev", *(part for text in texts for part in _visible(text))]
        self._show("sub", self._instruction, body, ["back to search", "< prev"])


def load_shop(folder, human_goals: bool = False, n_products: int | None = None) -> Shop:
    """The shop of a folder, loaded once per process: all its environments share it."""
    return _load_shop(str(folder), bool(human_goals), n_products)


@lru_cache(maxsize=None)
def _load_shop(folder, human_goals, n_products):  # one spelling of the arguments, one shop
    return Shop.load(folder, human_goals=human_goals, n_products=n_products)


def make_agent(folder, human_goals: bool = False, n_products: int | None = None):
    """A WebShopAgent in the process's shop; for EnvPool, in a functools.partial."""
    return WebShopAgent(load_shop(folder, human_goals, n_products))


def generated_data(root: Path = Path("data") / "webshop") -> Path:
    """The default data: a small invented shop in the official files, made on first use."""
    return shops.generate(root, shops.DEFAULT_PRODUCTS, seed=0)


def setup(cfg) -> tuple:
    """(make_pool, goals of the training split, goals of the held-out split) of a run."""
    choice = (str(cfg.data or generated_data()), cfg.human_goals, cfg.n_products or None)
    goals = splits(load_shop(*choice).n_goals)
    for flag, name in (("--train-split", cfg.train_split), ("--eval-split", cfg.eval_split)):
        if name not in goals:
            raise ValueError(f"{flag} {name} is no split of WebShop: use one of {', '.join(goals)}")
    make_pool = partial(EnvPool, partial(make_agent, *choice))
    train, held_out = ([str(i) for i in goals[n]] for n in (cfg.train_split, cfg.eval_split))
    return lambda n: make_pool(n, cfg.workers, cfg.env_timeout), train, held_out


class WebShopAgent:
    """One seat to shop at: tasks are goal indices as strings, one after another.

    Observations are the texts after the instruction, each in single quotes. Everything shown
    depends on the shop, the goal and the actions alone.
    """

    def __init__(self, shop: Shop):
        self._env = WebShopEnv(shop)
        self._running = False

    def reset(self, task: str) -> tuple[str, dict]:
        """Start a task, "0" .. str(n_goals - 1); returns (observation, info).

        info: task (str, the instruction), task_type (str, the product category), admissible
        (list[str]), won (bool: bought at a score of 1.0), score (float: official, 0.0 before).
        """
        if not str(task).isdecimal():
            raise ValueError(f"Task {task!r} is no goal; choose from '0' to "
                             f"'{self._env.shop.n_goals - 1}'.")
        self._env.reset(int(task))
        self._running = True
        return self._observation(), self._info(0.0)

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Returns (observation, reward, done, info), info as in `reset`; done means bought."""
        if not self._running:
            raise RuntimeError("step without a running task (none started, or already bought); "
                               "call reset first.")
        _, score, done, _ = self._env.step(action)
        info = self._info(score)
        self._running = not done
        return "" if done else self._observation(), WIN_REWARD * info["won"], done, info

    def _observation(self) -> str:
        return " [SEP] ".join(f"'{part}'" for part in self._env.parts[self._env.head :])

    def _info(self, score: float) -> dict:
        # The first page offers click[search], which does nothing: so do the others' prompts.
        admissible = ["search[<your query>]"] * self._env.has_search_bar
        admissible += [f"click[{name}]" for name in self._env.clickables]
        goal = self._env.goal
        return {
            "task": goal["instruction_text"].strip(),
            "task_type": goal["category"],
            "admissible": admissible,
            "won": score == 1.0,
            "score": score,
        }
