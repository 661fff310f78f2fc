"""ALFWorld games with a hidden property: the material of an object decides what cleans it.

    python -m examples.hidden                          PaW
    python -m examples.hidden --no-paw                 GRPO
    python -m examples.hidden --wm-target shuffled     the placebo

The world of locks (one_file.py) in ALFWorld's engine. There are 128 kinds of objects, each of one
of 8 materials, and 8 receptacles, each of which cleans the objects of one material. The agent holds
two objects, and may try to clean each once. The game is won if both are clean. No prompt says what
an object is made of. Each observation does, even after a wrong receptacle:

    <user>clean bluemug 1 with<agent>fridge<end>Dirty clay.

--seed also draws the world and the start model, so all arms of a seed share both. Games and start
model are written to data/hidden/<seed> on first use (a minute). Rerun a command to resume it.

The games are ALFWorld's domain and grammar with the changes of `write_domain` and `write_grammar`.
The package's environment plays them in the real engine. research/LOG.md has eight seeds.
"""

import importlib.util
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from examples.locks import make_model, train_on_random_rows
from examples.one_file import MATERIALS, WARM_LR, Size
from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import made_once, writing
from paw_min.cli import check_command, main
from paw_min.config import Config
from paw_min.envs.alfworld import AlfworldEnv
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Step, Tasks
from paw_min.envs.pool import EnvPool
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from paw_min.toy.standins import make_tokenizer

DATA = Path("data/hidden")
# The package is not imported: that would make folders.
ALFWORLD = Path(importlib.util.find_spec("alfworld").origin).parent / "data"
COLORS = ("Black", "Blue", "Brown", "Gray", "Green", "Pink", "Red", "White")
THINGS = ("Bottle", "Bowl", "Box", "Cup", "Dish", "Fork", "Kettle", "Knife", "Ladle", "Mug", "Pan",
          "Plate", "Pot", "Spoon", "Vase", "Watch")
KINDS = [color + thing for color in COLORS for thing in THINGS]
RECEPTACLES = ("BathtubBasin", "CoffeeMachine", "Fridge", "Microwave", "SinkBasin", "StoveBurner",
               "Toaster", "Toilet")
TASK = "clean what you hold"  # the same text in all games, so the engine parses one grammar
ROUNDS = 16  # pairs per kind in train: with 2, a kind met few others, and PaW learned slowly
SEED = 2  # the default is the first seed of the study

PRESETS = {"tiny": dict(
    seed=SEED, prompt="compact", history_length=0, max_prompt_tokens=16, max_response_tokens=2,
    max_obs_tokens=8, max_turns=2, updates=200, eval_every=25, eval_tasks=0, eval_repeats=4,
    eval_temperature=1.0, save_every=25, lr=Size.lr, beta2=0.95, mini_batch=64, micro_tokens=4096,
    statistics="trajectories", wm_separator="none",
    # one_file.py has neither of these two, nor a KL term. verl-agent's KL term stays:
    # without it, some runs lose the format, and all arms win less (research/LOG.md).
    entropy_coef=0.0, invalid_penalty=0.0)}


# ---- the games ----


@dataclass
class World:
    """The hidden facts."""

    material_of: dict[str, str]  # kind of object -> its material
    cleaner_of: dict[str, str]  # material -> class of the receptacle that cleans it

    def cleaner(self, kind: str) -> str:
        return self.cleaner_of[self.material_of[kind]]


def make_world(seed: int) -> World:
    """A random world. Each material is that of equally many kinds."""
    rng = random.Random(f"hidden world {seed}")
    materials = [MATERIALS[i % len(MATERIALS)] for i in range(len(KINDS))]
    rng.shuffle(materials)
    receptacles = rng.sample(RECEPTACLES, len(RECEPTACLES))
    return World(dict(zip(KINDS, materials)), dict(zip(MATERIALS, receptacles)))


