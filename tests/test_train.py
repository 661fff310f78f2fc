"""Whole runs of run_alfworld.py on the real engine: outputs, switches, resuming, bad input.

    python -m pytest tests/test_train.py

The model is random and tiny, the games are the generated ones: nothing here is about learning.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import run_alfworld
from paw_min import console, runs, session, train
from paw_min.config import UserError, flag, parse_args, settings
from paw_min.envs import alfworld
from paw_min.model.sampler import HFSampler
from paw_min.toy import default_model, standins
from paw_min.update import NonFinite
from tests.test_policy import make_policy

ROOT = Path(__file__).parent.parent


def numbers(folder) -> list[dict]:
    """metrics.jsonl without the times, which no run repeats."""
    timed = ("seconds", "generator_idle", "env_wait", "memory_gb")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)}
        for line in runs.read_metrics(folder)
    ]


def test_a_run_leaves_everything_behind(config, tmp_path, capsys):
    cfg = config()
    train.train(cfg)
    folder = tmp_path / "r"
    assert json.loads((folder / "config.json").read_text()) == asdict(cfg)
    lines = runs.read_metrics(folder)
    assert [line["update"] for line in lines] == [0, 1, 2, 3]
    assert ["eval_success" in line for line in lines] == [True, False, True, True]
    expected = {
        "success", "return", "length", "valid", "no_variance", "failed", "rows", "entropy", "ratio",
        "clip_fraction", "approx_kl", "ref_kl", "grad_norm", "lambda", "lambda_min", "lambda_max",
        "wm_loss", "loss_wm", "loss_pg", "loss_kl", "loss_entropy", "wm_clipped_tokens", "selected",
        "tokens_generated", "tokens_trained", "tokens_forward", "prompts_cut", "obs_tokens_cut",
        "generator_idle", "env_wait", "sampler_gap", "memory_gb", "duplicates",
        "seconds_rollout", "seconds_generate", "seconds_env", "seconds_old_pass", "seconds_update",
    }  # fmt: skip
    assert expected <= set(lines[1])
    assert any(key.startswith("eval_success/") for key in lines[0])
    for name in ("curves.png", "paw.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "Your task is to:" in (folder / "episodes.md").read_text()
    (checkpoint,) = folder.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-000003"
    AutoTokenizer.from_pretrained(checkpoint)
    after = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    before = AutoModelForCausalLM.from_pretrained(cfg.model).state_dict()
    assert any(not torch.equal(before[k], after[k]) for k in after)
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line[:7].strip().isdigit()]
    assert len(table) == 4 and len({len(line) for line in table} | {len(console.HEADER)}) <= 2
    assert "held-out success: 0.000 before, 0.000 after 3 updates" in out

    # The same command again has nothing left to do, and says so with the same numbers.
    train.train(cfg)
    assert runs.read_metrics(folder) == lines
    # More updates resume from there.
    train.train(config(updates=4))
    assert runs.read_metrics(folder)[:4] == lines and len(runs.read_metrics(folder)) == 5


def test_switches_reach_the_run(config, tmp_path, monkeypatch):
    """Every switch of the method, from the same configuration, with its effect on the numbers."""
    monkeypatch.setattr(train, "draw", lambda folders: None)  # pictures are slow, and seen above
    variants = {
        "paw": {}, "off": dict(paw=False), "gigpo": dict(algo="gigpo"), "ce": dict(wm_loss="ce"),
        "mae": dict(wm_loss="mae"), "alpha": dict(select_ratio=0.3), "rho": dict(rho=0.01),
        "constant": dict(wm_weight="constant"), "seed": dict(seed=1),
    }  # fmt: skip
    line = {}
    for name, changed in variants.items():
        train.train(config(name=name, updates=1, eval_tasks=1, kl_coef=0.0, **changed))
        line[name] = numbers(tmp_path / name)[1]
    base = line["paw"]
    assert "wm_loss" not in line["off"] and line["off"]["tokens_trained"] < base["tokens_trained"]
    assert line["ce"]["wm_loss"] > line["mae"]["wm_loss"] > base["wm_loss"]
    assert line["alpha"]["selected"] < base["selected"]
    assert line["rho"]["wm_clipped_tokens"] > base["wm_clipped_tokens"]
    assert line["constant"]["lambda"] == 1.0
    assert line["gigpo"]["success"] == base["success"]  # the same rollout ...
    assert line["seed"]["entropy"] != base["entropy"]  # ... and another


def test_killed_at_any_moment_it_resumes_bit_for_bit(config, tmp_path):
    """kill -9 after each new line of metrics, at shifting moments, until the run is through."""
    cfg = config(updates=3, eval_every=2)
    command = [sys.executable, str(ROOT / "run_alfworld.py")]
    for f in settings("alfworld"):
        value = getattr(cfg, f.name)
        if isinstance(value, bool):
            command.append(flag(f.name) if value else flag(f.name).replace("--", "--no-"))
        else:
            command += [flag(f.name), str(value)]
    whole = subprocess.run(command + ["--name", "whole"], capture_output=True, text=True, cwd=ROOT)
    assert whole.returncode == 0, whole.stderr
    folder = tmp_path / "cut"
    kills = 0
    for delay in (0.0, 0.3, None):  # seconds after a line has appeared; None: to the end
        seen = len(runs.read_metrics(folder))
        process = subprocess.Popen(
            command + ["--name", "cut"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT
        )
        while delay is not None and process.poll() is None:
            # Later lines are dropped on resuming, so wait for the file to grow again.
            if len(runs.read_metrics(folder)) > max(seen, kills):
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    assert kills >= 2
    assert numbers(folder) == numbers(tmp_path / "whole")
    for name in ("model.safetensors", "trainer.pt"):
        (a,) = (tmp_path / "whole").glob(f"checkpoint-*/{name}")
        (b,) = folder.glob(f"checkpoint-*/{name}")
        if name.endswith(".safetensors"):
            assert a.read_bytes() == b.read_bytes()


def test_a_kill_while_writing_loses_nothing(config, tmp_path, monkeypatch):
    """Dying at every file operation of a save: there is always a complete checkpoint."""
    cfg = config()
    train.train(cfg)
    run = runs.Run(cfg)
    policy = make_policy("qwen3")
    optimizer = torch.optim.AdamW(policy.parameters())

    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        raise Killed

    operations = [(torch, "save"), (runs, "flush"), (os, "replace"), (runs.shutil, "rmtree")]
    for target, name in operations:
        with monkeypatch.context() as patch:
            if name == "rmtree":  # the one that removes the older checkpoint, at the end
                patch.setattr(target, name, lambda *args, **options: options or die())
            else:
                patch.setattr(target, name, die)
            with pytest.raises(Killed):
                run.save(policy, optimizer, 9)
        good = runs.Run(cfg).checkpoint()
        assert good.name == ("checkpoint-000009" if name == "rmtree" else "checkpoint-000003")
        torch.load(good / "trainer.pt", weights_only=True)
        AutoModelForCausalLM.from_pretrained(good)
        assert not list((tmp_path / "r").glob("*.partial"))


def test_whatever_the_policy_holds_is_trained_and_saved(config):
    """A fork's critic: assigned to the policy, it is optimized, saved and restored with it."""

    def with_critic(seed: int):
        policy = make_policy("qwen3")
        torch.manual_seed(seed)
        policy.critic = torch.nn.Linear(32, 1)
        return policy, torch.optim.AdamW(policy.parameters(), lr=0.1)

    run, (policy, optimizer) = runs.Run(config()), with_critic(1)
    before = policy.critic.weight.clone()
    sum((p**2).sum() for p in policy.parameters()).backward()
    optimizer.step()
    assert not torch.equal(policy.critic.weight, before)
    run.save(policy, optimizer, 7)
    other, its_optimizer = with_critic(2)
    assert run.restore(other, its_optimizer) == 7
    assert torch.equal(other.critic.weight, policy.critic.weight)
    moments = [o.state[p.critic.weight]["exp_avg"] for p, o in
               ((policy, optimizer), (other, its_optimizer))]  # fmt: skip
    assert torch.equal(*moments)
    AutoModelForCausalLM.from_pretrained(run.checkpoint())  # still a plain Hugging Face folder


