"""PaW in one file: its equations by hand, short runs, and that it needs torch alone."""

import copy
import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from examples import one_file, three_worlds
from paw_min import advantages, balance, cmae, losses, select
from tests.helpers import ROOT, python

FILE = Path(one_file.__file__)


SHORT = one_file.Size(warm_steps=5, updates=3, evaluate_every=1)


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
    assert sorted(true.observation.tolist()) == sorted(other.observation.tolist())
    # None has its own.
    observation = torch.arange(20).view(10, 2)
    assert (one_file.shuffled(observation) != observation).all()


def test_mini_batches_add_up(monkeypatch):
    """The mean gradient of four mini-batches, at fixed parameters, is that of the whole update."""
    world, model = small()
    tasks = [["lock0", "lock1"], ["lock2", "lock3"]]
    rollout = one_file.play(model, world, tasks)
    advantage = torch.randn(32)
    weight = torch.rand(32)
    monkeypatch.setattr(one_file, "GRADIENT_CLIP", math.inf)
    moved = []
    for parts in (1, 4):
        monkeypatch.setattr(one_file, "MINI_BATCHES", parts)
        world, model = small()
        start = [p.clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 / parts)
        one_file.learn(model, optimizer, rollout, advantage, weight, one_file.Arm())
        moved.append(torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), start)]))
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
    every = [math.prod(task) for task in product(*steps)]
    found = one_file.evaluate(model, world, 0)
    assert found.success == pytest.approx(sum(every) / len(every), rel=1e-4)


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
    found = one_file.evaluate(model, world, 0)
    assert found.noise == pytest.approx(sum(p) / len(p), rel=1e-4)


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


def test_a_run_repeats():
    arms = one_file.make_arms(one_file.Arm())
    world = one_file.make_world(3, names=8)
    curves = {name: one_file.run(3, arm, world, SHORT) for name, arm in arms.items()}
    assert one_file.run(3, arms["paw"], world, SHORT) == curves["paw"]
    assert [point.update for point in curves["paw"]] == [0, 1, 2, 3]
    starts = {curve[0].success for curve in curves.values()}
    ends = {curve[-1].material for curve in curves.values()}
    assert len(starts) == 1 and len(ends) == 3  # one warm start, three ways to train
    assert one_file.run(4, arms["paw"], world, SHORT) != curves["paw"]


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
    assert table[3] == "no figure: pip install matplotlib"


@pytest.mark.parametrize("name, flags, picture, code, part", [
    ("one_file", [], "one_file.png", 1, "error: [Errno 21] Is a directory: 'one_file.png'"),
    ("three_worlds", ["serials"], "serials.png", 1, "[Errno 21] Is a directory: 'serials.png'"),
    ("one_file", ["--scale", "nan"], "none", 2, "--scale nan must be a finite number, 0 or more"),
])
def test_a_command_that_cannot_end_well_trains_nothing(name, flags, picture, code, part, tmp_path):
    (tmp_path / picture).mkdir()
    words = ["-m", f"examples.{name}", *flags]
    done = python(*words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, code=code)
    assert done.stderr.splitlines()[-1].endswith(part) and not done.stdout


