"""Generator of small ALFWorld games in the published format.

It writes splits of games in the layout of the ALFWorld release,
    <root>/json_2.1.1/{train,valid_seen,valid_unseen}/<task>-<Obj>-None-<Recep>-<scene>/trial_T<i>/
        {traj_data.json, game.tw-pddl}
cycling through the task types. ALFWorld's own classes can read the files: domain, grammar, goal
templates and the tables of what fits where come from the `alfworld` package.

Source: the ALFWorld release (json_2.1.1) and `alfworld.gen`. Deviations: the rooms are invented,
and so small (6-8 receptacles, 5-7 objects and a lamp, 27 classes in all) that a language model of a
million parameters can learn them on a CPU; the goal text is always the first template.

Every new game is verified: its walkthrough, which needs no search because the generator knows where
everything is, is played in the engine and must win. The same (split, n, seed) gives the same bytes
on every machine; a room depends on its scene only. valid_unseen has its own scenes; train and
valid_seen share scenes, but no (scene, goal) pair.
"""

import json
import random
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import textworld
from tqdm import tqdm

from paw_min.base.errors import UserError
from paw_min.base.files import made_once
from paw_min.envs.alfworld import engine


class _Tables(NamedTuple):
    """What the generator uses of the alfworld package."""

    can: dict[str, set[str]]  # property -> objects that have it
    fits: dict[str, set[str]]  # receptacle -> objects that may be in it
    goals: dict[str, dict]  # task type -> PDDL and templates of its goal
    domain: str  # PDDL
    grammar: str


def _read_tables() -> _Tables:
    engine.alfworld_wrappers()  # imports alfworld without its side effects on ~ and os.environ
    from alfworld import info
    from alfworld.gen import constants, goal_library

    return _Tables(
        can=constants.VAL_ACTION_OBJECTS,
        fits=constants.VAL_RECEPTACLE_OBJECTS,
        goals=goal_library.gdict,
        domain=Path(info.ALFRED_PDDL_PATH).read_text("utf-8"),
        grammar=Path(info.ALFRED_TWL2_PATH).read_text("utf-8"),
    )


ALFWORLD = _read_tables()
VERSION = 2  # increment it whenever the bytes of a game change
GENERATED = {"train": 400, "valid_seen": 120, "valid_unseen": 60}  # games of the default data
SCENES = {"train": range(6, 30), "valid_seen": range(6, 30), "valid_unseen": range(6)}
SEEN_SHARE = 5  # 1 in 5 (scene, goal) pairs belongs to valid_seen, the others to train

# task type -> verb to apply to the object before it is placed
TASKS = {
    "pick_and_place_simple": None,
    "look_at_obj_in_light": None,
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": None,
}
ABLE = {"clean": "Cleanable", "heat": "Heatable", "cool": "Coolable"}  # verb -> property it needs
# verb -> receptacle class to use, as in ALFWorld's domain
TOOLS = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}

# Each room has these and a Desk or SideTable for the lamp, as the six task types require ...
BASE_RECEPTACLES = ("Cabinet", "CounterTop", "Fridge", "Microwave", "SinkBasin")
LAMP_RECEPTACLES = ("Desk", "SideTable")
# ... and some of these; several per class, so that there are a "cabinet 1" and a "cabinet 2".
MORE_RECEPTACLES = (("Cabinet",) * 6 + ("CounterTop",) * 3 + ("Drawer",) * 3 + ("Shelf",) * 3
                    + ("DiningTable", "GarbageCan"))
OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave"}  # closed at the start
OBJECTS = ("Apple", "Book", "Bowl", "CellPhone", "Cloth", "Cup", "Egg", "Fork", "Mug", "Pen",
           "Plate", "Potato", "Spoon", "Tomato", "Watch")  # no Knife: it would add `slice`
HOLDERS = {"Bowl", "Cup", "Mug", "Plate"}  # isReceptacleObject, as in the release

