"""A rule-based ALFWorld teacher with the agent's observations, and its demonstrations.

It chooses the next command from the task text, the current observation and the admissible commands.
It does not know where hidden objects are, so it has to search, and a model can imitate it.

Source: none in the paper, which starts from an instruction-tuned LLM; a small model needs a warm
start. ALFWorld's handcoded expert searches a list of likely places and remembers where it has been,
which a policy with two steps of history cannot imitate. Almost everything here therefore depends on
the current step only:

    hands empty    take the wanted object if it is in view; else open this place if it is closed;
                   else go to the next place in the list of `go to` commands
    wanted object  clean, heat or cool it, then take it to the goal, which is always number 1 of its
                   class, so that the two objects of pick_two end in the same place; or use the lamp
    other object   put it down in the first place that accepts it

It remembers which objects are cleaned, heated or cooled, which one it holds, and where the lamp is.
All of this is read from observations, not from its own commands, so that it can continue after a
random command (noisy demonstrations). It reads all goal templates of the six task types, but not
the free-form task descriptions written by people.
"""

import random
import re
from itertools import chain
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.interface import Context
from paw_min.envs.pool import EnvPool
from paw_min.toy import default_data
from world_models.teachers.demonstrate import Action, Demonstrator, PlayedStep, play

SLIPS = 0.2  # share of demonstrated steps in which a random command is executed
MAX_STEPS = 25  # per demonstration

# put a hot egg in fridge | heat some egg and put it in fridge | find two cd and put them in safe
PUT_TASK = re.compile(r"(put|find|clean|heat|cool) (?:a|some|two) (?:(clean|hot|cool) )?(\w+) "
                      r"(?:and put (?:it|them) )?(?:in|on) (\w+)")
LIGHT_TASK = re.compile(r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)")
VERBS = {"clean": "clean", "hot": "heat", "heat": "heat", "cool": "cool"}
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}  # verb -> receptacle class
LAMP_PLACES = ("desk", "sidetable", "dresser", "shelf")  # where lamps are, most likely first


def kind(name: str) -> str:
    """The class of an object or place: `countertop 2` -> `countertop`."""
    return name.rsplit(" ", 1)[0]


