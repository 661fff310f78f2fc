"""WebShop's goals: what the user wants, how it is said, in which order, and how goals are split.

What it computes: from the products and their annotations the list of goals, shuffled once; and
which of them are for testing, for choosing and for training.

Source: the official `goal.py` and, for splits, the paper's baselines. There are two kinds:

- human: one goal per sentence that a person wrote; its options are a list of values.
- synthetic: one goal per product and combination of its option values, said by a template; its
  options are a dict. 1,000 products make some 7,000 goals.

Deviations, all in randomness. Price limits and the prices of ranges come from a seed of our own
(the official code draws them before it sets one). There is one shuffle, with the official seed, and
one split: in the code base that PaW builds on, each worker shuffles with a seed of its own, so that
an index means another goal in each worker and training meets the goals it is tested on.

A goal is made when asked for. A list of all would take more memory than the shop.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

SHUFFLE_SEED = 233  # official
NO_LIMIT = 1_000_000  # dollars, where fewer than two limits fit above the price


@dataclass(slots=True)
class Wish:
    """An instruction about a product: one goal, or one per combination of the product's options."""

    product: object  # shop.Product
    text: str  # what is wanted, without options and price
    attributes: list[str]
    price_upper: float
    options: list[str] | None  # of a human goal; None: any combination of the product's own
    weight: float = 1  # in the draw of a goal

    def count(self) -> int:
        """How many goals it makes."""
        if self.options is not None:
            return 1
        return math.prod(len(values) for values in self.product.options.values())

    def goal(self, number: int) -> dict:
        """Goal 0 .. count - 1: combinations in order of option names, the last name fastest."""
        options, said = self.options, ""
        if options is None:
            chosen = []
            for name in sorted(self.product.options, reverse=True):
                number, which = divmod(number, len(self.product.options[name]))
                chosen.append((name, self.product.options[name][which]))
            options = dict(reversed(chosen))
            said = ", and ".join(f"{name}: {value}" for name, value in options.items())
            said = said and f" with {said}"
        limit = f", and price lower than {self.price_upper:.2f} dollars"
        product = self.product
        return {
            "asin": product.asin,
            "category": product.category,
            "query": product.query,
            "name": product.name,
            "product_category": product.product_category,
            "instruction_text": self.text + said + limit * (self.price_upper != NO_LIMIT),
            "attributes": self.attributes,
            "price_upper": self.price_upper,
            "goal_options": options,
            "weight": self.weight,
        }


def price_limit(price: float, rng: random.Random) -> float:
    """The larger of two of the next four multiples of 10 dollars above the price, below 1000."""
    limits = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    return max(rng.sample(limits, 2)) if len(limits) >= 2 else NO_LIMIT


def human_wishes(products, instructions: dict, rng, dropped: Counter) -> list[Wish]:
    """One wish per written instruction of a product that is there and that names an attribute.

    products: in order of loading. instructions: asin -> records of items_human_ins.json.
    """
    known = {product.asin for product in products}
    dropped["instruction whose product is missing"] += sum(
        len(records) for asin, records in instructions.items() if asin not in known
    )
    wishes = []
    for product in products:
        for record in instructions.get(product.asin, ()):
            attributes = _field(record, "instruction_attributes", list, product.asin)
            if not attributes:
                dropped["instruction without attributes"] += 1
                continue
            text = _field(record, "instruction", str, product.asin).strip(".")
            options = _field(record, "instruction_options", list, product.asin)
            limit = price_limit(product.price, rng)
            wishes.append(Wish(product, text, attributes, limit, options))
    return wishes


def synthetic_wishes(products, annotations: dict, rng, dropped: Counter) -> list[Wish]:
    """One wish per product with an instruction, weighted so that rare attributes come up, too.

    annotations: asin -> record of items_ins_v2.json.
    """
    wishes = []
    for product in products:
        record = annotations.get(product.asin)
        if record is None:
            raise ValueError(f"Product {product.asin} is not in items_ins_v2: the two files do not "
                             "belong together; take both from the same download.")
        if record.get("instruction") is None:
            continue
        attributes = _field(record, "instruction_attributes", list, product.asin)
        if not attributes:  # stops the official code
            dropped["instruction without attributes"] += 1
            continue
        text = _field(record, "instruction", str, product.asin)
        wishes.append(Wish(product, text, attributes, price_limit(product.price, rng), None))
    frequency = Counter()  # attribute -> goals that ask for it
    for wish in wishes:
        for attribute in wish.attributes:
            frequency[attribute] += wish.count()
    for wish in wishes:
        if wish.count():
            wish.weight = sum(1 / frequency[a] for a in wish.attributes) / len(wish.attributes)
    return wishes


def _field(record, key, kind, asin):
    if not isinstance(record, dict) or not isinstance(record.get(key), kind):
        raise ValueError(f"An instruction of product {asin} has no {kind.__name__} called {key!r}; "
                         "the file is damaged, get it again.")
    return record[key]


class Goals:
    """The goals of some wishes, shuffled: `len`, `[i]`, `draw`."""

    def __init__(self, wishes: list[Wish]):
        counts = [wish.count() for wish in wishes]
        order = list(range(sum(counts)))
        random.Random(SHUFFLE_SEED).shuffle(order)
        self._wishes = wishes
        self._order = np.array(order, np.int32)  # shuffled goal -> its number before
        self._starts = np.cumsum([0, *counts])  # wish -> number of its first goal
        weights = np.repeat([float(wish.weight) for wish in wishes], counts)[self._order]
        self._cumulative = np.concatenate([[0.0], np.cumsum(weights)])

    def __len__(self):
        return len(self._order)

    def __getitem__(self, i: int) -> dict:
        if not 0 <= i < len(self):
            raise IndexError(i)  # ends an iteration, too
        number = int(self._order[i])
        wish = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._wishes[wish].goal(number - int(self._starts[wish]))

    def draw(self, rng: random.Random) -> int:
        """Index of a goal, drawn by weight, as the official code does it: off by one.

        Goal i comes up with the weight of goal i - 1, and the last one with its own on top; goal 0
        never does.
        """
        position = rng.uniform(0, self._cumulative[-1])
        return min(int(np.searchsorted(self._cumulative, position, side="right")), len(self) - 1)


def splits(n_goals: int) -> dict[str, range]:
    """Indices of the goals for "train", "eval" and "test", which never overlap.

    The paper's test 0-499 and eval 500-1499 from 6,000 goals on, so on the small official set with
    its 6,910, too. Below, a twelfth and a sixth of the goals, which is the same at 6,000. Goals of
    one product may differ in an option only and stand in different parts, as in the paper.
    """
    if n_goals < 12:
        raise ValueError(f"{n_goals} goals cannot be split; 12 or more are needed: take a shop "
                         "with more products.")
    n_test, n_eval = min(500, n_goals // 12), min(1000, n_goals // 6)
    return {"train": range(n_test + n_eval, n_goals), "eval": range(n_test, n_test + n_eval),
            "test": range(n_test)}