RECEPTACLE_COUNT = (6, 8)  # minimum and maximum per room
OBJECT_COUNT = (5, 7)  # minimum and maximum per game, not counting the lamp
# The size is in the keys of random draws, so that games of another size are others.
SIZE = f"Size(receptacles={RECEPTACLE_COUNT}, objects={OBJECT_COUNT})"


@dataclass
class Thing:
    """A receptacle, or an object with the receptacle it starts in."""

    kind: str  # class, in ALFRED's spelling: CounterTop
    inside: "Thing | None" = None
    id: str = ""  # CounterTop|+01.00|+00.90|-02.00
    name: str = ""  # its name in observations: countertop 1


@dataclass
class Game:
    task: str  # its type, one of TASKS
    scene: int
    target: str  # class of the object
    goal: str  # class of the receptacle it has to be in, or DeskLamp
    room: list[Thing]  # receptacles
    things: list[Thing]  # objects, the lamp included


def make_room(scene: int) -> list[Thing]:
    """The receptacles of a scene."""
    rng = random.Random(f"room {scene} {SIZE}")  # a str seed: the same everywhere
    kinds = [*BASE_RECEPTACLES, rng.choice(LAMP_RECEPTACLES)]
    kinds += rng.sample(MORE_RECEPTACLES, rng.randint(*RECEPTACLE_COUNT) - len(kinds))
    return identify([Thing(kind) for kind in sorted(kinds)], rng)


def make_game(split: str, index: int, seed: int) -> Game:
    """Draw game number `index` of a split."""
    rng = random.Random(f"game {split} {seed} {SIZE} {index}")
    task = list(TASKS)[index % len(TASKS)]
    verb = TASKS[task]
    tool = None
    candidates = list(OBJECTS)
    if verb:
        tool = TOOLS[verb]
        candidates = [kind for kind in OBJECTS if kind in ALFWORLD.can[ABLE[verb]]]
    # Draw until (scene, goal) belongs to this split: 5 draws on average for valid_seen.
    while True:
        scene = rng.choice(SCENES[split])
        room = make_room(scene)
        lamp_place = next(r for r in room if r.kind in LAMP_RECEPTACLES)
        target = rng.choice(candidates)
        # The goal is never the tool itself ("heat an egg and put it in the microwave").
        goals = {r.kind for r in room if target in ALFWORLD.fits[r.kind]} - {tool}
        if task == "look_at_obj_in_light":
            goal = "DeskLamp"
        else:
            goal = rng.choice(sorted(goals))  # sorted: the order of a set differs between processes
        # A hash, not a draw: a pair has to fall into the same split in every game.
        held_out = zlib.crc32(f"{scene} {task} {target} {goal}".encode()) % SEEN_SHARE == 0
        if split == "valid_unseen":  # has scenes of its own
            break
        if held_out == (split == "valid_seen"):
            break
    count = rng.randint(*OBJECT_COUNT)
    kinds = [target]
    if task == "pick_two_obj_and_place":
        kinds = [target, target]
    kinds += rng.choices(OBJECTS, k=count - len(kinds))
    things = [Thing("DeskLamp", lamp_place)]
    for kind in kinds:
        places = [r for r in room if kind in ALFWORLD.fits[r.kind]]
        if kind == target:
            # No target starts in a goal receptacle, so the game is not won at the start.
            places = [r for r in places if r.kind != goal]
        things.append(Thing(kind, rng.choice(places)))
    return Game(task, scene, target, goal, room, identify(things, rng))


