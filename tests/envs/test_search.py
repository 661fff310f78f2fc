"""Search QA without a server: questions, exact match, parsing, Fig. 9, the rules of an episode."""

import json
import random
import re
import threading

import pyarrow as pa
import pytest
from pyarrow import parquet

from paw_min.envs.interface import Context, Step, Turn
from paw_min.envs.search import prompts
from paw_min.envs.search.env import SearchPool, information, last_answer
from paw_min.envs.search.questions import Question, exact_match, load_questions
from tests.pools import reset, step

QUESTIONS = [
    Question("who wrote Hamlet?", ("William Shakespeare", "Shakespeare"), "nq"),
    Question("where is Rovaniemi?", ("Finland",), "hotpotqa"),
]
SEARCH = "<search>hamlet</search>"
ANSWER = "<answer>the Shakespeare!</answer>"


class Library:
    """A retriever that finds k passages named after the query, and records the calls."""

    def __init__(self):
        self.calls = []

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        return [[] if query == "nothing" else [
            {"document": {"id": str(n), "contents": f'"{query}"\ntext {n}\n'}, "score": 1 / (n + 1)}
            for n in range(k)] for query in queries]


# ---- scoring ----

@pytest.mark.parametrize("prediction, answers, right", [
    ("the Shakespeare!", ["Goethe", "shakespeare."], True),
    ("William Shakespeare", ["Shakespeare"], False),  # not a part of it
    ("The  Eiffel\tTower", ["eiffel tower"], True),
    ("state-of-the-art", ["stateoftheart"], True),  # punctuation goes first: no article is left ..
    ("a.n", ["an"], True),  # .. or one appears
    ("Beyoncé", ["Beyonce"], False),
    ("Beyonc\u00e9", ["Beyonce\u0301"], True),  # in NFD, which Qwen cannot write
    ("Beyonce\u0301", ["Beyonc\u00e9"], True),
    ("Sigur fi 2", ["Sigur \ufb01 \u00b2"], True),  # nor a tokenizer in NFKC these
    ("Rock ’n’ roll", ["Rock 'n' roll"], False),  # only ASCII punctuation goes
    ("The", ["the", "Goethe"], True),  # the film "The", blood group "A"
    ("+", ["+"], True),  # an operator
    ("!!!", ["!!!"], True),  # a band
    ("-", ["+"], False),
    ("+", ["plus"], False),
    ("", ["!!!"], False),
    ("!!!", ["the"], False),
    (None, [""], False),
])
def test_exact_match(prediction, answers, right):
    assert exact_match(prediction, answers) is right


def test_answers_are_those_of_the_regex():
    rng = random.Random(0)
    for _ in range(2000):
        parts = ["<answer>", "</answer>", "<search>", "</search>", "a", "\n", "<", "/"]
        text = "".join(rng.choices(parts, k=rng.randrange(9)))
        found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
        assert last_answer(text) == (found[-1].strip() if found else None)
    assert last_answer("<answer>" * 100_000) is None  # the regex takes minutes


# ---- prompts and parser ----

@pytest.mark.parametrize("response, command, valid", [
    ("<think>who?</think><search> hamlet author </search>", "<search>hamlet author</search>", True),
    ("<answer>巴黎</answer> and more", "<answer>巴黎</answer>", True),  # needs no thought
    ("<SEARCH>q</SEARCH>", "<search>q</search>", True),
    ("<answer>a</answer><search>q</search>", "<search>q</search>", False),  # both: search wins
    ("<search>q</search> then <answer>", "<search>q</search>", False),  # an opening tag counts
    ("<answer>a</answer> or </search>", "<answer>a</answer>", True),
    ("</search><search>q</search>", "", False),  # cut after the first closing tag
    ("<search>two\nlines</search>", "<search>two\nlines</search>", True),
    ("<search></search>", "<search></search>", False),
    ("I do not know.", "", False),
])
def test_parsing(response, command, valid):
    assert prompts.parse(response) == (command, valid)


def test_prompts_of_the_first_and_the_third_step():
    question = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: who wrote Hamlet?
"""
    instructions = """
Now it's your turn to respond for the current step.
You should first conduct reasoning process. This process MUST be enclosed within <think> </think> \
tags.
After completing your reasoning, choose only one of the following actions (do not perform both):
(1) If you find you lack some knowledge, you can call a search engine to get more external \
information using format: <search> your query </search>.
(2) If you have enough knowledge to answer the question confidently, provide your final answer \
within <answer> </answer> tags, without detailed illustrations. For example, \
<answer>Beijing</answer>.
"""
    context = Context("who wrote Hamlet?", "who wrote Hamlet?", [])
    assert prompts.paper(context, 4) == question + instructions
    history = [Turn("who wrote Hamlet?", SEARCH), Turn("<information>I</information>", "")]
    context = Context("who wrote Hamlet?", "", [], history)
    assert prompts.paper(context, 4) == question + """
