"""From what an agent knows to a prompt (h_t), and from its response to an action.

Every step is one user message, rendered afresh from the task, the last `history_length` pairs
of observation and action, the present observation and the admissible actions; no earlier turn is
concatenated. Style "paper" is Fig. 7 (ALFWorld), Fig. 8 (WebShop) or Fig. 9 (search) of PaW, with
the shorter form of the first step, which has no history; "compact" says the same in as few words
as it can, for the stand-in models of tiny.py.

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

WEBSHOP_FIRST = """
You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: {task}.
Your current observation is: {observation}.
Your admissible actions for the current situation are:
[
{admissible}
].
"""

WEBSHOP = """
You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: {task}.
Prior to this step, you have already taken {steps} step(s). Below are the most recent {shown} \
observations and the corresponding actions you took: {history}
You are now at step {now} and your current observation is: {observation}.
Your admissible actions for the current situation are:
[
{admissible}
].
"""

WEBSHOP_INSTRUCTIONS = """
Now it's your turn to take one action for the current step.
You should first reason step-by-step about the current situation, then think carefully which \
admissible action best advances the shopping goal. This reasoning process MUST be enclosed within \
<think> </think> tags.
Once you've finished your reasoning, you should choose an admissible action for current step and \
present it within <action> </action> tags.
"""
WEBSHOP_LIMIT = 13_000  # characters; a longer prompt loses its history (code base)

SEARCH_TASK = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: {task}
"""

SEARCH_HISTORY = """
Prior to this step, you have already taken {steps} step(s). Below is the interaction history where \
<search> </search> wrapped your past search queries and <information> </information> wrapped the \
corresponding search results returned by the external search engine. History:
{history}
"""

SEARCH_INSTRUCTIONS = """
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


@dataclass
class Context:
    """What the agent knows when it acts: h_t before it is put into words."""

    task: str
    observation: str  # o_t, the environment's text as it came
    admissible: list[str]
    history: list[tuple[str, str]] = field(default_factory=list)  # all (o, a) so far, oldest first


def render(env: str, style: str, context: Context, history_length: int) -> str:
    """The user message of this step; env and style as in Config."""
    forms = {
        ("alfworld", "paper"): alfworld,
        ("alfworld", "compact"): alfworld_compact,
        ("webshop", "paper"): webshop,
        ("webshop", "compact"): webshop_compact,
        ("search", "paper"): search,
        ("search", "compact"): search_compact,
    }
    if (env, style) not in forms:
        raise ValueError(f'there is no prompt {style!r} for {env!r}: use "paper" or "compact"')
    return forms[env, style](context, history_length)


def parse(env: str, response: str) -> tuple[str, bool]:
    """(action, is the format valid) of a response in this environment."""
    if env == "search":
        return parse_search(response)
    return parse_action(response, tail=20 if env == "webshop" else 30)


def alfworld(context: Context, history_length: int) -> str:
    """Fig. 7; the first step shows the observation alone, which then holds the task."""
    admissible = "\n ".join(f"'{action}'" for action in context.admissible)
    if not context.history:
        slots = dict(observation=context.observation, admissible=admissible)
        return ALFWORLD_FIRST.format(**slots) + INSTRUCTIONS
    return _with_history(ALFWORLD, context, history_length, admissible) + INSTRUCTIONS


def webshop(context: Context, history_length: int) -> str:
    """Fig. 8; a prompt of more than 13,000 characters is replaced by the form of the first step."""
    admissible = "\n".join(f"'{action}'," for action in context.admissible)
    if context.history:
        prompt = _with_history(WEBSHOP, context, history_length, admissible) + WEBSHOP_INSTRUCTIONS
        if len(prompt) <= WEBSHOP_LIMIT:
            return prompt
    slots = dict(task=context.task, observation=context.observation, admissible=admissible)
    return WEBSHOP_FIRST.format(**slots) + WEBSHOP_INSTRUCTIONS


def _with_history(template: str, context: Context, history_length: int, admissible: str) -> str:
    steps = len(context.history)
    recent = list(enumerate(context.history, start=1))[-history_length:] if history_length else []
    history = "\n".join(f"[Observation {n}: '{o}', Action {n}: '{a}']" for n, (o, a) in recent)
    return template.format(
        task=context.task,
        steps=steps,
        shown=len(recent),
        history=history,
        now=steps + 1,
        observation=context.observation,
        admissible=admissible,
    )


def search(context: Context, history_length: int) -> str:
    """Fig. 9: the question and, per step, what was asked and the information that came back."""
    prompt = SEARCH_TASK.format(task=context.task)
    if context.history:
        history = "\n".join(_search_steps(context, history_length))
        prompt += SEARCH_HISTORY.format(steps=len(context.history), history=history)
    return prompt + SEARCH_INSTRUCTIONS


def _search_steps(context: Context, history_length: int) -> list[str]:
    """`Step n:<action> <what followed>` for the latest steps; what followed is the observation."""
    actions = [action for _, action in context.history]
    answers = [observation for observation, _ in context.history[1:]] + [context.observation]
    steps = [f"Step {n}:{a} {o}\n" for n, (a, o) in enumerate(zip(actions, answers), start=1)]
    return steps[-history_length:] if history_length else []


def alfworld_compact(context: Context, history_length: int) -> str:
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


def webshop_compact(context: Context, history_length: int) -> str:
    """Instruction, the last actions, and the page without its buttons and quotes.

    No list of actions: what can be clicked stands on the page. No earlier page: an option that was
    chosen shows in the actions alone (the page stays as it is).
    """
    actions = [f"> {action}" for _, action in context.history]
    actions = actions[-history_length:] if history_length else []
    buttons = ("Back to Search", "< Prev", "Next >", "Description", "Features", "Reviews", "Search")
    parts = [part.strip("'") for part in context.observation.split(" [SEP] ")]
    page = " | ".join(part for part in parts if part not in buttons)
    return "\n".join([f"task {context.task}", *actions, f"| {page}"])


def search_compact(context: Context, history_length: int) -> str:
    """The question, and the last queries with the documents they found, without tags and JSON."""
    lines = []
    for step in _search_steps(context, history_length):
        step = re.sub(r'^Step \d+:|</?(search|information|answer)>|{"result": "|"}', " ", step)
        step = step.replace("\\n", " ").replace('\\"', "").strip()
        lines.append(re.sub(" +", " ", f"> {step}"))
    return "\n".join([f"task {context.task}", *lines])


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


def parse_search(response: str) -> tuple[str, bool]:
    """(`<search>..</search>`, `<answer>..</answer>` or "", is the format valid).

    What follows the first closing </search>, or else </answer>, is cut off; a search wins over an
    answer. Both kinds of tag, one kind twice, or neither make the response invalid; a thought is
    not asked for.
    """
    for closing in ("</search>", "</answer>"):
        if closing in response:
            cut = response[: response.index(closing) + len(closing)]
            break
    else:
        cut = response
    action = ""
    for kind in ("search", "answer"):
        found = re.search(f"<{kind}>(.*?)</{kind}>", cut, re.DOTALL | re.IGNORECASE)
        if found:
            action = f"<{kind}>{found.group(1).strip()}</{kind}>"
            break
    counts = [len(re.findall(f"<{kind}>", response, re.I)) for kind in ("search", "answer")]
    return action, bool(action) and sorted(counts) == [0, 1]
