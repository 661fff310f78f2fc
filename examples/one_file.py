"""PaW in one file: Policy and World Modeling Co-Training (arXiv 2606.02388), on a CPU in minutes.

An agent acts, observes what follows, and the episode ends with a reward. Reinforcement learning
(RL) learns from the reward alone, but each observation also says something about the world. PaW
trains the same model, in the same forward pass, to predict what follows its own actions:

    loss = RL loss + mean over groups g of  lambda_g * mean of m (1 - p)         (Eq. 11)

p is the probability that the model gives to a token of an observation, and m is 1 if p <= rho, else
0. A group is several episodes of one task. The inner mean is over the tokens of an observation,
then over the selected observations of the group.

Three choices make it PaW. It trains on what follows the actions about which the policy was least
sure (Eq. 4). A token costs 1 - p, not -log p, and nothing if p > rho (Eq. 7 and 8). And lambda_g,
in this world, is the share of the group's episodes that were lost (Eq. 10). The trained policy is
used without any prediction.

    python examples/one_file.py        # needs torch, and matplotlib for the figure one_file.png

trains three models in a world of locks: GRPO (RL alone), PaW, and a placebo, which is PaW with the
observations of other actions as targets. On average over 16 seeds, they win 88, 96 and 87 % of the
tasks in the end, and half of the seeds win 80 % after 175, 100 and 175 updates. Without GRPO's KL
term (--kl 0), they win 36, 95 and 36 % in the end (research/LOG.md).

Read this file from top to bottom: the world, the model, sampling, the equations, an update, a run,
the comparison. To try an idea, change `top_alpha`, `clipped_mae` or `World`; three_worlds.py has a
world made for each of the three choices. "Line 4" is a line of the paper's Algorithm 1, listed in
paw_min/update.py.
"""

import argparse
import copy
import math
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import Tensor, nn

