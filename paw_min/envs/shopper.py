"""A teacher for WebShop that sees only what the agent sees.

What it computes: the next action, from the instruction, the page, the admissible actions and the
last three actions; and demonstrations to imitate. It knows neither goals nor products, so it has to
search and to read. It remembers nothing but what a prompt with three earlier actions shows.

Source: none in the paper, which starts from an instruction-tuned LLM; a small model needs a warm
start. WebShop's own rule baseline searches the instruction and buys the first hit. Here:

    start page   search the instruction's attributes and kind
    results      click the first product whose title has all these words and whose price is not over
                 the limit; if it has just come back from such a product, the first one after that;
                 if there is none, turn the page, and after the last page go back to search
    product      click the wanted value of each option group, in the order of the instruction, then
                 buy; leave a product that does not fit or lacks a wanted value
    other pages  go back

A click on an option leaves no trace on the page. Which values are chosen is known from the last
three actions alone; so a product with more than three option groups would never be bought. It reads
synthetic instructions ("Find me loose leaf herbal tea with flavor: mint, and ..."), and not those
that people wrote.
"""

import random
import re

from paw_min.envs import webshop
from paw_min.prompts import Context

MEMORY = 3  # actions
SLIPS = 0.2  # share of demonstrated steps in which another action is carried out
MAX_TURNS = 15  # verl-agent
INSTRUCTION = re.compile(r"find me (.+?)(?: with (\w[\w ]*: .+?))?"
                         r"(?:, and price lower than ([\d.]+) dollars)?")
PRODUCT = re.compile(r"click\[(b[0-9a-z]{9})\]")


