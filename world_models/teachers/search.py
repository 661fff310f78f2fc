"""A teacher for search QA, which has the agent's observations and nothing more.

It chooses the next search or answer from the question and the information blocks so far. Its
episodes are the demonstrations that the stand-in model imitates before RL training.

Not in the paper, which starts from an instruction-tuned LLM. The teacher parses the questions and
passages of search_world.py only. It searches for the subject of each fact that it needs; in a
two-hop question, the first fact names the subject of the second. It then answers with the name from
the passage. Its knowledge comes from observations and not from its own commands, so that it
recovers when another command was executed (noisy demonstrations). If the retriever does not find
the passage, it repeats the search.

`haste` is the bad habit that RL has to unlearn: instead of searching for a name, the teacher gives
that name as the answer. In one-hop questions it is the name in the question, in two-hop questions
often the one in between.
"""

import random
import re
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.envs.interface import Context
from paw_min.envs.search.env import SearchPool
from paw_min.envs.search.questions import load_questions
from paw_min.retrieval import open_retriever
from paw_min.toy import search_world
from paw_min.toy.search_world import FIRST_WORDS, KINDS, NAME, RELATIONS
from world_models.teachers.demonstrate import Action, Demonstrator, PlayedStep, play

WORLDS = range(1, 13)  # seeds of the demonstrations' worlds; the training data have seed 0
PER_WORLD = 500  # questions; few from each of many worlds reward copying over memorizing
TOPK = 1  # passages per search, as in the preset `tiny`
MAX_TURNS = 4  # PaW, A.1
SLIPS = 0.1  # share of the searches in demonstrations that misspell the name


def _pattern(template: str) -> re.Pattern:
    """The regex of a template of search_world.py: {x} matches a name, {} any text."""
    pattern = re.sub(r"\\\{(\w+)\\\}", rf"(?P<\1>{NAME})", re.escape(template))
    return re.compile(pattern.replace(r"\{\}", "(.+)"))


def _words() -> dict[str, str]:
    """The word before the value of a relation in a passage: "the town {birthplace}" -> town."""
    words = {}
    for _, passage in KINDS.values():
        for word, relation in re.findall(r"(\w+) \{(\w+)\}", passage):
            if relation in RELATIONS:  # the name is not one
                words[relation] = word
    return words


WORDS = _words()  # They stand in the thought, and tell a small model where to look.
PASSAGES = [_pattern(passage) for _, passage in KINDS.values()]
QUESTIONS = {relation: _pattern(row[2]) for relation, row in RELATIONS.items()}
REFERENCES = {relation: _pattern(row[3]) for relation, row in RELATIONS.items()}


def read_question(question: str) -> tuple[str, list[str]]:
    """(name in the question, relations to follow from it); ValueError for other questions."""
    for second, pattern in QUESTIONS.items():
        match = pattern.fullmatch(question)
        if not match:
            continue
        subject = match[1]  # a name, or a reference to one: "the author of Galado Toresk"
        if re.fullmatch(NAME, subject):
            return subject, [second]
        for first, reference in REFERENCES.items():
            named = reference.fullmatch(subject)
            if named and re.fullmatch(NAME, named[1]):
                return named[1], [first, second]
    raise ValueError(f"The scholar cannot read {question!r}: it understands the questions of "
                     "paw_min.toy.search_world only.")


class Scholar:
    """The teacher in one episode."""

    def __init__(self, question: str):
        self.name, self.relations = read_question(question)
        self.facts = {}  # (name, relation) -> name
        self.slipped = False

    def act(self, context: Context) -> Action:
        """<search>name</search> or <answer>name</answer>."""
        # Learn all facts of the passages.
        for pattern in PASSAGES:
            for passage in pattern.finditer(context.observation):
                facts = passage.groupdict()
                name = facts.pop("name")
                for relation, value in facts.items():
                    self.facts[name, relation] = value
        # Follow the relations from the name in the question, up to the first unknown fact.
        name = self.name
        for relation in self.relations:
            if (name, relation) not in self.facts:
                return Action(f"<search>{name}</search>", f"need {WORDS[relation]}")
            name = self.facts[name, relation]
        return Action(f"<answer>{name}</answer>", f"know {WORDS[relation]}")

    def hasty(self, context: Context, command: str, haste: float, rng: random.Random) -> str:
        """Answer with a name instead of searching for it."""
        if command.startswith("<search>") and rng.random() < haste:
            return command.replace("search>", "answer>")
        return command

    def slip(self, context: Context, command: str, rng: random.Random) -> str | None:
        """At most once per episode, search for a misspelt name: the page is useless."""
        if not command.startswith("<search>") or self.slipped or rng.random() >= SLIPS:
            return None
        self.slipped = True
        misspelt = re.sub(r">\w+ ", f">{rng.choice(FIRST_WORDS)} ", command)
        return misspelt if misspelt != command else None


def training_tasks() -> list[str]:
    """ "world:number" of training questions, alternating between single and two-hop.

    The worlds differ from that of the training data: the model learns how to search, but no fact
    that is of use in RL training.
    """
    first_two_hop = search_world.N_TRAIN // 2
    tasks = []
    for i in range(PER_WORLD // 2):
        for number in (i, first_two_hop + i):
            tasks += [f"{world}:{number}" for world in WORLDS]
    return tasks


def demonstrations(tasks: list[str], seed: int, haste: float, episodes: int) -> list[PlayedStep]:
    """The steps of `episodes` episodes per question; see demonstrate.py for haste.

    tasks: as of training_tasks, or "number" alone: a training question of a run's generated data.
    """
    numbers = {}  # world, "" for that of runs -> its questions
    for task in tasks:
        world, _, number = task.rpartition(":")
        numbers.setdefault(world, []).append(int(number))
    steps = []
    for world, chosen in numbers.items():
        with tempfile.TemporaryDirectory() as folder:
            data = search_world.generate(Path(folder) / "world", seed=int(world or 0))
            questions = load_questions(data, "train")
            if max(chosen) >= len(questions):
                raise UserError(f"the generated data have no training question {max(chosen)}, and "
                                "the teacher knows no other: omit --data.")
            questions = [questions[number] for number in chosen]
            pool = SearchPool(questions, open_retriever(data), 64, MAX_TURNS, TOPK)
            name = f"{world}:" if world else ""
            for step in in_world(pool, len(questions), seed, haste, episodes):
                steps.append(replace(step, task=f"{name}{chosen[int(step.task)]}"))
    return steps


def in_world(
    pool: SearchPool, n: int, seed: int, haste: float, episodes: int
) -> list[PlayedStep]:
    """The same, of the `n` questions of a pool."""

    def start(number: int, task: str, first: Context) -> Demonstrator:
        # One generator per episode: its draws do not depend on the episodes played beside it.
        rng = random.Random(f"demonstrations {seed} {haste} {first.task} {number % episodes}")
        return Demonstrator(Scholar(first.task), rng, haste)

    tasks = [str(task) for task in range(n) for _ in range(episodes)]
    return list(chain.from_iterable(play("search", pool, tasks, start, MAX_TURNS)))
