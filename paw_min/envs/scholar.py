"""A teacher for search-augmented QA that sees only what the agent sees.

What it computes: the next search or answer, from the question and the information blocks that came
back; and from its episodes the transitions that a small model imitates before it is trained by RL.

Source: none in the paper, which starts from an instruction-tuned LLM. Here: a reader of the
questions and passages of envs/corpus.py, and of no others. Until it has read the fact it needs, it
searches for the name that the fact is told of; in a two-hop question the first fact gives the name
for the second. It then answers with the name as it stands in the passage. What it knows comes from
observations and not from its own actions, so that it goes on after another player's search
(noisy demonstrations). If the retriever does not find the passage, it asks again in vain.

Its bad habit, which RL has to cure, is haste: in place of the search for a name, that name is the
answer. For one hop it is the name in the question, for two hops often the one in between.
"""

import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from paw_min.envs import corpus
from paw_min.envs.corpus import FIRST_WORDS, KINDS, NAME, RELATIONS
from paw_min.envs.retrievers import open_retriever
from paw_min.envs.search import SearchPool, load_questions
from paw_min.prompts import Context

WORLDS = range(1, 13)  # seeds of the demonstrations' worlds; that of the training data is 0
PER_WORLD = 500  # questions; few of many worlds, so that copying pays and remembering does not
TOPK = 1  # passages per search, as in the preset `tiny`
SLIPS = 0.1  # share of the searches in demonstrations that look for a misspelt name


def _pattern(template: str) -> re.Pattern:
    """A template of corpus.py as a pattern: {x} is a name, {} whatever a question asks of."""
    pattern = re.sub(r"\\\{(\w+)\\\}", rf"(?P<\1>{NAME})", re.escape(template))
    return re.compile(pattern.replace(r"\{\}", "(.+)"))


# The word before the value in a passage: a thought of it tells a small reader where to look.
WORDS = {relation: re.search(rf"(\w+) \{{{relation}\}}", passage)[1]
         for _, passage in KINDS.values() for relation in RELATIONS if f"{{{relation}}}" in passage}
PASSAGES = [_pattern(passage) for _, passage in KINDS.values()]
QUESTIONS = {relation: _pattern(row[2]) for relation, row in RELATIONS.items()}
REFERENCES = {relation: _pattern(row[3]) for relation, row in RELATIONS.items()}


def read_question(question: str) -> tuple[str, list[str]]:
    """(the name in it, the relations to follow from there); ValueError if it is not one of ours."""
    for second, pattern in QUESTIONS.items():
        if not (asked := pattern.fullmatch(question)):
            continue
        if re.fullmatch(NAME, asked[1]):
            return asked[1], [second]
        for first, reference in REFERENCES.items():
            if (named := reference.fullmatch(asked[1])) and re.fullmatch(NAME, named[1]):
                return named[1], [first, second]
    raise ValueError(f"The scholar cannot read {question!r}: it understands the questions of "
                     "paw_min.envs.corpus only.")


class Scholar:
    """One player of one question at a time.

    haste: share of the searches in whose place it answers; rng decides which.
    """

    def __init__(self, rng: random.Random, haste: float = 0.0):
        self.rng, self.haste = rng, haste

    def reset(self, question: str):
        """Start an episode from its first observation."""
        self.name, self.relations = read_question(question)
        self.facts = {}  # (name, relation) -> name
        self.errand = ""

    def act(self, observation: str) -> str:
        """<search>name</search> or <answer>name</answer>."""
        for pattern in PASSAGES:
            for passage in pattern.finditer(observation):
                known = passage.groupdict()
                name = known.pop("name")
                self.facts |= {(name, relation): value for relation, value in known.items()}
        name = self.name
        for relation in self.relations:
            if (name, relation) not in self.facts:
                self.errand = f"need {WORDS[relation]}"
                kind = "answer" if self.rng.random() < self.haste else "search"
                return f"<{kind}>{name}</{kind}>"
            name = self.facts[name, relation]
        self.errand = f"know {WORDS[relation]}"
        return f"<answer>{name}</answer>"

    def thought(self) -> str:
        """What it is about, in two words; after `act`. Haste is against this better knowledge."""
        return self.errand


