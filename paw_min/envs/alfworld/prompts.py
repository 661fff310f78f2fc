"""ALFWorld prompts (h_t) and the parser of responses.

`paper` is Fig. 7 of PaW; the first step has no history and uses verl-agent's shorter template.
`compact` states the same facts in about 100 words, for the stand-in models.
"""

from paw_min.envs.interface import Command, Context
from paw_min.envs.prompting import parse_action, with_history

FIRST = """
You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: {observation}
"""

LATER = """
You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: {task}
Prior to this step, you have already taken {steps} step(s). Below are the most recent {shown} \
observations and the corresponding actions you took: {history}
You are now at step {now} and your current observation is: {observation}
"""

ADMISSIBLE = """\
Your admissible actions of the current situation are: [{admissible}].
"""

INSTRUCTIONS = """
Now it's your turn to take an action.
You should first reason step-by-step about the current situation. This reasoning process MUST be \
enclosed within <think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for current step and \
present it within <action> </action> tags.
"""


def paper(context: Context, history_length: int) -> str:
    """Fig. 7. The first prompt does not state the task: the first observation contains it."""
    admissible = "\n ".join(f"'{command}'" for command in context.admissible)
    listed = ADMISSIBLE.format(admissible=admissible)
    return situation(context, history_length) + listed + INSTRUCTIONS


def situation(context: Context, history_length: int) -> str:
    """The beginning of Fig. 7, up to the observation."""
    return with_history(LATER if context.history else FIRST, context, history_length)


def compact(context: Context, history_length: int) -> str:
    """The task, recent observations and commands, and the admissible commands, without labels.

    "Start." replaces the first observation: the task is stated, and the admissible commands name
    every place in the room. The commands that only look (`examine`, `inventory`, `look`) are left
    out.
    """
    observations = ["Start.", *(turn.observation for turn in context.history[1:])]
    if context.history:
        observations.append(context.observation)
    first = max(0, len(context.history) - history_length)
    parts = [f"task {context.task}", observations[first]]
    for turn, observation in zip(context.history[first:], observations[first + 1 :]):
        parts += [f"> {turn.command}", observation]
    looks = ("examine", "inventory", "look")
    commands = [c for c in context.admissible if c.split()[0] not in looks]
    return "\n".join(parts + ["| " + " | ".join(commands)])


def parse(response: str) -> Command:
    """The command of a response; without <action> tags, its last 30 characters (verl-agent)."""
    return parse_action(response, tail=30)
