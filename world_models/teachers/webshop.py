"""A rule-based teacher for WebShop with the agent's observations, and its demonstrations.

`Shopper` chooses the next command from the instruction, the page, the admissible commands and the
last three commands: from what a prompt with a history of three steps shows. It does not know the
goals or the products.

Source: none. The paper starts from an instruction-tuned LLM; a tiny model needs a warm start.
WebShop's own rule baseline searches the instruction and buys the first result. The rules here:

    start page   search the instruction's attributes and kind
    results      click the first product whose title has all these words and whose price is within
                 the limit; after coming back from such a product, the next one; without one, the
                 next page; after the last page, back to search
    product      click the wanted value of each option group in the order of the instruction, then
                 buy; leave a product that does not fit or lacks a wanted value
    other pages  go back

Limits: a clicked option leaves no trace on the page, so chosen values are read from the last three
commands, and a product with more than three wanted options is never bought. Only synthetic
instructions are understood ("Find me loose leaf herbal tea with flavor: mint, and ...").
"""

import math
import random
import re
from functools import partial
from itertools import chain

from paw_min.base.errors import UserError
from paw_min.envs.interface import Context
from paw_min.envs.pool import EnvPool
from paw_min.envs.webshop.env import WebShopAgent
from paw_min.envs.webshop.goals import splits
from paw_min.envs.webshop.shop import Shop
from paw_min.toy import default_data
from world_models.teachers.demonstrate import Action, Demonstrator, PlayedStep, play

MEMORY = 3  # earlier commands
SLIPS = 0.2  # share of demonstrated steps that execute a random command
MAX_TURNS = 15  # verl-agent
INSTRUCTION = re.compile(r"find me (.+?)(?: with (\w[\w ]*: .+?))?"
                         r"(?:, and price lower than ([\d.]+) dollars)?")
PRODUCT = re.compile(r"click\[(b[0-9a-z]{9})\]")


class Shopper:
    """The teacher for one instruction; stateless between the calls of `act`."""

    def __init__(self, instruction: str):
        found = INSTRUCTION.fullmatch(instruction.strip().lower())
        if not found:
            raise UserError(f"The shopper cannot read {instruction!r}; give it a synthetic "
                            "instruction: Find me <attributes> <kind> with <group>: <value>, ...")
        wanted, options, limit = found.groups()
        self.words = re.findall(r"\w+", wanted)  # attributes and kind
        self.kind = " ".join(self.words[-2:])
        self.options = {}  # group -> wanted value
        if options:
            for pair in options.split(", and "):
                group, value = pair.split(": ", 1)
                self.options[group] = value
        self.limit = math.inf  # dollars
        if limit:
            self.limit = float(limit)

    def act(self, context: Context) -> Action:
        page = context.observation.strip("'").split("' [SEP] '")  # visible texts
        recent = [turn.command for turn in context.history[-MEMORY:]]
        if "search[<your query>]" in context.admissible:
            return Action(f"search[{' '.join(self.words)}]", f"find {self.kind}")
        if "click[buy now]" in context.admissible:
            return self._at_product(page, context.admissible, recent)
        if "click[next >]" in context.admissible:
            return self._at_results(page, recent)
        return Action("click[< prev]", "go back")

    def hasty(self, context: Context, command: str, haste: float, rng: random.Random) -> str:
        """Buy before all options are chosen, or click the first result."""
        early = [c for c in context.admissible if c == "click[buy now]" or PRODUCT.fullmatch(c)]
        if early and rng.random() < haste:
            return early[0]
        return command

    def slip(self, context: Context, command: str, rng: random.Random) -> str | None:
        """Any admissible command except buying, which cannot be undone."""
        if rng.random() >= SLIPS:
            return None
        command = rng.choice([c for c in context.admissible if c != "click[buy now]"])
        if command == "search[<your query>]":
            command = f"search[{rng.choice(self.words)}]"
        return command

    def _at_results(self, page: list[str], recent: list[str]) -> Action:
        products = page[page.index("Next >") + 1:]  # asin, title, price tag, and so on
        good = []  # asins in lower case, as in commands
        for first in range(0, len(products) - 2, 3):
            asin, title, tag = products[first : first + 3]
            if self._fits(title, tag):
                good.append(asin.lower())
        # It came back from the last product that it clicked: only those after it are left.
        matches = [PRODUCT.fullmatch(command) for command in recent]
        clicked = [match[1] for match in matches if match]
        if clicked and clicked[-1] in good:
            good = good[good.index(clicked[-1]) + 1:]
        if good:
            return Action(f"click[{good[0]}]", f"pick {self.kind}")
        number, total = re.search(r"Page (\d+) \(Total results: (\d+)\)", page[1]).groups()
        if 10 * int(number) < int(total):
            return Action("click[next >]", "next page")
        return Action("click[back to search]", f"find {self.kind}")

    def _at_product(self, page: list[str], admissible: list[str], recent: list[str]) -> Action:
        # The page: two buttons, the options, the title, the price and more.
        price = next(i for i, text in enumerate(page) if text.startswith("Price: "))
        title = price - 1
        offered = all(f"click[{value}]" in admissible for value in self.options.values())
        if not offered or not self._fits(page[title], page[price]):
            return Action("click[< prev]", "go back")
        chosen = {}  # group -> value clicked since this product was opened
        for command in recent:
            value = command[len("click[") : -len("]")]
            if PRODUCT.fullmatch(command):
                chosen = {}
            elif value in page[:title]:
                # A value belongs to the last group name before it.
                names = [text for text in page[:page.index(value)] if text in self.options]
                if names:
                    chosen[names[-1]] = value
        for name, value in self.options.items():
            if chosen.get(name) != value:
                return Action(f"click[{value}]", f"{name} {value}")
        return Action("click[buy now]", f"buy {self.kind}")

    def _fits(self, title: str, tag: str) -> bool:
        """Compare title and price with the instruction; of a price range, the lower end counts."""
        price = float(re.search(r"\$([\d.]+)", tag)[1])
        return price <= self.limit and set(self.words) <= set(re.findall(r"\w+", title.lower()))


def training_tasks() -> list[str]:
    """The training goals of the default shop."""
    shop = Shop.load(default_data("webshop"))
    return [str(i) for i in splits(shop.n_goals)["train"]]


def demonstrations(tasks: list[str], seed: int, haste: float, episodes: int) -> list[PlayedStep]:
    """The steps of `episodes` episodes per goal; see demonstrate.py for haste."""
    rng = random.Random(f"demonstrations {seed} {haste}")
    shop = Shop.load(default_data("webshop"))

    def start(number: int, task: str, first: Context) -> Demonstrator:
        return Demonstrator(Shopper(first.task), rng, haste)

    goals = [task for task in tasks for _ in range(episodes)]
    # One slot: one episode after another, since they share the generator.
    with EnvPool(partial(WebShopAgent, shop), n_envs=1) as pool:
        return list(chain.from_iterable(play("webshop", pool, goals, start, MAX_TURNS)))
