"""The official WebShop environment (Yao et al., 2022) in text mode: its pages and its commands.

`WebShopEnv` plays one goal after another in a `Shop`. It returns the same texts, scores and
clickables as the official environment; the tests replay recordings of it. The interface and its
names (`action`, the tuple that `step` returns) are the official ones.

Source: the official `web_agent_text_env.py` and its page templates. The official code renders each
page as HTML and parses it three times per step, which takes nearly all of its time. Here a page is
a list of its visible texts.

Surprising rules of the official environment, all kept:

- A search is allowed on every page. A click counts only if the page has the button or link.
  Anything else, including text that is not `name[argument]`, changes nothing.
- Chosen options are not shown: clicking an option returns the same page.
- "Next >" has no last page. An option named like a button ("buy now") acts as that button.
- A purchase does not end anything: the agent can search, buy and be paid again.

Deviations: goal indices out of range raise an error, and `<r>` searches repeat (see shop.py).
"""

import json
import random
from numbers import Integral
from typing import NamedTuple

from paw_min.envs.prompting import as_listed
from paw_min.envs.webshop.shop import Shop

PAGE_SIZE = 10  # products per page of results
BUTTONS = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
SUB_PAGES = ("description", "features", "reviews", "attributes")
_DONE_PAGE = (  # "instuction" is the official spelling
    "Thank you for shopping with us!|Your code:|None|(Paste it in your MTurk interface.)|Purchased|"
    "asin|{asin}|options|{options}|attrs|None|category|None|query|None|product category|None|"
    "Target|asin|options|attrs|price upper|instuction text|category|product category|query|Goal|"
    "None|Reward|Your score (min 0.0, max 1.0)|{score}|Reward Details|None"
).split("|")


class Action(NamedTuple):
    name: str
    argument: str


def read_action(text: str) -> Action:
    """What the official regex, (.+)[(.+)] with plain brackets, reads; else two empty texts.

    In linear time: the regex tries every pair of brackets, which takes minutes for a long command.
    """
    line = text.partition("\n")[0]  # a dot matches all but line breaks
    end = line.rfind("]")
    # Both groups are greedy, and have at least one character.
    start = line.rfind("[", 1, max(0, end - 1))
    if start < 0:
        return Action("", "")
    return Action(line[:start], line[start + 1 : end])


def clicked(action: str, clickables: list[str]) -> str | None:
    """What an action clicks on a page, in lower case; None: not a click, or not on the page.

    The official code excludes "search": the button of the start page does nothing.
    """
    name, argument = read_action(action)
    argument = as_listed(argument.lower(), clickables)
    if name != "click" or argument not in clickables or argument == "search":
        return None
    return argument


def _visible(text: str) -> list[str]:
    """The stripped text as a list of one part, or of none if the page does not show it.

    As in the official HTML parsing, blank text is an empty part unless it has a line break.
    """
    is_blank = not text.strip(" \t\n\r\f")  # white space of HTML; strip() removes more
    if not is_blank:
        return [text.strip()]
    if text and "\n" not in text:
        return [""]
    return []


