"""The teacher of search QA: its parser, its success rate, its demonstrations.

test_train.py compares the demonstrations, mistakes included, with recorded digests.

    python -m pytest tests/test_scholar.py
"""

from collections import Counter

import pytest

from paw_min.envs.search.env import SearchPool, last_answer
from paw_min.envs.search.questions import exact_match, load_questions
from paw_min.retrieval import open_retriever
from paw_min.toy import search_world
from paw_min.toy.search_teacher import MAX_TURNS, Scholar, in_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return search_world.generate(tmp_path_factory.mktemp("corpus") / "search")


@pytest.fixture(scope="module")
def retriever(folder):
    return open_retriever(folder)


def demonstrate(folder, retriever, split="train", n=None, n_envs=64, seed=0, **mistakes):
    """The questions (the last n: two hops), and the steps of one episode each."""
    questions = load_questions(folder, split)[-(n or 0) :]
    with SearchPool(questions, retriever, n_envs, MAX_TURNS, topk=3) as pool:
        options = dict(haste=0.0, episodes=1) | mistakes
        steps = in_world(pool, len(questions), seed, **options)
    episodes = []
    for step in steps:
        if not step.context.history:
            episodes.append([])
        episodes[-1].append(step)
    return questions, episodes


def success(questions, episodes):
    """{source: share of correct answers}, {source: mean turns}"""
    won, turns = Counter(), Counter()
    for question, episode in zip(questions, episodes, strict=True):
        answer = last_answer(episode[-1].response)
        won[question.source] += exact_match(answer, question.answers)
        turns[question.source] += len(episode)
    n = Counter(question.source for question in questions)
    return tuple({source: c[source] / n[source] for source in n} for c in (won, turns))


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_correct(folder, retriever, split):
    won, turns = success(*demonstrate(folder, retriever, split))
    assert min(won["single"], won["two_hop"]) > 0.99
    assert turns["single"] < 2.2 and 2.8 < turns["two_hop"] <= 3.3


@pytest.mark.parametrize(
    "question",
    ["", "Who is the president?", "Who wrote it?", "Where was the dog of Oka Unk born?",
     "Where was the spouse of the author of Oka Unk born?"],
)
def test_other_questions_are_refused(question):
    with pytest.raises(ValueError, match="understands the questions of .*search_world only"):
        Scholar(question)


def test_demonstrations_do_not_depend_on_the_size_of_the_pool(folder, retriever):
    _, episodes = demonstrate(folder, retriever, n=100, doubt=0.2)
    assert demonstrate(folder, retriever, n=100, doubt=0.2, n_envs=7)[1] == episodes
    assert demonstrate(folder, retriever, n=100, doubt=0.2, seed=1)[1] != episodes


def test_a_name_is_misspelt_at_most_once_in_an_episode(folder, retriever):
    _, episodes = demonstrate(folder, retriever, n=200)
    slips = [sum(step.observation == "" for step in episode[:-1]) for episode in episodes]
    assert set(slips) == {0, 1}
