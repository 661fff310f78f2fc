"""PaW in one file: Policy and World Modeling Co-Training (arXiv 2606.02388) on a CPU, in a minute.

An agent acts, the environment answers, and at the end there is a reward. Reinforcement learning (RL)
learns from the reward alone. But each answer also says something about the world. PaW trains the
same model, in the same forward pass, to predict the answers to its own actions:

    loss = RL loss  +  mean over groups g of  lambda_g * L(transitions that Eq. 4 selects in g)   (11)

A group is several episodes of one task. L is the mean of 1 - p over the tokens of the answer, p being
the model's probability; tokens with p > rho are left out (Eq. 7-8). Selected are the transitions in
which the model was least sure what to do (Eq. 4). lambda_g falls as the group wins (Eq. 10). After
training, nothing is predicted: the policy is used as any other.

    python examples/one_file.py                      # needs torch, and matplotlib for the figure

trains three models in a world of locks: GRPO (RL alone), PaW, and a placebo, which is PaW with the
answers to other actions as targets. Read from top to bottom: the world, the model, sampling, the
equations, an update, a run, the figure. Differences from the paper are marked "Paper:".
"""

import argparse
import math
import random
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

# Shapes: G groups, E episodes of a group, N transitions of an update, B transitions of a mini-batch,
# T tokens of a transition, O tokens of an observation, V words, C channels, H heads.
UPDATES = 200  # RL updates of a run
EVALUATE_EVERY = 25  # updates
GROUPS = 16  # G, tasks of an update
EPISODES = 8  # E, attempts at each task
MINI_BATCHES = 4  # optimizer steps of an update
WARM_STEPS = 300  # optimizer steps before RL
WARM_ROWS = 256  # transitions of such a step
WARM_LR = 1e-3
LR = 3e-4  # of RL. The best for GRPO of 3e-4, 5e-4, 1e-3 and 2e-3: the baseline is not handicapped
CLIP = 0.2  # of the ratio in the RL loss
GRADIENT_CLIP = 1.0
WIDTH, LAYERS, HEADS = 64, 2, 4
R_MAX = 10.0  # the return of an episode that is won


# ---- The world -----------------------------------------------------------------------------------
# A task is two locks. The agent is told the name of a lock and tries a tool:
#
#     open lock17 with | saw | shut glass         prompt h | action a | next observation o'
#
# Each name has a material, and each material is opened by one tool. Neither is in the prompt. An
# episode is won if both locks open at the first try, so a random agent wins one in 64.
#
# RL alone has to find 128 facts (name -> tool), each from a rare reward. The observation tells the
# material even if the tool was wrong. Once the model has the materials, 8 facts are left to find.
# This is what a world model can give to a policy: structure that recurs across tasks, that the
# reward needs, and that the prompt does not show. Where one of these is missing, expect no gain.
#
# Why 8 materials? Their prior is 1/8, below rho = 0.2. Had the world 4 materials, a model that knows
# nothing but their frequency would have p = 0.25 > rho, and Eq. 7 would drop every one of them.
MATERIALS = ["bone", "clay", "glass", "ice", "iron", "stone", "wax", "wood"]
TOOLS = ["acid", "chisel", "drill", "hammer", "hook", "magnet", "saw", "torch"]


@dataclass
class World:
    """Which tool opens which lock. Another world is another object with these methods."""

    material_of: dict[str, str]  # name of a lock -> its material
    tool_of: dict[str, str]  # material -> the tool that opens it
    locks: int = 2  # of a task

    def prompt(self, name: str) -> list[str]:
        return ["open", name, "with"]

    def opens(self, name: str, tool: str) -> bool:
        return tool == self.right_tool(name)

    def observation(self, name: str, tool: str) -> list[str]:
        # Words that are no tool open nothing either: the policy may say any word.
        return ["opens" if self.opens(name, tool) else "shut", self.material_of[name]]

    def right_tool(self, name: str) -> str:
        return self.tool_of[self.material_of[name]]

    def words(self) -> list[str]:
        return ["open", "with", "opens", "shut", *self.material_of, *self.tool_of, *TOOLS]


