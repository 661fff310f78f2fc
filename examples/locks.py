"""The world of locks of `one_file.py` as an environment of the package, trained by `paw_min.train`.

    python -m examples.locks                           PaW
    python -m examples.locks --no-paw                  GRPO
    python -m examples.locks --wm-target shuffled      the placebo

A task is two locks, a response is a tool, and the observation says what the lock is made of:

    <user>open lock17 with<agent>saw<end>shut glass

--seed draws the world, too, as in `one_file.py`. The start model is trained on first use, in 15 s.
It serves all worlds, because it knows no fact of any. The settings are those of `one_file.py`;
research/closed.md says which others learn less, and why.
"""

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from examples import one_file
from examples.one_file import R_MAX, TOOLS, Size, World, make_world
from paw_min import cmae
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import made_once
from paw_min.cli import check_command, main
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Step, Tasks
from paw_min.envs.pool import EnvPool
from paw_min.model.batches import collate
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.toy.standins import make_tokenizer

START = Path("data/locks")  # the start model
TRAIN, HELD_OUT = 3200, 256  # tasks: different pairs of the same locks

PRESETS = {"tiny": dict(
    model=str(START), data="one_file.py", prompt="compact", history_length=0,
    max_prompt_tokens=16, max_response_tokens=2, max_obs_tokens=2, max_turns=2,
    updates=Size.updates, eval_every=Size.evaluate_every, eval_tasks=HELD_OUT,
    eval_temperature=1.0, save_every=25, groups=one_file.GROUPS,
    group_size=one_file.EPISODES, lr=Size.lr, beta2=0.95, mini_batch=64,
    statistics="trajectories", wm_separator="none",
    # one_file.py has neither of these two, nor a KL term. The KL term keeps the end of a response
    # in place while nothing is won. This was seen with 64 names at twice this rate; there, half the
    # rate, which is this one, did so as well (research/closed.md).
    entropy_coef=0.0, invalid_penalty=0.0)}


# ---- the environment ----


class Locks:
    """Each lock of a task is tried once. The task is their names: "lock17 lock3"."""

    kind, tools = "locks", TOOLS

    def __init__(self, world: World):
        self.world = world

    def reset(self, task: str) -> Step:
        self.task = task
        self.opened = []
        return self._step("")

    def step(self, command: str) -> Step:
        names = self.task.split()
        name = names[len(self.opened)]
        self.opened.append(self.world.opens(name, command))
        done = len(self.opened) == len(names)
        won = done and all(self.opened)
        return self._step(self.seen(name, command), reward=R_MAX * won, done=done, won=won)

    def seen(self, name: str, tool: str) -> str:
        return " ".join(self.world.observation(name, tool))

    def _step(self, observation: str, **outcome) -> Step:
        return Step(observation, self.task, self.kind, self.tools, **outcome)


def load(cfg: Config, data: str) -> Tasks:
    """Random pairs of locks. The world follows from the seed, so no data are read."""
    if data != PRESETS["tiny"]["data"]:
        raise UserError(f"--data {data}: locks reads no data; --seed chooses the world.")
    world = make_world(cfg.seed)
    pairs = [f"{first} {second}" for first in world.material_of for second in world.material_of]
    tasks = random.Random(cfg.seed).sample(pairs, TRAIN + HELD_OUT)

    def make_pool(n_envs: int) -> EnvPool:
        return EnvPool(partial(Locks, world), n_envs, cfg.workers)

    return Tasks(train=tasks[:TRAIN], held_out=tasks[TRAIN:], make_pool=make_pool)


def prompt(context: Context, history_length: int) -> str:
    """The name of the lock that is tried now; it needs no history."""
    names = context.task.split()
    return f"open {names[len(context.history)]} with"


def parse(response: str) -> Command:
    return Command(response, valid=response in TOOLS)


BENCHMARKS["locks"] = Benchmark(
    load, {"compact": prompt}, parse, r_max=R_MAX
)


# ---- the start model ----


def make_model(tokenizer, seed: int) -> GPTNeoXForCausalLM:
    """The model of `one_file.py`, but with rotary positions and a head without bias.

    The head is not tied to the embeddings: a tied one learned far more slowly. The matrices have
    PyTorch's default initialization, as in `one_file.py`: with the smaller one of transformers in
    the head, PaW rises later (research/closed.md).
    """
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=Size.width, intermediate_size=4 * Size.width,
        num_hidden_layers=Size.layers, num_attention_heads=Size.heads,
        max_position_embeddings=64, use_parallel_residual=False,
        tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # weights depend on `seed` only
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(config)  # embeddings: 0.02, as in one_file.py
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
    return model


def start_policy(world: World, seed: int) -> Policy:
    texts = [*TOOLS]
    for name in world.material_of:
        for tool in TOOLS:
            texts.append(" ".join([*world.prompt(name), *world.observation(name, tool)]))
    tokenizer = make_tokenizer(texts, complete=True)
    return Policy(make_model(tokenizer, seed), tokenizer)


def warm_start(folder: Path, seed: int = 0, size: Size = Size()) -> None:
    """Train a model on random tools and unrelated observations, as `one_file.py` does."""
    world = make_world(seed)
    names = list(world.material_of)
    rng = random.Random(seed)
    policy = start_policy(world, seed)
    chat, answer, encode = map(cache, (policy.encode_chat, policy.encode_response, policy.encode))

    def draw() -> TokenRow:
        unrelated = " ".join(world.observation(rng.choice(names), rng.choice(TOOLS)))
        message = " ".join(world.prompt(rng.choice(names)))
        return TokenRow(chat(message), answer(rng.choice(TOOLS)), encode(unrelated))

    train_on_random_rows(policy, draw, size.warm_steps, size.warm_rows, one_file.WARM_LR)
    policy.save(folder)


def train_on_random_rows(
    policy: Policy, draw: Callable[[], TokenRow], steps: int, n_rows: int, lr: float
) -> None:
    """Cross entropy of the responses and observations of `n_rows` new rows per step."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95))
    for _ in tqdm(range(steps), "warm start", unit="step", disable=None):
        rows = [draw() for _ in range(n_rows)]
        batch = collate(rows, [True] * n_rows, policy.pad_id)
        logp, _ = policy(batch)  # (B, S)
        loss = cmae.cross_entropy(logp, batch.response_mask | batch.obs_mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepare() -> None:
    """Train the start model, unless it is there."""
    made_once(START, warm_start)


def needed(cfg: Config) -> Path | None:
    """The start model, unless --model is another one."""
    return START if Path(cfg.model) == START else None


def run(presets=PRESETS, doc=__doc__, method=None, argv=None) -> None:
    """The command; cli.fork calls it with another method."""
    torch.set_num_threads(1)  # more are not faster for a model of this size
    with user_errors():
        if needed(check_command("locks", presets, doc, needed, argv)):
            prepare()
    main("locks", presets, doc, method, argv)


if __name__ == "__main__":
    run()
