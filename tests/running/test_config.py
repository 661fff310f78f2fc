"""Settings: the presets against the paper, bounds, run names, help and errors of the flags."""

import inspect
import re
from dataclasses import asdict, replace

import pytest

from paw_min import advantages, losses, ppo, update
from paw_min.base.errors import UserError
from paw_min.base.flags import flag
from paw_min.cli import parse_args
from paw_min.config import FLAGS, Config
from paw_min.envs.benchmarks import BENCHMARKS, NAMES, presets_of
from paw_min.envs.interface import Tasks
from paw_min.model.critic import LR_FACTOR
from paw_min.running.config_json import differences, public
from paw_min.running.session import WEIGHT_DECAY, count_tasks, find_tasks, open_session
from tests.helpers import one_sentence
from world_models.stage import command_line


def parse(*words: str, env: str = "alfworld") -> Config:
    return parse_args(env, presets_of(env), "", list(words))[0]


# ---- presets ----

A1 = dict(  # PaW A.1 and section 4.1, for all three benchmarks
    max_response_tokens=512, lr=1e-6, temperature=1.0, paw=True,
    wm_loss="cmae", alpha=0.75, rho=0.2, lambda_g="adaptive",
    algo="grpo", prompt="paper", wm_scale=1.0, wm_target="next",
    statistics="rows",  # verl-agent's: the paper gives none
)
OURS = dict(  # neither says; max_obs_tokens cuts nothing: Eq. 5-8 sum over all of |o|
    method="paw", max_obs_tokens=4096, name="", out="runs", seed=0, eval_repeats=1,
    data="", precision="auto", shard=False, grad_checkpointing=True,
    sampler="vllm", vllm_memory=0.4, micro_tokens=16384,
    human_goals=False, retriever="", topk=3, lora_rank=0, track="none", wm_separator="turn",
    beta2=0.999,
)
DECISIONS = dict(  # ALFWorld and WebShop
    groups=16, group_size=8, invalid_penalty=0.1, history_length=2,
    eval_temperature=0.4, kl_coef=0.01,
    entropy_coef=0.001, updates=150, eval_every=5, save_every=5, eval_tasks=128,
    model="Qwen/Qwen2.5-1.5B-Instruct",
)
PAPER = {
    "alfworld": DECISIONS | dict(
        max_prompt_tokens=2048, max_turns=50, mini_batch=256, eval_split="valid_seen", workers=4,
        n_products=0,
    ),
    "webshop": DECISIONS | dict(
        max_prompt_tokens=4096, max_turns=15, mini_batch=64, eval_split="test", workers=0,
        n_products=1000,
    ),
    "search": dict(
        max_prompt_tokens=4096, max_turns=4, mini_batch=512, groups=256, group_size=5,
        invalid_penalty=0.01, history_length=4, eval_temperature=0.0,
        kl_coef=0.001, entropy_coef=0.0, updates=200, eval_every=50, save_every=10,
        eval_tasks=0, eval_split="test", workers=0, n_products=0, model="Qwen/Qwen2.5-3B-Instruct",
        vllm_memory=0.3,
    ),
}


@pytest.mark.parametrize("env", NAMES)
def test_every_setting_of_the_paper_presets(env):
    """All fields, so that a changed default cannot change the paper's settings unnoticed."""
    preset = asdict(Config(**{"env": env} | presets_of(env)["paper"]))
    assert preset == {"env": env} | A1 | OURS | PAPER[env]
    cfg = parse("--preset", "paper", "--data", "d", env=env)
    assert asdict(cfg) | {"name": "", "data": ""} == preset
    model = cfg.model.split("/")[1]
    assert cfg.name == f"{env}-{model}-grpo-paw-seed0"


@pytest.mark.parametrize("env, tasks", [("alfworld", 128), ("webshop", 128), ("search", 256)])
def test_ppo_plays_each_task_once(env, tasks):
    cfg = parse("--preset", "paper", "--data", "d", "--algo", "ppo", env=env)
    assert (cfg.groups, cfg.group_size) == (tasks, 1) and "-ppo-paw-seed0" in cfg.name
    cfg = parse("--preset", "paper", "--data", "d", "--algo", "ppo", "--groups", "9", env=env)
    assert (cfg.groups, cfg.group_size) == (9, 1)
    assert parse("--algo", "ppo", env=env).groups == parse(env=env).groups  # tiny


