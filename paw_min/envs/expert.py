"""A teacher for ALFWorld that sees only what the agent sees.

What it computes: the next command, from the task text, the latest observation and the admissible
commands. It knows nothing of hidden objects, so it has to search, and its traces can be imitated.

Source: none in the paper, which starts from an instruction-tuned LLM; a small model needs a warm
start. ALFWorld's own handcoded expert searches from a list of likely places and remembers where it
has been; a policy whose prompt holds the last two steps cannot imitate that. Here, therefore,
almost nothing depends on more than the latest step:

    hands empty    take the wanted object if it is in view; else open this place if it is closed;
                   else go to the place that follows this one in the list of `go to` commands
    wanted object  clean, heat or cool it; then to the goal: always number 1 of its class, so that
                   the two objects of pick_two meet; under a lamp, if the task asks for light
    other object   put it down at the first place that takes it

What it remembers: objects already cleaned, heated or cooled, the object in hand, where the lamp
stands. All are read from the texts and not from its own commands, so that it goes on from whatever
another player did in between (noisy demonstrations). Covers the six task types of ALFWorld and all
their goal templates, not free human task descriptions.
"""

import random
import re
from pathlib import Path

from tqdm import tqdm

from paw_min.envs import alfworld
from paw_min.prompts import Context

SLIPS = 0.2

# put a hot egg in fridge | heat some egg and put it in fridge | find two cd and put them in safe
PUT_TASK = re.compile(r"(put|find|clean|heat|cool) (?:a|some|two) (?:(clean|hot|cool) )?(\w+) "
                      r"(?:and put (?:it|them) )?(?:in|on) (\w+)")
LIGHT_TASK = re.compile(r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)")
VERBS = {"clean": "clean", "hot": "heat", "heat": "heat", "cool": "cool"}
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}  # verb -> receptacle class
LAMP_PLACES = ("desk", "sidetable", "dresser", "shelf")  # where lamps stand, likely ones first


def kind(name: str) -> str:
    """The class of a thing: `countertop 2` -> `countertop`."""
    return name.rsplit(" ", 1)[0]


