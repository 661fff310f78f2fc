"""PaW in one file: its equations by hand, short runs, and that it needs torch alone."""

import copy
import math
import random
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from unittest.mock import Mock

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from examples import one_file, three_worlds
from paw_min import advantages, balance, cmae, losses, select
from tests.helpers import ROOT, python

FILE = Path(one_file.__file__)


def small():
    """A world of 8 names, and a model that knows nothing of it."""
    torch.manual_seed(0)
    world = one_file.make_world(0, names=8)
    return world, one_file.Model(world.words())


def test_the_placebo_trains_on_observations_of_others(monkeypatch):
    world, model = small()
    seen = []
    monkeypatch.setattr(one_file, "learn", lambda *args: seen.append(args[2]))
    for placebo in (False, True):
        torch.manual_seed(1)
        one_file.update(model, None, world, [["lock0", "lock1"]], one_file.Arm(placebo=placebo))
    true, other = seen
    assert torch.equal(true.action, other.action)
    assert not torch.equal(true.observation, other.observation)
    observation = torch.arange(20).view(10, 2)
    shuffled = one_file.shuffled(observation)
    assert (shuffled != observation).all()  # none has its own
    assert sorted(shuffled.tolist()) == observation.tolist()


def test_the_kl_term_is_to_the_start_model(monkeypatch):
    world, model = small()
    start = copy.deepcopy(model)
    start.head.bias.data[model.id_of["saw"]] = 2.0
    seen = []
    monkeypatch.setattr(one_file, "learn", lambda *args: seen.append(args[2]))
    one_file.update(model, None, world, [["lock0", "lock1"]], one_file.Arm(kl=0.01), start)
    (rollout,) = seen
    logp = start(rollout.prompt)[:, -1].gather(1, rollout.action[:, None])[:, 0]
    torch.testing.assert_close(rollout.start_logp, logp)


def test_mini_batches_add_up(monkeypatch):
    """The mean gradient of four mini-batches, at fixed parameters, is that of the whole update."""
    world, model = small()
    rollout = one_file.play(model, world, [["lock0", "lock1"], ["lock2", "lock3"]])
    advantage = torch.randn(32)
    weight = torch.rand(32)
    monkeypatch.setattr(one_file, "GRADIENT_CLIP", math.inf)
    moved = []
    for parts in (1, 4):
        monkeypatch.setattr(one_file, "MINI_BATCHES", parts)
        _, model = small()
        start = parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 / parts)
        one_file.learn(model, optimizer, rollout, advantage, weight, one_file.Arm())
        moved.append(parameters_to_vector(model.parameters()) - start)
    # The parameters move a little between mini-batches.
    assert (moved[0] - moved[1]).norm() < 0.01 * moved[0].norm()


def test_observation_does_not_change_the_action():
    world, model = small()
    act = world.prompt("lock0") + ["saw"]
    shut, opens = model.encode([act + ["shut", "wax"], act + ["opens", "wax"]])
    a, b = model(torch.stack([shut, opens]))
    assert torch.equal(a[:4], b[:4])
    assert not torch.allclose(a[4:], b[4:])


@pytest.mark.parametrize("kind", [one_file.World, three_worlds.Corridors])
def test_success_is_that_of_all_tasks(kind):
    world = kind(**vars(one_file.make_world(0, names=8)))
    model = one_file.Model(world.words())
    steps = []  # for each step of a task, the probability of the right action at each name
    for names in world.steps():
        right = model.encode([[world.right_tool(name)] for name in names])
        p = model(model.encode([world.prompt(name) for name in names]))[:, -1].exp()
        steps.append(p.gather(1, right)[:, 0].tolist())
    expected = mean(math.prod(task) for task in product(*steps))
    assert one_file.evaluate(model, world, 0).success == pytest.approx(expected, rel=1e-4)


def test_noise_is_what_follows_the_material():
    """None in plain locks; the digits of a serial number."""
    plain, model = small()
    assert one_file.evaluate(model, plain, 0).noise == 0
    world = three_worlds.Serials(**vars(plain))
    model = one_file.Model(world.words())
    p = []  # of each digit
    for name, tool in product(world.material_of, one_file.TOOLS):
        text = model.encode([[*world.prompt(name), tool, *world.observation(name, tool)]])
        logp = one_file.logp_of(model(text[:, :-1]), text[:, 1:])[0]
        p += logp[-8:].exp().tolist()
    assert one_file.evaluate(model, world, 0).noise == pytest.approx(mean(p), rel=1e-4)


