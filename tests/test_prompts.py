"""Fig. 7 word by word, and every corner of action parsing.

    python -m pytest tests/test_prompts.py
"""

import pytest

from paw_min.prompts import Context, parse_action, render

FIRST = Context("put a mug in desk.", "You are in a room.\n\nYour task is to: put a mug in desk.",
                ["go to desk 1", "look"])  # fmt: skip
LATER = Context(
    "put a mug in desk.",
    "You see a mug 1.",
    ["take mug 1 from desk 1", "look"],
    [("o one", "look"), ("o two", "go to bed 1"), ("o three", "go to desk 1")],
)


def test_first_step():
    assert render("alfworld", FIRST, 2) == """
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
    prompt = render("alfworld", LATER, 2)
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


@pytest.mark.parametrize("length, shown", [(0, 0), (1, 1), (5, 3)])
def test_history_length(length, shown):
    prompt = render("alfworld", LATER, length)
    assert f"most recent {shown} observations" in prompt
    assert prompt.count("[Observation") == shown


def test_compact():
    assert render("compact", FIRST, 2) == "task put a mug in desk.\nStart.\n| go to desk 1"
    assert render("compact", LATER, 1) == (
        "task put a mug in desk.\no three\n> go to desk 1\nYou see a mug 1.\n"
        "| take mug 1 from desk 1"
    )


def test_unknown_style():
    with pytest.raises(ValueError, match="'webshop' is unknown"):
        render("webshop", FIRST, 2)


GOOD = "<think>hm</think><action>go to desk 1</action>"


@pytest.mark.parametrize(
    "response, action, valid",
    [
        (GOOD, "go to desk 1", True),
        (GOOD + " and more", "go to desk 1", True),
        ("<think>\n</think>\n<action>  Go To Desk 1 \n</action>", "go to desk 1", True),
        ("<ACTION>look</ACTION><think></think>", "look", True),  # tags of action: any case, order
        ("<THINK>hm</THINK><action>look</action>", "look", False),  # tags of thought: lower case
        ("<action>look</action>", "look", False),
        ("<think><action>look</action>", "look", False),
        ("<think></think><action></action>", "", True),  # emptiness is not a matter of format
        ("<think></think><action>a</action><action>b</action>", "a", True),
        ("<think></think></action>x<action>", "", True),
        ("<think></think><action>look", "<think></think><action>look", False),
        ("I would GO TO the second desk, thanks, bye", "o the second desk, thanks, bye", False),
        ("<think>\u4f60</think><action>look</action>", "look", False),
        ("", "", False),
    ],
)
def test_parsing(response, action, valid):
    assert parse_action(response) == (action, valid)
