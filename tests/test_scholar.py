"""The teacher of search QA: its parser, its success rate, its demonstrations.

    python -m pytest tests/test_scholar.py
"""

import re
from collections import Counter

import pytest

from paw_min.envs.search import prompts
from paw_min.envs.search.env import SearchPool, last_answer
from paw_min.envs.search.questions import exact_match, load_questions
from paw_min.retrieval import open_retriever
from paw_min.toy import search_world
from paw_min.toy.search_teacher import MAX_TURNS, SLIPS, Scholar, in_world


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


def test_success_with_haste(folder, retriever):
    won, turns = success(*demonstrate(folder, retriever, haste=0.35))
    assert won["single"] == pytest.approx(0.65, abs=0.05)
    # Both searches have to be made; a few pages contain both facts.
    assert won["two_hop"] == pytest.approx(0.65**2, abs=0.06)
    assert turns["single"] < 1.8
    never, _ = success(*demonstrate(folder, retriever, "test", haste=1.0))
    assert never == {"single": 0, "two_hop": 0}


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


def test_demonstrations_misspell_a_name_at_most_once(folder, retriever):
    _, episodes = demonstrate(folder, retriever, n=200)
    slips = searches = 0
    for episode in episodes:
        slips_here = 0
        for step, after in zip(episode, episode[1:]):
            searches += 1
            command, valid = prompts.parse(step.response)
            assert valid and re.match(r"<think>(need|know) [a-z]+</think>", step.response)
            page = after.context.observation
            assert page.startswith("<information>")
            if step.executed == command:
                assert step.observation == page
            else:
                slips_here += 1
                assert step.observation == ""  # no target
                wrong, name = step.executed[8:-9].split(), command[8:-9].split()
                assert wrong[0] in search_world.FIRST_WORDS and wrong[0] != name[0]
                assert wrong[1:] == name[1:]
        assert slips_here <= 1
        slips += slips_here
    assert 0.7 * SLIPS < slips / searches < 1.2 * SLIPS  # at most one per episode: below SLIPS


def test_haste_answers_with_a_name_that_it_should_search_for(folder, retriever):
    _, episodes = demonstrate(folder, retriever, n=200, haste=0.35, episodes=3)
    assert [e[0].task for e in episodes[:4]] == ["0", "0", "0", "1"]
    firsts = [episode[0].response for episode in episodes]
    hasty = sum("<answer>" in response for response in firsts) / len(firsts)
    assert hasty == pytest.approx(0.35, abs=0.07)
    assert all("need" in response for response in firsts)
    last = [episode[-1] for episode in episodes]
    names = [(s.context.task, re.search("need.*<answer>(.+)</answer>", s.response)) for s in last]
    assert any(name[1] not in question for question, name in names if name)  # of the first fact
    # The episodes of a question differ.
    again = [firsts[k : k + 3] for k in range(0, len(firsts), 3)]
    assert sum(len(set(responses)) > 1 for responses in again) > 50


def test_doubt_searches_for_and_answers_with_names_that_it_knows(folder, retriever):
    _, episodes = demonstrate(folder, retriever, n=100, doubt=1.0)
    commands = [prompts.parse(e[0].response).text for e in episodes]
    assert 0.3 < sum(c.startswith("<answer>") for c in commands) / len(commands) < 0.7
    for episode, command in zip(episodes, commands):
        assert command[8:-9] in episode[0].context.task  # nothing else is known yet