def test_a_line_that_was_cut_off_is_dropped(config, tmp_path):
    train.train(config(updates=1))
    path = tmp_path / "r" / "metrics.jsonl"
    before = runs.read_metrics(tmp_path / "r")
    path.write_text(path.read_text() + '{"update": 2, "succ')
    assert runs.read_metrics(tmp_path / "r") == before
    train.train(config(updates=2))
    assert [line["update"] for line in runs.read_metrics(tmp_path / "r")] == [0, 1, 2]


def test_killed_before_the_first_checkpoint(config, tmp_path):
    """A line of metrics without its checkpoint does not count."""
    train.train(config(updates=1))
    expected = numbers(tmp_path / "r")
    runs.shutil.rmtree(tmp_path / "r" / "checkpoint-000001")
    train.train(config(updates=1))
    assert numbers(tmp_path / "r") == expected


def test_the_command_line_ends_in_one_sentence():
    command = [sys.executable, str(ROOT / "run_alfworld.py"), "--rho", "1.5"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == (
        "error: --rho 1.5 is out of range: it must be above 0 and at most 1.\n"
    )


def test_a_run_folder_belongs_to_its_settings(config):
    train.train(config(updates=1))
    with pytest.raises(UserError, match=r"belongs to a run with --lr 0.001.*another --name"):
        train.train(config(updates=1, lr=2e-3))


def test_the_rows_of_a_nan_loss_are_saved(config, tmp_path, monkeypatch):
    """The message names the weights to continue with: a checkpoint only where there is one."""

    def broken(*args):
        raise NonFinite("the loss became nan (pg nan)", [])

    for update, start in ((1, "the start model"), (2, tmp_path / "r" / "checkpoint-000001")):
        with monkeypatch.context() as patch:
            patch.setattr(train, "learn", broken)
            text = f"update {update}: the loss became nan.*nonfinite-00000{update}.pt.*: lower --lr"
            with pytest.raises(UserError, match=f"{text} .* --model set to {start}") as error:
                train.train(config(updates=2))
        assert "\n" not in str(error.value)
        assert ("checkpoint" in str(error.value)) == (update == 2)
        assert torch.load(tmp_path / "r" / f"nonfinite-00000{update}.pt") == []
        if update == 1:
            assert runs.Run(config()).checkpoint() is None
            train.train(config(updates=1))
    assert runs.Run(config()).checkpoint() == start


def cpu_seconds(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("seconds", [0.3, 1, 3, 8])
def test_ctrl_c_is_one_sentence(config, seconds):
    """After these seconds of CPU time: while Python imports torch and transformers, and later."""
    cfg = config()
    command = [sys.executable, str(ROOT / "run_alfworld.py"), "--data", cfg.data, "--out", cfg.out]
    command += ["--updates", "1000", "--groups", "2", "--group-size", "2", "--eval-tasks", "6"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while cpu_seconds(process.pid) < seconds and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "interrupted: rerun the same command to resume", errors
    assert "Traceback" not in errors


def test_environments_in_processes_of_their_own_give_the_same_numbers(config, tmp_path):
    for workers in (0, 2):
        train.train(config(name=f"workers{workers}", updates=1, workers=workers))
    for inside, outside in zip(numbers(tmp_path / "workers0"), numbers(tmp_path / "workers2")):
        # Who is batched with whom depends on who answers first, and so does the rounding.
        assert inside == pytest.approx(outside, abs=1e-4, rel=1e-4)


def test_eval_only(config, capsys, tmp_path):
    train.train(config(), eval_only=True)
    out = capsys.readouterr().out
    assert "eval_success" in out and "eval_success/" in out
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_eval_only_names_the_update_of_its_weights(config, tmp_path):
    """That of the checkpoint, even if a killed run has logged a later one."""
    train.train(config(updates=1, eval_every=0))
    with open(tmp_path / "r" / "metrics.jsonl", "a") as file:
        file.write('{"update": 2, "success": 0.0}\n')
    train.train(config(updates=1, eval_every=0), eval_only=True)
    assert json.loads((tmp_path / "r" / "evaluation.json").read_text())["update"] == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(data="no/such/folder"), "no/such/folder.*does not exist"),
        (dict(model="no/such/model"), "the model no/such/model cannot be loaded"),
        (dict(groups=999), "999.*12"),
        (dict(max_prompt_tokens=8), "a prompt of .* tokens exceeds max_prompt_tokens=8"),
    ],
)
def test_bad_input_is_one_sentence(config, settings, message):
    with pytest.raises(UserError, match=message) as error:
        train.train(config(**settings))
    assert "\n" not in str(error.value)