class Shopper:
    """One customer with one errand at a time.

    rng: used only where no rule applies, to try any admissible action.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng

    def reset(self, observation: str, info: dict):
        """Take the instruction info["task"]; raises ValueError on one it cannot read."""
        found = INSTRUCTION.fullmatch(info["task"].strip().lower())
        if not found:
            raise ValueError(f"the shopper cannot read {info['task']!r}; give it a synthetic "
                             f"instruction: Find me <attributes> <kind> with <group>: <value>, ...")
        wanted, options, limit = found.groups()
        self.words = re.findall(r"\w+", wanted)  # attributes and kind
        self.kind = " ".join(self.words[-2:])
        pairs = options.split(", and ") if options else []
        self.options = dict(pair.split(": ", 1) for pair in pairs)  # group -> wanted value
        self.limit = float(limit) if limit else float("inf")
        self.actions = []  # the last MEMORY

    def act(self, observation: str, info: dict) -> str:
        """The next action: an admissible one, or `search[words]` where there is a search bar."""
        page = observation.strip("'").split("' [SEP] '")
        action, self._thought = self._choose(page, info["admissible"])
        self.actions = [*self.actions, action][-MEMORY:]
        return action

    def thought(self) -> str:
        """What it is about, in two to four words; after `act`."""
        return self._thought

    def slipped(self, action: str):
        """Tell it that this was carried out in place of its last action."""
        self.actions[-1] = action

    def _choose(self, page: list[str], admissible: list[str]) -> tuple[str, str]:
        """(action, thought) for a page, which is a list of its texts."""
        if "search[<your query>]" in admissible:
            return f"search[{' '.join(self.words)}]", f"find {self.kind}"
        if "click[buy now]" in admissible:
            return self._at_product(page, admissible)
        if "click[next >]" in admissible:
            return self._at_results(page)
        if "click[< prev]" in admissible:
            return "click[< prev]", "go back"
        return self.rng.choice(admissible), "look around"

    def _at_results(self, page: list[str]) -> tuple[str, str]:
        products = page[page.index("Next >") + 1:]  # asin, title, price tag, and so on
        good = [asin.lower() for asin, title, tag in zip(*[iter(products)] * 3)
                if self._fits(title, tag)]
        clicked = [found[1] for action in self.actions if (found := PRODUCT.fullmatch(action))]
        if clicked and clicked[-1] in good:
            good = good[good.index(clicked[-1]) + 1:]
        if good:
            return f"click[{good[0]}]", f"pick {self.kind}"
        number, total = re.search(r"Page (\d+) \(Total results: (\d+)\)", page[1]).groups()
        if 10 * int(number) < int(total):
            return "click[next >]", "next page"
        return "click[back to search]", f"find {self.kind}"

    def _at_product(self, page: list[str], admissible: list[str]) -> tuple[str, str]:
        end = next(i for i, text in enumerate(page) if text.startswith("Price: ")) - 1
        offered = all(f"click[{value}]" in admissible for value in self.options.values())
        if not offered or not self._fits(page[end], page[end + 1]):
            return "click[< prev]", "go back"
        chosen = {}  # group -> value, by the actions since this product was opened
        for action in self.actions:
            if PRODUCT.fullmatch(action):
                chosen = {}
            elif action[6:-1] in page[:end]:
                # A value belongs to the last group name before it.
                names = [text for text in page[:page.index(action[6:-1])] if text in self.options]
                chosen |= {name: action[6:-1] for name in names[-1:]}
        for name, value in self.options.items():
            if chosen.get(name) != value:
                return f"click[{value}]", f"{name} {value}"
        return "click[buy now]", f"buy {self.kind}"

    def _fits(self, title: str, tag: str) -> bool:
        """A price range fits if its lower end does: `$9.99 to $12.5`."""
        price = float(re.search(r"\$([\d.]+)", tag)[1])
        return price <= self.limit and set(self.words) <= set(re.findall(r"\w+", title.lower()))


def training_tasks() -> list[str]:
    """The training goals of the default shop."""
    shop = webshop.load_shop(str(webshop.generated_data()))
    return [str(i) for i in webshop.splits(shop.n_goals)["train"]]


def demonstrations(tasks: list[str], seed: int, haste: float, episodes: int, render, shop=None):
    """[(prompt, response, next observation)], a triple for each step of `episodes` per task.

    render: Context -> prompt. shop: default: the generated one. haste: probability, at each step
    that allows it, of buying before all options are chosen, or of clicking the first result unread,
    against the better thought. In SLIPS of the steps another action is carried out instead, for the
    model to see the way back; what comes of that is not what the response asked for, and the triple
    ends with "".
    """
    rng = random.Random(f"demonstrations {seed} {haste}")
    shop = shop or webshop.load_shop(str(webshop.generated_data()))
    agent, rows = webshop.WebShopAgent(shop), []
    for task in [task for task in tasks for _ in range(episodes)]:
        observation, info = agent.reset(task)
        shopper = Shopper(random.Random(rng.random()))
        shopper.reset(observation, info)
        context = Context(info["task"], observation, info["admissible"])
        for _ in range(MAX_TURNS):
            action = shopper.act(observation, info)
            hasty = [a for a in info["admissible"] if a == "click[buy now]" or PRODUCT.fullmatch(a)]
            if hasty and rng.random() < haste:
                action = hasty[0]
            prompt = render(context)
            response = f"<think>{shopper.thought()}</think><action>{action}</action>"
            slip = rng.random() < SLIPS
            if slip:
                action = _slip(rng, shopper.words, info["admissible"])
            shopper.slipped(action)
            observation, _, done, info = agent.step(action)
            rows.append((prompt, response, "" if slip else observation))
            context.history.append((context.observation, action))
            context.observation, context.admissible = observation, info["admissible"]
            if done:
                break
    return rows


def _slip(rng: random.Random, words: list[str], admissible: list[str]) -> str:
    """Any admissible action but buying, from which there is no way back."""
    action = rng.choice([a for a in admissible if a != "click[buy now]"])
    return f"search[{rng.choice(words)}]" if action == "search[<your query>]" else action
