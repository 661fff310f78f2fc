"""WebShop prompts (h_t) and the parser of responses.

`paper` is Fig. 8 of PaW; the first step has no history and uses verl-agent's shorter template.
`compact` states the same facts in as few words as possible, for the stand-in models.
"""

from paw_min.envs.interface import Command, Context, recent
from paw_min.envs.prompting import parse_action, with_history

FIRST = """
You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: {task}.
Your current observation is: {observation}.
"""

LATER = """
You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: {task}.
Prior to this step, you have already taken {steps} step(s). Below are the most recent {shown} \
observations and the corresponding actions you took: {history}
You are now at step {now} and your current observation is: {observation}.
"""

ADMISSIBLE = """\
Your admissible actions for the current situation are:
[
{admissible}
].
"""

INSTRUCTIONS = """
Now it's your turn to take one action for the current step.
You should first reason step-by-step about the current situation, then think carefully which \
admissible action best advances the shopping goal. This reasoning process MUST be enclosed within \
<think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for current step and \
present it within <action> </action> tags.
"""

MAX_CHARACTERS = 13_000  # a longer prompt loses its history (verl-agent)
BUTTONS = ("Back to Search", "< Prev", "Next >", "Description", "Features", "Reviews", "Search")


def paper(context: Context, history_length: int) -> str:
    """Fig. 8. A prompt of more than 13,000 characters uses the template of the first step."""
    admissible = "\n".join(f"'{command}'," for command in context.admissible)
    listed = ADMISSIBLE.format(admissible=admissible) + INSTRUCTIONS
    prompt = situation(context, history_length) + listed
    if len(prompt) <= MAX_CHARACTERS:
        return prompt
    return with_history(FIRST, context, history_length) + listed


def situation(context: Context, history_length: int) -> str:
    """The beginning of Fig. 8, up to the observation."""
    return with_history(LATER if context.history else FIRST, context, history_length)


def compact(context: Context, history_length: int) -> str:
    """The instruction, the last commands, and the page without buttons and quotes.

    No admissible commands: everything that can be clicked is on the page. No earlier pages: a
    click on an option does not change the page, so the commands alone show which are chosen.
    """
    commands = [f"> {turn.command}" for turn in recent(context.history, history_length)]
    # One quote on each side: a value such as 5' (feet) ends with its own.
    quoted = context.observation.split(" [SEP] ")
    parts = [part.removeprefix("'").removesuffix("'") for part in quoted]
    page = " | ".join(part for part in parts if part not in BUTTONS)
    return "\n".join([f"task {context.task}", *commands, f"| {page}"])


def parse(response: str) -> Command:
    """The command of a response; without <action> tags, its last 20 characters (verl-agent)."""
    return parse_action(response, tail=20)
