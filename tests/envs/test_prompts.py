"""The prompts of Fig. 7, 8 and 9, the compact prompts, and the parsing of responses."""

import json
from dataclasses import replace

import pytest

from paw_min.envs.alfworld import prompts as alfworld
from paw_min.envs.interface import Context, Turn
from paw_min.envs.search import prompts as search
from paw_min.envs.webshop import prompts as webshop

FIRST = Context("put a mug in desk.", "You are in a room.\n\nYour task is to: put a mug in desk.",
                ["go to desk 1", "look"])
LATER = Context(
    "put a mug in desk.",
    "You see a mug 1.",
    ["take mug 1 from desk 1", "look"],
    [Turn("o one", "look"), Turn("o two", "go to bed 1"), Turn("o three", "go to desk 1")],
)


def test_first_step():
    assert alfworld.paper(FIRST, 2) == """
You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: You are in a room.

Your task is to: put a mug in desk.
Your admissible actions of the current situation are: ['go to desk 1'
 'look'].

Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be \
enclosed within <think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for current step and \
present it within <action> </action> tags.
"""


def test_later_step_shows_the_last_two():
    prompt = alfworld.paper(LATER, 2)
    assert prompt.startswith("""
You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: put a mug \
in desk.
Prior to this step, you have already taken 3 step(s). Below are the most recent 2 observations and \
the corresponding actions you took: [Observation 2: 'o two', Action 2: 'go to bed 1']
[Observation 3: 'o three', Action 3: 'go to desk 1']
You are now at step 4 and your current observation is: You see a mug 1.
Your admissible actions of the current situation are: ['take mug 1 from desk 1'
 'look'].
""")


def test_a_history_of_no_steps():
    prompt = alfworld.paper(LATER, 0)
    assert "most recent 0 observations" in prompt and "Action" not in prompt


def test_compact():
    assert alfworld.compact(FIRST, 2) == "task put a mug in desk.\nStart.\n| go to desk 1"
    end = "You see a mug 1.\n| take mug 1 from desk 1"
    assert alfworld.compact(LATER, 1) == (
        f"task put a mug in desk.\no three\n> go to desk 1\n{end}"
    )
    assert alfworld.compact(LATER, 5) == (
        "task put a mug in desk.\nStart.\n> look\no two\n> go to bed 1\no three\n> go to desk 1\n"
        + end
    )
    assert alfworld.compact(LATER, 0) == f"task put a mug in desk.\n{end}"


START = Context("find me socks", "'Search'", ["search[<your query>]", "click[search]"])
ITEM = Context(
    "find me socks",
    "'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red' [SEP] 'blue' [SEP] 'Soft Socks'",
    ["click[back to search]", "click[red]"],
    [
        Turn("'Search'", "search[socks]"),
        Turn("page one", "click[b012]"),
        Turn("an item", "click[blue]"),
    ],
)


def test_webshop_first_step():
    assert webshop.paper(START, 2) == """
You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: find me socks.
Your current observation is: 'Search'.
Your admissible actions for the current situation are:
[
'search[<your query>]',
'click[search]',
].

Now it's your turn to take one action for the current step.
You should first reason step-by-step about the current situation, then think carefully which \
admissible action best advances the shopping goal. This reasoning process MUST be enclosed within \
<think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for current step and \
present it within <action> </action> tags.
"""


def test_webshop_later_step_and_its_limit():
    prompt = webshop.paper(ITEM, 2)
    assert prompt.startswith("""
You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: find me socks.
Prior to this step, you have already taken 3 step(s). Below are the most recent 2 observations and \
the corresponding actions you took: [Observation 2: 'page one', Action 2: 'click[b012]']
[Observation 3: 'an item', Action 3: 'click[blue]']
You are now at step 4 and your current observation is: 'Back to Search' [SEP] '< Prev' [SEP] """)
    room = webshop.MAX_CHARACTERS - len(prompt)
    for more, shown in ((room, True), (room + 1, False)):
        last = Turn("an item" + "x" * more, "click[blue]")
        longer = replace(ITEM, history=[*ITEM.history[:2], last])
        prompt = webshop.paper(longer, 2)
        assert ("Prior to this step" in prompt) == shown
        assert prompt.endswith("within <action> </action> tags.\n") and "click[red]" in prompt


def test_webshop_compact():
    assert webshop.compact(START, 3) == "task find me socks\n| "
    assert webshop.compact(ITEM, 2) == (
        "task find me socks\n> click[b012]\n> click[blue]\n| color | red | blue | Soft Socks"
    )
    rug = replace(ITEM, observation="'size' [SEP] '5'' [SEP] '' [SEP] '8'", history=[])
    assert webshop.compact(rug, 2) == "task find me socks\n| size | 5' |  | 8"  # click[5']


def information(text):
    return f"<information>{json.dumps({'result': text})}</information>"


ASKED = Context(
    "Who?",
    information("two"),
    [],
    [Turn("Who?", "<search>a</search>"), Turn(information("one"), "<search>b</search>")],
)


def test_search_history_pairs_a_query_with_its_result():
    prompt = search.paper(ASKED, 1)
    assert "Step 1:" not in prompt and f"Step 2:<search>b</search> {information('two')}" in prompt
    assert search.compact(ASKED, 4) == "task Who?\n> a one\n> b two"
    found = replace(ASKED, observation=information('Doc 1: "X Y"\nThe X.\n'))
    assert search.compact(found, 1) == "task Who?\n> b Doc 1: X Y The X."
    assert search.compact(replace(ASKED, observation=""), 1) == "task Who?\n> b"  # no search


@pytest.mark.parametrize("response, command, valid", [
    ("<think>\n</think>\n<action>  Go To Desk 1 \n</action>", "go to desk 1", True),
    ("<ACTION>look</ACTION><think></think>", "look", True),  # action tags: any case and order
    ("<THINK>hm</THINK><action>look</action>", "look", False),  # think tags: lower case only
    ("<think></think><action></action>", "", False),
    ("<think></think><action>a</action><action>b</action>", "a", True),
    ("<think></think></action>x<action>look</action>", "look", True),
    ("<think></think><action>look", "<think></think><action>look", False),
    ("<think>\u4f60</think><action>look</action>", "look", False),
    ("I would GO TO the second desk, thanks, bye", "o the second desk, thanks, bye", False),
])
def test_parsing_of_actions(response, command, valid):
    assert alfworld.parse(response) == (command, valid)


def test_without_tags_the_tail_of_webshop_is_shorter():
    assert webshop.parse("0123456789" * 3) == ("0123456789" * 2, False)