def make_world(seed: int, names: int = 128) -> World:
    """A random world in which all materials are equally frequent."""
    rng = random.Random(seed)
    materials = [MATERIALS[i % len(MATERIALS)] for i in range(names)]
    rng.shuffle(materials)
    tools = rng.sample(TOOLS, len(TOOLS))
    return World(
        material_of={f"lock{i}": material for i, material in enumerate(materials)},
        tool_of=dict(zip(MATERIALS, tools, strict=True)),
    )


# ---- The model: a language model in which every word is a token ------------------------------------
class Block(nn.Module):
    """Causal attention, then a network that is applied to each position."""

    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        by_head = self.query_key_value(x).view(B, T, 3, HEADS, C // HEADS)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)  # (B, H, T, C/H) each
        score = query @ key.transpose(-1, -2) / math.sqrt(C // HEADS)  # (B, H, T, T)
        # No position sees a later one. So the observation, which stands after the action, cannot
        # change the action's probability: appending it leaves the policy as it is.
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weight = score.masked_fill(future, -torch.inf).softmax(-1)
        return self.out((weight @ value).transpose(1, 2).reshape(B, T, C))


class Model(nn.Module):
    """Policy and world model in one: what it says next is an action, or an observation."""

    def __init__(self, words: list[str]):
        super().__init__()
        self.words = words
        self.id_of = {word: i for i, word in enumerate(words)}
        self.token = nn.Embedding(len(words), WIDTH)
        self.position = nn.Embedding(16, WIDTH)
        # Small, as in GPT-2: at first, all names look the same, and training has to tell them apart.
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(words))

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the word after each position: (B, T) -> (B, T, V)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]  # (B, T, C)
        return self.head(self.norm(self.blocks(x))).log_softmax(-1)

    def encode(self, texts: list[list[str]]) -> Tensor:
        """Texts of equal length -> tokens (N, T)."""
        return torch.tensor([[self.id_of[word] for word in text] for text in texts])