class WebShopEnv:
    """The official environment. After `reset` and `step`, these describe the current page:

    text: the page as one string
    parts: its visible texts
    head: number of parts up to and including the instruction; 0 on the last page, which has none
    clickables: lower-case names of what can be clicked
    has_search_bar: True on the start page
    instruction_text: "Instruction: " and the goal's instruction
    """

    def __init__(self, shop: Shop, seed: int = 0):
        self.shop = shop
        self.clickables = None  # no page yet
        self._rng = random.Random(seed)  # draws goals for resets without an index

    def reset(self, goal_index=None) -> str:
        """Start the goal with this index. Draw one if it is not an integer, as officially."""
        if not isinstance(goal_index, Integral):
            goal_index = self.shop.draw(self._rng)
        self.goal_index = int(goal_index)
        self.goal = self.shop.goal(self.goal_index)
        self.instruction_text = "Instruction: " + self.goal["instruction_text"]
        self._instruction = ["Instruction:", *_visible(self.goal["instruction_text"])]
        self._show_index()
        return self.text

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Return (text, score, done, info). The score is 0.0 except at a purchase.

        info: `clickables` and `has_search_bar` of the new page.
        """
        if self.clickables is None:
            raise RuntimeError("step before the first reset; call reset first.")
        score = 0.0
        done = False
        name, argument = read_action(action)
        target = clicked(action, self.clickables)
        if name == "search":
            self._results = self.shop.search(argument.lower())
            self._show_results(1)
        elif target == "buy now":
            score = self._buy()
            done = True
        elif target is not None:
            self._click(target)
        info = {"clickables": list(self.clickables), "has_search_bar": self.has_search_bar}
        return self.text, score, done, info

    def _click(self, name: str):
        # The order of the cases is the official one: it decides what an option named like a button
        # does.
        if name == "back to search":
            self._show_index()
        elif self._page == "results":
            if name == "next >":
                self._show_results(self._number + 1)
            elif name == "< prev":
                self._show_results(self._number - 1)
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
        else:  # an option; if several groups have this value, the last one is set
            groups = [g for g, values in self._product.options.items() if name in values]
            self._options[groups[-1]] = name

    def _buy(self) -> float:
        asin = self._product.asin
        score = self.shop.reward(self.goal_index, asin, self._options)
        # Flask's JSON for HTML escapes these four characters and everything outside ASCII.
        shown = json.dumps(self._options, sort_keys=True)
        for char in "<>&'":
            shown = shown.replace(char, f"\\u{ord(char):04x}")
        values = {"{asin}": asin, "{options}": shown, "{score}": str(score)}
        body = [values.get(part, part) for part in _DONE_PAGE]
        self._show("done", head=[], body=body, clickables=[])
        return score

    # The pages. Only results pages link to products, so they clear the product and its options.

    def _show(self, page: str, head: list, body: list, clickables: list):
        self._page = page  # index, results, item, sub or done
        self.has_search_bar = page == "index"
        self.clickables = clickables
        self.head = len(head)
        self.parts = head + body
        self.text = " [SEP] ".join(self.parts)

    def _show_index(self):
        self._show("index", ["WebShop", *self._instruction], ["Search"], ["search"])

    def _show_results(self, number: int):
        self._number = number
        self._product = None
        self._options = {}  # name -> chosen value
        shown = self._results[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        self._asins = {asin.lower(): asin for asin in shown}  # links are in lower case
        turn = ["Next >"]
        if number > 1:
            turn = ["< Prev", "Next >"]
        body = ["Back to Search", f"Page {number} (Total results: {len(self._results)})", *turn]
        for product in map(self.shop.products.get, shown):
            body += [product.asin, *_visible(product.name), product.price_tag]
        clickables = ["back to search", *map(str.lower, turn), *self._asins]
        self._show("results", self._instruction, body, clickables)

    def _show_item(self):
        product = self._product
        body = ["Back to Search", "< Prev"]
        clickables = list(BUTTONS)
        for group, values in product.options.items():
            for text in (group, *values):
                body += _visible(text)
            clickables += values
        body += _visible(product.name)
        body += [f"Price: {product.price_tag}", "Rating: N.A.", "Description", "Features",
                 "Reviews", "Buy Now"]
        # Each name once: an option may be named like a button, or be in two groups.
        clickables = list(dict.fromkeys(clickables))
        self._show("item", self._instruction, body, clickables)

    def _show_sub_page(self, name: str):
        product = self._product
        # The official templates indent bullets and attributes by a space: a blank one is shown.
        if name == "description":
            texts = [product.description]
        elif name == "features":
            texts = [f" {bullet}" for bullet in product.bullets]
        elif name == "reviews":
            texts = []  # the official data have none
        else:
            texts = [f" {attribute}" for attribute in product.attributes]
            texts += [product.category, product.query, product.product_category]
        body = ["Back to Search", "< Prev"]
        for text in texts:
            body += _visible(text)
        self._show("sub", self._instruction, body, ["back to search", "< prev"])
