"""Small, real ALFWorld games, made and proved on the spot.

What it computes: a split of games in the published ALFWorld layout,
    <root>/json_2.1.1/{train,valid_seen,valid_unseen}/<task>-<Obj>-None-<Recep>-<scene>/trial_T<i>/
        {traj_data.json, game.tw-pddl}
for the six task types in equal turn. The files are what the stock ALFWorld classes read: domain,
grammar, goal templates and the tables of what fits where come from the `alfworld` package.

Source: the ALFWorld release (json_2.1.1) and `alfworld.gen`. Here: rooms of our own, so small (6-8
receptacles, 5-7 objects and a lamp, 27 classes in all) that a language model of a million
parameters can learn them on a CPU; the goal text is always the first template.

Every game is proved when it is made: we know where things are, so a plan needs no search, and it is
replayed in the engine until the game says `won`. The plan is kept as `walkthrough`. The same
(split, n, seed, size) gives the same bytes everywhere; a room depends on (scene, size) alone.
valid_unseen has scenes of its own; train and valid_seen share scenes, but no scene and goal.

    python -m paw_min.envs.games --root DIR --split train --n 400 --seed 0
"""

import argparse
import json
import os
import random
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import textworld
from tqdm import tqdm

from paw_min.envs import engine


def _alfworld():
    """What the alfworld package knows: property -> objects, place -> objects, goals, two texts."""
    engine._alfworld_wrappers()  # the first import of alfworld, without its effect on ~ and environ
    from alfworld import info
    from alfworld.gen import constants, goal_library
    texts = [Path(p).read_text("utf-8") for p in (info.ALFRED_PDDL_PATH, info.ALFRED_TWL2_PATH)]
    tables = constants.VAL_ACTION_OBJECTS, constants.VAL_RECEPTACLE_OBJECTS
    return *tables, goal_library.gdict, *texts


CAN, FITS, GOALS, DOMAIN, GRAMMAR = _alfworld()
VERSION = 2  # raise it with every change that changes the bytes of a game
SCENES = {"train": range(6, 30), "valid_seen": range(6, 30), "valid_unseen": range(6)}
SEEN_SHARE = 5  # 1 of 5 (scene, goal) pairs belongs to valid_seen, the others to train

# task type -> (needed property of the object, receptacle class that gives it, command)
TASKS = {
    "pick_and_place_simple": None,
    "look_at_obj_in_light": None,
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin", "clean"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave", "heat"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge", "cool"),
    "pick_two_obj_and_place": None,
}

# Each room has these and a Desk or a SideTable for the lamp (what the six task types need) ...
BASE_RECEPTACLES = ("Cabinet", "CounterTop", "Fridge", "Microwave", "SinkBasin")
LAMP_RECEPTACLES = ("Desk", "SideTable")
# ... and some of these; several of a class, so that "cabinet 1" and "cabinet 2" must be told apart.
MORE_RECEPTACLES = (("Cabinet",) * 6 + ("CounterTop",) * 3 + ("Drawer",) * 3 + ("Shelf",) * 3
                    + ("DiningTable", "GarbageCan"))
OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave"}  # closed at the start
OBJECTS = ("Apple", "Book", "Bowl", "CellPhone", "Cloth", "Cup", "Egg", "Fork", "Mug", "Pen",
           "Plate", "Potato", "Spoon", "Tomato", "Watch")  # no Knife: it would bring `slice`
HOLDERS = {"Bowl", "Cup", "Mug", "Plate"}  # isReceptacleObject, as in the release


@dataclass(frozen=True)
class Size:
    receptacles: tuple[int, int] = (6, 8)  # fewest and most per room
    objects: tuple[int, int] = (5, 7)  # fewest and most per game, the lamp not counted

    def __post_init__(self):
        fewest = len(BASE_RECEPTACLES) + 1
        most = fewest + len(MORE_RECEPTACLES)
        if not (fewest <= self.receptacles[0] <= self.receptacles[1] <= most
                and 2 <= self.objects[0] <= self.objects[1]):
            raise ValueError(f"{self}: choose a smaller and a larger number of receptacles from "
                             f"{fewest} to {most}, and of objects from 2 up.")