class Expert:
    """One player of one game at a time.

    rng: used only where no rule applies, to try any admissible command.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng

    def reset(self, observation: str):
        """Start a game from its first observation; raises ValueError on a task it cannot read."""
        put, light = PUT_TASK.search(observation), LIGHT_TASK.search(observation)
        if not put and not light:
            raise ValueError(f"no task template of ALFWorld in {observation[-80:]!r}; the expert "
                             f"reads generated task texts only.")
        self.verb = self.goal = self.lamp = None
        if light:
            self.target, self.lamp = light.groups()
        else:
            first, state, self.target, self.goal = put.groups()
            self.verb = VERBS.get(state or first)
        self.places = set(re.findall(r"\ba ([a-z]+ \d+)", observation))
        self.hand = None  # name of the object carried
        self.ready = set()  # objects cleaned, heated or cooled as the task asks
        self.lamp_place = None
        self.dark = set()  # places known to have no lamp

    def act(self, observation: str, admissible: list[str]) -> str:
        """The next command, one of `admissible` (which holds `go to X` for each place but this)."""
        gos = [c for c in admissible if c.startswith("go to ")]
        self.places |= {c.removeprefix("go to ") for c in gos}
        here = next((c[8:] for c in admissible if c[:8] == "examine " and c[8:] in self.places), "")
        self._read(observation, admissible, here)
        for command in self._wishes(admissible, here):
            if command in admissible:
                return command
        for command in (f"open {here}", *(c for c in gos if c > f"go to {here}"), *gos):
            if command in admissible:  # nothing to do here: the next place, cyclic
                return command
        return self.rng.choice(admissible)

    def thought(self) -> str:
        """What it is about, in three words or so; after `act`."""
        if self.hand is None or kind(self.hand) != self.target:
            return f"find {self.target}"
        if self.lamp:
            return f"use {self.lamp}"
        if self.verb and self.hand not in self.ready:
            return f"{self.verb} {self.target}"
        return f"put {self.target} in {self.goal}"

    def _read(self, observation: str, admissible: list[str], here: str):
        """Update what is remembered."""
        if found := re.search(r"You pick up the (.+?) from", observation):
            self.hand = found[1]
        elif "You move the " in observation or "not carrying anything" in observation:
            self.hand = None
        elif found := re.search(r"You are carrying: an? (.+?)\.", observation):
            self.hand = found[1]
        elif found := re.search(r"You (clean|heat|cool) the (.+?) using", observation):
            self.hand = found[2]
            if found[1] == self.verb:
                self.ready.add(self.hand)
            elif found[1] != "clean" and self.verb != "clean":  # cooling undoes heating
                self.ready.discard(self.hand)
        # The admissible commands are surer than any memory of texts.
        if any(c.startswith("take ") for c in admissible):
            self.hand = None
        for command in admissible:
            if found := re.match(r"move (.+) to |(?:clean|heat|cool) (.+) with ", command):
                self.hand = found[1] or found[2]
        if self.lamp and here:
            if any(c.startswith(f"use {self.lamp}") for c in admissible):
                self.lamp_place = here
            elif f"open {here}" not in admissible:
                self.dark.add(here)

    def _wishes(self, admissible: list[str], here: str):
        """Yield the commands worth giving now, best first, whether admissible or not."""
        goal = min((p for p in self.places if kind(p) == self.goal), default=None)
        if self.hand is None:
            # What lies at the goal stays there, unless it is not yet clean, hot or cool.
            if self.verb or here != goal:
                yield from (c for c in admissible if c.startswith(f"take {self.target} "))
        elif kind(self.hand) != self.target:
            yield f"move {self.hand} to {here}"
        elif self.lamp:
            yield from (c for c in admissible if c.startswith(f"use {self.lamp}"))
            if self.lamp_place:
                yield f"go to {self.lamp_place}"
            likely = sorted((LAMP_PLACES.index(kind(p)), p) for p in self.places - self.dark
                            if kind(p) in LAMP_PLACES)
            yield from (f"go to {place}" for _, place in likely)
        elif self.verb and self.hand not in self.ready:
            tools = sorted(p for p in self.places if kind(p) == TOOLS[self.verb])
            yield from (f"{self.verb} {self.hand} with {tool}" for tool in tools)
            yield from (f"go to {tool}" for tool in tools)
        else:
            yield from (f"move {self.hand} to {goal}", f"go to {goal}")


def training_tasks() -> list[str]:
    """The generated training games, by trial number: each stretch of the list mixes the types."""
    games = alfworld.list_games(alfworld.generated_data(), "train")
    return sorted(games, key=lambda game: Path(game).parent.name)


def demonstrations(
    games: list[str], seed: int, haste: float, episodes: int, render
) -> list[tuple[str, str, str]]:
    """(prompt, response, next observation) of each step of `episodes` episodes per game.

    haste: share of the steps with something to grab or drop in which it does so at random, against
    its own better thought. In SLIPS of the steps another command is executed than the one shown, so
    that the rows go on from where no expert would get to (and the observation is what came of that
    other command). render: Context -> prompt.
    """
    rng = random.Random(f"demonstrations {seed} {haste}")
    env, rows = alfworld.AlfworldEnv(), []
    progress = tqdm(games, "demonstrations", unit="game", leave=False, disable=None)
    for game in [game for game in progress for _ in range(episodes)]:
        observation, info = env.reset(game)
        expert = Expert(random.Random(rng.random()))
        expert.reset(observation)
        context = Context(info["task"], observation, info["admissible"])
        for _ in range(25):
            action = expert.act(observation, info["admissible"])
            hasty = [a for a in info["admissible"] if a.startswith(("take ", "move "))]
            if hasty and rng.random() < haste:
                action = rng.choice(hasty)
            prompt = render(context)
            response = f"<think>{expert.thought()}</think><action>{action}</action>"
            if rng.random() < SLIPS:
                action = rng.choice(info["admissible"])
            observation, _, done, info = env.step(action)
            rows.append((prompt, response, observation))
            context.history.append((context.observation, action))
            context.observation, context.admissible = observation, info["admissible"]
            if done:
                break
    return rows
