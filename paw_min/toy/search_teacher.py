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
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from paw_min.envs.interface import Context, Turn
from paw_min.envs.search.env import SearchPool
from paw_min.envs.search.questions import Question, load_questions
from paw_min.retrieval import open_retriever
from paw_min.toy import Demonstration, search_world
from paw_min.toy.search_world import FIRST_WORDS, KINDS, NAME, RELATIONS

WORLDS = range(1, 13)  # seeds of the demonstrations' worlds; the training data have seed 0
PER_WORLD = 500  # questions; few from each of many worlds reward copying over memorizing
TOPK = 1  # passages per search, as in the preset `tiny`
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
            if relation in RELATIONS:  # and not the name
                words[relation] = word
    return words


WORDS = _words()  # in the thought, they tell a small reader where to look
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
    """The teacher in one episode at a time.

    haste: share of the searches that it replaces by an answer, drawn with `rng`.
    """

    def __init__(self, rng: random.Random, haste: float = 0.0):
        self.rng = rng
        self.haste = haste

    def reset(self, question: str) -> None:
        self.name, self.relations = read_question(question)
        self.facts = {}  # (name, relation) -> name
        self.thought = ""  # two words on the last command; haste acts against it

    def act(self, observation: str) -> str:
        """The next command: <search>name</search> or <answer>name</answer>."""
        # Learn all facts of the passages.
        for pattern in PASSAGES:
            for passage in pattern.finditer(observation):
                facts = passage.groupdict()
                name = facts.pop("name")
                for relation, value in facts.items():
                    self.facts[name, relation] = value
        # Follow the relations from the name in the question, up to the first unknown fact.
        name = self.name
        for relation in self.relations:
            if (name, relation) not in self.facts:
                self.thought = f"need {WORDS[relation]}"
                if self.rng.random() < self.haste:
                    return f"<answer>{name}</answer>"
                return f"<search>{name}</search>"
            name = self.facts[name, relation]
        self.thought = f"know {WORDS[relation]}"
        return f"<answer>{name}</answer>"

    def names(self) -> list[str]:
        """All names that it knows of, in the order in which it met them."""
        return list(dict.fromkeys([self.name, *self.facts.values()]))


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


def demonstrations(
    tasks: list[str], seed: int, haste: float, episodes: int, render: Callable[[Context], str],
    doubt: float = 0.0,
) -> list[Demonstration]:  # fmt: skip
    """The steps of `episodes` episodes per task; see `transitions`."""
    numbers = {}
    for task in tasks:
        world, number = map(int, task.split(":"))
        numbers.setdefault(world, []).append(number)
    rows = []
    for world, chosen in numbers.items():
        with tempfile.TemporaryDirectory() as folder:
            data = search_world.generate(Path(folder) / "world", seed=world)
            questions = load_questions(data, "train")
            questions = [questions[number] for number in chosen]
            pool = SearchPool(questions, open_retriever(data), n_envs=64, topk=TOPK)
            rows += transitions(questions, pool, seed, haste, episodes, render, doubt)
    return rows


def transitions(
    questions: list[Question],
    pool: SearchPool,
    seed: int,
    haste: float,
    episodes: int,
    render: Callable[[Context], str],
    doubt: float = 0.0,
) -> list[Demonstration]:
    """The steps of `episodes` episodes per question.

    pool: a pool of the same questions. render: makes a step's prompt. doubt: in each step, the
    probability of a search or an answer, at random, with any name of the question and the facts.

    At most once per episode, in a share SLIPS of the searches, a misspelt name is searched for, so
    that the model sees how to continue after a useless page. The row keeps the correct response,
    and its observation is "", because it followed another command.
    """
    tasks = []
    rngs = []
    for task, question in enumerate(questions):
        for n in range(episodes):
            tasks.append(str(task))
            # One generator per episode: its draws do not depend on the episodes played beside it.
            key = f"demonstrations {seed} {haste} {question.question} {n}"
            rngs.append(random.Random(key))
    rows = []
    with tqdm(total=len(tasks), desc="demonstrations", unit="episode", leave=False,
              disable=None) as bar:
        for start in range(0, len(tasks), pool.n_envs):
            part = slice(start, start + pool.n_envs)
            rows += _play(pool, tasks[part], rngs[part], haste, render, doubt)
            bar.update(len(tasks[part]))
    return rows


def _play(
    pool: SearchPool,
    tasks: list[str],
    rngs: list[random.Random],
    haste: float,
    render: Callable[[Context], str],
    doubt: float,
) -> list[Demonstration]:
    """Play one episode per task in lock-step; their rows, episode by episode."""
    rows = [[] for _ in tasks]
    # Of each slot with a running episode:
    contexts = {}
    scholars = {}
    slipped = set()  # slots that have misspelt a name
    for slot, task in enumerate(tasks):
        pool.reset(slot, task)
    for slot, step in [pool.recv() for _ in tasks]:
        scholars[slot] = Scholar(rngs[slot], haste)
        scholars[slot].reset(step.observation)
        contexts[slot] = Context(step.task, step.observation, step.admissible)
    while contexts:
        prompts = {}
        responses = {}
        executed = {}  # slot -> command
        for slot, context in contexts.items():
            command = scholars[slot].act(context.observation)
            rng = rngs[slot]
            if doubt and rng.random() < doubt:
                verb = rng.choice(("search", "answer"))
                command = f"<{verb}>{rng.choice(scholars[slot].names())}</{verb}>"
            executed[slot] = command
            prompts[slot] = render(context)
            responses[slot] = f"<think>{scholars[slot].thought}</think>{command}"
            if command.startswith("<search>") and slot not in slipped and rng.random() < SLIPS:
                slipped.add(slot)
                executed[slot] = re.sub(r">\w+ ", f">{rng.choice(FIRST_WORDS)} ", command)
            pool.step(slot, executed[slot])
        for slot, step in [pool.recv() for _ in executed]:
            context = contexts[slot]
            command = executed[slot]
            shown = ""
            if command in responses[slot]:  # not misspelt
                shown = step.observation
            rows[slot].append(Demonstration(prompts[slot], responses[slot], shown))
            context.history.append(Turn(context.observation, command))
            context.observation = step.observation
            context.admissible = step.admissible
            if step.done:
                del contexts[slot]
    return list(chain.from_iterable(rows))
