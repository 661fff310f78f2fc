"""From what an agent knows to a prompt (h_t), and from its response to an action.

Every step is one user message, rendered afresh from the task, the last `history_length` pairs
of observation and action, the present observation and the admissible actions; no earlier turn is
concatenated. `alfworld` is Fig. 7 of PaW, with the shorter form of the first step, which has no
history; `compact` says the same in as few words as it can, for the stand-in model of tiny.py.

Parsing looks at the format only: whether the action is admissible is the environment's business,
and a badly formatted response is executed too, as far as it can be read.
"""

import re
from dataclasses import dataclass, field

INSTRUCTIONS = """
Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be \
enclosed within <think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for current step and \
present it within <action> </action> tags.
"""

ALFWORLD_FIRST = """
You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: {observation}
Your admissible actions of the current situation are: [{admissible}].
"""

ALFWORLD = """
You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: {task}
Prior to this step, you have already taken {steps} step(s). Below are the most recent {shown} \
observations and the corresponding actions you took: {history}
You are now at step {now} and your current observation is: {observation}
Your admissible actions of the current situation are: [{admissible}].
"""


@dataclass
class Context:
    """What the agent knows when it acts: h_t before it is put into words."""

    task: str
    observation: str  # o_t, the environment's text as it came
    admissible: list[str]
    history: list[tuple[str, str]] = field(default_factory=list)  # all (o, a) so far, oldest first


def render(style: str, context: Context, history_length: int) -> str:
    """The user message of this step; style is "alfworld" or "compact"."""
    if style == "alfworld":
        return alfworld(context, history_length)
    if style == "compact":
        return compact(context, history_length)
    raise ValueError(f'prompt style {style!r} is unknown: use "alfworld" or "compact"')


def alfworld(context: Context, history_length: int) -> str:
    """Fig. 7; the first step shows the observation alone, which then holds the task."""
    admissible = "\n ".join(f"'{action}'" for action in context.admissible)
    observation = context.observation
    if not context.history:
        prompt = ALFWORLD_FIRST.format(observation=observation, admissible=admissible)
        return prompt + INSTRUCTIONS
    steps = len(context.history)
    recent = list(enumerate(context.history, start=1))[-history_length:] if history_length else []
    history = "\n".join(f"[Observation {n}: '{o}', Action {n}: '{a}']" for n, (o, a) in recent)
    prompt = ALFWORLD.format(
        task=context.task,
        steps=steps,
        shown=len(recent),
        history=history,
        now=steps + 1,
        observation=observation,
        admissible=admissible,
    )
    return prompt + INSTRUCTIONS


def compact(context: Context, history_length: int) -> str:
    """The same facts in about 100 words: task, recent actions and what they led to, choices.

    The first observation is left out: the task is stated, and the admissible actions name every
    place in the room again. So are the actions that only look (`examine`, `inventory`, `look`).
    """
    observations = [o for o, _ in context.history] + [context.observation]
    observations = ["Start." if "Your task is to:" in o else o for o in observations]
    first = max(0, len(context.history) - history_length)
    parts = [f"task {context.task}", observations[first]]
    for (_, action), observation in zip(context.history[first:], observations[first + 1 :]):
        parts += [f"> {action}", observation]
    acts = [a for a in context.admissible if a.split()[0] not in ("examine", "inventory", "look")]
    return "\n".join(parts + ["| " + " | ".join(acts)])


def parse_action(response: str, tail: int = 30) -> tuple[str, bool]:
    """(action, is the format valid) of a response, both tags of thought and action required.

    Without both action tags the last `tail` characters are tried as an action. Text after the
    closing tag is allowed; Chinese characters anywhere make the response invalid.
    """
    lowered = response.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start == -1 or end == -1:
        return lowered[-tail:], False
    thought = "<think>" in response and "</think>" in response
    chinese = re.search("[\u4e00-\u9fff]", response)
    return lowered[start + len("<action>") : end].strip(), thought and not chinese
