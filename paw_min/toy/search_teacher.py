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


# The word before the value in a passage: in the thought, it tells a small reader where to look.
WORDS = {relation: re.search(rf"(\w+) \{{{relation}\}}", passage)[1]
         for _, passage in KINDS.values() for relation in RELATIONS if f"{{{relation}}}" in passage}
PASSAGES = [_pattern(passage) for _, passage in KINDS.values()]
QUESTIONS = {relation: _pattern(row[2]) for relation, row in RELATIONS.items()}
REFERENCES = {relation: _pattern(row[3]) for relation, row in RELATIONS.items()}


def read_question(question: str) -> tuple[str, list[str]]:
    """(name in the question, relations to follow from it); ValueError for other questions."""
    for second, pattern in QUESTIONS.items():
        if not (match := pattern.fullmatch(question)):
            continue
        if re.fullmatch(NAME, match[1]):
            return match[1], [second]
        for first, reference in REFERENCES.items():
            if (named := reference.fullmatch(match[1])) and re.fullmatch(NAME, named[1]):
                return named[1], [first, second]
    raise ValueError(f"The scholar cannot read {question!r}: it understands the questions of "
                     "paw_min.toy.search_world only.")


class Scholar:
    """The teacher in one episode at a time.

    haste: share of the searches that it replaces by an answer, drawn with `rng`.
    """

    def __init__(self, rng: random.Random, haste: float = 0.0):
        self.rng, self.haste = rng, haste

    def reset(self, question: str) -> None:
        self.name, self.relations = read_question(question)
        self.facts = {}  # (name, relation) -> name
        self.thought = ""  # two words on the last command; haste acts against it

    def act(self, observation: str) -> str:
        """The next command: <search>name</search> or <answer>name</answer>."""
        for pattern in PASSAGES:
            for passage in pattern.finditer(observation):
                known = passage.groupdict()
                name = known.pop("name")
                self.facts |= {(name, relation): value for relation, value in known.items()}
        name = self.name
        for relation in self.relations:
            if (name, relation) not in self.facts:
                self.thought = f"need {WORDS[relation]}"
                kind = "answer" if self.rng.random() < self.haste else "search"
                return f"<{kind}>{name}</{kind}>"
            name = self.facts[name, relation]
        self.thought = f"know {WORDS[relation]}"
        return f"<answer>{name}</answer>"


def training_tasks() -> list[str]:
    """ "world:number" of training questions, alternating between single and two-hop.

    The worlds differ from that of the training data: the model learns how to search, but no fact
    that is of use in RL training.
    """
    first_two_hop = search_world.N_TRAIN // 2
    numbers = [n for i in range(PER_WORLD // 2) for n in (i, first_two_hop + i)]
    return [f"{world}:{number}" for number in numbers for world in WORLDS]


def demonstrations(
    tasks: list[str], seed: int, haste: float, episodes: int, render: Callable[[Context], str]
) -> list[Demonstration]:
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
            rows += transitions(questions, pool, seed, haste, episodes, render)
    return rows


def transitions(
    questions: list[Question],
    pool: SearchPool,
    seed: int,
    haste: float,
    episodes: int,
    render: Callable[[Context], str],
) -> list[Demonstration]:
    """The steps of `episodes` episodes per question.

    pool: a pool of the same questions. render: makes a step's prompt.

    At most once per episode, in a share SLIPS of the searches, a misspelt name is searched for, so
    that the model sees how to continue after a useless page. The row keeps the correct response,
    and its observation is "", because it followed another command.
    """
    rows = []
    plan = [(str(task), n) for task in range(len(questions)) for n in range(episodes)]
    with tqdm(total=len(plan), desc="demonstrations", unit="episode", leave=False,
              disable=None) as bar:
        for start in range(0, len(plan), pool.n_envs):
            part = plan[start : start + pool.n_envs]
            keys = [f"{seed} {haste} {questions[int(task)].question} {n}" for task, n in part]
            rngs = [random.Random(f"demonstrations {key}") for key in keys]
            rows += _play(pool, [task for task, _ in part], rngs, haste, render)
            bar.update(len(part))
    return rows


def _play(pool, tasks, rngs, haste, render) -> list[Demonstration]:
    """Play one episode per task in lock-step; their rows, episode by episode."""
    rows = [[] for _ in tasks]
    contexts, scholars, slipped = {}, {}, set()
    for slot, task in enumerate(tasks):
        pool.reset(slot, task)
    for slot, step in [pool.recv() for _ in tasks]:
        scholars[slot] = Scholar(rngs[slot], haste)
        scholars[slot].reset(step.observation)
        contexts[slot] = Context(step.task, step.observation, step.admissible)
    while contexts:
        prompts, responses, executed = {}, {}, {}
        for slot, context in contexts.items():
            command = executed[slot] = scholars[slot].act(context.observation)
            prompts[slot] = render(context)
            responses[slot] = f"<think>{scholars[slot].thought}</think>{command}"
            rng = rngs[slot]
            if command.startswith("<search>") and slot not in slipped and rng.random() < SLIPS:
                slipped.add(slot)
                executed[slot] = re.sub(r">\w+ ", f">{rng.choice(FIRST_WORDS)} ", command)
            pool.step(slot, executed[slot])
        for slot, step in [pool.recv() for _ in executed]:
            context, command = contexts[slot], executed[slot]
            shown = step.observation if command in responses[slot] else ""
            rows[slot].append(Demonstration(prompts[slot], responses[slot], shown))
            context.history.append(Turn(context.observation, command))
            context.observation, context.admissible = step.observation, step.admissible
            if step.done:
                del contexts[slot]
    return [row for episode in rows for row in episode]