def test_the_presets_for_one_gpu_are_the_papers_with_adapters_and_their_rate():
    for size, model in (("24gb", "1.5B"), ("80gb", "7B")):
        cfg = parse("--preset", size, "--data", "x")
        assert (cfg.model, cfg.lora_rank, cfg.lr) == (f"Qwen/Qwen2.5-{model}-Instruct", 16, 1e-5)


def default(function, name: str):
    return inspect.signature(function).parameters[name].default


def test_the_constants_beside_the_presets():
    """What A.1 or verl-agent say, and no flag changes."""
    assert default(advantages.gigpo, "weight") == 1.0  # omega in A.1
    assert LR_FACTOR == 10  # A.1: 1e-5 and 1e-6
    assert update.GRAD_CLIP == 1.0
    assert WEIGHT_DECAY == 0.01
    assert ppo.GAE_LAMBDA == 1.0
    assert default(losses.clipped_surrogate, "clip_low") == 0.2
    assert default(losses.clipped_surrogate, "clip_high") == 0.2
    assert default(losses.clipped_surrogate, "dual_clip") == 3.0
    assert update.GAMMA == 0.95
    found = {env: (BENCHMARKS[env].r_max, BENCHMARKS[env].cut_prompts) for env in NAMES}
    assert found == {"alfworld": (10, False), "webshop": (10, False), "search": (1, True)}


@pytest.mark.parametrize("url", ["http://me:p@ss@host", "http://me:p/ss@host:80/retrieve"])
@pytest.mark.parametrize("name", ["retriever", "data"])
def test_a_password_is_neither_stored_nor_printed(name, url):
    cfg = Config(env="search", **{name: url})
    stored = public(cfg)[name]
    assert stored.startswith("http://***@host") and "ss" not in stored
    # A run that was begun by an older version has stored it.
    shown = differences(cfg, replace(cfg, **{name: ""}))
    with pytest.raises(UserError) as error:
        find_tasks(replace(cfg, data=url))
    shown += [count_tasks(cfg, Tasks([], [], make_pool=None)), str(error.value)]
    shown.append(command_line(["--data", url]))
    assert "ss@" not in " ".join(shown)


