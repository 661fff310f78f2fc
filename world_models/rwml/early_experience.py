"""Early experience (arXiv 2510.08558, section 4): predict other actions, then imitate.

    1. states s_i of an expert's demonstrations; in each, K other admissible commands are executed,
       and the next observations are labels: (s_i, a) -> s', cross entropy, one epoch
    2. imitation of the expert's responses, from the same weights
    3. RL, by the run scripts

The expert is the rule-based teacher of the generated data, so this works with generated data only.
It slips, as in the demonstrations of the stand-ins: in a fifth of the steps (teachers/), a
random command is executed instead of its own, which stays the label of the imitation.
A state is reached by replaying the commands before it. Its observation must equal the
demonstration's; otherwise the branches would belong to another game. Prompt, label, batch and
learning rate are those of WM-SFT, so that the methods differ in their data; in the paper, the label
is the observation alone, the batch 16 and the learning rate 1e-5.
"""

from paw_min.base.console import progress_bar
from paw_min.base.errors import UserError
from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Pool, Step, recent
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow
from world_models.rwml.triplets import Triplet
from world_models.teachers.demonstrate import PlayedStep

BRANCHES = 8  # K, B.1: sampled without replacement, besides the expert's own command


def branches(cfg: Config, pool: Pool, steps: list[PlayedStep]) -> list[Triplet]:
    """What the expert's command and K others lead to, in each state."""
    found = []
    with progress_bar(len(steps), "branches", "state") as bar:
        for number, step in enumerate(steps):
            context = step.context
            history = recent(context.history, cfg.history_length)
            own = BENCHMARKS[cfg.env].parse(step.response).text
            # WebShop lists search[<your query>], which is not a command.
            others = [c for c in context.admissible if c not in (own, "search[<your query>]")]
            rng = generator("branches", cfg.seed, number)
            for command in [own, *rng.sample(others, min(BRANCHES, len(others)))]:
                following = result_of(pool, step, command)
                if following:
                    found.append(Triplet(
                        context.task, history, context.observation, command, following,
                        steps=len(context.history),
                    ))
            bar.update()
    return found


def result_of(pool: Pool, step: PlayedStep, command: str) -> str:
    """o_{t+1} of a command in the state of a demonstrated step; UserError in another state."""
    pool.reset(0, step.task)
    state = answer(pool, step.task)
    for turn in step.context.history:
        pool.step(0, turn.command)
        state = answer(pool, step.task)
    known = step.context
    if (state.task, state.observation) != (known.task, known.observation):
        raise UserError(
            f"{step.task} does not repeat the teacher's episode, which plays the generated data "
            "only: omit --data."
        )
    pool.step(0, command)
    return answer(pool, step.task).observation.strip()


def answer(pool: Pool, task: str) -> Step:
    step = pool.recv().step
    if step.failed:
        raise UserError(f"{task} failed: {step.failed}")
    return step


def imitation_rows(cfg: Config, policy: Policy, steps: list[PlayedStep]) -> list[TokenRow]:
    """Stage 2: the expert's responses to the agent's own prompts."""
    render = BENCHMARKS[cfg.env].prompts[cfg.prompt]
    rows = []
    for step in steps:
        prompt_ids = policy.encode_chat(render(step.context, cfg.history_length))
        rows.append(TokenRow(prompt_ids, policy.encode_response(step.response), []))
    return rows