def logp_of(logp: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of these tokens: (..., V), (...) -> (...)."""
    return logp.gather(-1, tokens[..., None])[..., 0]


# ---- Sampling ------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """The transitions of an update, ordered by group, episode and lock."""

    prompt: Tensor  # (N, T - 1 - O) tokens of h
    action: Tensor  # (N,) the token of a
    observation: Tensor  # (N, O) tokens of o'
    old_logp: Tensor  # (N,) log-probability of the action when it was sampled
    entropy: Tensor  # (N,) of the distribution that the action was sampled from, in nats
    returns: Tensor  # (G, E)


@torch.no_grad()
def play(model: Model, world: World, tasks: list[list[str]]) -> Rollout:
    """EPISODES attempts at each task. A task is the names of its locks."""
    names = []  # (N,), the lock of each transition
    for task in tasks:
        names += task * EPISODES
    prompt = model.encode([world.prompt(name) for name in names])
    # The locks of an episode do not depend on each other, so all actions are sampled at once.
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
        entropy=-(logp.exp() * logp).sum(-1),
        returns=R_MAX * won.float(),
    )


# ---- The equations -------------------------------------------------------------------------------
def advantages(returns: Tensor) -> Tensor:
    """GRPO: how much better than its group an episode was, in standard deviations: (G, E) -> (G, E).

    All episodes lost, or all won: 0. From such a group, RL learns nothing.
    """
    centered = returns - returns.mean(1, keepdim=True)
    return centered / (returns.std(1, keepdim=True) + 1e-6)


def policy_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> Tensor:
    """Eq. 1, with PPO's clipped ratio in place of log pi: (B,), (B,), (B,) -> ().

    Paper: a sum over the actions of an episode. Here: a mean over actions, as in its code base.
    """
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def top_alpha(entropy: Tensor, alpha: float) -> Tensor:
    """Eq. 4: the ceil(alpha * N) transitions of the highest action entropy: (N,) -> bool (N,).

    Why the entropy of the action, and not of the observation? It costs nothing, sampling has it
    already. And it tells where the policy has not decided: there, what an action does matters most.
    Paper: the printed formula has the sampled tokens alone. Here: the whole distribution.
    """
    count = math.ceil(alpha * len(entropy) * (1 - 1e-9))  # 0.07 * 100 is slightly above 7
    order = entropy.sort(descending=True, stable=True).indices
    selected = torch.zeros_like(entropy, dtype=torch.bool)
    selected[order[:count]] = True
    return selected


def cross_entropy(logp: Tensor) -> Tensor:
    """Eq. 5: (B, O) -> (B,). Its gradient is that of p divided by p: largest for rare tokens."""
    return -logp.mean(-1)


def mae(logp: Tensor) -> Tensor:
    """Eq. 6, the mean absolute error: (B, O) -> (B,). Its gradient is that of p: bounded."""
    return (1 - logp.exp()).mean(-1)


def is_hard(logp: Tensor, rho: float) -> Tensor:
    """Eq. 7: 1 where p <= rho, else 0: (B, O) -> (B, O).

    Why p <= rho, and so low? A token above it is known well enough to be of use. To push it on to 1
    would cost the policy capacity, and where several outcomes are possible, it would be wrong.
    The mask has no gradient, for a comparison has none: it decides which tokens are trained, but
    the model gains nothing by moving a token across rho.
    """
    return (logp.exp() <= rho).float()


def clipped_mae(logp: Tensor, rho: float) -> Tensor:
    """Eq. 8: (B, O) -> (B,). The divisor is all of |o'|, the dropped tokens included."""
    return (is_hard(logp, rho) * (1 - logp.exp())).mean(-1)


def group_lambda(returns: Tensor) -> Tensor:
    """Eq. 10: (G, E) -> (G,), from 1 (all lost) to 0 (all won).

    A group that is lost has no advantages, but observations. A group that is won needs no more.
    """
    return 1 - returns.mean(1) / R_MAX


def transition_weights(selected: Tensor, lam: Tensor) -> Tensor:
    """Eq. 9 and 11: weights with which the losses of transitions add up: bool (N,), (G,) -> (N,).

    The mean over a group's selected transitions, times its lambda, and the mean over the groups.
    """
    selected = selected.view(len(lam), -1).float()  # (G, N/G)
    size = selected.sum(1, keepdim=True).clamp(min=1)  # of a group without selected ones: 1, not 0
    return (lam[:, None] * selected / size / len(lam)).flatten()


# ---- An update -----------------------------------------------------------------------------------
@dataclass
class Arm:
    """What an arm of the comparison trains on. The defaults are the paper's."""

    scale: float = 1.0  # of the world-model loss; 0: GRPO
    alpha: float = 0.75  # Eq. 4
    rho: float = 0.2  # Eq. 7
    balance: str = "return"  # lambda_g by Eq. 10, or "constant": 1
    loss: str = "cmae"  # Eq. 8, or "mae" (Eq. 6), "ce" (Eq. 5)
    placebo: bool = False  # targets are the observations of other transitions


def shuffled(observation: Tensor) -> Tensor:
    """The observation of another transition for each: (N, O) -> (N, O).

    Why a placebo? A second loss changes training whatever it teaches: it moves shared weights, and
    Adam's step sizes. The placebo has the same words, as often, and a loss of the same form, but
    they do not belong to the action. Only what PaW gains beyond it comes from knowing the world.
    """
    order = torch.randperm(len(observation))
    result = torch.empty_like(observation)
    result[order] = observation[order.roll(1)]  # along a circle, so none keeps its own
    return result


def world_model_loss(logp: Tensor, arm: Arm) -> Tensor:
    """(B, O) -> (B,)."""
    if arm.loss == "ce":
        return cross_entropy(logp)
    if arm.loss == "mae":
        return mae(logp)
    return clipped_mae(logp, arm.rho)


def learn(
    model: Model, optimizer, rollout: Rollout, advantage: Tensor, weight: Tensor, arm: Arm
) -> None:
    """Lines 7, 8 and 11: MINI_BATCHES steps on Eq. 11. advantage, weight: (N,)."""
    action = rollout.action[:, None]  # (N, 1)
    tokens = torch.cat([rollout.prompt, action, rollout.observation], 1)  # (N, T)
    n_prompt = rollout.prompt.shape[1]
    for index in torch.randperm(len(tokens)).chunk(MINI_BATCHES):  # (B,)
        # One pass for both losses. Position i predicts token i + 1.
        logp = logp_of(model(tokens[index, :-1]), tokens[index, 1:])  # (B, T - 1)
        action_logp = logp[:, n_prompt - 1]  # (B,)
        observation_logp = logp[:, n_prompt:]  # (B, O)
        rl = policy_loss(action_logp, rollout.old_logp[index], advantage[index])  # line 7
        wm = weight[index] @ world_model_loss(observation_logp, arm)  # line 8
        # The weights add up over all N transitions, of which this mini-batch has B.
        loss = rl + arm.scale * wm * len(tokens) / len(index)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()  # line 11


def update(model: Model, optimizer, world: World, tasks: list[list[str]], arm: Arm) -> Rollout:
    """One pass of the loop of Algorithm 1."""
    rollout = play(model, world, tasks)  # lines 2 and 3: the pools are the rows of the rollout
    selected = top_alpha(rollout.entropy, arm.alpha)  # line 4: over all groups at once
    lam = group_lambda(rollout.returns)  # line 9, before the loop over groups: a tensor has them all
    if arm.balance == "constant":
        lam = torch.ones_like(lam)
    weight = transition_weights(selected, lam)  # line 6
    # Both actions of an episode get its advantage: nothing tells which of them was wrong.
    advantage = advantages(rollout.returns)[:, :, None].expand(-1, -1, world.locks).flatten()  # (N,)
    targets = shuffled(rollout.observation) if arm.placebo else rollout.observation
    learn(model, optimizer, replace(rollout, observation=targets), advantage, weight, arm)
    return rollout


# ---- A run ---------------------------------------------------------------------------------------
@dataclass
class Evaluation:
    update: int
    success: float  # probability of winning a random task
    material: float  # probability of the material in an observation, over all locks and tools
    wins: float  # share of the episodes of the update before it


@torch.no_grad()
def evaluate(model: Model, world: World) -> tuple[float, float]:
    """Success and knowledge from the model's probabilities: no sampling, so no noise."""
    names = list(world.material_of)
    logp = model(model.encode([world.prompt(name) for name in names]))[:, -1]  # (names, V)
    right = model.encode([[world.right_tool(name)] for name in names])[:, 0]
    # The locks of a task are drawn independently, so the mean over all tasks is a power.
    success = logp_of(logp, right).exp().mean() ** world.locks
    texts = [
        world.prompt(name) + [tool] + world.observation(name, tool)
        for name in names for tool in TOOLS
    ]  # fmt: skip
    tokens = model.encode(texts)
    material = logp_of(model(tokens[:, :-1]), tokens[:, 1:])[:, -1].exp().mean()
    return success.item(), material.item()


def warm_start(model: Model, world: World, rng: random.Random) -> None:
    """Teach what is usual to say: some tool, and some observation.

    This stands for pretraining. A pretrained model knows the language of its environment, but not
    the facts of this one. So the observations are shuffled, as the placebo's are.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, betas=(0.9, 0.95))
    names = list(world.material_of)
    for _ in range(WARM_STEPS):
        tries = [(rng.choice(names), rng.choice(TOOLS)) for _ in range(WARM_ROWS)]
        prompt = model.encode([world.prompt(name) for name, _ in tries])
        action = model.encode([[tool] for _, tool in tries])
        observation = shuffled(model.encode([world.observation(*one) for one in tries]))
        tokens = torch.cat([prompt, action, observation], 1)
        logp = logp_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss = cross_entropy(logp[:, prompt.shape[1] - 1 :]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run(
    seed: int, arm: Arm, world: World | None = None, updates: int = UPDATES, name: str = ""
) -> list[Evaluation]:
    """Train one model. name: of the lines to print, one per evaluation; none without it."""
    world = world or make_world(seed)
    torch.manual_seed(seed)
    model = Model(world.words())
    # Tasks have random numbers of their own, so that all arms get the same tasks.
    rng = random.Random(seed)
    warm_start(model, world, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    curve = []
    wins = 0.0
    names = list(world.material_of)
    for k in range(updates + 1):
        if k > 0:  # line 1
            tasks = [rng.choices(names, k=world.locks) for _ in range(GROUPS)]
            rollout = update(model, optimizer, world, tasks, arm)
            wins = rollout.returns.mean().item() / R_MAX
        if k % EVALUATE_EVERY == 0 or k == updates:
            curve.append(Evaluation(k, *evaluate(model, world), wins))
            if name:
                print(
                    f"{name:8} seed {seed}  update {k:3}  success {100 * curve[-1].success:5.1f} %"
                    f"  p(material) {curve[-1].material:.3f}",
                    flush=True,
                )
    return curve


# ---- The comparison ------------------------------------------------------------------------------
def arms(paw: Arm) -> dict[str, Arm]:
    return {
        "grpo": replace(paw, scale=0.0),
        "paw": paw,
        "placebo": replace(paw, placebo=True),
    }


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def draw(curves: dict[str, list[list[Evaluation]]], path: str) -> None:
    """Mean success of each arm, and the band from its lowest to its highest seed."""
    import matplotlib

    matplotlib.use("Agg")  # without a screen
    import matplotlib.pyplot as plt

    for name, runs in curves.items():
        points = [[100 * point.success for point in at] for at in zip(*runs)]  # by update
        x = [point.update for point in runs[0]]
        plt.plot(x, [mean(p) for p in points], label=name)
        plt.fill_between(x, [min(p) for p in points], [max(p) for p in points], alpha=0.2)
    plt.xlabel("updates")
    plt.ylabel("success (%)")
    plt.legend()
    plt.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="PaW in one file")
    names = list(arms(Arm()))
    parser.add_argument("--arms", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--alpha", type=float, default=Arm.alpha, help="Eq. 4")
    parser.add_argument("--rho", type=float, default=Arm.rho, help="Eq. 7")
    parser.add_argument("--balance", default=Arm.balance, choices=["return", "constant"])
    parser.add_argument("--loss", default=Arm.loss, choices=["cmae", "mae", "ce"])
    parser.add_argument("--scale", type=float, default=Arm.scale, help="of the world-model loss")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is small, and the sums are the same on every machine
    paw = Arm(args.scale, args.alpha, args.rho, args.balance, args.loss)
    curves = {name: [] for name in args.arms}
    seconds = dict.fromkeys(args.arms, 0.0)
    for seed in args.seeds:
        for name in args.arms:
            start = time.time()
            curves[name].append(run(seed, arms(paw)[name], updates=args.updates, name=name))
            seconds[name] += time.time() - start
    print("\narm       mean success   at the end   p(material)   seconds per run")
    for name, runs in curves.items():
        area = 100 * mean(point.success for curve in runs for point in curve[1:])
        end = 100 * mean(curve[-1].success for curve in runs)
        material = mean(curve[-1].material for curve in runs)
        spent = seconds[name] / len(runs)
        print(f"{name:8}  {area:10.1f} %  {end:9.1f} %  {material:12.3f}  {spent:16.1f}")
    draw(curves, "one_file.png")


if __name__ == "__main__":
    main()