def test_returns_are_for_two_locks(monkeypatch):
    """An episode is won if both are opened, at any position of the rollout."""
    world, model = small()
    names = ["lock0", "lock1"]
    right = model.encode([[world.right_tool(name)] for name in names])[:, 0]
    wrong = model.encode([["open"]])[0, 0]
    chosen = torch.stack([right[0], right[1], right[0], wrong, wrong, right[1]])
    monkeypatch.setattr(one_file, "EPISODES", 3)
    monkeypatch.setattr(torch, "multinomial", lambda p, n: chosen[:, None])
    rollout = one_file.play(model, world, [names])
    assert rollout.returns.tolist() == [[10.0, 0.0, 0.0]]
    said = [model.words[i] for i in rollout.observation[:, 0]]
    assert said == ["opens", "opens", "opens", "shut", "shut", "opens"]


@pytest.mark.slow
def test_runs_with_torch_alone(tmp_path):
    """Without this package, numpy and matplotlib, from another folder."""
    code = f"""
import sys
for name in ("paw_min", "numpy", "matplotlib", "transformers"):
    sys.modules[name] = None  # importing it fails
sys.path.insert(0, {str(FILE.parent)!r})
import one_file
one_file.warm_start = lambda *_: None
sys.argv = ["one_file.py", "--seeds", "5", "--updates", "1", "--lambda-g", "constant"]
one_file.main()
"""
    out = python("-W", "ignore", "-c", code, cwd=tmp_path).stdout
    table = out.split("seconds per run\n")[1].splitlines()
    assert [line.split()[0] for line in table[:3]] == ["grpo", "paw", "placebo"]


@pytest.mark.parametrize("words, code, part", [
    (["examples.three_worlds", "serials"], 1, "[Errno 21] Is a directory: 'serials.png'"),
    (["examples.one_file", "--scale", "nan"], 2, "--scale nan must be a finite number, 0 or more"),
    (["examples.one_file", "--kl", "-1"], 2, "--kl -1.0 must be a finite number, 0 or more"),
])
def test_a_command_that_cannot_end_well_trains_nothing(words, code, part, tmp_path):
    (tmp_path / "serials.png").mkdir()
    done = python("-m", *words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, code=code)
    assert done.stderr.splitlines()[-1].endswith(part) and not done.stdout