def test_a_model_with_too_few_positions_is_refused(config, tmp_path):
    """A prompt and its response must fit; observations may be far shorter than their limit."""
    make_policy("qwen3", max_position_embeddings=64).save(tmp_path / "short")
    short = dict(model=str(tmp_path / "short"), max_prompt_tokens=60)
    with pytest.raises(UserError, match="short has 64 positions: .* together 65") as error:
        train.train(config(**short, max_response_tokens=5))
    assert "\n" not in str(error.value)
    with session.open_session(config(**short, max_response_tokens=4)):
        pass


def test_a_model_with_damaged_weights_is_refused_before_anything_else(config, model, tmp_path):
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="the model .*/cut cannot be loaded") as error:
        train.train(config(model=str(tmp_path / "cut")))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_corrupt_game_is_named(config, games_root, tmp_path):
    copy = tmp_path / "games"
    shutil.copytree(games_root, copy)
    for cache in copy.rglob(".paw_min_*"):
        cache.unlink()
    broken = min(copy.glob("json_2.1.1/train/*/*/game.tw-pddl"))
    broken.write_text(broken.read_text()[:1000])
    with pytest.raises(UserError, match=f"{broken.parent.name}"):
        train.train(config(data=str(copy)))


def test_the_paper_preset_is_the_same_code(model, games_root, tmp_path):
    """Fig. 7's prompts, KL, checkpointed activations: only the sizes are cut down."""
    small = {"model": model, "data": games_root, "out": tmp_path, "name": "paper", "updates": 1,
             "groups": 2, "group-size": 2, "max-turns": 2, "eval-tasks": 2, "micro-tokens": 4096,
             "sampler": "transformers", "mini-batch": 4, "max-response-tokens": 4}  # fmt: skip
    argv = ["--preset", "paper"]
    for key, value in small.items():
        argv += [f"--{key}", str(value)]
    cfg, _ = parse_args("alfworld", run_alfworld.PRESETS, "", argv)
    train.train(cfg)
    line = numbers(tmp_path / "paper")[1]
    assert line["rows"] == 8 and line["loss_kl"] >= 0 and line["wm_loss"] > 0
    assert line["valid"] == 0 and line["prompts_cut"] == 0