# Shapes: G groups, E episodes per group, N transitions of an update, B of a mini-batch, T tokens of
# a transition, O tokens of its observation, V words of the vocabulary, C channels, H heads.
GROUPS = 16  # G, tasks per update
EPISODES = 8  # E, attempts at each task
MINI_BATCHES = 4  # optimizer steps per update
WARM_LR = 1e-3
CLIP = 0.2  # the ratio of the RL loss stays within 1 ± this
GRADIENT_CLIP = 1.0
R_MAX = 10.0  # return of an episode that is won


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a run."""

    width: int = 64  # C
    layers: int = 2
    heads: int = 4  # H
    warm_steps: int = 300  # optimizer steps before RL
    warm_rows: int = 256  # transitions per such step
    lr: float = 5e-4  # the best of 3e-4, 5e-4 and 1e-3 for GRPO
    updates: int = 200
    evaluate_every: int = 25  # updates


# ---- The world ----
# A task is two locks. The prompt shows the name of a lock, and the agent tries one tool:
#
#     open lock17 with | saw | shut glass         prompt h | action a | next observation o'
#
# One such row is a transition. Each name has a hidden material, and each material is opened by one
# tool. An episode is won if both locks open. A random agent wins one episode in 64. A chat
# model needs a separator between response and observation, which the package inserts; this world
# needs none, since the warm start has shown the rows as they are here.
#
# RL alone has to find 128 facts, the tool for each name, and each from a rare reward. But the
# observation shows the material even if the tool was wrong. A model that knows the materials has
# only 8 facts left to find. That is how a world model can help a policy: observations reveal
# structure that recurs across tasks, that the reward needs, and that the prompt does not show.
#
# Why does a prediction after the action help the choice before it? Both read the same embedding of
# the name. To predict the material, names of one material have to become alike, so that what RL
# learns about one of them holds for the others. (The word "opens" also tells whether each lock
# opened, which the reward does not. With this word alone, no gain of PaW was seen; ECHO, in
# three_worlds.py, gains half of what it gains with the material: research/LOG.md.)
#
# Why 8 materials? A model that knows only how frequent they are gives each p = 1/8, below
# rho = 0.2. With 4 materials it would be 1/4: Eq. 7 would drop the words for them, and hardly any
# material would be learned.
MATERIALS = ["bone", "clay", "glass", "ice", "iron", "stone", "wax", "wood"]
TOOLS = ["acid", "chisel", "drill", "hammer", "hook", "magnet", "saw", "torch"]


@dataclass
class World:
    """The hidden facts. All prompts have one length, all observations too; an action is a word."""

    material_of: dict[str, str]  # name of a lock -> its material
    tool_of: dict[str, str]  # material -> the tool that opens it
    locks: int = 2  # per task

    def steps(self) -> list[list[str]]:
        """For each step of a task, the names that it is drawn from."""
        return [list(self.material_of)] * self.locks

    def prompt(self, name: str) -> list[str]:
        return ["open", name, "with"]

    def right_tool(self, name: str) -> str:
        return self.tool_of[self.material_of[name]]

    def opens(self, name: str, tool: str) -> bool:
        return tool == self.right_tool(name)  # false for a word that is not a tool, too

    # What the warm start shows: no fact of this world.
    def shown_tool(self, name: str, rng: random.Random) -> str:
        return rng.choice(TOOLS)

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        return self.observation(rng.choice(names), rng.choice(TOOLS))

    def observation(self, name: str, tool: str) -> list[str]:
        return ["opens" if self.opens(name, tool) else "shut", self.material_of[name]]

    def words(self) -> list[str]:
        return ["open", "with", "opens", "shut", *self.material_of, *self.tool_of, *TOOLS]


def make_world(seed: int, names: int = 128) -> World:
    """A random world. Each material is that of equally many names."""
    rng = random.Random(seed)
    materials = [MATERIALS[i % len(MATERIALS)] for i in range(names)]
    rng.shuffle(materials)
    tools = rng.sample(TOOLS, len(TOOLS))
    return World(
        material_of={f"lock{i}": material for i, material in enumerate(materials)},
        tool_of=dict(zip(MATERIALS, tools)),
    )


# ---- The model: a small GPT, in which each word is a token ----
class Block(nn.Module):
    """Causal attention between positions, then a network applied to each position."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        by_head = self.query_key_value(x).view(B, T, 3, self.heads, C // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)  # (B, H, T, C/H) each
        score = query @ key.transpose(-1, -2) / math.sqrt(C // self.heads)  # (B, H, T, T)
        # No position sees a later one. The observation comes after the action, so it cannot change
        # the action's probability in this pass. (Learning to predict it changes the weights.)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weight = score.masked_fill(future, -torch.inf).softmax(-1)
        return self.out((weight @ value).transpose(1, 2).reshape(B, T, C))


class Model(nn.Module):
    """Policy and world model in one: after a prompt it says an action, then an observation."""

    def __init__(self, words: list[str], size: Size = Size()):
        super().__init__()
        self.words = words
        self.id_of = {word: i for i, word in enumerate(words)}
        self.token = nn.Embedding(len(words), size.width)
        # A row has at most 16 words.
        self.position = nn.Embedding(16, size.width)
        # Small as in GPT-2 (PyTorch's standard deviation is 1), so that names differ by what is
        # learned about them.
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        blocks = [Block(size.width, size.heads) for _ in range(size.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, len(words))

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the word after each position: (B, T) -> (B, T, V)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]  # (B, T, C)
        return self.head(self.norm(self.blocks(x))).log_softmax(-1)

    def encode(self, texts: list[list[str]]) -> Tensor:
        """Texts of equal length -> tokens (N, T)."""
        return torch.tensor([[self.id_of[word] for word in text] for text in texts])


def logp_of(logp: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token: (..., V), (...) -> (...)."""
    return logp.gather(-1, tokens[..., None])[..., 0]


# ---- Sampling ----
@dataclass
class Rollout:
    """The transitions of an update, ordered by group, episode and lock."""

    prompt: Tensor  # (N, T - 1 - O) tokens of h
    action: Tensor  # (N,) the token of a
    observation: Tensor  # (N, O) tokens of o'
    old_logp: Tensor  # (N,) log-probability with which the action was sampled
    entropy: Tensor  # (N,) of the policy where it chose the action, in nats
    returns: Tensor  # (G, E)
    start_logp: Tensor | None = None  # (N,) of the action in the start model; for the KL term


@torch.no_grad()
def play(model: Model, world: World, tasks: list[list[str]]) -> Rollout:
    """Play each task EPISODES times. A task is the names of its locks."""
    names = []  # (N,) the lock of each transition
    for task in tasks:
        names += task * EPISODES
    prompt = model.encode([world.prompt(name) for name in names])
    # No prompt depends on an earlier observation, so one call samples all actions.
    logp = model(prompt)[:, -1]  # (N, V)
    action = torch.multinomial(logp.exp(), 1)[:, 0]
    tools = [model.words[token] for token in action]
    opened = [world.opens(name, tool) for name, tool in zip(names, tools)]
    won = torch.tensor(opened).view(len(tasks), EPISODES, -1).all(-1)  # (G, E)
    return Rollout(
        prompt=prompt,
        action=action,
        observation=model.encode([world.observation(n, t) for n, t in zip(names, tools)]),
        old_logp=logp_of(logp, action),
        entropy=action_entropy(logp),
        returns=R_MAX * won.float(),
    )


# ---- The equations ----
def grpo(returns: Tensor) -> Tensor:
    """GRPO: return relative to the group, in standard deviations: (G, E) -> (G, E).

    If all episodes of a group are lost, or all are won, its advantages are 0: RL learns nothing
    from it.

    Mean and deviation are over the episodes of the group. In the package's presets they are over
    its transitions (--statistics, CHOICES.md). Here all episodes have equally many transitions, so
    the mean is the same, and the deviation differs by its divisor n - 1 alone.
    """
    centered = returns - returns.mean(1, keepdim=True)
    return centered / (returns.std(1, keepdim=True) + 1e-6)


def clipped_surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> Tensor:
    """Eq. 1, with GRPO's clipped ratio in place of log pi: (B,), (B,), (B,) -> ().

    The paper prints a sum over the actions of an episode. The code that it builds on takes the mean
    over all actions, and so does this. The entropy bonus and the dual clip of the package's
    losses.py are left out.
    """
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def action_entropy(logp: Tensor) -> Tensor:
    """H of Eq. 4, of the policy where it chose the action, in nats: (N, V) -> (N,)."""
    return -(logp.exp() * logp).sum(-1)


def top_alpha(entropy: Tensor, alpha: float) -> Tensor:
    """Eq. 4: True for the ceil(alpha * N) transitions with the highest entropy: (N,) -> bool (N,).

    Why the entropy of the action? It is high where the policy has not decided yet, and there the
    consequence of an action is likely to be news. It costs nothing, since sampling computes the
    probabilities anyway. All groups are ranked together, as in the paper.
    """
    # 0.07 * 100 is 7.000000000000001 in floating point, of which ceil would make 8.
    count = math.ceil(alpha * len(entropy) * (1 - 1e-9))
    order = entropy.sort(descending=True, stable=True).indices
    selected = torch.zeros_like(entropy, dtype=torch.bool)
    selected[order[:count]] = True
    return selected


def k3(logp: Tensor, start_logp: Tensor) -> Tensor:
    """GRPO's KL term, which holds the policy near the start model: (B,), (B,) -> ().

    Schulman's estimator of the KL divergence: 0 where both probabilities are equal, else positive.
    """
    log_ratio = start_logp - logp
    return (log_ratio.exp() - 1 - log_ratio).mean()


def cross_entropy(logp: Tensor) -> Tensor:
    """Eq. 5: (B, O) -> (B,). At a token's logit, its gradient has the size 1 - p."""
    return -logp.mean(-1)


def mae(logp: Tensor) -> Tensor:
    """The MAE of section 3.2, for each token: (B, O) -> (B, O).

    At a token's logit, its gradient has the size p (1 - p): small where p is near 0, as for the
    words of a serial number. This world has no such words, and cross entropy does as well. Where
    each name has a serial number, cross entropy memorizes it: that model wins no more than GRPO,
    and PaW wins more (three_worlds.py).
    """
    return 1 - logp.exp()


def hard_tokens(logp: Tensor, rho: float) -> Tensor:
    """Eq. 7: 1 where p <= rho, else 0: (B, O) -> (B, O).

    Why drop tokens that are known? The MAE is lowest with all probability on the most frequent
    observation. Where several observations are possible, the mask stops before that.

    What does the mask do here? A lock and a tool have exactly one observation, so there is nothing
    to protect, and p(material) ends well below 1. That is enough: above chance, 1/8, names of one
    material are already alike. No gain from the mask was seen in this world. It helps where most
    observations say the same (research/LOG.md).

    The mask has no gradient, since a comparison is constant almost everywhere. It decides which
    tokens are trained; the model is not rewarded for moving a token across rho.
    """
    return (logp.exp() <= rho).float()


def clipped_mae(logp: Tensor, rho: float) -> Tensor:
    """Eq. 8: (B, O) -> (B,). The mean is over all O tokens, even those that Eq. 7 drops.

    So the loss of a transition shrinks as its tokens are learned. With rho = 1, it is the MAE of
    section 3.2.
    """
    return (hard_tokens(logp, rho) * mae(logp)).mean(-1)


def lambda_g(returns: Tensor) -> Tensor:
    """Eq. 10: (G, E) -> (G,), from 1 (all episodes lost) to 0 (all won).

    In a lost group, all advantages are 0, but it has observations. A solved group needs no world
    model. Where most is won already, a constant 1 costs success with cross entropy, and no
    difference was found with PaW's loss (three_worlds.py).
    """
    return 1 - returns.mean(1) / R_MAX


def row_weights(selected: Tensor, lambdas: Tensor) -> Tensor:
    """Eq. 9 and 11 as one weight per transition: bool (N,), (G,) -> (N,).

    The weighted sum of losses is: the mean over the selected transitions of a group (9), times
    lambda_g, and then the mean over the groups (11).
    """
    selected = selected.view(len(lambdas), -1).float()  # (G, N/G)
    size = selected.sum(1, keepdim=True).clamp(min=1)  # (G, 1); at least 1, to divide by it
    return (lambdas[:, None] * selected / size / len(lambdas)).flatten()


# ---- An update ----
@dataclass
class Arm:
    """What a model is trained on. The defaults are PaW's."""

    scale: float = 1.0  # weight of the world-model loss; 0 is GRPO
    kl: float = 0.0  # weight of the KL term
    alpha: float = 0.75  # Eq. 4
    rho: float = 0.2  # Eq. 7
    lambda_g: str = "adaptive"  # Eq. 10, or "constant": 1
    loss: str = "cmae"  # Eq. 8, or "ce": Eq. 5
    placebo: bool = False  # targets are the observations of other transitions


def shuffled(observation: Tensor) -> Tensor:
    """Give each transition the observation of another one: (N, O) -> (N, O).

    Why a placebo? A second loss changes training whatever it teaches: it moves shared weights, it
    changes Adam's step sizes, and it takes its part of the clipped gradient. The placebo does this,
    too, with the same words and the same loss, but its observations say almost nothing about the
    lock and the action. So PaW's lead over it shows what knowing the world adds, unless the placebo
    is itself below GRPO, as it is with a KL term (research/LOG.md).
    """
    order = torch.randperm(len(observation))
    result = torch.empty_like(observation)
    result[order] = observation[order.roll(1)]  # one cycle, so none keeps its own
    return result


def learn(
    model: Model, optimizer, rollout: Rollout, advantage: Tensor, weight: Tensor, arm: Arm
) -> None:
    """Lines 7, 8 and 11 of Algorithm 1, on mini-batches. advantage, weight: (N,)."""
    tokens = torch.cat([rollout.prompt, rollout.action[:, None], rollout.observation], 1)  # (N, T)
    n_prompt = rollout.prompt.shape[1]
    for index in torch.randperm(len(tokens)).chunk(MINI_BATCHES):  # (B,)
        # One forward pass for both losses. Position i predicts token i + 1.
        logp = logp_of(model(tokens[index, :-1]), tokens[index, 1:])  # (B, T - 1)
        action_logp = logp[:, n_prompt - 1]  # (B,)
        observation_logp = logp[:, n_prompt:]  # (B, O)
        rl = clipped_surrogate(action_logp, rollout.old_logp[index], advantage[index])  # line 7
        if arm.kl:
            rl = rl + arm.kl * k3(action_logp, rollout.start_logp[index])
        if arm.loss == "ce":
            wm = cross_entropy(observation_logp)  # (B,)
        else:
            wm = clipped_mae(observation_logp, arm.rho)  # (B,)
        # Line 8. The weights belong to a sum over all N transitions. These are B of them, so N / B
        # times their sum estimates it.
        wm = (weight[index] * wm).sum() * len(tokens) / len(index)
        loss = rl + arm.scale * wm
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()  # line 11


def update(
    model: Model, optimizer, world: World, tasks: list[list[str]], arm: Arm,
    start: Model | None = None,
) -> None:
    """One update of Algorithm 1. Its loop over groups (lines 5 and 10) is in the shapes.

    start: the model before RL, for the KL term; not needed if arm.kl is 0.
    """
    rollout = play(model, world, tasks)  # lines 2 and 3
    selected = top_alpha(rollout.entropy, arm.alpha)  # line 4, over all groups at once
    lambdas = lambda_g(rollout.returns)  # line 9, (G,)
    if arm.lambda_g == "constant":
        lambdas = torch.ones_like(lambdas)
    weight = row_weights(selected, lambdas)  # line 6, (N,)
    # All actions of an episode get its advantage: the return does not say which one was wrong.
    advantage = grpo(rollout.returns).flatten().repeat_interleave(len(tasks[0]))  # (N,)
    if arm.placebo:
        rollout = replace(rollout, observation=shuffled(rollout.observation))
    if arm.kl:
        with torch.no_grad():
            start_logp = logp_of(start(rollout.prompt)[:, -1], rollout.action)  # (N,)
        rollout = replace(rollout, start_logp=start_logp)
    learn(model, optimizer, rollout, advantage, weight, arm)  # lines 7, 8 and 11


# ---- A run ----
@dataclass
class Evaluation:
    update: int
    success: float  # probability that a random task is won
    material: float  # probability of the material in o', mean over all locks and tools
    noise: float  # the same of the words after it; 0 if there are none, as here


@torch.no_grad()
def predict(model: Model, world: World) -> Tensor:
    """Log-probability of each word of o', for all locks and tools: (locks * tools, O)."""
    names = list(world.material_of)
    texts = [
        world.prompt(name) + [tool] + world.observation(name, tool)
        for name in names for tool in TOOLS
    ]
    tokens = model.encode(texts)
    n_prompt = len(world.prompt(names[0]))
    return logp_of(model(tokens[:, :-1]), tokens[:, 1:])[:, n_prompt:]


@torch.no_grad()
def evaluate(model: Model, world: World, update: int) -> Evaluation:
    """Computed from the model's probabilities, not by sampling. So it has no noise.

    The locks are those of training: what a policy has learned here does not help with new names.
    """
    # The steps of a task are drawn independently, so the mean of the product is a product of means.
    success = torch.tensor(1.0)
    for names in world.steps():
        logp = model(model.encode([world.prompt(name) for name in names]))[:, -1]  # (names, V)
        right = model.encode([[world.right_tool(name)] for name in names])[:, 0]
        success = success * logp_of(logp, right).exp().mean()
    logp = predict(model, world)
    material = logp[:, 1:2].exp().mean()
    noise = logp[:, 2:].exp().sum() / max(1, logp[:, 2:].numel())
    return Evaluation(update, success.item(), material.item(), noise.item())


def warm_start(model: Model, world: World, rng: random.Random, size: Size) -> None:
    """Train on random tools, and on observations of other locks and tools.

    This stands for pretraining: the model learns what can be said, but no fact of this world.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, betas=(0.9, 0.95))
    names = list(dict.fromkeys(name for step in world.steps() for name in step))
    n_prompt = len(world.prompt(names[0]))
    for _ in range(size.warm_steps):
        texts = []
        for _ in range(size.warm_rows):
            unrelated = world.shown_observation(names, rng)
            name = rng.choice(names)
            texts.append(world.prompt(name) + [world.shown_tool(name, rng)] + unrelated)
        tokens = model.encode(texts)
        logp = logp_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss = cross_entropy(logp[:, n_prompt - 1 :]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run(
    seed: int, arm: Arm, world: World | None = None, size: Size = Size(), name: str = ""
) -> list[Evaluation]:
    """Train a model from its warm start. With a name, print a line per evaluation."""
    world = world or make_world(seed)
    torch.manual_seed(seed)
    model = Model(world.words(), size)
    # Warm start and tasks have a random generator of their own, so all arms get the same ones.
    rng = random.Random(seed)
    warm_start(model, world, rng, size)
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.95))
    curve = []
    for k in range(size.updates + 1):
        if k > 0:  # line 1; the first evaluation is of the warm start
            tasks = [[rng.choices(step)[0] for step in world.steps()] for _ in range(GROUPS)]
            update(model, optimizer, world, tasks, arm, start)
        if k % size.evaluate_every == 0 or k == size.updates:
            point = evaluate(model, world, k)
            curve.append(point)
            if name:
                percent = 100 * point.success
                print(f"{name:8} seed {seed}  update {k:4}", end="  ")
                print(f"success {percent:5.1f} %  p(material) {point.material:.3f}", flush=True)
    return curve


# ---- The comparison ----
def make_arms(paw: Arm) -> dict[str, Arm]:
    return {"grpo": replace(paw, scale=0.0), "paw": paw, "placebo": replace(paw, placebo=True)}


def draw(curves: dict[str, list[list[Evaluation]]], path: str) -> None:
    """For each arm, the mean success, and the band from its worst to its best seed."""
    try:
        from matplotlib.figure import Figure  # pyplot would change how a notebook shows figures
    except ImportError:
        print("no figure: pip install matplotlib")
        return
    figure = Figure()
    axis = figure.subplots()
    colors = {"grpo": "#E69F00", "paw": "#0072B2", "placebo": "#7F7F7F"}
    names = {"grpo": "GRPO", "paw": "PaW", "placebo": "placebo"}
    for arm, runs in curves.items():
        updates = [point.update for point in runs[0]]
        success = [[100 * point.success for point in points] for points in zip(*runs)]
        middle = [mean(seeds) for seeds in success]
        # three_worlds.py has other arms, too.
        (line,) = axis.plot(updates, middle, color=colors.get(arm), label=names.get(arm, arm))
        lowest, highest = [min(seeds) for seeds in success], [max(seeds) for seeds in success]
        axis.fill_between(updates, lowest, highest, color=line.get_color(), alpha=0.2, lw=0)
    # An axis of 1.5 to 1.6 % would show a rise where nothing is learned.
    axis.set(xlabel="updates", ylabel="success (%)", ylim=(0, 100))
    # The legend is below the axes, where it covers no curve.
    axis.legend(title="line: mean, band: worst to best seed", ncols=3, loc="upper center",
                bbox_to_anchor=(0.5, -0.12), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def check_writable(path: str) -> None:
    """OSError before the runs for a picture that cannot be written; no empty one is left."""
    is_new = not os.path.lexists(path)
    with open(path, "ab"):
        pass
    if is_new:
        os.remove(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO, PaW and a placebo in a world of locks")
    names = list(make_arms(Arm()))
    parser.add_argument("--arms", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", nargs="+", default=[0, 1], type=int)
    parser.add_argument("--updates", default=Size.updates, type=int)
    parser.add_argument("--alpha", default=0.75, type=float, help="Eq. 4, in (0, 1]")
    parser.add_argument("--rho", default=0.2, type=float, help="Eq. 7, in (0, 1]; 1 is MAE")
    parser.add_argument("--lambda-g", default="adaptive", choices=["adaptive", "constant"],
                        help="Eq. 10, or 1")
    parser.add_argument("--loss", default="cmae", choices=["cmae", "ce"], help="Eq. 8 or Eq. 5")
    parser.add_argument("--scale", default=1.0, type=float, help="of the world-model loss")
    parser.add_argument("--kl", default=0.01, type=float, help="weight of GRPO's KL term")
    args = parser.parse_args()
    for flag, value in (("--alpha", args.alpha), ("--rho", args.rho)):
        if not 0 < value <= 1:
            parser.error(f"{flag} {value} is out of range (0, 1]")
    if args.updates < 1:
        parser.error(f"--updates {args.updates} must be at least 1")
    if not 0 <= args.scale < math.inf:
        parser.error(f"--scale {args.scale} must be a finite number, 0 or more")
    if not 0 <= args.kl < math.inf:
        parser.error(f"--kl {args.kl} must be a finite number, 0 or more")
    check_writable("one_file.png")
    # More threads would not be faster, and sums would depend on their number.
    torch.set_num_threads(1)
    paw = Arm(
        scale=args.scale, alpha=args.alpha, rho=args.rho, lambda_g=args.lambda_g,
        loss=args.loss, kl=args.kl,
    )
    arms = make_arms(paw)
    size = Size(updates=args.updates)
    curves = {name: [] for name in args.arms}
    seconds = {name: 0.0 for name in args.arms}
    for seed in args.seeds:
        for name in args.arms:
            start = time.time()
            curves[name].append(run(seed, arms[name], size=size, name=name))
            seconds[name] += time.time() - start

    print("\narm       success over the run  at the end  p(material)  seconds per run")
    for name, runs in curves.items():
        during = 100 * mean(point.success for curve in runs for point in curve[1:])
        end = 100 * mean(curve[-1].success for curve in runs)
        material = mean(curve[-1].material for curve in runs)
        spent = seconds[name] / len(runs)
        print(f"{name:8}  {during:18.1f} %  {end:8.1f} %  {material:11.3f}  {spent:15.1f}")
    draw(curves, "one_file.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except OSError as error:
        sys.exit(f"error: {error}")