# ---- the package does the same ----


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
    rollout = replace(rollout, returns=returns, old_logp=old_logp)
    group = [n // 16 for n in range(n_rows)]
    trajectory = [n // 2 for n in range(n_rows)]
    score = returns.flatten().repeat_interleave(2)  # (N,)

    advantage = one_file.grpo(returns).flatten().repeat_interleave(2)  # (N,)
    theirs = advantages.grpo(score, group, trajectory, over="trajectories")
    torch.testing.assert_close(advantage, theirs, atol=1e-6, rtol=1e-6)

    with torch.no_grad():
        logits = model(rollout.prompt)[:, -1:]  # (N, 1, V) log-probs are logits, too
    entropy = select.action_entropy(select.full_entropy(logits), torch.ones(n_rows, 1))
    torch.testing.assert_close(rollout.entropy, entropy, atol=1e-6, rtol=1e-6)
    selected = one_file.top_alpha(rollout.entropy, 0.6)
    assert torch.equal(selected, select.top_alpha(entropy, 0.6)) and 0 < selected.sum() < n_rows

    lambdas = one_file.lambda_g(returns)
    mean_return = balance.group_mean_return(score.tolist(), group)
    theirs = {g: balance.lambda_g(r, r_max=one_file.R_MAX) for g, r in mean_return.items()}
    assert lambdas.tolist() == [1, 0.625, 0.375, 0]
    assert [float(value) for value in theirs.values()] == pytest.approx(lambdas.tolist())
    weight = one_file.row_weights(selected, lambdas)
    torch.testing.assert_close(weight, losses.row_weights(group, selected, theirs))

    # A higher rho than the default, so that the model, which knows nothing, has tokens on both
    # sides of it.
    other = copy.deepcopy(model)
    tokens = torch.cat([rollout.prompt, rollout.action[:, None], rollout.observation], 1)
    with torch.no_grad():
        rho = one_file.logp_of(other(tokens[:, :-1]), tokens[:, 1:])[:, 3:].exp().median().item()
    arm = one_file.Arm(alpha=0.6, rho=rho, loss=loss, scale=0.7)
    # A step of SGD is the gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    one_file.learn(model, optimizer, rollout, advantage, weight, arm)

    logp = one_file.logp_of(other(tokens[:, :-1]), tokens[:, 1:])
    action_logp = logp[:, 2:3]
    observation_logp = logp[:, 3:]
    one = torch.ones(n_rows, 1)
    rl, _ = losses.clipped_surrogate(action_logp, old_logp[:, None], advantage, one)
    mask = torch.ones_like(observation_logp)
    if loss == "ce":
        row_loss = cmae.cross_entropy(observation_logp, mask)
    else:
        row_loss = cmae.clipped_mae(observation_logp, mask, rho)
    (rl + 0.7 * (weight * row_loss).sum()).backward()
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
    known = {tuple(serials.observation(name, "saw")[2:]) for name in locks for _ in range(2)}
    shown = {tuple(serials.shown_observation(locks, rng)[2:]) for _ in range(200)}
    assert len(known) == len(locks) and not known & shown
    # What is seen in a corridor is new each time.
    seen = {tuple(corridors.observation("corridor3", "walk")) for _ in range(50)}
    assert len(seen) == 50
    assert corridors.opens("corridor3", "walk") and not corridors.opens("corridor3", "saw")
    assert not corridors.opens("lock3", "walk")
    assert len(corridors.observation("lock3", "saw")) == len(corridors.observation("corridor3", ""))
    assert corridors.shown_tool("corridor3", rng) == "walk"
    # 0.7 by design, and an eighth of the rest by chance.
    right = [polish.opens(name, polish.shown_tool(name, rng)) for name in locks * 50]
    assert abs(sum(right) / len(right) - 0.7 - 0.3 / 8) < 0.04


@pytest.mark.slow
def test_paw_learns_the_materials_and_wins_more_than_grpo():
    """In a small world: 0.54 and 0.33 after 60 updates."""
    size = one_file.Size(warm_rows=64, updates=60)
    world = one_file.make_world(3, names=16)
    arms = one_file.make_arms(one_file.Arm())
    grpo, paw = (one_file.run(3, arms[name], world, size)[-1] for name in ("grpo", "paw"))
    assert paw.success > grpo.success + 0.1
    assert paw.material > grpo.material + 0.08


@pytest.mark.parametrize("world", three_worlds.LESSONS)
def test_every_arm_of_a_world_is_drawn(world, tmp_path):
    point = one_file.Evaluation(0, 0.5, 0.5, 0.0)
    curves = {name: [[point]] for name in three_worlds.LESSONS[world].arms}
    one_file.draw(curves, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 0