def solve(game: Game) -> list[str]:
    """The walkthrough: commands that win the game."""
    commands = []
    here = None  # receptacle
    opened = set()  # names of receptacles

    def go(place: Thing, door: bool = True):
        """Go to a place; with `door`, open it as well."""
        nonlocal here
        if here is not place:
            commands.append(f"go to {place.name}")
            here = place
        if door and place.kind in OPENABLE and place.name not in opened:
            commands.append(f"open {place.name}")
            opened.add(place.name)

    targets = [thing for thing in game.things if thing.kind == game.target]
    # There may be more: other objects are drawn from all classes.
    n_wanted = 1
    if game.task == "pick_two_obj_and_place":
        n_wanted = 2
    verb = TASKS[game.task]
    for thing in targets[:n_wanted]:
        go(thing.inside)
        commands.append(f"take {thing.name} from {thing.inside.name}")
        if game.goal == "DeskLamp":
            lamp = next(t for t in game.things if t.kind == "DeskLamp")
            go(lamp.inside)
            commands.append(f"use {lamp.name}")
            continue
        if verb:
            tool = next(r for r in game.room if r.kind == TOOLS[verb])
            go(tool, door=False)  # microwave and fridge work with the door closed, too
            commands.append(f"{verb} {thing.name} with {tool.name}")
        # Both objects of pick_two have to end in the same receptacle, not only in one class.
        end = next(r for r in game.room if r.name == f"{game.goal.lower()} 1")
        go(end)
        commands.append(f"move {thing.name} to {end.name}")
    return commands


def identify(things: list[Thing], rng: random.Random) -> list[Thing]:
    """Set each thing's ALFRED id, and the name that alfworld's Demangler derives from it."""
    spots = rng.sample(range(-400, 400), len(things))  # centimeters; all different, so ids are, too
    for thing, spot in zip(things, spots):
        thing.id = f"{thing.kind.removesuffix('Basin')}|{spot / 100:+06.2f}|+00.90|+01.00"
        if thing.kind.endswith("Basin"):
            thing.id += f"|{thing.kind}"  # Sink|x|y|z|SinkBasin

    def mangled(thing: Thing) -> str:
        return mangle(thing.id).lower()

    # The Demangler numbers the things of a class from the last id to the first.
    numbers = Counter()
    for thing in sorted(things, key=mangled, reverse=True):
        numbers[thing.kind] += 1
        thing.name = f"{thing.kind.lower()} {numbers[thing.kind]}"
    return things


def mangle(text: str) -> str:
    for mark, word in (("-", "minus"), ("+", "plus"), ("|", "bar"), (".", "dot")):
        text = text.replace(mark, f"_{word}_")
    return text


def write_problem(game: Game) -> str:
    """The PDDL problem: objects, places, what fits where, and the goal."""
    room = game.room
    things = game.things
    start = mangle("loc|0|0|0|30")  # no receptacle: "You are in the middle of a room"
    spot = {}  # name of a receptacle -> its location
    for i, r in enumerate(room):
        spot[r.name] = mangle(f"loc|{i + 1}|{-i}|{i % 4}|60")
    room_kinds = sorted({r.kind for r in room})
    thing_kinds = sorted({t.kind for t in things})

    objects = ["agent1 - agent"]
    objects += [f"{place} - location" for place in [start, *spot.values()]]
    objects += [f"{mangle(r.id)} - receptacle" for r in room]
    objects += [f"{mangle(t.id)} - object" for t in things]
    objects += [f"{kind}Type - otype" for kind in thing_kinds]
    objects += [f"{kind}Type - rtype" for kind in room_kinds]

    facts = [f"atLocation agent1 {start}"]
    for place in room_kinds:
        fitting = [kind for kind in thing_kinds if kind in ALFWORLD.fits[place]]
        facts += [f"canContain {place}Type {kind}Type" for kind in fitting]
    for r in room:
        id = mangle(r.id)
        facts.append(f"receptacleType {id} {r.kind}Type")
        facts.append(f"receptacleAtLocation {id} {spot[r.name]}")
        if r.kind in OPENABLE:
            facts.append(f"openable {id}")  # it is closed: `opened` is not stated
    for t in things:
        id = mangle(t.id)
        facts.append(f"objectType {id} {t.kind}Type")
        facts.append(f"inReceptacle {id} {mangle(t.inside.id)}")
        facts.append(f"objectAtLocation {id} {spot[t.inside.name]}")
        if t.kind != "DeskLamp":
            facts.append(f"pickupable {id}")
        if t.kind in HOLDERS:
            facts.append(f"isReceptacleObject {id}")
        abilities = [able for able in sorted(ALFWORLD.can) if t.kind in ALFWORLD.can[able]]
        facts += [f"{able.lower()} {id}" for able in abilities]

    goal = ALFWORLD.goals[game.task]["pddl"]
    goal = goal.format(obj=game.target, recep=game.goal, toggle="DeskLamp")
    goal = goal.replace("#", "-")
    return "\n".join([
        "(define (problem game) (:domain alfred)",
        "(:objects",
        *objects,
        ")",
        "(:init",
        *(f"({fact})" for fact in facts),
        ")",
        goal,  # has the parenthesis that closes `(define`
    ])


