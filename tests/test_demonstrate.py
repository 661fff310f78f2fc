"""The loop of the rule-based teachers: steps, slips, generators, failures; the demonstrations."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from paw_min.envs.interface import Step
from paw_min.envs.pool import EnvPool
from paw_min.toy import default_model, standins
from paw_min.toy.demonstrate import Action, Demonstrator, play


class Corridor:
    """Task "n": n steps `on` win; "broken" fails in its second step."""

    def reset(self, task):
        self.task = task
        self.at = 0
        return self.seen()

    def step(self, command):
        self.at += command == "on"
        if self.task == "broken" and self.at == 2:
            raise OSError("a wall")
        return self.seen()

    def seen(self):
        won = self.at == (int(self.task) if self.task.isdigit() else 9)
        return Step(f"door {self.at}", f"walk {self.task}", "", ["on", "back"], done=won, won=won)


class Walker:
    """Counts its steps in its thoughts."""

    def __init__(self):
        self.n = 0

    def act(self, context):
        self.n += 1
        return Action("on", f"step {self.n}")

    def hasty(self, context, command, haste, rng):
        return command

    def slip(self, context, command, rng):
        return "back" if rng.random() < 0.3 else None


def walk(tasks, slots=1, max_turns=50, seed=0):
    """One generator per episode."""

    def start(number, task, first):
        assert first.task == f"walk {task}" and first.observation == "door 0"
        rng = random.Random(f"{seed} {number}")
        return Demonstrator(Walker(), rng, haste=0.0, doubt=0.0)

    with EnvPool(Corridor, slots) as pool:
        return play("alfworld", pool, tasks, start, max_turns)


def test_the_steps_say_what_was_seen_said_done_and_followed():
    episodes = walk(["3", "9", "3"])
    slips = 0
    for task, steps in zip(["3", "9", "3"], episodes, strict=True):
        door = 0
        for n, step in enumerate(steps):
            assert step.task == task and step.context.observation == f"door {door}"
            assert step.context.task == f"walk {task}"
            assert step.response == f"<think>step {n + 1}</think><action>on</action>"
            before = [(s.context.observation, s.executed) for s in steps[:n]]
            assert step.context.history == before
            assert step.context.responses == [s.response for s in steps[:n]]
            slipped = step.executed == "back"
            slips += slipped
            door += not slipped
            # What follows a slip does not follow from the response.
            assert step.observation == ("" if slipped else f"door {door}")
        assert door == int(task)
    assert slips > 2


def test_an_episode_does_not_depend_on_those_beside_it():
    tasks = ["4", "2", "6", "broken", "1", "5"]
    assert walk(tasks, slots=3) == walk(tasks) != walk(tasks, seed=1)


def test_an_episode_ends_at_its_last_turn_or_where_its_environment_fails():
    short, broken, whole = walk(["9", "broken", "2"], max_turns=4)
    assert len(short) == 4 and whole[-1].observation == "door 2"
    assert broken[-1].executed == "on" and broken[-1].observation == "" and len(broken) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("env", ["webshop", "search"])
def test_the_demonstrations_are_those_of_the_stand_ins(env, tmp_path, monkeypatch):
    """To the byte, mistakes included. test_train.py trains on ALFWorld's, too."""
    monkeypatch.chdir(tmp_path)
    tasks = standins.TEACHERS[env].training_tasks()[:12]
    rows = standins.demonstrations(standins.LESSONS[env], tasks, seed=0)
    record = json.loads((Path(default_model(env)) / "record.json").read_text())
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == record["miniature"]["demonstrations"]