@dataclass
class Thing:
    """A receptacle, or an object and the receptacle it starts in."""
    kind: str  # class, as ALFRED spells it: CounterTop
    inside: "Thing | None" = None
    id: str = ""  # CounterTop|+01.00|+00.90|-02.00
    name: str = ""  # what the player reads: countertop 1


def make_room(scene: int, size: Size) -> list[Thing]:
    """The receptacles of a scene; they depend on the scene and the size alone."""
    rng = random.Random(f"room {scene} {size}")  # str seeds: independent of PYTHONHASHSEED
    kinds = [*BASE_RECEPTACLES, rng.choice(LAMP_RECEPTACLES)]
    kinds += rng.sample(MORE_RECEPTACLES, rng.randint(*size.receptacles) - len(kinds))
    return _identify([Thing(kind) for kind in sorted(kinds)], rng)


def make_game(split: str, index: int, seed: int, size: Size) -> dict:
    """Draw one game; returns its task, scene, target and goal class, room, and things."""
    rng = random.Random(f"game {split} {seed} {size} {index}")
    task = list(TASKS)[index % len(TASKS)]
    while True:  # until the goal belongs to this split; 5 draws on average for valid_seen
        scene = rng.choice(SCENES[split])
        room = make_room(scene, size)
        lamp_place = next(r for r in room if r.kind in LAMP_RECEPTACLES)
        need = TASKS[task]
        target = rng.choice([o for o in OBJECTS if not need or o in CAN[need[0]]])
        # "heat and put it in the microwave" is no task of its own: the goal is another receptacle
        goals = sorted({r.kind for r in room if target in FITS[r.kind]} - {need and need[1]})
        goal = "DeskLamp" if task == "look_at_obj_in_light" else rng.choice(goals)
        held_out = zlib.crc32(f"{scene} {task} {target} {goal}".encode()) % SEEN_SHARE == 0
        if split == "valid_unseen" or held_out == (split == "valid_seen"):
            break
    count = rng.randint(*size.objects)
    kinds = [target] * (2 if task == "pick_two_obj_and_place" else 1)
    kinds += rng.choices(OBJECTS, k=count - len(kinds))
    things = [Thing("DeskLamp", lamp_place)]
    for kind in kinds:
        # A target never starts where it should end, so the goal is open at the start.
        places = [r for r in room if kind in FITS[r.kind] and (kind, r.kind) != (target, goal)]
        things.append(Thing(kind, rng.choice(places)))
    return {"task": task, "scene": scene, "target": target, "goal": goal, "room": room,
            "things": _identify(things, rng)}


def solve(game: dict) -> list[str]:
    """Commands that win the game. No search: the places are known."""
    commands, here, opened = [], None, set()

    def go(place: Thing, door: bool = True):
        nonlocal here
        if here is not place:
            commands.append(f"go to {place.name}")
            here = place
        if door and place.kind in OPENABLE and place.name not in opened:
            commands.append(f"open {place.name}")
            opened.add(place.name)

    wanted = [thing for thing in game["things"] if thing.kind == game["target"]]
    for thing in wanted[:2 if game["task"] == "pick_two_obj_and_place" else 1]:
        go(thing.inside)
        commands.append(f"take {thing.name} from {thing.inside.name}")
        if game["goal"] == "DeskLamp":
            lamp = next(t for t in game["things"] if t.kind == "DeskLamp")
            go(lamp.inside)
            commands.append(f"use {lamp.name}")
            continue
        if TASKS[game["task"]]:
            _, kind, verb = TASKS[game["task"]]
            tool = next(r for r in game["room"] if r.kind == kind)
            go(tool, door=False)  # a microwave heats, and a fridge cools, with its door closed too
            commands.append(f"{verb} {thing.name} with {tool.name}")
        end = next(r for r in game["room"] if r.name == f"{game['goal'].lower()} 1")
        go(end)
        commands.append(f"move {thing.name} to {end.name}")
    return commands