Prior to this step, you have already taken 2 step(s). Below is the interaction history where \
<search> </search> wrapped your past search queries and <information> </information> wrapped the \
corresponding search results returned by the external search engine. History:
Step 1:<search>hamlet</search> <information>I</information>

Step 2: \n
""" + instructions


# ---- the episode ----

def test_the_information_block_is_json():
    hits = [{"document": {"contents": '"Zoë"\nshe – "it"\n'}}, {"document": {"contents": " b "}}]
    assert information(hits) == ('<information>{"result": "Doc 1: \\"Zoë\\"\\nshe – \\"it\\"\\n'
                     'Doc 2: b\\n"}</information>')
    assert information([]) == '<information>{"result": "No search results found."}</information>'


@pytest.mark.parametrize("commands, rewards, dones, n_searches", [
    (["<answer>Goethe</answer>"], [0], [True], 0),
    (["", "", ANSWER], [0, 0, 1], [False, False, True], 0),  # an invalid turn uses up a turn
    ([SEARCH, SEARCH, SEARCH, SEARCH], [0] * 4, [False] * 3 + [True], 3),  # the last is not run
    ([SEARCH, "<answer></answer>"], [0, 0], [False, True], 1),
])
def test_rules_of_an_episode(commands, rewards, dones, n_searches):
    library = Library()
    pool = SearchPool(QUESTIONS, library, n_envs=1)
    (started,) = reset(pool, ["0"])
    asked = QUESTIONS[0].question
    assert started == Step(asked, task=asked, task_type="nq", admissible=[])
    steps = [step(pool, {0: command})[0] for command in commands]
    assert [s.reward for s in steps] == rewards
    assert [s.done for s in steps] == dones
    assert [s.won for s in steps] == [reward == 1 for reward in rewards]
    assert [bool(s.observation) for s in steps] == [
        command == SEARCH and not done for command, done in zip(commands, dones)]
    assert len(library.calls) == n_searches


# ---- a retriever that waits for a server ----

class Server(Library):
    """Each call waits for `gate`; `under_way` counts the calls that have started."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.under_way = threading.Semaphore(0)

    def search(self, queries, k):
        found = super().search(queries, k)
        self.under_way.release()
        self.gate.acquire(timeout=60)
        return found


def test_other_requests_do_not_wait_for_a_server():
    server = Server()
    pool = SearchPool(QUESTIONS, server, n_envs=5, remote=True)
    reset(pool, ["0"] * 5)

    def ask(slot, query):
        pool.step(slot, f"<search>{query}</search>")

    ask(0, "a")
    assert pool.recv(0) is None
    assert server.under_way.acquire(timeout=60)
    pool.step(1, ANSWER)
    assert pool.recv().slot == 1  # answered while the search is under way
    for slot, query in ((2, "b"), (3, "b"), (4, "c")):
        ask(slot, query)
    pool.reset(1, "1")
    assert pool.recv(0).slot == 1
    assert pool.recv(0) is None

    def found(query):
        return information(Library().search([query], 3)[0])

    server.gate.release()
    slot, first = pool.recv()
    assert slot == 0 and first.observation == found("a")
    server.gate.release()
    answers = dict(pool.recv() for _ in range(3))
    assert server.calls == [(["a"], 3), (["b", "c"], 3)]  # queries during a call: one more call
    assert answers[2].observation == answers[3].observation == found("b")
    assert answers[4].observation == found("c")
    assert pool.recv(0) is None


# ---- question files ----

def search_r1_row(question: Question) -> dict:
    answers = list(question.answers)
    return {
        "id": "test_0",
        "question": question.question,
        "golden_answers": answers,
        "data_source": question.source,
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
    }


def verl_agent_row(question: Question) -> dict:
    truth = {"target": list(question.answers)}
    asked = {"question": question.question, "data_source": question.source, "ground_truth": truth}
    return {"data_source": question.source, "env_kwargs": asked}


@pytest.mark.parametrize("layout", [search_r1_row, verl_agent_row])
def test_published_files(tmp_path, layout):
    path = tmp_path / "test.parquet"
    parquet.write_table(pa.Table.from_pylist([layout(question) for question in QUESTIONS]), path)
    assert load_questions(path) == load_questions(tmp_path, "test") == QUESTIONS


def test_jsonl_files(tmp_path):
    rows = [
        {"question": " who? ", "golden_answers": "me", "data_source": "nq", "id": 7},
        {"question": "when?", "golden_answers": ["now", "", "1990"]},  # an alias is blank
        {"question": "who?", "golden_answers": ' ["me", "you"]'},  # stored as JSON
        {"question": "who?", "reward_model": {"ground_truth": {"target": '["me"]'}}},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    expected = [
        Question("who?", ("me",), "nq"), Question("when?", ("now", "1990"), "own"),
        Question("who?", ("me", "you"), "own"), Question("who?", ("me",), "own"),
    ]
    assert load_questions(path) == load_questions(str(tmp_path), "own") == expected
