"""A shop of WebShop: products, search, goals and scores.

`Shop.load` reads the files of a folder and indexes the products. A loaded shop is read-only, so all
environments of a process share one.

Source: the official `engine.py`, with Lucene's ranking (retrieval/bm25.py). Deviations:
`<a> attribute` and a bare `<c>`, which crash the official code, find nothing. `<r>` returns the
same 50 products (or all, if there are fewer) whenever the same query is repeated, so that an
episode can be replayed.
"""

import random
from functools import cached_property

from paw_min.base.files import read_dict
from paw_min.envs.webshop import goals as shop_goals
from paw_min.envs.webshop import reward as shop_reward
from paw_min.envs.webshop.files import REMEDY, SMALL, Product, find_file, read_products
from paw_min.retrieval.bm25 import BM25

MAX_RESULTS = 50  # per search, official


class Shop:
    """Products, search, goals and scores; built by `Shop.load`.

    products: asin -> Product
    tagger: function from a text to its nouns
    """

    def __init__(self, products, templates, tagger):
        self.products = {product.asin: product for product in products}
        self._goals = shop_goals.Goals(templates)
        self._index = BM25(list(self.products), map(_indexed_text, products))
        self.tagger = tagger or shop_reward.default_tagger()
        self._nouns = {}  # title -> nouns

    @classmethod
    def load(cls, folder, human_goals=False, seed=0, n_products=None, tagger=None) -> "Shop":
        """Read a shop. Raises FileNotFoundError or ValueError for missing or damaged data.

        folder: has items_shuffle.json, items_ins_v2.json and, for human goals,
            items_human_ins.json, or the small official versions, `..._1000.json`. With both, the
            full files are read unless n_products is 1000 or less.
        seed: of prices and price limits
        n_products: number of rows to read (None: all)
        tagger: function from a text to its nouns in lower case (None: reward.default_tagger)
        """
        if n_products is not None and n_products < 1:
            raise ValueError(f"n_products is {n_products}; take 1 or more, or None for all.")
        small = n_products is not None and n_products <= SMALL
        items = find_file(folder, "items_shuffle", small)
        small = items.stem.endswith(f"_{SMALL}")  # the annotations must belong to the products
        annotations = read_dict(find_file(folder, "items_ins_v2", small), REMEDY)
        if human_goals:
            instructions = read_dict(find_file(folder, "items_human_ins", small), REMEDY)

        # One generator, used in the official order: all prices, then all price limits.
        rng = random.Random(seed)
        products = read_products(items, annotations, rng, n_products)
        if human_goals:
            templates = shop_goals.human_templates(products, instructions, rng)
        else:
            templates = shop_goals.synthetic_templates(products, annotations, rng)
        if not any(template.count() for template in templates):
            kind = "human" if human_goals else "synthetic"
            raise ValueError(f"{folder} has {len(products)} products and no {kind} goal for any of "
                             f"them; use more products or human_goals={not human_goals}.")
        return cls(products, templates, tagger)

    @property
    def n_goals(self) -> int:
        return len(self._goals)

    @cached_property
    def goals(self) -> list[dict]:
        """All goals; they can take more memory than the shop."""
        return [self._goals[i] for i in range(self.n_goals)]

    def goal(self, index: int) -> dict:
        """One goal, as the dict of the official code."""
        if not 0 <= index < self.n_goals:
            raise ValueError(f"No goal {index} among {self.n_goals}; choose from 0 to "
                             f"{self.n_goals - 1}.")
        return self._goals[index]

    def draw(self, rng: random.Random) -> int:
        """Draw the index of a goal by weight."""
        return self._goals.draw(rng)

    def search(self, query: str) -> list[str]:
        """Return the asins of at most 50 products that share a word with the query, best first.

        query: in lower case. `<c> category` and `<q> query` list all products of a category or
        scraped with a query; `<r>` lists 50 random products.
        """
        first, *words = query.split(" ")
        if first == "<r>":
            n = min(MAX_RESULTS, len(self.products))
            # Seeded by the query: the official draw differs each time.
            return random.Random(f"<r> {query}").sample(list(self.products), n)
        if first == "<c>":
            if not words:
                return []
            category = words[0].strip()  # one word only, as officially
            return [p.asin for p in self.products.values() if p.category == category]
        if first == "<q>":
            phrase = " ".join(words).strip()
            return [p.asin for p in self.products.values() if p.query == phrase]
        if first == "<a>":
            return []
        return [asin for asin, _ in self._index.search(query, MAX_RESULTS)]

    def reward(self, goal_index: int, asin: str, options: dict, price=None) -> float:
        """Score a purchase in [0, 1].

        options: name -> value
        price: replaces the product's own, if given
        """
        product = self.products.get(asin)
        if product is None:
            raise ValueError(f"No product {asin!r} among the {len(self.products)} of this shop; "
                             "choose one that a search lists.")
        if price is None:
            price = product.price
        return shop_reward.reward(product, self.goal(goal_index), price, options, self.nouns)

    def nouns(self, title: str) -> list[str]:
        """The nouns of a title, cached: each purchase needs them, and a spaCy model is slow."""
        if title not in self._nouns:
            self._nouns[title] = self.tagger(title)
        return self._nouns[title]


def _indexed_text(product: Product) -> str:
    """The text that search sees: title, description, first bullet only (official) and options."""
    groups = [f"{name}: {', '.join(values)}" for name, values in product.options.items()]
    options = ", and ".join(groups)
    first_bullet = product.bullets[0] if product.bullets else ""
    return " ".join([product.name, product.description, first_bullet, options]).lower()
