"""WebShop for training: the agent's view of the pages, and the tasks of a run.

`WebShopAgent` wraps the official environment (pages.py) as verl-agent does, the code that PaW
builds on. An observation is the page without the instruction, each text in single quotes. The
reward is 10 for a purchase with a score of 1.0, else 0.

Deviation: the observation after the purchase, which ends the episode, is empty and thus no
world-model target. The official last page prints the score.
"""

from functools import cache, partial

from paw_min.config import Config
from paw_min.envs.interface import Step, Tasks
from paw_min.envs.pool import EnvPool
from paw_min.envs.webshop.goals import splits
from paw_min.envs.webshop.pages import WebShopEnv
from paw_min.envs.webshop.shop import Shop

WIN_REWARD = 10.0  # verl-agent


class WebShopAgent:
    """An `Environment` (interface.py); tasks are goal indices as strings.

    Deterministic: the steps depend only on the shop, the goal and the commands.
    """

    def __init__(self, shop: Shop):
        self._env = WebShopEnv(shop)

    def reset(self, task: str) -> Step:
        self._env.reset(int(task))
        return self._step()

    def step(self, command: str) -> Step:
        _, score, done, _ = self._env.step(command)
        return self._step(score, done)

    def _step(self, score: float = 0.0, done: bool = False) -> Step:
        """What the agent sees of the current page."""
        env = self._env
        won = score == 1.0
        # The instruction is left out: it is in every prompt.
        texts = [] if done else env.parts[env.head :]
        admissible = []
        if env.has_search_bar:
            admissible.append("search[<your query>]")
        # The start page offers click[search], which does nothing; verl-agent lists it, too.
        admissible += [f"click[{name}]" for name in env.clickables]
        return Step(
            observation=" [SEP] ".join(f"'{text}'" for text in texts),
            task=env.goal["instruction_text"].strip(),
            task_type=env.goal["category"],
            admissible=admissible,
            reward=WIN_REWARD if won else 0.0,
            done=done,
            won=won,
            score=score,
        )


@cache
def load_shop(folder: str, human_goals: bool, n_products: int | None) -> Shop:
    """Load a shop once per process; all environments share it."""
    return Shop.load(folder, human_goals=human_goals, n_products=n_products)


def make_agent(folder: str, human_goals: bool, n_products: int | None) -> WebShopAgent:
    """Build an agent in the shared shop. Picklable with functools.partial, for the workers."""
    return WebShopAgent(load_shop(folder, human_goals, n_products))


def load(cfg: Config, data: str) -> Tasks:
    """Load the shop in the folder `data` and split its goals."""
    n_products = cfg.n_products or None  # 0 stands for all
    # The goals are counted in this process; workers load the shop again, each of them once.
    shop = load_shop(data, cfg.human_goals, n_products)
    goals = splits(shop.n_goals)

    def make_pool(n_envs: int) -> EnvPool:
        make_env = partial(make_agent, data, cfg.human_goals, n_products)
        return EnvPool(make_env, n_envs, cfg.workers)

    return Tasks(
        train=[str(i) for i in goals["train"]],
        held_out=[str(i) for i in goals[cfg.eval_split]],
        make_pool=make_pool,
    )
