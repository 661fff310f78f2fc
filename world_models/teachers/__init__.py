"""Rule-based teachers of the generated data, and the stand-in models that have imitated them.

    python -m world_models.teachers alfworld --out paw_min/toy/weights/alfworld
    python -m world_models.teachers webshop --out paw_min/toy/weights/webshop

train the stand-ins again. They are part of the repository, because each takes 7 to 10 minutes on
one idle core. Early experience (rwml/) and Word2World also let a teacher play. The stand-in of
search learned from a teacher in twelve worlds with other facts, whose generator is in commit
713d70c4 only.

A stand-in takes the place of the pretrained model: it knows the words of the environment and how to
act, and it has a bad habit for RL to correct. The teacher is hasty: it often acts too early,
against its own thought. It takes or drops objects at random, or buys before all options are chosen
(in search, it answers before it has searched). In some steps, a command other than the demonstrated
one is executed, so that the data include states that the teacher never reaches (such a step has no
observation). The thought in a response is the current subgoal ("find mug"). The next command then
depends mostly on the last few words, which a model of this size learns much faster.
"""

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.policy import Policy
from paw_min.toy.standins import Demonstration, imitate, make_model, make_tokenizer
from world_models.teachers import alfworld, webshop

# Each has training_tasks() and demonstrations(...).
TEACHERS = {"alfworld": alfworld, "webshop": webshop}


class Lesson(NamedTuple):
    """How a stand-in is trained."""

    history: int  # earlier steps in a prompt
    haste: float  # probability that the teacher is hasty in a step that allows it
    episodes: int  # per task
    steps: int  # training steps


LESSONS = {
    "alfworld": Lesson(history=1, haste=0.5, episodes=4, steps=1500),
    "webshop": Lesson(history=3, haste=0.25, episodes=2, steps=1000),
}


def demonstrations(env: str, tasks: list[str], seed: int) -> list[Demonstration]:
    """The teacher's episodes with compact prompts."""
    prompt = BENCHMARKS[env].prompts["compact"]
    lesson = LESSONS[env]
    return [
        Demonstration(prompt(step.context, lesson.history), step.response, step.observation)
        for step in TEACHERS[env].demonstrations(tasks, seed, lesson.haste, lesson.episodes)
    ]


def warm_start(env: str, out: Path, seed: int = 0) -> None:
    """Train a stand-in (minutes); write it to `out` with record.json.

    record.json: the result of `miniature`, with which a test checks that the current code is the
    code that trained the weights in the repository.
    """
    lesson = LESSONS[env]
    tasks = TEACHERS[env].training_tasks()
    rows = demonstrations(env, tasks, seed)
    tokenizer = make_tokenizer(list(chain.from_iterable(rows)))
    policy = Policy(make_model(tokenizer, seed), tokenizer)
    imitate(policy, rows, seed, lesson.steps)
    record = miniature(env, tasks[:12], tokenizer, seed)
    policy.save(out)
    (out / "record.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


def miniature(env: str, tasks: list[str], tokenizer, seed: int) -> dict:
    """Three steps on a few tasks: digest of the demonstrations, and losses."""
    lesson = LESSONS[env]
    rows = demonstrations(env, tasks, seed)
    policy = Policy(make_model(tokenizer, seed), tokenizer)
    losses = imitate(policy, rows, seed, lesson.steps, stop=3)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return {"demonstrations": digest, "loss": losses}