@pytest.mark.parametrize("words, lines", [
    ("", ["--updates INT RL updates, the outer loop of Alg. 1; 0: only evaluate (default 8; paper",
          "--rho FLOAT confidence threshold of clipped MAE, Eq. 7 (default 0.2)",
          "default: the stand-in model (paper Qwen/Qwen2.5-1.5B-Instruct)"]),
    ("--preset echo paper", ["only evaluate (default 150)", "fraction (default 1.0; paper 0.75)"]),
])
def test_help_has_the_values_of_the_command_in_front_of_it(words, lines, capsys):
    with pytest.raises(SystemExit):
        parse(*words.split(), "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert all(line in shown for line in lines), shown


# ---- bounds ----


@pytest.mark.parametrize("words, message", [
    (["--rho", "1.5"], "--rho 1.5 is out of range: it must be in .0, 1.[.]"),
    (["--alpha", "0"], "--alpha 0.0 is out of range"),
    (["--shard"], "add --sampler vllm"),
    (["--sampler", "vllm", "--temperature", "2.5"], "--temperature 2.5 or --eval-temp"),
    (["--group-size", "1"], "--group-size 1 leaves nothing to compare"),
    (["--updates", "1000000"], "--updates 1000000 is out of range"),  # checkpoint-000000
    (["--algo", "ppo", "--statistics", "trajectories"], "not for --algo ppo: use rows"),
    (["--preset", "tiny", "paper"], "--preset tiny paper: choose one size, and at most one met"),
    (["--preset", "echo", "echo"], "--preset echo echo: choose one size, and at most one met"),
    (["--preset", "24gb"], "--preset 24gb is for published data"),
    (["--seed", "4294967296"], "--seed 4294967296 is out of range"),  # vLLM takes none
    (["--model", "http://me:p@ss@host/x"], r"--model http://\*{3}@host/x is a URL: give a f"),
    (["--name", ".."], r"--name '\.\.' cannot be a folder in --out: use a plain name."),
    (["--name", "a\x1b[2J"], r"--name 'a\\x1b.2J' cannot be a folder"),  # clears the screen
    (["--out", "~nobodyx/y"], "^~nobodyx/y begins with a home folder that does not"),
    (["--groups", "1e3"], "^error: .*1e3.*; see --help"),
    (["--retriever", "u"], "unrecognized arguments: --retriever.*; see --help"),  # of search
    (["--wm-scal", "3"], "unrecognized arguments: --wm-scal.*; see --help"),  # misspelled
    (["--algo", "reinforce"], "--algo: invalid choice: 'reinforce'"),
    (["--prompt", "long"], "^--prompt long is unknown: alfworld has paper, compact"),
    (["--eval-split", "foo"], "^--eval-split foo is unknown: alfworld has train, valid_seen, v"),
    (["--data="], '--data "" is empty'),
    (["--data", ""], '--data "" is empty: give a value, or omit it'),  # $DIR is not set
])
def test_bad_flags(words, message, monkeypatch, capsys):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises((UserError, SystemExit)) as error:
        parse(*words)
    is_ours = isinstance(error.value, UserError)
    said = str(error.value) if is_ours else capsys.readouterr().err.rstrip()
    assert re.search(message, said) and "\n" not in said and len(said) < 200


def test_numbers_must_be_within_their_bounds():
    """Each number that has a flag has bounds, and no float may be infinite."""
    for name in FLAGS:
        kind = Config.__annotations__[name]
        for value in {int: ["-1"], float: ["-1.0", "nan", "inf"]}.get(kind, []):
            with pytest.raises(UserError, match=f"^{flag(name)} {value} is out of range: it must"):
                parse(f"{flag(name)}={value}", env="search" if name == "retriever" else "webshop")


def test_search_needs_no_workers():
    with one_sentence("^--workers 3: search needs none.*; omit it.$"):
        parse("--workers", "3", env="search")


def test_echo_is_a_preset_on_top_of_a_size():
    echo = dict(wm_loss="ce", alpha=1.0, lambda_g="constant", wm_scale=0.05)
    for size in ("tiny", "paper"):
        plain = parse("--preset", size, "--data", "d")
        cfg = parse("--preset", size, "echo", "--data", "d")
        assert asdict(cfg) == asdict(plain) | echo | {"name": plain.name.replace("paw", "echo")}
    assert parse("--preset", "echo") == parse("--preset", "tiny", "echo")
    own = parse_args("alfworld", {"own": dict(wm_scale=10.0)}, "", ["--preset", "echo"])[0]
    assert own.wm_scale == 0.05
    with pytest.raises(SystemExit):  # the presets of a fork name its method
        parse_args("alfworld", {"own": dict(method="own")}, "", ["--preset", "echo"])


def test_out_is_below_a_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("--out=~/runs").out == f"{tmp_path}/runs"


# ---- names ----


@pytest.mark.parametrize("words, name", [
    ("", "alfworld-tiny-grpo-paw-seed0"),
    ("--preset tiny --alpha 0.75 --seed 3", "alfworld-tiny-grpo-paw-seed3"),  # 0.75 is the preset's
    ("--preset paper --data d", "alfworld-Qwen2.5-1.5B-Instruct-grpo-paw-seed0"),
    ("--preset 24gb --data d", "alfworld-Qwen2.5-1.5B-Instruct-24gb-grpo-paw-seed0"),
    ("--algo gigpo --group-size 11 --rho 0.3",
     "alfworld-tiny-gigpo-paw-group-size=11-rho=0.3-seed0"),
    ("--no-paw --rho 0.3 --kl-coef 0.1", "alfworld-tiny-grpo-kl-coef=0.1-seed0"),
    # What a run may change when it resumes, and where its data are.
    ("--updates 9 --eval-every 1 --micro-tokens 99 --data d", "alfworld-tiny-grpo-paw-seed0"),
    ("--model runs/A/checkpoint-000150/", "alfworld-A-checkpoint-000150-grpo-paw-seed0"),
    ("--model data/alfworld", "alfworld-grpo-paw-seed0"),  # named once
])
def test_a_name_has_what_differs_from_the_preset(words, name):
    assert parse(*words.split()).name == name


def test_weight_decay_and_beta2_reach_the_optimizer(config, monkeypatch):
    monkeypatch.setattr("paw_min.running.session.WEIGHT_DECAY", 0.3)
    with open_session(config(beta2=0.95)) as s:
        (group,) = s.optimizer.param_groups
        assert (group["weight_decay"], group["betas"]) == (0.3, (0.9, 0.95))