def exchanged(text: str, old: str, new: str) -> str:
    """`text` with its only `old` replaced."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


def write_domain() -> str:
    """ALFWorld's domain, in which the material decides what cleans, and each object has one try."""
    domain = (ALFWORLD / "alfred.pddl").read_text("utf-8")
    domain = exchanged(domain, "  otype\n", "  otype\n  material\n")
    predicates = """(:predicates
    (madeOf ?o - object ?m - material)
    (cleans ?t - rtype ?m - material)
    (tried ?o - object)
"""
    domain = exchanged(domain, "(:predicates\n", predicates)
    start = domain.index("(:action CleanObject")
    end = domain.index(";; agent heats")
    action = """(:action CleanObject
    :parameters (?a - agent ?l - location ?r - receptacle ?o - object ?t - rtype ?m - material)
    :precondition (and
            (cleanable ?o)
            (receptacleType ?r ?t)
            (madeOf ?o ?m)
            (atLocation ?a ?l)
            (receptacleAtLocation ?r ?l)
            (holds ?a ?o)
            (not (tried ?o))
            )
    :effect (and
                (increase (total-cost) 5)
                (tried ?o)
                (when (cleans ?t ?m)
                    (isClean ?o))
            )
 )

"""
    return domain[:start] + action + domain[end:]


def write_grammar() -> str:
    """ALFWorld's grammar, in which an attempt to clean shows the material, whatever comes of it."""
    shown = (
        '"condition": "isclean(o:object)", "rhs": "Clean {m.id}."}, '
        '{"rhs": "Dirty {m.id}."'
    )
    old = '"rhs": "You clean the {o.name} using the {r.name}."'
    grammar = (ALFWORLD / "alfred.twl2").read_text("utf-8")
    return exchanged(exchanged(grammar, old, shown), "UNKNOWN GOAL", TASK)


def pddl_name(kind: str) -> str:
    """ALFRED's id, such as Sink|+01.00|+00.90|+01.00|SinkBasin, with its signs written as words.

    ALFWorld makes `sinkbasin 1` of it. All positions are the same: nothing depends on them.
    """
    place = "bar__plus_01_dot_00_bar__plus_00_dot_90_bar__plus_01_dot_00"
    name = f"{kind.removesuffix('Basin')}_{place}"
    return f"{name}_bar_{kind}" if kind.endswith("Basin") else name


def write_problem(world: World, pair: tuple[str, str]) -> str:
    """One place with all receptacles, where the agent holds both objects."""
    here = "loc_here"
    receptacle = {kind: pddl_name(kind) for kind in RECEPTACLES}
    thing = {kind: pddl_name(kind) for kind in pair}
    objects = ["agent1 - agent", f"{here} - location"]
    objects += [f"{name} - receptacle" for name in receptacle.values()]
    objects += [f"{name} - object" for name in thing.values()]
    objects += [f"{kind}Type - rtype" for kind in RECEPTACLES]
    objects += [f"{kind}Type - otype" for kind in pair]
    objects += [f"{material} - material" for material in MATERIALS]
    facts = [f"atLocation agent1 {here}", "holdsAny agent1"]
    for kind, name in receptacle.items():
        facts += [f"receptacleType {name} {kind}Type", f"receptacleAtLocation {name} {here}"]
    for material, kind in world.cleaner_of.items():
        facts.append(f"cleans {kind}Type {material}")
    for kind, name in thing.items():
        facts += [f"objectType {name} {kind}Type", f"madeOf {name} {world.material_of[kind]}"]
        facts += [f"cleanable {name}", f"holds agent1 {name}"]
    return "\n".join([
        "(define (problem game) (:domain alfred)",
        "(:objects", *objects, ")",
        "(:init", *(f"({fact})" for fact in facts), ")",
        "(:goal (and", *(f"(isClean {name})" for name in thing.values()), "))",
        ")",
    ])


def make_game(world: World, pair: tuple[str, str]) -> dict:
    """The contents of game.tw-pddl."""
    return {
        "pddl_domain": write_domain(),
        "grammar": write_grammar(),
        "pddl_problem": write_problem(world, pair),
        "solvable": True,
        "walkthrough": [
            f"clean {kind.lower()} 1 with {world.cleaner(kind).lower()} 1" for kind in pair
        ],
    }


def make_pairs(seed: int) -> dict[str, list[tuple[str, str]]]:
    """Split -> pairs of kinds, all different.

    Each kind is in ROUNDS pairs of train. held_out has 32 other pairs, so half of the kinds are in
    it, once each.
    """
    kinds = random.Random(f"hidden pairs {seed}").sample(KINDS, len(KINDS))
    # A kind at an even place meets the one at the next odd place in each round.
    rounds = []
    for k in range(ROUNDS + 1):
        odd = kinds[2 * k + 1 :: 2] + kinds[1 : 2 * k + 1 : 2]
        rounds.append(list(zip(kinds[::2], odd)))
    return {"train": sum(rounds[:ROUNDS], []), "held_out": rounds[ROUNDS][:32]}


