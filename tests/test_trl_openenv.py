"""TRL's trainer plays a benchmark through our OpenEnv server, with the code of examples/README.md.

The model is random, so its tool calls are written by the test; everything else is TRL's.
"""

import json
import re

import pytest

pytest.importorskip("openenv")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from examples import openenv_server
from paw_min.config import Config
from paw_min.envs.alfworld import BENCHMARK
from tests import pools
from tests.helpers import ROOT, SIZE, SMOLLM2, publish
from tests.openenv_client import serving

pytestmark = pytest.mark.slow


def call(command: str) -> str:
    content = json.dumps({"name": "step", "arguments": {"command": command}})
    return f"<tool_call>\n{content}\n</tool_call><|im_end|>"


class Scripted(GRPOTrainer):
    """All its episodes look, take stock and stop."""

    responses = [call("look"), call("inventory"), "Done.<|im_end|>"]

    def _generate_single_turn(self, prompt_ids, *_, **__):
        ids = self.processing_class(self.responses.pop(0))["input_ids"]
        return [ids] * len(prompt_ids), None


@pytest.fixture
def game():
    """The class in the README, in which a test puts the URL of its server."""
    text = (ROOT / "examples/README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = [block for block in blocks if "class Game" in block]
    return code


def test_trl_plays_through_the_server(game, games_root, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = publish(AutoTokenizer.from_pretrained(SMOLLM2), "qwen2_5")  # which has tools
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), head_dim=8, **SIZE))
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=1,
        per_device_train_batch_size=2, num_generations=2, max_completion_length=1000,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
    )
    tasks = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 4, "seed": range(4)})
    own = BENCHMARK.load(Config(), str(games_root))
    games = openenv_server.Games(own)
    with serving(openenv_server.make_app(games)) as url:
        names = {}
        exec(game.replace("http://127.0.0.1:8000", url), names)
        trainer = Scripted(
            model, args=config, train_dataset=tasks, processing_class=tokenizer,
            environment_factory=names["Game"],
        )
        trainer.train()
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0
    assert trainer.state.log_history[0]["tools/call_frequency"] == 2
    seen = [environment.result.observation["text"] for environment in trainer.environments]
    pool = own.make_pool(1)
    expected = set()
    for task in own.train[:4]:
        pools.reset(pool, [task])
        expected.add(pools.step(pool, {0: "inventory"})[0].observation)
    assert len(seen) == 2 and seen[0] == seen[1] and seen[0] in expected
