"""examples/boxes.py, with a tiny random model instead of SmolLM2."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from examples import boxes, locks
from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.interface import Context, Turn
from paw_min.model.loading import load_policy
from paw_min.running import runs
from paw_min.toy.standins import make_tokenizer
from tests.helpers import SMOLLM2, make_policy

WORLD = boxes.make_world(7)
TEXTS = [boxes.ask(name) for name in boxes.NAMES] + [
    *boxes.TOOLS, *boxes.MATERIALS, "open shut is made the plan heat"
]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """The start model, as `prepare` makes it, but tiny and hardly trained."""
    policy = boxes.bare_format(make_policy("llama", tokenizer=make_tokenizer(TEXTS)))
    boxes.warm_start(policy, steps=2)
    folder = tmp_path_factory.mktemp("boxes") / "start"
    policy.save(folder)
    return folder


@pytest.mark.parametrize("words", [(), ("plan", "heat")])
def test_each_observation_shows_the_material(words):
    """With serial numbers, it is longer. test_locks_package.py has the rules of a game."""
    world = boxes.make_world(7, words=words)
    environment = boxes.Boxes(world)
    step = environment.reset("Alice Bob")
    context = Context(step.task, step.observation, step.admissible)
    for name in ("Alice", "Bob"):
        assert boxes.prompt(context, 0) == f"Box of {name}"
        material = WORLD.material_of[name]
        step = environment.step(WORLD.tool_of[material])
        assert step.observation == f" {material} open{world.serial_of[name]}"
        context.history.append(Turn(context.observation, "a tool"))
    assert step.won and step.reward == boxes.R_MAX


def test_worlds():
    """Each material is that of 8 boxes. The seed draws both facts; `natural` fixes the tools."""
    materials = list(WORLD.material_of.values())
    assert {materials.count(material) for material in boxes.MATERIALS} == {8}
    assert sorted(WORLD.tool_of.values()) == sorted(boxes.TOOLS)
    assert WORLD == boxes.make_world(7) != boxes.make_world(8)
    natural = boxes.make_world(7, natural=True)
    assert natural.material_of == WORLD.material_of and natural.tool_of == boxes.TOOL_OF


@pytest.mark.parametrize("data, sentence", [
    ("unknown", "--data unknown is not a world of boxes"),
    ("serials", "use --preset smollm2-serials"),
])
def test_refused_worlds(data, sentence):
    with pytest.raises(UserError, match=sentence):
        boxes.load(Config(env="boxes", max_obs_tokens=2), data)


@pytest.mark.parametrize("words", [(), ("plan", "heat")])
def test_the_warm_start_shows_no_fact(start, words, monkeypatch):
    """Serial numbers are new in each row."""
    collate = Mock(wraps=locks.collate)
    monkeypatch.setattr(locks, "collate", collate)
    policy = load_policy(str(start))
    boxes.warm_start(policy, steps=10, words=words)
    seen = [row for call in collate.call_args_list for row in call.args[0]]
    true = 0
    serials = set()
    for row in seen:
        name = policy.decode(row.prompt_ids).split()[-1].capitalize()
        material, outcome, *serial = policy.decode(row.obs_ids).split()
        assert policy.decode(row.response_ids) in boxes.TOOLS and outcome in ("open", "shut")
        true += material == boxes.make_world(0).material_of[name]
        serials.add((name, *serial))
    assert 0.05 < true / len(seen) < 0.2  # by chance: 1 of 8
    assert (len(serials) > len(boxes.NAMES)) == bool(words)


def test_a_box_has_its_serial_number():
    """The other facts of a seed are those of the world without serial numbers."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    words = boxes.serial_words(tokenizer)
    assert len(set(words)) == boxes.SERIAL_WORDS and not {*boxes.TOOLS, "shut"} & {*words}
    assert all(len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1 for word in words)
    world = boxes.make_world(7, words=words)
    assert (world.material_of, world.tool_of) == (WORLD.material_of, WORLD.tool_of)
    assert len(set(world.serial_of.values())) == len(boxes.NAMES)


def test_a_run(start, tmp_path):
    """A tool ends its response, and rows have 6 tokens."""
    settings = boxes.PRESETS["smollm2"] | dict(
        env="boxes", model=str(start), precision="fp32", eval_tasks=2, groups=2, group_size=4,
        lora_rank=0, lr=1e-2, updates=1, out=str(tmp_path), name="r", workers=0,
    )
    train.train(Config(**settings))
    line = runs.read_metrics(tmp_path / "r")[1]
    assert line["grad_norm"] > 0 and line["rows"] == 16 and line["tokens_forward"] <= 16 * 6
    # Only a response that is not a tool has no end.
    assert line["responses_cut"] + line["valid"] == pytest.approx(1.0)
    policy = load_policy(str(start))
    assert {policy.decode([token]) for token in policy.eos_ids[1:]} == set(boxes.TOOLS)
