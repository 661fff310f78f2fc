"""A WebShop: its products, how they are found, and what buying one is worth.

What it computes: `Shop.load` reads the files of a folder and indexes the products; the shop then
answers searches, makes goals and scores purchases. Nothing in it changes afterwards, so all
environments of a process share one.

Source: the official `engine.py`, with Lucene's ranking (see `bm25.py`). Deviations: `<a> attribute`
and a bare `<c>`, which stop the official code, find nothing; `<r>` finds the same 50 products each
time the same query is given, so that an episode can be played again, and all if there are fewer.
"""

import random
from collections import Counter
from functools import cached_property

from paw_min.envs import shop_goals, shop_reward
from paw_min.envs.bm25 import BM25
from paw_min.envs.shop_files import SMALL, Product, find_file, read_dict, read_products

MAX_RESULTS = 50  # official, of a search


class Shop:
    """Products, search, goals and score. Use `Shop.load`.

    goals: list of dicts, made when first asked for; `goal(i)` makes one alone. dropped: reason ->
    number of rows of the files that were left out. tagger: the one in use.
    """

    def __init__(self, products, wishes, dropped, tagger):
        self.products = {product.asin: product for product in products}
        self.dropped = {reason: n for reason, n in dropped.items() if n}
        self._goals = shop_goals.Goals(wishes)
        self._index = BM25(list(self.products), map(_indexed_text, products))
        self.tagger, self._nouns = tagger or shop_reward.default_tagger(), {}

    @classmethod
    def load(cls, folder, human_goals=False, seed=0, n_products=None, tagger=None) -> "Shop":
        """Read a shop; raises FileNotFoundError or ValueError for data that it cannot use.

        folder: holds items_shuffle.json, items_ins_v2.json and, for human goals,
        items_human_ins.json, or the official small `..._1000.json`. If both are there, the full
        file is read, unless n_products is 1000 or less.
        seed: of prices and price limits. n_products: keep the first n rows (default: all).
        tagger: text -> list of its nouns in lower case (default: see shop_reward.default_tagger).
        """
        if n_products is not None and n_products < 1:
            raise ValueError(f"n_products is {n_products}; take 1 or more, or None for all.")
        small = n_products is not None and n_products <= SMALL
        items = find_file(folder, "items_shuffle", small)
        small = items.stem.endswith(f"_{SMALL}")  # the annotations go with the products found
        annotations = read_dict(find_file(folder, "items_ins_v2", small))
        if human_goals:
            instructions = read_dict(find_file(folder, "items_human_ins", small))

        # One generator in the official order: the prices of all products, then all limits.
        rng, dropped = random.Random(seed), Counter()
        products = read_products(items, annotations, rng, dropped, n_products)
        if human_goals:
            wishes = shop_goals.human_wishes(products, instructions, rng, dropped)
        else:
            wishes = shop_goals.synthetic_wishes(products, annotations, rng, dropped)
        if not any(wish.count() for wish in wishes):
            kind = "human" if human_goals else "synthetic"
            raise ValueError(f"{folder} has {len(products)} products and no {kind} goal for any of "
                             f"them; take more products or human_goals={not human_goals}.")
        return cls(products, wishes, dropped, tagger)

    @property
    def n_goals(self) -> int:
        return len(self._goals)

    @cached_property
    def goals(self) -> list[dict]:
        return list(self._goals)

    def goal(self, index: int) -> dict:
        if not 0 <= index < self.n_goals:
            raise ValueError(f"No goal {index} among {self.n_goals}; choose from 0 to "
                             f"{self.n_goals - 1}.")
        return self._goals[index]

    def draw(self, rng: random.Random) -> int:
        """Index of a goal, drawn by weight."""
        return self._goals.draw(rng)

    def search(self, query: str) -> list[str]:
        """Asins that a query (in lower case) finds, best first.

        50 at most, of the products that share a word with it. `<c> category` and `<q> query` list
        all products of a category or collected with a query, `<r>` 50 at random.
        """
        first, *words = query.split(" ")
        if first == "<r>":
            n = min(MAX_RESULTS, len(self.products))
            return random.Random(f"<r> {query}").sample(list(self.products), n)
        if first == "<c>":  # the second word alone
            category = words[0].strip() if words else None
            return [p.asin for p in self.products.values() if p.category == category]
        if first == "<q>":
            phrase = " ".join(words).strip()
            return [p.asin for p in self.products.values() if p.query == phrase]
        if first == "<a>":
            return []
        return [asin for asin, _ in self._index.search(query, MAX_RESULTS)]

    def reward(self, goal_index: int, asin: str, options: dict, price=None) -> float:
        """Score in [0, 1] of buying a product with options (name -> value); price: not its own."""
        product = self.products.get(asin)
        if product is None:
            raise ValueError(f"No product {asin!r} among the {len(self.products)} of this shop; "
                             "take one that a search lists.")
        price = product.price if price is None else price
        return shop_reward.reward(product, self.goal(goal_index), price, options, self.nouns)

    def nouns(self, title: str) -> list[str]:
        """The tagger's nouns, kept: they are needed at each purchase, and a model is slow."""
        if title not in self._nouns:
            self._nouns[title] = self.tagger(title)
        return self._nouns[title]


def _indexed_text(product: Product) -> str:
    """What the search engine knows: title, description, the FIRST bullet and the options."""
    options = ", and ".join(f"{name}: {', '.join(v)}" for name, v in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return " ".join([product.name, product.description, first, options]).lower()
