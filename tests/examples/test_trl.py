"""PaW in TRL: its update without the world-model term, our gradient with it.

Two groups of four episodes of two turns, with run_alfworld.py's model; a third counts as won.
"""

import functools
import os
import re
import runpy
import sys
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from examples import trl_paw
from examples.trl_paw import PaWConfig, PaWTrainer, play, reward
from paw_min import toy
from paw_min.config import Config
from paw_min.envs.alfworld import list_games
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.model.batches import training_batches
from paw_min.model.loading import load_policy
from paw_min.rows import Episode, Transition, flatten
from paw_min.update import loss_terms, prepare

pytestmark = pytest.mark.slow
MODEL = toy.default_model("alfworld")
GROUP = 4


class Watch(TrainerCallback):
    """The gradient of the first optimizer step."""

    gradient = None

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if self.gradient is None:
            self.gradient = {name: p.grad.clone() for name, p in model.named_parameters()}


class Run:
    """A run of a trainer: what it played, its first gradient and its last weights."""

    def __init__(self, trainer, folder, games_root, steps=1, **settings):
        self.played = None
        torch.manual_seed(0)
        config = PaWConfig(
            str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=steps,
            per_device_train_batch_size=2, gradient_accumulation_steps=GROUP, max_grad_norm=0,
            num_generations=GROUP, max_completion_length=16, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, **settings,
        )
        games = Dataset.from_dict({"prompt": list_games(games_root, "train")})
        watch = Watch()
        self.trainer = trainer(
            MODEL, reward, config, train_dataset=games, rollout_func=self.play, callbacks=[watch]
        )
        self.trainer.train()
        self.gradient = watch.gradient
        self.weights = self.trainer.model.state_dict()

    def play(self, games, trainer):
        columns = play(games, trainer, max_turns=2)
        columns["episode_return"] = [10.0 * (n % 3 == 0) for n in range(len(games))]
        self.played = self.played or columns
        return columns


@pytest.fixture(scope="module")
def run(tmp_path_factory, games_root):
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return functools.cache(
        lambda trainer, **settings: Run(
            trainer, tmp_path_factory.mktemp("trl"), games_root, **settings
        )
    )


def equal(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_without_the_world_model_it_is_trl_to_the_last_digit(run):
    plain = run(GRPOTrainer, steps=2)
    off = run(PaWTrainer, wm_scale=0.0, steps=2)
    assert plain.gradient.keys() == off.gradient.keys() and equal(plain.gradient, off.gradient)
    assert plain.weights.keys() == off.weights.keys() and equal(plain.weights, off.weights)
    assert any(g.any() for g in plain.gradient.values())  # the rewards differ within groups
    assert len(trl_paw.ENVS) == len(off.played["completion_ids"])  # all four rollouts share them


def episodes(played: dict) -> list[Episode]:
    """The same episodes as rows of paw_min: each action after everything before it."""
    found = []
    for n, ids in enumerate(played["completion_ids"]):
        episode = Episode("", n // GROUP, n)
        kinds = zip(played["env_mask"][n], played["obs_mask"][n])
        parts = [[id for id, _ in part] for _, part in groupby(zip(ids, kinds), itemgetter(1))]
        # The fourth of a turn, if another follows, is <agent>.
        for k in range(0, len(parts), 4):
            generated, separator, observed = parts[k : k + 3]
            start = sum(map(len, parts[:k]))
            episode.transitions.append(
                Transition(
                    played["prompt_ids"][n] + ids[:start], generated, observed,
                    sampler_logp=[], reward=0.0, valid=True, observation="", group=n // GROUP,
                    trajectory=n, separator_ids=separator,
                )
            )
        episode.transitions[-1].reward = played["episode_return"][n]
        found.append(episode)
    return found


@pytest.mark.parametrize("settings", [{}, {"alpha": 1.0, "rho": 0.9, "r_max": 20.0}])
def test_with_it_the_gradient_is_ours(run, settings, monkeypatch):
    on = run(PaWTrainer, **settings)
    off = run(PaWTrainer, wm_scale=0.0, steps=2)
    assert on.played == off.played
    cfg = Config(
        mini_batch=0, kl_coef=0.0, entropy_coef=0.0, alpha=on.trainer.args.alpha,
        rho=on.trainer.args.rho, micro_tokens=1024,
    )
    benchmark = replace(BENCHMARKS[cfg.env], r_max=on.trainer.args.r_max)
    monkeypatch.setitem(BENCHMARKS, cfg.env, benchmark)
    policy = load_policy(MODEL)
    rows = prepare(cfg, policy, None, flatten(episodes(on.played)))
    assert len(rows.tokens) == 16 and len(set(rows.row_weight.tolist())) > 1
    everything = list(range(len(rows.tokens)))
    total = 0.0
    for batch in training_batches(policy, rows, everything, cfg.micro_tokens):
        terms = loss_terms(cfg, policy(batch), batch, 1.0).terms
        if "wm" in terms:
            terms["wm"].backward()
            total += terms["wm"].item()
    ours = {name: p.grad for name, p in policy.model.named_parameters()}
    logged = on.trainer.state.log_history[0]["wm_loss"]
    assert logged == pytest.approx(total, rel=1e-5)
    apart = {name: g - off.gradient[name] - ours[name] for name, g in on.gradient.items()}
    for name in apart:  # rounding: the terms of some parameters cancel
        assert apart[name].norm() < 1e-3 * ours[name].norm(), name
    assert norm(apart) < 5e-5 * norm(ours)


def norm(gradient: dict) -> float:
    return sum(g.square().sum().item() for g in gradient.values()) ** 0.5


@pytest.mark.parametrize("flags, message", [
    (["--temperature", "0.5"], "error: temperature 0.5 is not supported: use 1"),
    (["--mask_truncated_completions", "True"], "error: mask_truncated_completions .*: omit it"),
    (["--rho", "1.1"], r"error: rho 1.1 is out of range \(0, 1\]"),
    (["--kappa", "1"], "error: Some specified arguments are not used .*'--kappa', '1'\\]"),
])
def test_a_wrong_value_ends_in_one_sentence(flags, message, tmp_path, monkeypatch):
    argv = ["trl_paw", "--output_dir", str(tmp_path), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(trl_paw.__file__, run_name="__main__")
    assert re.search(f"{message}$", ended.value.code) and "\n" not in ended.value.code


def test_it_says_where_it_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trl_paw"])
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(GRPOTrainer, "train", lambda self: None)
    runpy.run_path(trl_paw.__file__, run_name="__main__")
    assert f"checkpoints: {tmp_path}/trainer_output (--output_dir)\n" in capsys.readouterr().out
