"""PaW in verl on a CPU, against `paw_min.update` on the same rows: pytest runs it in test_verl.py.

verl's own agent-loop worker, trainer steps, FSDP2 engine and losses. Replaced: the inference server
by random admissible commands, the device by "cpu", and Ray's TransferQueue by a dictionary. By hand
with the real queue:

    VERL_QUEUE=ray python -m pytest tests/examples/verl_cases.py

Two groups of four episodes of two turns, with run_alfworld.py's model; a third counts as won.
"""
# ruff: noqa: E402  (the device is set before verl is imported)

import asyncio
import os
import random
import socket
import sys
from functools import partial
from types import SimpleNamespace

os.environ["VERL_PLATFORM"] = "cpu"
sys.modules["trl"] = None  # verl's engine asks for an older one, and fails beside trl 1.16

import hydra
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from paw_min import toy
from paw_min.config import Config
from paw_min.envs.alfworld import AlfworldEnv, list_games, prompts
from paw_min.model.batches import training_batches
from paw_min.model.chat import ChatTokenizer
from paw_min.model.loading import load_policy
from paw_min.rows import Episode, Transition, flatten
from paw_min.update import loss_terms, prepare
from tests.helpers import one_sentence


def nothing(*_, **__) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks a device for."""

    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(
        memory_allocated=nothing, memory_reserved=nothing, mem_get_info=lambda *_: (0, 0),
        empty_cache=nothing, max_memory_allocated=nothing, max_memory_reserved=nothing,
        synchronize=nothing,
    )

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"

    def get_device_capability(self, index=0):
        return None, None


for name in PlatformCPU.__abstractmethods__:
    setattr(PlatformCPU, name, nothing)
PlatformCPU.__abstractmethods__ = frozenset()

# After the platform, which verl reads when it is imported.
import transfer_queue
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.losses import ppo_loss

from examples import verl_paw

MODEL = toy.default_model("alfworld")
GROUP, TURNS, STEPS = 4, 2, 2
REAL_QUEUE = os.environ.get("VERL_QUEUE") == "ray"
SETTINGS = [
    "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.n={GROUP}",
    f"actor_rollout_ref.rollout.multi_turn.max_user_turns={TURNS}",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/verl_loops.yaml",
    # 12 rows per optimizer step: verl pads the 16 to 24.
    "actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "algorithm.adv_estimator=grpo",
]


@pytest.fixture(scope="module")
def config():
    """The function from settings by name to all of verl's."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        base = hydra.compose("ppo_trainer", overrides=SETTINGS)

    def made(**more):
        config = base.copy()
        for name, value in more.items():
            OmegaConf.update(config, name, value, force_add=True)
        return config

    return made


class Queue:
    """The functions of TransferQueue that verl calls here: {key: {column: value}}."""

    def __init__(self):
        self.rows, self.tags = {}, {}

    def kv_list(self, partition_id):
        return {partition_id: self.tags}

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        for n, key in enumerate(keys):
            for name, values in fields.items():
                one = values[n]
                value = one if isinstance(one, torch.Tensor) else getattr(one, "data", one)
                self.rows.setdefault(key, {})[name] = value
            if tags:
                self.tags[key] = tags[n]
        tags = [self.tags[key] for key in keys]
        return transfer_queue.KVBatchMeta(keys, tags, partition_id, list(self.rows[keys[0]]))

    async def async_kv_batch_put(self, **arguments):
        return self.kv_batch_put(**arguments)

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        found = self.rows[keys[0]]
        columns = {}
        for name in [name for name in (select_fields or found) if name in found]:
            values = [self.rows[key][name] for key in keys]
            if isinstance(values[0], torch.Tensor) and values[0].dim():
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = tu.NonTensorStack(*values)
        return TensorDict(columns, batch_size=len(keys))


class Server:
    """Answers with an admissible command, which the compact prompt lists."""

    def __init__(self, chat):
        self.chat, self.random, self.said = chat, random.Random(0), []

    async def generate(self, request_id, prompt_ids, sampling_params):
        *_, commands = self.chat.tokenizer.decode(prompt_ids).partition("|")
        command = self.random.choice(commands.split("|"))
        command = command.partition("<")[0].strip()  # the last is followed by the template
        ids = self.chat.encode_response(f"<action>{command}</action>")
        self.said.append((prompt_ids, ids))
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids))


