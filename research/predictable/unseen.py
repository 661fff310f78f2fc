"""A world made to break one rule of which observation words to train on. See three_worlds.py first.

The rule: cross entropy (weight 0.05) on words of o' whose prediction has e^H <= 32, behind actions
about which the policy is undecided (H at least a quarter of that at the start).

A workshop. A task has two steps: read the label of a lock, and open a lock (each drawn at random):

    look lock17 and  | read | label brand23 . . .             the routine step
    open lock17 with | saw  | shut chisel acid drill acid     the choice

Each name has one of 40 brands, and the brand decides the tool: 240 names, 6 per brand, 5 brands per
tool. Only the label tells the brand. The warm start has shown that one reads when looking, so this
action is decided. After the attempt, one sees 4 tools that lie beside that lock: each is one of 3
common ones, fixed for this name, drawn independently of the right tool. They can be memorized, and
are of no use.

It is like an assistant that opens a ticket, a file or a product page (a routine call that is always
the same) and there finds an identifier out of many (an error code, a model number), which decides
what to do. The choice that it then hesitates about is answered by a status and by boilerplate
fields with few values, some of which name other actions that were not the right ones.

Why it should break the rule, by reasoning alone (no loss was tried, only GRPO):
1. The fact is behind a decided action: H of "read" is about 0.03, against 2.2 for the tools. The
   rule drops it. PaW takes all attempts and, with alpha = 0.75, half of the labels; ECHO takes all
   labels. (If "at the start" is measured for each prompt, and not over all transitions, labels may
   pass for some updates. Then point 2 drops the brand.)
2. The fact has 40 outcomes: e^H > 32. The dots and "label" are all that remains there. (Predictions
   drift: under GRPO alone e^H of a brand can fall below 32 late in a run. So point 1 is needed.)
3. What passes both is opens/shut and the tools lying about: e^H at most 2 and about 3, behind the
   undecided actions. Cross entropy memorizes these words. They are names of actions, so the same
   embeddings and the same head learn to say a wrong tool after this name. PaW leaves them alone:
   p = 1/3 > 0.2. ECHO memorizes them too, but it also learns the brands.
4. The rule is strongest at the start, where the policy has most to find, and off late.

Predicted, in the mean of the curve: ECHO > PaW > GRPO >= rule; the rule at best level with GRPO.
PaW's lead is the less sure: it sees half of the labels, and its gradient at p = 1/40 is small.
GRPO alone, seeds 40 and 41: 12 % at the start, 50 and 50 % at the end, 34 and 25 % as the mean of
the curve. There e^H of a brand is 45 at the start and 41 and 39 at the end (lowest 24).

In an Evaluation, material is p(brand) on the label, for any action word; noise is p of the dots.
"""

import random
from dataclasses import dataclass

from examples.one_file import TOOLS, Size, World

BRANDS = [f"brand{i}" for i in range(40)]
COMMON = TOOLS[:3]  # the tools that lie about; as often right as any other
NAMES = 240
SIZE = Size(
    width=32, layers=1, heads=2, warm_steps=300, warm_rows=128, lr=1e-3, updates=120,
    evaluate_every=20,
)  # fmt: skip


@dataclass
class Workshop(World):
    """material_of: name -> brand; tool_of: brand -> tool. "try lock17" is the attempt at lock17."""

    locks: int = 1  # not used: steps() is overridden
    seed: int = 0

    def __post_init__(self):
        rng = random.Random(f"workshop {self.seed}")
        self.lying = {f"try {name}": rng.choices(COMMON, k=4) for name in self.material_of}

    def steps(self) -> list[list[str]]:
        return [list(self.material_of), list(self.lying)]

    def prompt(self, name: str) -> list[str]:
        if name in self.material_of:
            return ["look", name, "and"]
        return ["open", name.removeprefix("try "), "with"]

    def right_tool(self, name: str) -> str:
        if name in self.material_of:
            return "read"
        return super().right_tool(name.removeprefix("try "))

    def shown_tool(self, name: str, rng: random.Random) -> str:
        return "read" if name in self.material_of else rng.choice(TOOLS)

    def observation(self, name: str, tool: str) -> list[str]:
        if name in self.material_of:
            return ["label", self.material_of[name], ".", ".", "."]
        return ["opens" if self.opens(name, tool) else "shut", *self.lying[name]]

    def shown_observation(self, names: list[str], rng: random.Random) -> list[str]:
        """Random words in the two forms: no fact of this world."""
        if rng.random() < 0.5:
            return ["label", rng.choice(BRANDS), ".", ".", "."]
        return ["opens" if rng.random() < 1 / 8 else "shut", *rng.choices(COMMON, k=4)]

    def words(self) -> list[str]:
        names, tools = list(self.material_of), list(TOOLS)
        rest = ["look", "open", "and", "with", "read", "label", "opens", "shut", "."]
        return [*rest, *names, *self.tool_of, *tools]


def make_world(seed: int, names: int = NAMES) -> Workshop:
    """A random world. Each brand is that of equally many names, each tool that of 5 brands."""
    rng = random.Random(f"brands {seed}")
    brands = [BRANDS[i % len(BRANDS)] for i in range(names)]
    rng.shuffle(brands)
    tools = [TOOLS[i % len(TOOLS)] for i in range(len(BRANDS))]
    rng.shuffle(tools)
    return Workshop(
        material_of={f"lock{i}": brand for i, brand in enumerate(brands)},
        tool_of=dict(zip(BRANDS, tools)),
        seed=seed,
    )