def _identify(things: list[Thing], rng: random.Random) -> list[Thing]:
    """Give each thing its ALFRED id, and the name that alfworld's Demangler will make of it."""
    spots = rng.sample(range(-400, 400), len(things))  # centimetres, all different: so are the ids
    for thing, spot in zip(things, spots):
        thing.id = f"{thing.kind.removesuffix('Basin')}|{spot / 100:+06.2f}|+00.90|+01.00"
        thing.id += f"|{thing.kind}" * thing.kind.endswith("Basin")  # Sink|x|y|z|SinkBasin
    numbers = Counter()
    for thing in sorted(things, key=lambda t: _mangle(t.id).lower(), reverse=True):
        numbers[thing.kind] += 1  # the Demangler counts from the last id to the first
        thing.name = f"{thing.kind.lower()} {numbers[thing.kind]}"
    return things


def _mangle(text: str) -> str:
    for mark, word in (("-", "minus"), ("+", "plus"), ("|", "bar"), (".", "dot")):
        text = text.replace(mark, f"_{word}_")
    return text


def write_problem(game: dict) -> str:
    """The PDDL problem: things, places, what fits where, and the goal."""
    room, things = game["room"], game["things"]
    start = _mangle("loc|0|0|0|30")  # no receptacle here: "You are in the middle of a room"
    spot = {r.name: _mangle(f"loc|{i + 1}|{-i}|{i % 4}|60") for i, r in enumerate(room)}
    rkinds, okinds = sorted({r.kind for r in room}), sorted({t.kind for t in things})
    objects = ["agent1 - agent", *(f"{place} - location" for place in [start, *spot.values()])]
    objects += [f"{_mangle(r.id)} - receptacle" for r in room]
    objects += [f"{_mangle(t.id)} - object" for t in things]
    objects += [f"{k}Type - otype" for k in okinds] + [f"{k}Type - rtype" for k in rkinds]
    facts = [f"atLocation agent1 {start}"]
    facts += [f"canContain {r}Type {o}Type" for r in rkinds for o in okinds if o in FITS[r]]
    for r in room:
        id = _mangle(r.id)
        facts += [f"receptacleType {id} {r.kind}Type", f"receptacleAtLocation {id} {spot[r.name]}"]
        facts += [f"openable {id}"] * (r.kind in OPENABLE)
    for t in things:
        id = _mangle(t.id)
        facts += [f"objectType {id} {t.kind}Type", f"inReceptacle {id} {_mangle(t.inside.id)}",
                  f"objectAtLocation {id} {spot[t.inside.name]}"]
        facts += [f"pickupable {id}"] * (t.kind != "DeskLamp")
        facts += [f"isReceptacleObject {id}"] * (t.kind in HOLDERS)
        facts += [f"{able.lower()} {id}" for able in sorted(CAN) if t.kind in CAN[able]]
    goal = GOALS[game["task"]]["pddl"].format(obj=game["target"], recep=game["goal"],
                                              toggle="DeskLamp").replace("#", "-")
    return "\n".join(["(define (problem game) (:domain alfred)", "(:objects", *objects, ")",
                      "(:init", *(f"({fact})" for fact in facts), ")", goal])  # goal: last ) too


