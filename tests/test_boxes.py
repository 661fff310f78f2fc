"""examples/boxes.py and its study, with a tiny random model in place of SmolLM2."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples import boxes, locks, probable
from paw_min import cli, train, update
from paw_min.base.errors import UserError
from paw_min.config import METHOD_PRESETS, Config, parse_args
from paw_min.envs.interface import Context, Turn
from paw_min.model import lora
from paw_min.model.policy import Policy, load_policy
from paw_min.rows import flatten
from paw_min.running import runs
from paw_min.toy.standins import make_tokenizer
from research.boxes import study
from research.boxes.material import material, most_predicted
from tests.helpers import BASE, EPISODES, ROWS, SMOLLM2, make_policy, plain_logp, run, weights_of

WORLD = boxes.make_world(7)
TEXTS = [boxes.ask(name) for name in boxes.NAMES] + [
    *boxes.TOOLS, *boxes.MATERIALS, "open shut is made the plan heat"
]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """The start model, as `prepare` makes it, but tiny and hardly trained."""
    tokenizer = make_tokenizer(TEXTS)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    torch.manual_seed(0)
    policy = boxes.bare_format(Policy(LlamaForCausalLM(config), tokenizer))
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


@pytest.mark.parametrize("micro_tokens", [60, 10_000])
def test_p_of_the_material_is_that_of_the_first_observation_token(micro_tokens, monkeypatch):
    """And the update is PaW's, bit for bit."""
    monkeypatch.setattr("research.boxes.material.most_predicted", lambda policy: 0.5)
    settings = dict(alpha=1.0, lambda_g="constant", mini_batch=0, micro_tokens=micro_tokens)
    cfg, policy = Config(**BASE | settings), make_policy()
    first = [plain_logp(policy, t)[len(t.response_ids)].exp().item() for t in ROWS if t.obs_ids]
    optimizer = torch.optim.SGD(policy.parameters(), lr=cfg.lr)
    s = SimpleNamespace(policy=policy, optimizer=optimizer)
    rows = update.prepare(cfg, policy, None, flatten(EPISODES))
    metrics = material(cfg, s, rows, 0)
    assert metrics.pop("wm_p_most") == 0.5
    assert metrics.pop("wm_p_first") == pytest.approx(sum(first) / len(first), rel=1e-5)
    weights, expected = run(**settings)
    assert torch.equal(weights_of(policy), weights)
    assert metrics == {name: expected[name] for name in metrics}
    # There is none without a trained observation.
    nothing = replace(rows, row_weight=torch.zeros_like(rows.row_weight))
    assert not {"wm_p_first", "wm_p_most"} & {*material(cfg, s, nothing, 1)}


def test_the_most_predicted_material_is_measured_over_all_boxes(start):
    policy = load_policy(str(start))
    with torch.no_grad():
        p = [policy.model(torch.tensor([policy.encode(f"Box of {name} hammer")])).logits[0, -1]
             .softmax(-1) for name in boxes.NAMES]
    means = {word: torch.stack(p)[:, policy.encode(f" {word}")].mean().item()
             for word in boxes.MATERIALS}
    assert most_predicted(policy) == pytest.approx(max(means.values()), rel=1e-5)
    # The runs have bf16 passes and adapters.
    trained = load_policy(str(start), precision="bf16")
    lora.attach(trained.model, 2, "bf16", 0, None)
    assert most_predicted(trained) == pytest.approx(max(means.values()), rel=0.05)


def settings_of(presets, method: str, flags: list[str]) -> Config:
    """As cli.main has them for a method of one's own."""
    presets = {name: preset | {"method": method} for name, preset in presets.items()}
    return parse_args("boxes", presets, "", flags)[0]


@pytest.mark.parametrize("arm", study.ARMS)
def test_every_arm_is_a_command_and_measures_p_where_there_is_a_world_model(arm, monkeypatch):
    play = Mock(return_value=[{"eval_success": 0.0}, {"eval_success": 1.0}])
    monkeypatch.setattr(study.study, "play", play)
    assert study.train((arm, 3))["held_out"] == [0.0, 1.0]
    module, flags, _ = play.call_args.args
    measured = module == "research.boxes.material"
    method = "material" if measured else Config.method
    cfg = settings_of(boxes.PRESETS, method, flags[flags[0] == "probable" :])
    assert cfg.seed == 3 and cfg.paw == measured
    if arm == "echo":
        echo = METHOD_PRESETS["echo"] | {"wm_scale": 1.0}
        assert echo.items() <= vars(cfg).items()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # they are run as scripts
def test_probable_runs_with_echos_settings(monkeypatch):
    run, fork = Mock(), Mock()
    monkeypatch.setattr(boxes, "run", run)
    monkeypatch.setattr(cli, "fork", fork)
    monkeypatch.setattr("sys.argv", ["x", "probable", "--seed", "3"])
    runpy.run_module("research.boxes.material", run_name="__main__")
    runpy.run_module("examples.probable", run_name="__main__")
    presets, _, method, flags = run.call_args.args
    cfg = settings_of(presets, method.__name__, flags)
    assert cfg.method == "probable_material"
    assert METHOD_PRESETS["echo"].items() <= vars(cfg).items()
    assert fork.call_args.args[1] == METHOD_PRESETS["echo"]
    assert probable.FLOOR == 0.03


def test_a_difference_has_common_seeds_and_an_interval_from_four():
    """Three seeds are shown one by one; a picture has the seeds of all of its arms."""
    runs = {
        (arm, seed): {"success": [share] * 20, "held_out": [0.0, share]}
        for arm, share in (("paw", 0.75), ("grpo", 0.5)) for seed in range(5)
    }
    pair = (("paw", "grpo"),)
    assert "| 5 | +25.0 [+25.0, +25.0] |" in study.differences(runs, pair)
    del runs["grpo", 0]
    assert "| 4 | +25.0 [+25.0, +25.0] |" in study.differences(runs, pair)
    del runs["paw", 1]
    assert "| 3 | +25.0, +25.0, +25.0 |" in study.differences(runs, pair)


def test_the_table_has_every_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    study.table()
    printed = capsys.readouterr().out
    assert "| echo | 0 | 43.4 | 93.4 | 78.1 | 0.906 | - |" in printed
    runs = study.study.read_runs(study.RUNS)
    assert all(f"| {arm} | {seed} | " in printed for arm, seed in runs)
    assert all((tmp_path / f"curves{suffix}.png").exists() for suffix in study.PICTURES)
