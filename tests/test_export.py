"""The folder of an exported policy, and its model card.

    python -m pytest tests/test_export.py
"""

import json
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from paw_min.base.errors import UserError
from paw_min.config import parse_args
from paw_min.running import card, export
from paw_min.running.presets import presets_of
from paw_min.running.runs import read_metrics


def stored(run, **changes) -> None:
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def command_of(text: str, env: str):
    """The settings of the command in a card."""
    (line,) = [line for line in text.splitlines() if line.startswith("    python ")]
    python, script, *flags = shlex.split(line)
    assert (python, script) == ("python", f"run_{env}.py")
    return parse_args(env, presets_of(env), "", flags)


def test_the_folder_and_its_card(finished, config, tmp_path, capsys):
    out = tmp_path / "plain"
    export.main([str(finished), "--out", str(out)])
    assert f"plain: the policy of {finished}/checkpoint-000001\n" in capsys.readouterr().out
    assert (out / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    modes = {path.name: path.stat().st_mode for path in out.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # others may read the weights, too
    shown = ModelCard.load(out / "README.md")
    assert shown.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["paw", "reinforcement-learning", "alfworld"],
    }
    evaluated = read_metrics(finished)[1]
    for name in ("success", "eval_success", "eval_length"):
        assert f"| {name} | 1 | {evaluated[name]:.4g} |" in shown.text
    assert "| `--rho` | 0.2 |" in shown.text
    # A card is public: no path of this machine.
    assert str(tmp_path) not in shown.content and str(Path(config().data)) not in shown.content
    names = {name: Path(getattr(config(), name)).name for name in ("data", "model")}
    assert command_of(shown.text, "alfworld") == (config(**names, out="runs", updates=1), "train")
    assert "Updates: 1." in shown.text


def test_the_weights_have_the_published_type(finished, tmp_path):
    """Those of a checkpoint, whose config.json names that type too, stay fp32 for the next step."""
    path = finished / "checkpoint-000001" / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    export.main([str(finished), "--out", str(tmp_path / "plain")])
    ours = load_file(tmp_path / "plain" / "model.safetensors")
    for name, weight in load_file(path.with_name("model.safetensors")).items():
        assert torch.equal(ours[name], weight.bfloat16()) and weight.dtype == torch.float32


def test_a_base_model_of_the_hub(finished):
    secret = "http://me:key@127.0.0.1:1"
    stored(finished, model="Qwen/Qwen2.5-1.5B-Instruct", retriever=secret, data="/home/me/games")
    shown = ModelCard(card.model_card(finished / "checkpoint-000001"))
    assert shown.data.base_model == "Qwen/Qwen2.5-1.5B-Instruct" and shown.data.license is None
    assert "me:key" not in shown.content
    assert "games" in shown.content and "/home/me" not in shown.content


def test_the_lines_after_the_checkpoint_are_not_of_this_policy(finished):
    before = card.model_card(finished / "checkpoint-000001")
    with open(finished / "metrics.jsonl", "a") as file:
        file.write('{"update": 2, "success": 0.123}\n')
    assert card.model_card(finished / "checkpoint-000001") == before


def test_an_environment_without_a_run_script(finished):
    stored(finished, env="guess")
    assert "python run_" not in card.model_card(finished / "checkpoint-000001")


@pytest.mark.parametrize("env", ["alfworld", "webshop", "search"])
def test_the_command_gives_the_settings_of_the_run(env):
    presets = presets_of(env)
    for preset in presets:
        flags = ["--preset", preset]
        if preset in ("paper", "24gb", "80gb"):
            flags += ["--data", "some folder"]
        others = ["--no-paw", "--lr=1e-5"], ["--model=a/b", "--name", "it's", "--seed=3"]
        ppo = ["--algo=ppo"], ["--algo=ppo", "--groups=16", "--group-size=8"]
        for more in ([], *others, *ppo):
            parsed = parse_args(env, presets, "", flags + more)
            assert command_of(f"    {card.command(parsed[0])}", env) == parsed


def test_a_folder_with_files_stays_as_it_is(finished):
    def content() -> dict:
        return {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}

    before = content()
    with pytest.raises(UserError, match="is not empty: give a new folder"):
        export.main([str(finished), "--out", str(finished)])
    assert content() == before