def game_files(game: dict) -> tuple[dict, dict]:
    """The contents of traj_data.json and game.tw-pddl, the game not yet proved."""
    text = GOALS[game["task"]]["templates"][0].format(
        obj=game["target"].lower(), recep=game["goal"].lower(), toggle="desklamp")
    lamp = game["goal"] == "DeskLamp"
    params = {"object_target": game["target"], "object_sliced": False, "mrecep_target": "",
              "parent_target": "" if lamp else game["goal"],
              "toggle_target": "DeskLamp" if lamp else ""}
    traj = {"task_type": game["task"], "scene": {"scene_num": game["scene"]},
            "pddl_params": params, "turk_annotations": {"anns": [{"task_desc": text}]}}
    return traj, {"pddl_domain": DOMAIN, "grammar": GRAMMAR.replace("UNKNOWN GOAL", text),
                  "pddl_problem": write_problem(game), "solvable": True,
                  "walkthrough": solve(game)}


def prove(env, path: Path):
    """Replay the game's walkthrough; raises unless it wins at its last command and not before."""
    walkthrough = json.loads(path.read_bytes())["walkthrough"]
    env.load(str(path))
    won = [env.reset()["won"]] + [env.step(command)[0]["won"] for command in walkthrough]
    if won != [False] * len(walkthrough) + [True]:
        raise RuntimeError(f"{path}: {walkthrough} does not win at its end; won: {won}.")


def generate(root, split: str, n: int, seed: int, size: Size = Size(),
             progress: bool = False) -> list[str]:
    """Make, complete or find a split of n games under root; returns their paths, sorted.

    A game file appears only when proved, so the same call completes an interrupted one; a finished
    split is not proved again. Another (n, seed, size) in the same folder is a ValueError.
    """
    if split not in SCENES or n < 1:
        raise ValueError(f"split is {split!r} and n is {n}; choose one of {', '.join(SCENES)}, and "
                         f"1 game or more.")
    folder = Path(root).expanduser() / "json_2.1.1" / split
    manifest = folder / "manifest.json"
    asked = {"generator": VERSION, "n": n, "seed": seed, "size": str(size)}
    if manifest.exists():
        found = json.loads(manifest.read_text(encoding="utf-8"))
        paths = found.pop("games", None)
        if found != asked:
            raise ValueError(f"{folder} holds games made with {found}, and {asked} was asked for; "
                             f"choose another root or delete this folder.")
        if paths and all((folder / p).is_file() for p in paths):
            return [str(folder / p) for p in paths]
    elif folder.exists() and any(p.is_dir() for p in folder.iterdir()):
        raise ValueError(f"{folder} holds games from elsewhere; choose another root.")
    _write(manifest, asked)

    env, paths = None, []
    for index in tqdm(range(n), f"games {split}", unit="game", disable=None if progress else True):
        game = make_game(split, index, seed, size)
        name = f"{game['task']}-{game['target']}-None-{game['goal']}-{game['scene']}"
        path = folder / name / f"trial_T{index:05d}" / "game.tw-pddl"
        paths.append(path.relative_to(folder).as_posix())
        if path.exists():
            continue
        traj, content = game_files(game)
        _write(path.with_name("traj_data.json"), traj)
        draft = path.with_name("draft.tw-pddl")  # no reader takes it for a game
        _write(draft, content)
        env = env or engine.make_env(textworld.EnvInfos(won=True))
        prove(env, draft)
        os.replace(draft, path)
    _write(manifest, asked | {"games": sorted(paths)})
    return [str(folder / p) for p in sorted(paths)]


def _write(path: Path, content: dict):
    """Write JSON so that the file is whole or absent, with the same bytes on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes((json.dumps(content, indent=1) + "\n").encode("ascii"))
    os.replace(partial, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="data folder; json_2.1.1 is made in it")
    parser.add_argument("--split", required=True, choices=list(SCENES))
    parser.add_argument("--n", type=int, required=True, help="number of games")
    parser.add_argument("--seed", type=int, default=0)
    paths = generate(**vars(parser.parse_args()), progress=True)
    print(f"{len(paths)} games, the first is {paths[0]}")


if __name__ == "__main__":
    main()