def game_files(game: Game) -> tuple[dict, dict]:
    """The contents of traj_data.json and game.tw-pddl."""
    template = ALFWORLD.goals[game.task]["templates"][0]
    text = template.format(
        obj=game.target.lower(), recep=game.goal.lower(), toggle="desklamp"
    )
    params = {
        "object_target": game.target,
        "object_sliced": False,
        "mrecep_target": "",
        "parent_target": game.goal,
        "toggle_target": "",
    }
    if game.goal == "DeskLamp":  # a lamp is switched on, it contains nothing
        params["parent_target"] = ""
        params["toggle_target"] = "DeskLamp"
    traj = {
        "task_type": game.task,
        "scene": {"scene_num": game.scene},
        "pddl_params": params,
        "turk_annotations": {"anns": [{"task_desc": text}]},
    }
    content = {
        "pddl_domain": ALFWORLD.domain,
        "grammar": ALFWORLD.grammar.replace("UNKNOWN GOAL", text),
        "pddl_problem": write_problem(game),
        "solvable": True,
        "walkthrough": solve(game),
    }
    return traj, content


def verify(env, content: dict):
    """Play the walkthrough of a game.tw-pddl; raises unless it wins with its last command."""
    walkthrough = content["walkthrough"]
    env.load(content)
    won = [env.reset()["won"]]
    for command in walkthrough:
        state, _, _ = env.step(command)
        won.append(state["won"])
    if won != [False] * len(walkthrough) + [True]:
        raise RuntimeError(f"the walkthrough {walkthrough} does not win with its last command; "
                           f"won: {won}.")


def generate_split(root: Path, split: str, n: int, seed: int) -> None:
    """Generate a split of n games under `root`, complete or not at all, unless it is there.

    UserError if it was generated with other arguments.
    """
    folder = root / "json_2.1.1" / split
    manifest = json.dumps({"generator": VERSION, "n": n, "seed": seed, "size": SIZE}) + "\n"

    def make(new: Path) -> None:
        for name, text in (make_split(split, n, seed) | {"manifest.json": manifest}).items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(text.encode("ascii"))  # text mode may change line ends

    made_once(folder, make)
    path = folder / "manifest.json"
    if not path.is_file() or path.read_bytes() != manifest.encode():
        raise UserError(f"{folder} has other games than those of now: delete it to have them "
                        "generated again, or choose another folder.")


def make_split(split: str, n: int, seed: int) -> dict[str, str]:
    """n verified games: path of a file, below the folder of the split -> content."""
    env = engine.make_env(textworld.EnvInfos(won=True))
    texts = {}
    for index in tqdm(range(n), f"games {split}", unit="game", disable=None):
        game = make_game(split, index, seed)
        traj, content = game_files(game)
        verify(env, content)
        name = f"{game.task}-{game.target}-None-{game.goal}-{game.scene}"
        trial = f"{name}/trial_T{index:05d}"
        texts[f"{trial}/traj_data.json"] = json.dumps(traj, indent=1) + "\n"
        texts[f"{trial}/game.tw-pddl"] = json.dumps(content, indent=1) + "\n"
    return texts


def generate(root: Path) -> Path:
    """Generate the default data, 580 games, unless they exist (a minute); returns `root`."""

    def make(folder: Path) -> None:
        for split, n in GENERATED.items():
            generate_split(folder, split, n, seed=0)

    # A folder that is there has all splits: --dry-run says so, and generates nothing.
    made_once(root, make)
    make(root)  # checks them
    return root
