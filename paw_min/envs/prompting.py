"""What the prompts of ALFWorld and WebShop share: the numbered history and the tag parser.

And how a text of an environment is found that a model has written: tokenizers change Unicode.

A prompt is one user message, rendered anew in every step from the task, the last `history_length`
(observation, command) pairs, the current observation and the admissible commands. Earlier messages
are never concatenated. Source: verl-agent, which PaW builds on.
"""

import re
import unicodedata

from paw_min.envs.interface import Command, Context, recent


def with_history(template: str, context: Context, history_length: int) -> str:
    """Fill in a template of Fig. 7 or 8."""
    steps = len(context.history)
    shown = recent(context.history, history_length)
    numbered = enumerate(shown, start=steps - len(shown) + 1)
    history = "\n".join(f"[Observation {n}: '{o}', Action {n}: '{c}']" for n, (o, c) in numbered)
    return template.format(
        task=context.task,
        steps=steps,
        shown=len(shown),
        history=history,
        now=steps + 1,
        observation=context.observation,
    )


def parse_action(response: str, tail: int) -> Command:
    """Read `<action>command</action>` from a response in lower case.

    The format is valid if both <think> tags are there as well, the command is not empty, and there
    are no Chinese characters; text around the tags is allowed. Without <action>, or </action> after
    it, the last `tail` characters are the command. Only the format is checked here, not whether the
    command is admissible. Deviation: in verl-agent, an empty command is valid, even that of a
    closing tag before the opening one.
    """
    lowered = response.lower()
    start = lowered.find("<action>")
    end = lowered.find("</action>", start + 1)
    if start == -1 or end == -1:
        return Command(lowered[-tail:], valid=False)
    command = lowered[start + len("<action>") : end].strip()
    has_thought = "<think>" in response and "</think>" in response
    is_chinese = re.search("[\u4e00-\u9fff]", response) is not None
    return Command(command, valid=bool(command) and has_thought and not is_chinese)


def composed(text: str) -> str:
    """The text in NFC: an accented letter is one character."""
    return unicodedata.normalize("NFC", text)


def forms(text: str) -> set[str]:
    """The text as tokenizers can write it: in NFC, as those of Qwen, or in NFKC."""
    return {composed(text), unicodedata.normalize("NFKC", text)}


def as_listed(command: str, listed: list[str]) -> str:
    """The command as the environment lists it; one that is not listed stays as it is."""
    if command in listed:
        return command
    return next((other for other in listed if composed(command) in forms(other)), command)