class Game(AlfworldEnv):
    """The last turn of a third of the episodes is paid."""

    seen = []  # observations of all steps

    def reset(self, task):
        self.turn = 0
        return super().reset(task)

    def step(self, command):
        step = super().step(command)
        self.turn += 1
        self.seen.append(step.observation)
        step.reward = 10.0 * (self.turn == TURNS and len(self.seen) // TURNS % 3 == 1)
        return step


class Workers:
    """The worker group of one process that has the engine."""

    _dispatch_info = {"actor": [0]}

    def __init__(self, queue, engine):
        self.queue, self.engine = queue, engine

    def set_loss_fn(self, loss):
        self.loss = loss

    def compute_log_prob(self, batch):
        data = columns_of(self.queue, batch)
        tu.assign_non_tensor(data, **batch.extra_info)
        with self.engine.eval_mode():
            out = self.engine.infer_batch(data)["model_output"]
        fields = TensorDict(out, batch_size=len(batch))
        self.queue.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
        return batch


def columns_of(queue, batch, keys=None, micro=8):
    """What an actor gets: the tensors of the columns that the batch lists."""
    data = queue.kv_batch_get(
        keys=keys or batch.keys, partition_id="train", select_fields=batch.fields
    )
    data = data.select(*[name for name in data.keys() if isinstance(data[name], torch.Tensor)])
    tu.assign_non_tensor(data, use_remove_padding=False, use_dynamic_bsz=False, temperature=1.0,
                         micro_batch_size_per_gpu=micro)
    return data


@pytest.fixture(scope="module")
def engine():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{port}")
    made = FSDPEngineWithLMHead(
        HFModelConfig(path=MODEL, use_remove_padding=False, enable_gradient_checkpointing=False,
                      override_config={"attn_implementation": "eager"}),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, use_remove_padding=False,
                         mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"}),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=10), CheckpointConfig(),
    )
    made.initialize()
    yield made
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def queue():
    if REAL_QUEUE:
        import ray

        ray.init(num_cpus=16, object_store_memory=100_000_000, include_dashboard=False)
        transfer_queue.init()
        yield transfer_queue
        transfer_queue.close()
        ray.shutdown()
        return
    with pytest.MonkeyPatch.context() as patch:
        fake = Queue()
        for module in (agent_loop_tq, trainer_base, padding_utils, verl_paw):
            patch.setattr(module, "tq", fake)
        yield fake


@pytest.fixture(scope="module")
def played(queue, config, games_root):
    """verl's agent-loop worker plays; the same steps as episodes of paw_min."""
    config = config()
    policy = load_policy(MODEL)
    chat = ChatTokenizer(policy.tokenizer)
    server = Server(chat)
    worker = object.__new__(agent_loop_tq.AgentLoopWorkerTQ.__ray_actor_class__)
    worker.__dict__.update(reward_loop_worker_handles=None, distillation_enabled=False,
                           processor=None, mm_processor_kwargs={}, tokenizer=policy.tokenizer)
    (listed,) = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    games = list_games(games_root, "train")[:2]

    async def play():
        for n in range(2 * GROUP):
            loop = hydra.utils.instantiate(
                listed, trainer_config=DictConfigWrap(config), server_manager=server,
                tokenizer=policy.tokenizer, processor=None, dataset_cls=None,
                data_config=DictConfigWrap(config.data),
            )
            at = dict(uid=f"task_{n // GROUP}", session_id=n % GROUP, global_steps=0)
            rows = await loop.run({}, game=games[n // GROUP], index=0, **at)
            await worker._agent_loop_postprocess(rows, False, **at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verl_paw, "AlfworldEnv", Game)
        patch.setattr(prompts, "paper", lambda context, _: prompts.compact(context, 1))
        asyncio.run(play())
    episodes = [Episode("", n // GROUP, n) for n in range(2 * GROUP)]
    for k, ((prompt_ids, ids), seen) in enumerate(zip(server.said, Game.seen, strict=True)):
        n = k // TURNS
        last = k % TURNS == TURNS - 1
        episodes[n].transitions.append(Transition(
            prompt_ids, ids, chat.encode(seen), separator_ids=chat.separator(ids),
            sampler_logp=[], reward=10.0 * (n % 3 == 0 and last), valid=True, observation="",
            group=n // GROUP, trajectory=n,
        ))
    return SimpleNamespace(policy=policy, rows=flatten(episodes))


@pytest.fixture
def updated(played, queue, engine, config, monkeypatch):
    """A function from settings to verl's batch before its optimizer steps, and paw_min's rows."""
    monkeypatch.setattr(trainer_base.PPOTrainer, "init", nothing)  # it starts Ray's workers

    def made(**paw):
        verls = config(paw=paw)
        verl_paw.check(verls)
        workers = Workers(queue, engine)
        trainer = object.__new__(verl_paw.PaWTrainer)
        trainer.__dict__.update(config=verls, use_critic=False, global_steps=1,
                                tokenizer=played.policy.tokenizer, actor_rollout_wg=workers)
        trainer.init()
        tags = queue.kv_list(partition_id="train")["train"]
        tags = {key: tag for key, tag in tags.items() if not tag.get("is_padding")}
        batch = transfer_queue.KVBatchMeta(list(tags), list(tags.values()), "train")
        for step in ("_balance_batch", "_compute_old_log_prob", "_compute_advantage"):
            batch = getattr(trainer, step)(batch, {})
        cfg = Config(mini_batch=0, kl_coef=0.0, entropy_coef=0.0, micro_tokens=1024,
                     alpha=verls.paw.alpha, rho=verls.paw.rho)
        cfg.wm_scale = verls.paw.wm_scale
        return batch, workers.loss, cfg, prepare(cfg, played.policy, None, played.rows)

    return made


def gradient(engine, loss, data, n_rows):
    """Of all rows in one optimizer step -> by parameter, and what the loss logs."""
    tu.assign_non_tensor(data, global_batch_size=n_rows)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        out = engine.forward_backward_batch(data, loss)
        found = {n: p.grad.full_tensor().clone() for n, p in engine.module.named_parameters()}
    engine.optimizer_zero_grad()
    return found, out["metrics"]


def ours(cfg, policy, rows):
    """The gradient and value of the world-model term of paw_min.update."""
    policy.zero_grad()
    value = 0.0
    for batch in training_batches(policy, rows, list(range(len(rows.tokens))), cfg.micro_tokens):
        terms = loss_terms(cfg, policy(batch), batch, 1.0).terms
        if "wm" in terms:
            terms["wm"].backward()
            value += terms["wm"].item()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}, value


def norm(gradient):
    return sum(g.square().sum().item() for g in gradient.values()) ** 0.5


def apart(a, b):
    return norm({name: a[name] - b[name] for name in b})


@pytest.mark.parametrize("paw, micro, processes", [
    ({"rho": 0.2}, 1, 1), ({"rho": 0.9, "alpha": 0.5, "wm_scale": 0.5}, 4, 2),
])
def test_the_gradient_is_ours(
    played, queue, engine, updated, monkeypatch, paw, micro, processes
):
    """Without advantages, verl's gradient is the world model's.

    Two processes: each computes the gradient of its half, and FSDP averages them.
    """
    batch, loss, cfg, rows = updated(**paw)
    n = len(batch)
    assert len(set(rows.row_weight.tolist())) > 2 and len(rows.tokens) == 16 and n == 24
    monkeypatch.setattr(engine, "get_data_parallel_size", lambda: processes)
    parts, values = [], []
    for k in range(processes):
        keys = batch.keys[k * n // processes : (k + 1) * n // processes]
        data = columns_of(queue, batch, keys, micro)
        data["advantages"] = 0.0 * data["advantages"]
        found, metrics = gradient(engine, loss, data, n)
        parts.append(found)
        values.append(metrics["actor/wm_loss"].aggregate())
    verl = {name: sum(part[name] for part in parts) / processes / STEPS for name in parts[0]}
    value = sum(values) / processes / STEPS
    expected, expected_value = ours(cfg, played.policy, rows)
    difference = apart(verl, expected) / norm(expected)
    print(f"loss: verl {value:.7f}, ours {expected_value:.7f}; gradients apart {difference:.1e}")
    assert value == pytest.approx(expected_value, rel=1e-5)
    assert difference < 2e-5


def test_the_rl_loss_is_verls(played, queue, engine, updated):
    """Without weights the gradient is verl's own; with them, the sum of both."""
    batch, loss, cfg, rows = updated()
    verls = partial(ppo_loss, config=loss.keywords["config"])
    plain, _ = gradient(engine, verls, columns_of(queue, batch), len(batch))
    data = columns_of(queue, batch)
    data["wm_weight"] = 0.0 * data["wm_weight"]
    off, _ = gradient(engine, loss, data, len(batch))
    assert norm(plain) > 0 and apart(off, plain) == 0
    on, _ = gradient(engine, loss, columns_of(queue, batch), len(batch))
    expected, _ = ours(cfg, played.policy, rows)
    world_model = {name: (on[name] - off[name]) / STEPS for name in on}
    rounding = 1e-6 * norm(plain)  # of a difference of two gradients
    assert apart(world_model, expected) < 2e-5 * norm(expected) + rounding < 0.1 * norm(expected)


def test_the_weights_are_ours(queue, updated):
    """On the tokens of a selected o' and nowhere else; 0 in the rows with which verl pads."""
    batch, _, _, rows = updated()
    data = queue.kv_batch_get(keys=batch.keys, partition_id="train")
    expected = {}
    for n, (row, weight) in enumerate(zip(rows.tokens, rows.row_weight.tolist())):
        key = f"task_{n // TURNS // GROUP}_{n // TURNS % GROUP}_{n % TURNS}"
        before = len(row.response_ids) + len(row.separator_ids)
        each = STEPS * weight / len(row.obs_ids)
        expected[key] = [0.0] * before + [each] * len(row.obs_ids)
    for n, key in enumerate(batch.keys):
        found = data["wm_weight"][n].tolist()
        assert found == pytest.approx(expected.pop(key, [0.0]))
    assert not expected


def test_an_episode_may_be_one_row():
    """The same weights as a row per step; a step without o' does not compete."""
    paw = verl_paw.PaWConfig(alpha=0.5)
    torch.manual_seed(0)
    own = torch.tensor([1, 1, 0, 0, 0])
    seen = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0] * 5, [0, 0, 0, 0, 1]]).repeat(3, 1)
    entropy = torch.rand(12, 5)
    entropy[8:] += 1.0  # all of the third episode are selected
    scores = torch.zeros(12, 5)
    scores[4:8, -1] = 10.0  # of three episodes, the second is won
    tasks = ["x_y_0", "x_y_1", "z_0"]
    keys = [f"{tasks[n // 4]}_{n % 4}" for n in range(12)]
    steps = verl_paw.token_weights(keys, [False] * 12, [own] * 12, seen, entropy, scores, paw)
    whole = verl_paw.token_weights(
        [f"{task}_0" for task in tasks], [False] * 3, [own.repeat(4)] * 3, seen.view(3, 20),
        entropy.view(3, 20), scores.view(3, 4, 5)[:, -1].repeat(1, 4).view(3, 20) / 4, paw,
    )
    assert torch.equal(torch.stack(steps).view(3, 20), torch.stack(whole))
    # Groups x_y, lambda 0.5, and z, lambda 1: each adds lambda / G, if a row of it is selected.
    assert torch.stack(whole[:2]).sum() == pytest.approx(0.25)
    assert whole[2].sum() == pytest.approx(0.5)
    assert sum(int(weight.bool().any()) for weight in steps) == 5  # of nine with an observation


@pytest.mark.parametrize("name, value, message", [
    ("paw.rho", 1.1, r"^error: \+paw.rho=1.1 is out of range \(0, 1\]$"),
    ("paw.kappa", 1, r"^error: \+paw: Key 'kappa' not in 'PaWConfig'"),
    ("actor_rollout_ref.rollout.temperature", 0.5, "rollout.temperature=0.5 .*: use 1"),
    ("algorithm.rollout_correction.bypass_mode", True, "bypass_mode=True .*: use False"),
    ("trainer.v1.trainer_mode", "colocate_async", "trainer_mode=colocate_async .*: use sync"),
])
def test_a_wrong_value_ends_in_one_sentence(config, name, value, message):
    with one_sentence(message, SystemExit):
        verl_paw.check(config(**{name: value}))


def test_verl_gets_the_trainer(config, monkeypatch):
    seen = []
    runner = verl_paw.TaskRunner.__ray_actor_class__
    parent = verl_paw.TaskRunnerV1.__ray_actor_class__
    monkeypatch.setattr(parent, "run", lambda self, config: seen.append(
        trainer_base.get_trainer_cls(config.trainer.v1.trainer_mode)))
    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "sync", None)
    runner.run(object.__new__(runner), config())
    assert seen == [verl_paw.PaWTrainer]