class Expert:
    """The teacher in one game. `rng` is used only if no rule applies."""

    def __init__(self, observation: str, rng: random.Random):
        """observation: the first of the game; UserError if its task cannot be read."""
        put = PUT_TASK.search(observation)
        light = LIGHT_TASK.search(observation)
        if not put and not light:
            raise UserError(f"{observation[-80:]!r} matches no task template of ALFWorld; the "
                            "expert reads generated task texts only.")
        self.rng = rng
        self.verb = None  # clean, heat or cool
        self.goal = None  # receptacle class
        self.lamp = None  # object class
        if light:
            self.target, self.lamp = light.groups()
        else:
            first, state, self.target, self.goal = put.groups()
            # "put a hot egg" states the verb in "hot", "heat some egg and put it" in "heat".
            self.verb = VERBS.get(state or first)
        self.places = set(re.findall(r"\ba ([a-z]+ \d+)", observation))
        self.hand = None  # name of the object that it holds
        self.sees = False  # the wanted object is in view
        self.ready = set()  # objects cleaned, heated or cooled as required
        self.lamp_place = None
        self.dark = set()  # places without a lamp

    def act(self, context: Context) -> Action:
        """The next command, one of the admissible (with a `go to X` for every other place)."""
        command = self._command(context.observation, context.admissible)
        return Action(command, self._thought())

    def hasty(self, context: Context, command: str, haste: float, rng: random.Random) -> str:
        """Take or move anything, at random."""
        early = [c for c in context.admissible if c.startswith(("take ", "move "))]
        if early and rng.random() < haste:
            return rng.choice(early)
        return command

    def slip(self, context: Context, command: str, rng: random.Random) -> str | None:
        if rng.random() < SLIPS:
            return rng.choice(context.admissible)
        return None

    def _command(self, observation: str, admissible: list[str]) -> str:
        gos = [c for c in admissible if c.startswith("go to ")]
        self.places |= {c.removeprefix("go to ") for c in gos}
        # Only the place where the agent is can be examined; objects can be, too.
        examined = [c.removeprefix("examine ") for c in admissible if c.startswith("examine ")]
        here = next((name for name in examined if name in self.places), "")
        self._remember_hand(observation, admissible)
        self._remember_lamp(admissible, here)
        wishes = [command for command in self._wishes(admissible, here) if command in admissible]
        self.sees = self.hand is None and bool(wishes)
        if wishes:
            return wishes[0]
        # Nothing to do here: look inside, else go to the next place, after the last to the first.
        if f"open {here}" in admissible:
            return f"open {here}"
        later = [c for c in gos if c > f"go to {here}"]
        if later:
            return later[0]
        if gos:
            return gos[0]
        return self.rng.choice(admissible)

    def _thought(self) -> str:
        if self.hand is None or kind(self.hand) != self.target:
            if self.sees:
                return f"take {self.target}"
            return f"find {self.target}"
        if self.lamp:
            return f"use {self.lamp}"
        if self.verb and self.hand not in self.ready:
            return f"{self.verb} {self.target}"
        return f"put {self.target} in {self.goal}"

    def _remember_hand(self, observation: str, admissible: list[str]):
        """Remember what the agent holds, and which objects are ready.

        Only empty hands can take something, and only what is held can be moved, cleaned, heated or
        cooled. Where neither is admissible, as at a closed place, it holds what it held before.
        """
        if any(c.startswith("take ") for c in admissible):
            self.hand = None
        for command in admissible:
            held = re.match(r"move (.+) to |(?:clean|heat|cool) (.+) with ", command)
            if held:
                self.hand = held[1] or held[2]
        changed = re.search(r"You (clean|heat|cool) the (.+?) using", observation)
        if changed:
            verb, name = changed.groups()
            if verb == self.verb:
                self.ready.add(name)
            elif verb != "clean" and self.verb != "clean":  # cooling undoes heating
                self.ready.discard(name)

    def _remember_lamp(self, admissible: list[str], here: str):
        """Remember where the lamp is, or is not."""
        if not self.lamp or not here:
            return
        if any(c.startswith(f"use {self.lamp}") for c in admissible):
            self.lamp_place = here
        elif f"open {here}" not in admissible:
            self.dark.add(here)

    def _wishes(self, admissible: list[str], here: str) -> list[str]:
        """Useful commands, best first, admissible or not."""
        # Number 1 of its class: the two objects of pick_two have to go to the same place.
        goal = min((p for p in self.places if kind(p) == self.goal), default=None)
        if self.hand is None:
            # An object at the goal stays there, unless it must be cleaned, heated or cooled.
            if here == goal and not self.verb:
                return []
            return [c for c in admissible if c.startswith(f"take {self.target} ")]
        if kind(self.hand) != self.target:
            return [f"move {self.hand} to {here}"]
        if self.lamp:
            return self._ways_to_light(admissible)
        if self.verb and self.hand not in self.ready:
            tools = sorted(p for p in self.places if kind(p) == TOOLS[self.verb])
            uses = [f"{self.verb} {self.hand} with {tool}" for tool in tools]
            return uses + [f"go to {tool}" for tool in tools]
        return [f"move {self.hand} to {goal}", f"go to {goal}"]

    def _ways_to_light(self, admissible: list[str]) -> list[str]:
        """Use the lamp here, or go to where it is, or else to the most likely place."""
        ways = [c for c in admissible if c.startswith(f"use {self.lamp}")]
        if self.lamp_place:
            ways.append(f"go to {self.lamp_place}")
        unseen = [p for p in self.places - self.dark if kind(p) in LAMP_PLACES]
        likely = sorted((LAMP_PLACES.index(kind(p)), p) for p in unseen)
        return ways + [f"go to {place}" for _, place in likely]


def training_tasks() -> list[str]:
    """The stored training games by trial number, so that task types alternate."""

    def trial(game: str) -> str:
        return Path(game).parent.name

    return sorted(list_games(default_data("alfworld"), "train"), key=trial)


def demonstrations(tasks: list[str], seed: int, haste: float, episodes: int) -> list[PlayedStep]:
    """The steps of `episodes` episodes per game; see demonstrate.py for haste."""
    rng = random.Random(f"demonstrations {seed} {haste}")

    def start(number: int, task: str, first: Context) -> Demonstrator:
        expert = Expert(first.observation, random.Random(rng.random()))
        return Demonstrator(expert, rng, haste)

    games = [task for task in tasks for _ in range(episodes)]
    with EnvPool(AlfworldEnv, n_envs=1) as pool:  # one game after another share the generator
        return list(chain.from_iterable(play("alfworld", pool, games, start, MAX_STEPS)))
