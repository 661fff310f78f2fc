"""WebShop's goals: their generation, shuffled order, random draw and splits.

Source: the official `goal.py`; the splits follow the WebShop paper's baselines. Two kinds:

- human: one goal per instruction written by a person; its options are a list of values.
- synthetic: one goal per product and combination of its option values, with an instruction from a
  template; its options are a dict. 1,000 products give about 7,000 goals.

Deviations, all in the randomness: price limits and the prices of ranges are seeded (the official
code draws them before it sets a seed). Goals are shuffled once, with the official seed, and split
once. In verl-agent, each worker shuffles with its own seed: an index is a different goal in each
worker, and training includes goals of the test split.

Goals are generated on access. A list of all goals would take more memory than the shop.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from paw_min.base.files import damaged
from paw_min.envs.webshop.files import Product, check_texts, texts_of

SHUFFLE_SEED = 233  # official
MAX_GOALS = 100_000_000  # a goal takes about 40 bytes; 1,000 products have about 7,000
NO_LIMIT = 1_000_000  # dollars; the price limit of products for $980 or more
AGAIN = "get the file again"


@dataclass(slots=True)
class GoalTemplate:
    """The goals of one instruction: one, or one per combination of the product's options."""

    product: Product
    text: str  # the instruction without options and price
    attributes: list[str]
    price_upper: float
    options: list[str] | None  # a human goal's; None: all combinations of the product's options
    weight: float = 1  # its weight in `Goals.draw`

    def count(self) -> int:
        if self.options is not None:
            return 1
        return math.prod(len(values) for values in self.product.options.values())

    def goal(self, number: int) -> dict:
        """Generate goal 0 .. count - 1. The alphabetically last option name varies fastest."""
        product = self.product
        options = self.options
        text = self.text
        if options is None:
            # `number` in mixed radix: one digit per option name, the last name first.
            chosen = []
            for name in sorted(product.options, reverse=True):
                values = product.options[name]
                number, which = divmod(number, len(values))
                chosen.append((name, values[which]))
            options = dict(reversed(chosen))
            if options:
                pairs = [f"{name}: {value}" for name, value in options.items()]
                text += " with " + ", and ".join(pairs)
        if self.price_upper != NO_LIMIT:
            text += f", and price lower than {self.price_upper:.2f} dollars"
        return {
            "asin": product.asin,
            "category": product.category,
            "query": product.query,
            "name": product.name,
            "product_category": product.product_category,
            "instruction_text": text,
            "attributes": self.attributes,
            "price_upper": self.price_upper,
            "goal_options": options,
            "weight": self.weight,
        }


def price_limit(price: float, rng: random.Random) -> float:
    """Draw two of the next four multiples of $10 above the price and return the larger.

    Limits stay below $1000; with fewer than two left, there is NO_LIMIT.
    """
    limits = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    if len(limits) < 2:
        return NO_LIMIT
    return max(rng.sample(limits, 2))


def human_templates(products, instructions: dict, rng) -> list[GoalTemplate]:
    """Make a template of each instruction that names an attribute of a loaded product.

    instructions: asin -> records of items_human_ins.json
    """
    templates = []
    for product in products:
        with damaged(f"The instruction of product {product.asin} in items_human_ins", AGAIN):
            for record in instructions.get(product.asin, []):
                attributes = record["instruction_attributes"]
                if not attributes:
                    continue
                text = record["instruction"].strip(".")
                options = record["instruction_options"]
                limit = price_limit(product.price, rng)
                check_texts(text, *texts_of(attributes), *texts_of(options))
                templates.append(GoalTemplate(product, text, attributes, limit, options))
    return templates


def synthetic_templates(products, annotations: dict, rng) -> list[GoalTemplate]:
    """Make a template of each product with an instruction; rare attributes get larger weights.

    annotations: asin -> record of items_ins_v2.json
    """
    templates = []
    for product in products:
        record = annotations.get(product.asin)
        if record is None:
            raise ValueError(f"Product {product.asin} is not in items_ins_v2: the two files do not "
                             "belong together; use both from the same download.")
        with damaged(f"The instruction of product {product.asin} in items_ins_v2", AGAIN):
            # No attributes: that crashes the official code.
            if record.get("instruction") is None or not record["instruction_attributes"]:
                continue
            limit = price_limit(product.price, rng)
            text, attributes = record["instruction"], record["instruction_attributes"]
            check_texts(text, *texts_of(attributes))
            templates.append(GoalTemplate(product, text, attributes, limit, None))
    frequency = Counter()  # attribute -> number of goals with it
    for template in templates:
        for attribute in template.attributes:
            frequency[attribute] += template.count()
    for template in templates:
        if template.count():  # a product with an empty option group has 0
            inverse = [1 / frequency[attribute] for attribute in template.attributes]
            template.weight = sum(inverse) / len(inverse)
    return templates


class Goals:
    """The shuffled goals of some templates (G goals, T templates)."""

    def __init__(self, templates: list[GoalTemplate]):
        counts = [template.count() for template in templates]
        if sum(counts) > MAX_GOALS:
            product = templates[counts.index(max(counts))].product
            raise ValueError(f"{sum(counts)} goals are more than {MAX_GOALS}, and product "
                             f"{product.asin} has {max(counts)} of them, one per combination of "
                             "its options: remove it, or use fewer products or --human-goals.")
        order = list(range(sum(counts)))
        random.Random(SHUFFLE_SEED).shuffle(order)
        self._templates = templates
        self._order = np.array(order, np.int32)  # (G,) shuffled index -> number before the shuffle
        self._starts = np.cumsum([0, *counts])  # (T + 1,) number of each template's first goal
        weights = np.repeat([float(t.weight) for t in templates], counts)[self._order]  # (G,)
        self._cumulative = np.concatenate([[0.0], np.cumsum(weights)])  # (G + 1,)

    def __len__(self):
        return len(self._order)

    def __getitem__(self, i: int) -> dict:
        number = int(self._order[i])
        # The last template that starts at or before this number. side="right": a template without
        # goals starts where the next one does, and must not be found.
        t = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._templates[t].goal(number - int(self._starts[t]))

    def draw(self, rng: random.Random) -> int:
        """Draw the index of a goal by weight, off by one as in the official code.

        Goal i is drawn with the weight of goal i - 1, the last goal with its own weight in
        addition, and goal 0 never.
        """
        position = rng.uniform(0, self._cumulative[-1])
        found = int(np.searchsorted(self._cumulative, position, side="right"))
        return min(found, len(self) - 1)


SPLITS = ("train", "eval", "test")


def splits(n_goals: int) -> dict[str, range]:
    """Disjoint ranges of goal indices for "train", "eval" and "test".

    With 6,000 goals or more (the small official set has 6,910), these are the WebShop paper's: test
    0-499, eval 500-1499, train the rest. With fewer, test and eval are a twelfth and a sixth of
    the goals, which agrees at 6,000. As in the paper, goals of one product can be in two splits.
    """
    if n_goals < 12:
        raise ValueError(f"{n_goals} goals cannot be split; 12 or more are needed, so use a shop "
                         "with more products.")
    n_test = min(500, n_goals // 12)
    n_eval = min(1000, n_goals // 6)
    train, evaluation = range(n_test + n_eval, n_goals), range(n_test, n_test + n_eval)
    return dict(zip(SPLITS, (train, evaluation, range(n_test))))