def write_games(folder: Path, seed: int) -> None:
    world = make_world(seed)
    for split, pairs in make_pairs(seed).items():
        for i, pair in enumerate(pairs):
            trial = folder / split / f"{'-'.join(pair)}" / f"{i:05d}"
            trial.mkdir(parents=True)
            for name, content in (("traj_data.json", {"task_type": "clean_two"}),
                                  ("game.tw-pddl", make_game(world, pair))):
                (trial / name).write_text(json.dumps(content), encoding="utf-8")


# ---- the benchmark ----


def begun(admissible: list[str]) -> str:
    """The beginning of the commands that clean the first object, by name, that was not tried."""
    first = next(command for command in admissible if command.startswith("clean "))
    return first.rpartition(" with ")[0] + " with"


class Env(AlfworldEnv):
    """The package's environment, in which the prompt has the beginning of the command."""

    def reset(self, task: str) -> Step:
        self.current = super().reset(task)
        return self.current

    def step(self, command: str) -> Step:
        self.current = super().step(f"{begun(self.current.admissible)} {command} 1")
        # The episode is over once both objects were tried, even with more than two turns.
        left = any(command.startswith("clean ") for command in self.current.admissible)
        self.current.done = self.current.done or not left
        return self.current


def load(cfg: Config, data: str) -> Tasks:
    """The games of `data`, in the package's environment."""

    def listed(split: str) -> list[str]:
        return sorted(str(path) for path in Path(data).glob(f"{split}/*/*/game.tw-pddl"))

    def make_pool(n_envs: int) -> EnvPool:
        return EnvPool(Env, n_envs, cfg.workers)

    train, held_out = listed("train"), listed("held_out")
    if not train:
        raise UserError(f"--data {data} has no games train/*/*/game.tw-pddl: leave it out, or name "
                        "a folder in data/hidden.")
    return Tasks(train, held_out, make_pool)


def prompt(context: Context, history_length: int) -> str:
    """The beginning of the next command. No material, and no list of commands."""
    return begun(context.admissible)


def parse(response: str) -> Command:
    """The response is the class of a receptacle; `Env` completes the command."""
    return Command(response, valid=response in [kind.lower() for kind in RECEPTACLES])


BENCHMARKS["hidden"] = Benchmark(load, {"compact": prompt}, parse)


# ---- the start model ----


def warm_start(folder: Path, seed: int) -> None:
    """Train a model on random receptacles, and on what other attempts have shown.

    It learns how to act and what may be observed, but no fact of this world.
    """
    rng = random.Random(f"hidden warm start {seed}")
    kinds = [kind.lower() for kind in KINDS]
    receptacles = [kind.lower() for kind in RECEPTACLES]
    # Shown objects are clean as often as random receptacles clean.
    outcomes = ["Clean"] + ["Dirty"] * (len(RECEPTACLES) - 1)
    observations = [f"{outcome} {material}." for material in MATERIALS for outcome in outcomes]
    texts = [*observations, *(f"clean {kind} 1 with" for kind in [*kinds, *receptacles])]
    tokenizer = make_tokenizer(texts)
    policy = Policy(make_model(tokenizer, seed), tokenizer)
    chat, answer, encode = map(cache, (policy.encode_chat, policy.encode_response, policy.encode))

    def draw() -> TokenRow:
        message = f"clean {rng.choice(kinds)} 1 with"
        return TokenRow(
            chat(message), answer(rng.choice(receptacles)), encode(rng.choice(observations))
        )

    train_on_random_rows(policy, draw, Size.warm_steps, Size.warm_rows, WARM_LR)
    with writing(str(folder)):
        policy.save(folder)


# ---- a run ----


def prepare(seed: int) -> None:
    """Write the games and the start model of a seed to its folder, unless they are there."""

    def make(folder: Path) -> None:
        print(f"writing games and a start model: {folder}", flush=True)
        write_games(folder, seed)
        warm_start(folder / "start", seed)

    made_once(DATA / str(seed), make)


def run(presets=PRESETS, doc=__doc__, method=None, argv=None) -> None:
    """The command; cli.fork calls it with another method."""
    torch.set_num_threads(1)
    with user_errors():
        seed = check_command("hidden", presets, doc, lambda cfg: DATA / str(cfg.seed), argv).seed
        prepare(seed)
    folder = DATA / str(seed)
    own = dict(data=str(folder), model=str(folder / "start"), seed=seed)
    presets = {name: preset | own for name, preset in presets.items()}
    main("hidden", presets, doc, method, argv)


if __name__ == "__main__":
    run()
