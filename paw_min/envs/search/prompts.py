"""Search prompts (h_t) and the parser of responses.

`paper` is Fig. 9 of PaW; the first step has no history. `compact` states the same facts in as few
words as possible, for the stand-in models.
"""

import json
import re

from paw_min.envs.interface import Command, Context, recent

TASK = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: {task}
"""

HISTORY = """
Prior to this step, you have already taken {steps} step(s). Below is the interaction history where \
<search> </search> wrapped your past search queries and <information> </information> wrapped the \
corresponding search results returned by the external search engine. History:
{history}
"""

INSTRUCTIONS = """
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


def paper(context: Context, history_length: int) -> str:
    """Fig. 9: the question, and each command with the observation that followed it."""
    return situation(context, history_length) + INSTRUCTIONS


def situation(context: Context, history_length: int) -> str:
    """Fig. 9 without what it asks for."""
    prompt = TASK.format(task=context.task)
    if context.history:
        steps = [
            f"Step {n}:{command} {observation}\n"
            for n, command, observation in _steps(context, history_length)
        ]
        prompt += HISTORY.format(steps=len(context.history), history="\n".join(steps))
    return prompt


def compact(context: Context, history_length: int) -> str:
    """The question, and the last queries with the documents found, without tags and JSON."""
    lines = [f"task {context.task}"]
    for _, command, observation in _steps(context, history_length):
        query = re.sub("</?(search|information|answer)>", " ", command)
        step = f"{query} {_documents(observation)}".strip()
        lines.append(re.sub(" +", " ", f"> {step}"))
    return "\n".join(lines)


def _steps(context: Context, history_length: int) -> list[tuple[int, str, str]]:
    """(number, command, next observation) of the last `history_length` steps."""
    commands = [turn.command for turn in context.history]
    # A command is followed by the observation of the next turn, the last one by the current one.
    observations = [turn.observation for turn in context.history[1:]] + [context.observation]
    numbers = range(1, len(commands) + 1)
    steps = list(zip(numbers, commands, observations))
    return recent(steps, history_length)


def _documents(observation: str) -> str:
    """The text of an information block, on one line and without quotes; "" if there is none."""
    if not observation:
        return ""
    block = observation.removeprefix("<information>").removesuffix("</information>")
    return json.loads(block)["result"].replace("\n", " ").replace('"', "")


def parse(response: str) -> Command:
    """Read `<search>query</search>` or `<answer>text</answer>` from a response.

    Everything after the first </search> (or, if there is none, the first </answer>) is ignored. If
    both kinds remain, the search is executed. The format is valid if the whole response has exactly
    one opening tag, and text after it; <think> tags are not required. Only the format is checked
    here. Deviation: in verl-agent, an empty query or answer is valid. It is executed all the same.
    """
    cut = response
    for closing in ("</search>", "</answer>"):
        if closing in response:
            cut = response[: response.index(closing) + len(closing)]
            break
    command = text = ""
    for kind in ("search", "answer"):
        found = re.search(f"<{kind}>(.*?)</{kind}>", cut, re.DOTALL | re.IGNORECASE)
        if found:
            text = found.group(1).strip()
            command = f"<{kind}>{text}</{kind}>"
            break
    # Count in the whole response: a second tag after the command makes the format wrong, too.
    opening_tags = re.findall("<(?:search|answer)>", response, re.IGNORECASE)
    return Command(command, valid=bool(text) and len(opening_tags) == 1)