def training_tasks() -> list[str]:
    """ "world:number" of training questions, single and two-hop in turns.

    The worlds are not the one of the training data: what is imitated is how to search, and no fact
    that RL could find in the weights.
    """
    first_two_hop = corpus.N_TRAIN // 2
    numbers = [n for i in range(PER_WORLD // 2) for n in (i, first_two_hop + i)]
    return [f"{world}:{number}" for number in numbers for world in WORLDS]


def demonstrations(tasks: list[str], seed: int, haste: float, episodes: int, render) -> list:
    """(prompt, response, next observation) of each step; see `transitions`."""
    numbers = {}
    for task in tasks:
        world, number = map(int, task.split(":"))
        numbers.setdefault(world, []).append(number)
    rows = []
    for world, chosen in numbers.items():
        with tempfile.TemporaryDirectory() as folder:
            data = corpus.generate(Path(folder) / "world", seed=world)
            questions = load_questions(data, "train")
            questions = [questions[number] for number in chosen]
            pool = SearchPool(questions, open_retriever(data), n_envs=64, topk=TOPK)
            rows += transitions(questions, pool, seed, haste, episodes, render)
    return rows


def transitions(
    questions: list,
    pool,
    seed: int,
    haste: float,
    episodes: int,
    render: Callable[[Context], str],
) -> list[tuple[str, str, str]]:
    """(prompt, response, next observation) of each step of `episodes` episodes per question.

    pool: a SearchPool over the same questions. render: makes a step's prompt.
    At most once an episode, in SLIPS of the searches, another name that shares a word with the
    right one is looked for, so that the model sees what to do with a page that does not help. Such
    a row keeps the right response, and its next observation, which followed another, is "".
    """
    rows = []
    plan = [(str(task), n) for task in range(len(questions)) for n in range(episodes)]
    with tqdm(total=len(plan), desc="demonstrations", unit="episode", leave=False,
              disable=None) as bar:
        for start in range(0, len(plan), pool.n_envs):
            part = plan[start : start + pool.n_envs]
            rngs = [random.Random(f"demonstrations {seed} {haste} {key}") for key in part]
            rows += _play(pool, [task for task, _ in part], rngs, haste, render)
            bar.update(len(part))
    return rows


def _play(pool, tasks, rngs, haste, render) -> list[tuple[str, str, str]]:
    """One episode per task, side by side -> their rows, episode by episode."""
    rows = [[] for _ in tasks]
    contexts, scholars, slipped = {}, {}, set()
    for slot, (observation, info) in enumerate(pool.reset(tasks)):
        scholars[slot] = Scholar(rngs[slot], haste)
        scholars[slot].reset(observation)
        contexts[slot] = Context(info["task"], observation, info["admissible"])
    while contexts:
        said, done = {}, {}
        for slot, context in contexts.items():
            action = done[slot] = scholars[slot].act(context.observation)
            response = f"<think>{scholars[slot].thought()}</think>{action}"
            said[slot] = (render(context), response)
            rng = rngs[slot]
            if action.startswith("<search>") and slot not in slipped and rng.random() < SLIPS:
                slipped.add(slot)
                done[slot] = re.sub(r">\w+ ", f">{rng.choice(FIRST_WORDS)} ", action)
        for slot, (observation, _, over, info) in pool.step(done).items():
            context, (prompt, response) = contexts[slot], said[slot]
            rows[slot].append((prompt, response, observation if done[slot] in response else ""))
            context.history.append((context.observation, done[slot]))
            context.observation, context.admissible = observation, info["admissible"]
            if over:
                del contexts[slot]
    return [row for episode in rows for row in episode]
