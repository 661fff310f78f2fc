"""The teacher of search QA: its parser and its success rate.

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


def demonstrate(folder):
    """The test questions, and the steps of one episode each."""
    questions = load_questions(folder, "test")
    with SearchPool(questions, open_retriever(folder), 64, MAX_TURNS, topk=3) as pool:
        steps = in_world(pool, len(questions), seed=0, haste=0.0, episodes=1)
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


def test_answers_are_correct(tmp_path):
    won, turns = success(*demonstrate(search_world.generate(tmp_path / "search")))
    assert min(won["single"], won["two_hop"]) > 0.99
    assert turns["single"] < 2.2 and 2.8 < turns["two_hop"] <= 3.3


@pytest.mark.parametrize("question", ["", "Where was the dog of Oka Unk born?"])
def test_other_questions_are_refused(question):
    with pytest.raises(ValueError, match="understands the questions of .*search_world only"):
        Scholar(question)