@pytest.mark.parametrize("name", ["alfworld", "sparse"])
def test_the_stand_in_is_what_its_command_makes(name, games_root):
    """The whole remake takes ten minutes; its miniature on 12 games repeats what was recorded."""
    folder = Path(default_model(name))
    record = json.loads((folder / "record.json").read_text())
    games = sorted(alfworld.list_games(games_root, "train"), key=lambda g: Path(g).parent.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(5)  # nobody else's generator matters
    again = standins.miniature(name, games, tokenizer, seed=0)
    assert again["demonstrations"] == record["miniature"]["demonstrations"]
    assert again["loss"] == pytest.approx(record["miniature"]["loss"], rel=1e-4)
    lesson = standins.LESSONS[name]
    assert len(record["loss"]) == -(-lesson.steps // 100)
    # The kept weights are those at the end of the record: they cost what its last steps did.
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 0.8e6 < model.num_parameters() < 1.2e6
    rows = standins.demonstrations("alfworld", games, 0, lesson.haste, lesson.episodes)
    assert all(row.observation != "Nothing happens." for row in rows)  # of another command
    loss = standins.imitate(model, tokenizer, rows, 0, 60, 1e-9, stop=6)
    assert sum(loss) / 6 == pytest.approx(record["loss"][-1], rel=0.25)


def test_the_warm_start_supervises_what_its_kind_says():
    """One row, so that each step sees it: the mean loss of its parts by hand."""
    folder = default_model("alfworld")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    response = "<think>find mug</think><action>go to desk 1</action>"
    row = standins.Demonstration("go to desk 1", response, "You arrive at desk 1.")

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def nll(tokens: list[int]) -> torch.Tensor:
        logp = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return -logp.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]

    prompt, observation = ids(f"<user>{row.prompt}<agent>"), ids(row.observation)
    steps = nll(prompt + ids(row.response) + [end] + observation)[len(prompt) - 1 :]
    acts, document = steps[: -len(observation)], nll([end, *observation] * 2)
    both = acts.sum() + 0.3 * document.sum()
    expected = {
        "sft": acts.mean(), "actobs": steps.mean(),
        "words": both / (len(acts) + 0.3 * len(document)),
    }  # fmt: skip
    for kind, value in expected.items():
        (loss,) = standins.imitate(model, tokenizer, [row], 0, 60, 1e-9, kind, stop=1)
        assert loss == pytest.approx(value.item(), rel=1e-3), kind


@pytest.mark.parametrize("off, stops", [(2e-3, True), (5e-4, False), (float("nan"), True)])
def test_a_sampler_that_is_out_of_step_stops_the_run(config, tmp_path, monkeypatch, off, stops):
    class Stale(HFSampler):
        def _generate(self, *args):
            responses = super()._generate(*args)
            return [replace(r, logps=[x - off for x in r.logps]) for r in responses]

    monkeypatch.setattr(session, "HFSampler", Stale)
    cfg = config(updates=1, eval_every=0)
    if not stops:
        train.train(cfg)
        assert numbers(tmp_path / "r")[1]["sampler_gap"] == pytest.approx(off, rel=1e-2)
        return
    with pytest.raises(UserError, match="update 1: the sampler's .* nats per token") as error:
        train.train(cfg)
    assert "\n" not in str(error.value) and "--sampler transformers" in str(error.value)
    assert "checkpoint" not in str(error.value)  # there is none
    assert len(numbers(tmp_path / "r")) == 1  # nothing was trained on it
