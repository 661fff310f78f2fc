"""What the prompts of ALFWorld and WebShop share: the numbered history and the tag parser.

A prompt is one user message, rendered anew in every step from the task, the last `history_length`
(observation, command) pairs, the current observation and the admissible commands. Earlier messages
are never concatenated. Source: verl-agent, which PaW builds on.
"""

import re

from paw_min.envs.interface import Command, Context


def with_history(template: str, context: Context, history_length: int, admissible: str) -> str:
    """Fill in a template of Fig. 7 or 8, given the admissible commands as text."""
    steps = len(context.history)
    recent = list(enumerate(context.history, start=1))[-history_length:] if history_length else []
    history = "\n".join(f"[Observation {n}: '{o}', Action {n}: '{c}']" for n, (o, c) in recent)
    return template.format(
        task=context.task,
        steps=steps,
        shown=len(recent),
        history=history,
        now=steps + 1,
        observation=context.observation,
        admissible=admissible,
    )


def parse_action(response: str, tail: int) -> Command:
    """Read `<action>command</action>` from a response in lower case.

    The format is valid if both <think> tags are there as well and there are no Chinese characters;
    text around the tags is allowed. If an <action> tag is missing, the last `tail` characters are
    the command. Only the format is checked here, not whether the command is admissible.
    """
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start == -1 or end == -1:
        return Command(lowered[-tail:], False)
    thought = "<think>" in response and "</think>" in response
    chinese = re.search("[\u4e00-\u9fff]", response)
    return Command(lowered[start + len("<action>") : end].strip(), thought and not chinese)
