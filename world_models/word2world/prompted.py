"""Prompted world models: any instruct model in place of the environment (Word2World, Table 1).

Zero-shot, or with three examples of state transitions in the prompt (sec. 3.1). Nothing is trained.
The paper gives no prompt and does not say what an example shows. Here:

    system       what a world model does; the examples; S_0, as a trained one reads it
    user         the agent's command
    assistant    the answer, and so on: the chat of trajectories.py

An example is one transition: S_0 of its episode, the answer before, the command and the answer. The
three are steps drawn at random from three training trajectories, the same ones for all episodes.
"""

from dataclasses import replace
from pathlib import Path

from paw_min.base.errors import UserError
from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.model.policy import Policy
from paw_min.running.session import start_model
from world_models.supervised import load
from world_models.word2world.trajectories import (
    ACTIONS,
    MARKER,
    Message,
    Trajectory,
    read_trajectories,
    said,
)
from world_models.word2world.world_model import WorldModel, check_template

CONTEXT = 12_288  # most tokens of a chat, as in training, if the model has as many positions

INSTRUCTIONS = f"""\
You are a text-based environment, such as a game or a web shop. An agent acts in it. Each message \
of the user is one command of the agent. Reply with what the environment shows after this command, \
in the same style as before, and with nothing else. Keep track of the state of all things, and of \
where the agent is. A command that is impossible changes nothing.

After the text, list what the agent can do next, on a line of its own that begins with \
"{ACTIONS.strip()}", separated by " | ". If the command solves the agent's task, leave out this \
list and end with "{MARKER.strip()}"."""

EXAMPLE = """\
=== Example {number} ===

{context}

Command: {command}

Answer: {answer}"""


class PromptedWorldModel(WorldModel):
    """A world model whose chats begin with instructions."""

    def __init__(self, policy: Policy, instructions: str, answer_tokens: int):
        super().__init__(policy, min(CONTEXT, policy.positions), answer_tokens)
        self.instructions = instructions

    def tokens(self, chat: list[Message]) -> tuple[list[int], list[range]]:
        if chat:  # an episode whose reset failed has no message
            context = f"{self.instructions}\n\n=== The episode ===\n\n{chat[0]['content']}"
            chat = [said("system", context), *chat[1:]]
        return super().tokens(chat)


def draw_examples(trajectories: list[Trajectory], shots: int, seed: int) -> list[str]:
    """One random step of each of `shots` random trajectories."""
    rng = generator("shots", seed)
    usable = [trajectory for trajectory in trajectories if trajectory.answers]
    if len(usable) < shots:
        raise UserError(f"--examples has {len(usable)} episodes with an answer, --shots asks for "
                        f"{shots}: collect more.")
    found = []
    for number, trajectory in enumerate(rng.sample(usable, shots), start=1):
        step = rng.randrange(len(trajectory.answers))
        context = trajectory.messages[0]["content"]
        if step > 0:
            context += f"\n\nSome steps later:\n{trajectory.answers[step - 1]}"
        example = EXAMPLE.format(
            number=number, context=context, command=trajectory.commands[step],
            answer=trajectory.answers[step],
        )
        found.append(example)
    return found


def load_prompted(
    name: str, cfg: Config, shots: int, files: tuple[Path, ...], evaluated: set[str],
    answer_tokens: int,
) -> PromptedWorldModel:
    """An instruct model as a world model.

    name: as --model. files: training trajectories. evaluated: tasks that no example may be of.
    """
    examples = []
    if shots:
        trajectories = read_trajectories(files)
        shared = evaluated & {trajectory.task for trajectory in trajectories}
        if shared:
            raise UserError(f"--examples has {len(shared)} tasks that are evaluated, such as "
                            f"{min(shared)}: give trajectories of training tasks.")
        examples = draw_examples(trajectories, shots, cfg.seed)
    policy = load(cfg, start_model(replace(cfg, model=name)))
    if policy.opened_thought:
        raise UserError(f"the chat template of {name} opens a thought before each answer, which "
                        "would count as what the environment shows: use another model.")
    instructions = "\n\n".join([INSTRUCTIONS, *examples])
    world_model = PromptedWorldModel(policy, instructions, answer_tokens)
    n_tokens = check_template(world_model)
    if n_tokens >= world_model.context:
        raise UserError(f"the prompt has {n_tokens} tokens, the model {world_model.context} "
                        "positions: use another model, or --shots 0.")
    return world_model