@pytest.mark.parametrize("command, words, picture", [
    (one_file, ["one_file.py"], "one_file.png"),
    (three_worlds, ["three_worlds.py", "serials"], "serials.png"),
])
def test_an_interrupted_command_leaves_the_picture_as_it_was(
    command, words, picture, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(command, "run", Mock(side_effect=KeyboardInterrupt))
    for before in ({}, {picture: b"older"}):
        for name, content in before.items():
            Path(name).write_bytes(content)
        with pytest.raises(KeyboardInterrupt):
            command.main()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---- the package does the same ----

CLOSE = dict(atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("loss", ["cmae", "ce"])
def test_an_update_is_that_of_the_package(monkeypatch, loss):
    """One rollout through both: each quantity, the gradient and the weights after a step."""
    monkeypatch.setattr(one_file, "MINI_BATCHES", 1)
    world, model = small()
    tasks = [["lock0", "lock1"], ["lock2", "lock3"], ["lock4", "lock0"], ["lock5", "lock6"]]
    rollout = one_file.play(model, world, tasks)
    # Groups that lost, mixed, mixed and won; and ratios on both sides of the clip.
    returns = torch.zeros(4, 8)
    returns[1, :3] = returns[2, 2:7] = returns[3] = one_file.R_MAX
    n_rows = len(rollout.action)
    old_logp = rollout.old_logp + torch.linspace(-0.5, 0.5, n_rows)
    start_logp = rollout.old_logp + torch.linspace(1, -1, n_rows)
    rollout = replace(rollout, returns=returns, old_logp=old_logp, start_logp=start_logp)
    group = [n // 16 for n in range(n_rows)]
    trajectory = [n // 2 for n in range(n_rows)]
    score = returns.flatten().repeat_interleave(2)  # (N,)

    advantage = one_file.grpo(returns).flatten().repeat_interleave(2)  # (N,)
    theirs = advantages.grpo(score, group, trajectory, over="trajectories")
    torch.testing.assert_close(advantage, theirs, **CLOSE)

    with torch.no_grad():
        logits = model(rollout.prompt)[:, -1:]  # (N, 1, V) log-probs are logits, too
    entropy = select.action_entropy(select.full_entropy(logits), torch.ones(n_rows, 1))
    torch.testing.assert_close(rollout.entropy, entropy, **CLOSE)
    selected = one_file.top_alpha(rollout.entropy, 0.6)
    assert torch.equal(selected, select.top_alpha(entropy, 0.6)) and 0 < selected.sum() < n_rows

    lambdas = one_file.lambda_g(returns)
    mean_return = balance.group_mean_return(score.tolist(), group)
    theirs = {g: balance.lambda_g(r, r_max=one_file.R_MAX) for g, r in mean_return.items()}
    assert lambdas.tolist() == [1, 0.625, 0.375, 0]
    assert [float(value) for value in theirs.values()] == pytest.approx(lambdas.tolist())
    weight = one_file.row_weights(selected, lambdas)
    torch.testing.assert_close(weight, losses.row_weights(group, selected, theirs))

    other = copy.deepcopy(model)
    tokens = torch.cat([rollout.prompt, rollout.action[:, None], rollout.observation], 1)
    logp = one_file.logp_of(other(tokens[:, :-1]), tokens[:, 1:])
    observation_logp = logp[:, 3:]
    # The model knows nothing: with this rho, it has tokens on both sides.
    rho = observation_logp.exp().median().item()
    arm = one_file.Arm(alpha=0.6, rho=rho, loss=loss, scale=0.7, kl=0.3)
    # A step of SGD is the gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    one_file.learn(model, optimizer, rollout, advantage, weight, arm)

    one = torch.ones(n_rows, 1)
    rl, _ = losses.clipped_surrogate(logp[:, 2:3], old_logp[:, None], advantage, one)
    mask = torch.ones_like(observation_logp)
    if loss == "ce":
        row_loss = cmae.cross_entropy(observation_logp, mask)
    else:
        row_loss = cmae.clipped_mae(observation_logp, mask, rho)
    kl = losses.k3_kl(logp[:, 2:3], start_logp[:, None], one)
    (rl + 0.3 * kl + 0.7 * (weight * row_loss).sum()).backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), one_file.GRADIENT_CLIP)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    for ours, theirs in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


# ---- three_worlds ----


def test_the_three_worlds():
    serials, corridors, polish = (lesson.make_world(5) for lesson in three_worlds.LESSONS.values())
    rng = random.Random(1)
    locks = list(serials.material_of)
    # A serial number is that of its name; the warm start shows none.
    known = {tuple(serials.observation(name, "saw")[2:]) for name in locks * 2}
    shown = {tuple(serials.shown_observation(locks, rng)[2:]) for _ in range(200)}
    assert len(known) == len(locks) and not known & shown
    # What is seen in a corridor is new each time; to walk is right there only.
    assert len({tuple(corridors.observation("corridor3", "walk")) for _ in range(50)}) == 50
    assert corridors.opens("corridor3", "walk") and not corridors.opens("lock3", "walk")
    # 0.7 by design, and an eighth of the rest by chance.
    right = mean(polish.opens(name, polish.shown_tool(name, rng)) for name in locks * 50)
    assert abs(right - 0.7 - 0.3 / 8) < 0.04


@pytest.mark.slow
def test_paw_learns_the_materials_and_wins_more_than_grpo():
    """In a small world: 0.54 and 0.33 after 60 updates."""
    size = one_file.Size(warm_rows=64, updates=60)
    world = one_file.make_world(3, names=16)
    arms = one_file.make_arms(one_file.Arm())
    grpo, paw = (one_file.run(3, arms[name], world, size)[-1] for name in ("grpo", "paw"))
    assert paw.success > grpo.success + 0.1
    assert paw.material > grpo.material + 0.08
