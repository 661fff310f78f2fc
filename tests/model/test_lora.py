"""LoRA: gradients of the merged model, the start model as reference, checkpoints, export.

With the real peft. Over several ranks: test_dist.py; in vLLM: test_vllm.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model import lora
from paw_min.model.batches import collate, training_batches
from paw_min.model.loading import load_policy
from paw_min.rows import flatten
from paw_min.running import export, runs, session
from paw_min.update import loss_terms, optimize, prepare
from tests.helpers import (
    BASE,
    EPISODES,
    FAMILIES,
    SMALL,
    TOKEN_ROWS,
    make_policy,
    numbers,
    with_adapters,
)
from tests.model_kinds import make_kind

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")
RUN = dict(lora_rank=4, updates=1, eval_every=1, kl_coef=0.1, lr=1e-2)
SETTINGS = BASE | dict(kl_coef=0.1, entropy_coef=0.01, lora_rank=4)


def merged(policy, family: str):
    """A policy without adapters, with the weights that vLLM gets."""
    plain = make_policy(family)
    plain.model.load_state_dict(dict(lora.full_weights(policy.model)))
    return plain


def gradients(policy, cfg: Config) -> dict[str, torch.Tensor]:
    """Of Eq. 11 with all its terms, on fixed rows."""
    rows = prepare(cfg, policy, make_policy(), flatten(EPISODES))
    everything = list(range(len(rows.tokens)))
    for batch in training_batches(policy, rows, everything, cfg.micro_tokens):
        terms = loss_terms(cfg, policy(batch), batch, 1.0).terms
        assert set(terms) == {"pg", "entropy", "kl", "wm"} and all(terms.values())
        sum(terms.values()).backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_merged_weights(family):
    """y = (W + 2 B A) x: dL/dA = 2 B^T dL/dW and dL/dB = 2 dL/dW A^T, by autograd without peft."""
    policy = with_adapters(make_policy(family))
    weights = dict(policy.model.named_parameters())
    ours = gradients(policy, Config(**SETTINGS))
    theirs = gradients(merged(policy, family), Config(**SETTINGS))
    names = [name.removesuffix(".weight") for name in theirs if "proj" in name]
    names = [name for name in names if not name.endswith("bias")]
    assert len(names) == 2 * 7 and len(ours) == 2 * len(names)  # all linear layers, nothing else
    for name in names:
        a, b = (f"{name}.lora_{x}.default.weight" for x in "AB")
        d_weight = theirs[f"{name}.weight"]
        torch.testing.assert_close(ours[a], 2 * weights[b].T @ d_weight, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(ours[b], 2 * d_weight @ weights[a].T, atol=1e-6, rtol=1e-4)
        assert ours[a].shape[0] == ours[b].shape[1] == 4


def briefly_trained(policy, precision="bf16"):
    """Adapters as large as 25 steps of Adam at the presets' rate make them."""
    lora.attach(policy.model, 16, precision, seed=0, checkpoint=None)
    draw = torch.Generator().manual_seed(1)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            p.data = 25e-5 * (2 * torch.rand(p.shape, generator=draw) - 1)
    return policy


def part_that_arrives(policy, rounded: dict[str, torch.Tensor]) -> float:
    """The projection of (rounded - W) on s B A: 1 if all of it is there, 0 if W is unchanged."""
    along = length = 0.0
    exact = dict(lora.full_weights(policy.model))
    for name, layer in policy.model.named_modules():
        if hasattr(layer, "lora_A"):
            before = layer.base_layer.weight.float()
            learned = exact[f"{name}.weight"] - before
            along += ((rounded[f"{name}.weight"].float() - before) * learned).sum().item()
            length += learned.square().sum().item()
    return along / length


def test_small_adapters_arrive_in_bf16():
    policy = briefly_trained(make_policy(hidden_size=128, intermediate_size=256))
    exact = dict(lora.full_weights(policy.model))
    nearest = {name: weight.bfloat16() for name, weight in exact.items()}
    assert part_that_arrives(policy, nearest) < 0.2
    state = torch.get_rng_state()
    rounded = dict(lora.full_weights(policy.model, "bf16"))
    assert torch.equal(state, torch.get_rng_state())
    assert part_that_arrives(policy, rounded) == pytest.approx(1, abs=0.15)
    again = dict(lora.full_weights(policy.model, "bf16"))
    for name, weight in rounded.items():
        assert torch.equal(again[name], weight)
        if "proj.weight" not in name:
            assert torch.equal(weight, exact[name])  # vLLM rounds it as the passes do
            continue
        assert weight.dtype == torch.bfloat16
        # One of the two neighbors, and a bf16 number is its own.
        apart = (weight.float() - exact[name]).abs()
        assert (apart < exact[name].abs() / 128 + 1e-30).all()
        whole = exact[name].bfloat16()
        assert torch.equal(lora.round_bf16(whole.float(), name), whole)


def test_a_bf16_model_from_an_adapter_has_the_weights_of_its_run(tmp_path):
    """In the run's own engine. To the nearest, nearly the start model would play."""
    policy = make_policy(hidden_size=128, intermediate_size=256)
    for weight in policy.parameters():
        weight.data = weight.bfloat16().float()  # as published
    policy.save(tmp_path / "start")
    policy.model.name_or_path = str(tmp_path / "start")
    briefly_trained(policy).save(tmp_path / "adapter")
    arrived = dict(lora.full_weights(policy.model, "bf16"))
    again = load_policy(str(tmp_path / "adapter"), precision="bf16").model
    for name, weight in lora.full_weights(again, "bf16"):
        # A sum in another order may be next to a border.
        assert (weight != arrived[name]).float().mean() < 1e-3, name


@torch.no_grad()
def test_small_adapters_arrive_in_bf16_passes():
    """Of each layer, beside peft's own way to add."""
    policy = briefly_trained(make_policy(hidden_size=128, intermediate_size=256))
    draw = torch.Generator().manual_seed(2)
    parts = {"ours": 0.0, "peft": 0.0}
    length = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        for layer in lora.adapted_layers(policy.model):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            x = torch.randn(4, 64, a.shape[1], generator=draw)
            learned = 2 * x @ a.T @ b.T
            length += learned.float().square().sum()
            for name, y in (("ours", layer(x)), ("peft", type(layer).forward(layer, x))):
                assert y.dtype == torch.bfloat16
                parts[name] += ((y.float() - layer.base_layer(x).float()) * learned).sum()
    assert parts["ours"] / length == pytest.approx(1, abs=0.1)
    assert parts["peft"] / length < 0.5


def test_gradients_in_bf16_passes():
    policy = with_adapters(make_policy(), "bf16")
    draw = torch.Generator().manual_seed(2)
    for layer in lora.adapted_layers(policy.model):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = torch.randn(4, 8, a.shape[1], generator=draw, requires_grad=True)
        weight = layer.base_layer.weight.float()
        g = torch.randn(4, 8, len(b), generator=draw)
        exact = torch.autograd.grad((x @ (weight + 2 * b @ a).T * g).sum(), (x, a, b))
        with torch.autocast("cpu", torch.bfloat16):
            ours = torch.autograd.grad((layer(x) * g).sum(), (x, a, b))
        for d, exact_d in zip(ours, exact, strict=True):
            assert (d - exact_d).norm() < 0.02 * exact_d.norm()


def test_the_mean_of_many_roundings_is_the_number():
    numbers = torch.tensor([0.1, -0.1, 1.001, -3e-5])
    drawn = lora.round_bf16(numbers.expand(40_000, 4).contiguous(), "name").float()
    torch.testing.assert_close(drawn.mean(0), numbers, atol=0, rtol=1e-4)
    assert all(len(column.unique()) == 2 for column in drawn.T)
    other = lora.round_bf16(numbers.expand(40_000, 4).contiguous(), "other name").float()
    assert not torch.equal(drawn, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_neox", "opt", "phi3"])
def test_adapters_are_merged_right_in_other_kinds_of_models(kind, tmp_path):
    """For vLLM (full_weights), and in a checkpoint that is loaded by peft as a start model."""
    policy = make_kind(kind)
    policy.save(tmp_path / "start")
    policy.model.name_or_path = str(tmp_path / "start")
    batch = collate(TOKEN_ROWS, [True] * 3, policy.pad_id)
    start = policy(batch)[0]
    with_adapters(policy, "fp32")
    assert {type(layer).__name__ for layer in lora.adapted_layers(policy)} == {"Linear"}
    ours = policy(batch)[0]
    assert (ours - start).abs().max() > 0.05
    policy.save(tmp_path / "adapter")
    plain = load_policy(str(tmp_path / "adapter"))
    torch.testing.assert_close(plain(batch)[0], ours, atol=1e-4, rtol=0)
    for p in plain.parameters():
        torch.nn.init.zeros_(p)
    plain.model.load_state_dict(dict(lora.full_weights(policy.model)))
    torch.testing.assert_close(plain(batch)[0], ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("change, reason", [
    (lambda weights: {n: w for n, w in weights.items() if "layers.0" in n}, "Found missing adapt"),
    (lambda weights: weights | {n.replace("layers.1", "layers.7"): w.clone()
                                for n, w in weights.items() if "layers.1" in n}, "has .*layers.7"),
])
def test_an_adapter_of_other_layers_is_refused(tmp_path, change, reason):
    """As a start model and on resume: peft fills the rest with new adapters, and leaves others."""
    policy = make_policy()
    policy.save(tmp_path / "start")
    policy.model.name_or_path = str(tmp_path / "start")
    with_adapters(policy).save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    changed = change(load_file(file))
    save_file(changed, file)
    with pytest.raises(UserError, match=reason):
        load_policy(str(tmp_path / "adapter"))
    torch.save(changed, file.with_suffix(".bin"))  # as older versions of peft wrote it
    kept = file.rename(file.with_suffix(".kept"))
    with pytest.raises(UserError, match=reason):
        load_policy(str(tmp_path / "adapter"))
    kept.rename(file)
    with pytest.raises(UserError, match="has adapters of other layers .model.layers.*restore"):
        lora.attach(make_policy().model, 4, "fp32", 0, tmp_path / "adapter")


def test_new_adapters_change_nothing_and_belong_to_the_seed():
    policies = [make_policy() for _ in range(3)]
    drawn = []
    state = torch.get_rng_state()
    for policy, seed in zip(policies, (5, 5, 6)):
        lora.attach(policy.model, 4, "fp32", seed, None)
        drawn.append(policy.model.model.layers[1].mlp.up_proj.lora_A["default"].weight)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(state, torch.get_rng_state())
    batch = collate(TOKEN_ROWS, [True] * 3, policies[0].pad_id)
    assert torch.equal(policies[0](batch)[0], make_policy()(batch)[0])


def test_a_new_policy_is_its_reference_in_bf16():
    """Whatever its biases: the start model's own passes round them together with the products."""
    policy = make_policy(precision="bf16")
    lora.attach(policy.model, 4, "bf16", 0, None)
    batch = collate(TOKEN_ROWS, [False] * 3, policy.pad_id)
    with lora.adapters_off(policy):
        reference = policy(batch).logp
    assert torch.equal(policy(batch).logp, reference)


@pytest.mark.parametrize("family, precision", [("qwen2", "fp32"), ("llama", "bf16")])
def test_the_policy_without_adapters_is_the_reference_bit_for_bit(family, precision):
    """An update with it, and with a second model, which has fp32 weights in bf16 passes too."""
    outcomes = []
    for second_model in (True, False):
        cfg = Config(**SETTINGS | dict(mini_batch=8))
        policy = with_adapters(make_policy(family), precision)
        reference = make_policy(family, precision=precision) if second_model else policy
        rows = prepare(cfg, policy, reference, flatten(EPISODES))
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], cfg.lr)
        metrics = optimize(cfg, policy, optimizer, rows, (0, 0))
        ref, old = (torch.tensor(sum(logp, [])) for logp in (rows.ref_logp, rows.old_logp))
        assert (ref - old).abs().max() > 0.1 and metrics["ref_kl"] > 0.01
        outcomes.append((ref, metrics, dict(policy.named_parameters())))
    (theirs, metrics, weights), (ours, same_metrics, same_weights) = outcomes
    assert torch.equal(ours, theirs) and same_metrics == metrics
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_from_its_adapter(config, model, tmp_path):
    """With PPO, whose critic is saved beside the adapter."""
    settings = RUN | dict(updates=2, algo="ppo", group_size=1, groups=4)
    train.train(config(**settings, name="whole"))
    train.train(config(**settings | {"updates": 1}))
    cfg = config(**settings)
    train.train(cfg)
    whole = numbers(tmp_path / "whole")
    assert numbers(tmp_path / "r") == whole
    assert whole[-1]["ref_kl"] > 1e-6 and max(m["sampler_gap"] for m in whole[1:]) < 1e-5
    a, b = (tmp_path / name / "checkpoint-000002" for name in ("r", "whole"))
    file = "adapter_model.safetensors"
    assert (a / file).read_bytes() == (b / file).read_bytes()
    # The adapter, the critic, and the optimizer's state of what is trained: no frozen weight.
    assert not list(a.glob("model*.safetensors")) and len(load_file(a / file)) == 2 * 2 * 7
    state = torch.load(a / "trainer.pt", weights_only=True)
    assert state["weights"] and all(name.startswith("critic.") for name in state["weights"])
    groups = state["optimizer"]["param_groups"]
    trained = {name for group in groups for name in group["params"]}
    assert all("lora_" in name or name.startswith("critic.") for name in trained)
    assert len(trained) == 2 * 2 * 7 + len(state["weights"])
    assert trained == set(state["optimizer"]["state"])
    with session.open_session(cfg, eval_only=True) as s:  # evaluates the adapter, too
        for name, weight in load_policy(model).model.state_dict().items():
            kept = s.policy.model.state_dict()
            assert torch.equal(kept.get(name.replace("proj.", "proj.base_layer."), weight), weight)
        assert all(p.any() for name, p in s.policy.named_parameters() if "lora_B" in name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model, games_root):
    """The folder of a run of one update."""
    out = tmp_path_factory.mktemp("trained")
    train.train(Config(**SMALL | RUN, data=str(games_root), model=model, out=str(out)))
    return out / "r"


@pytest.fixture
def checkpoint(trained, tmp_path):
    """Of a copy of that run, which config(**RUN) resumes."""
    return Path(shutil.copytree(trained, tmp_path / "r")) / "checkpoint-000001"


@pytest.mark.slow
def test_a_plain_folder_with_merged_weights(config, model, checkpoint, tmp_path, capsys):
    export.main([str(checkpoint.parent), "--out", str(tmp_path / "plain")])
    assert f"plain: the policy of {checkpoint}" in capsys.readouterr().out
    assert not (tmp_path / "plain" / "adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with session.open_session(config(**RUN), eval_only=True) as s:
        # The same bits as those of a bf16 engine on a CPU.
        weights = dict(lora.full_weights(s.policy.model, "bf16"))
    start = load_policy(model).model.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, weights[name].bfloat16().float())
        assert ("proj" in name) == (not torch.equal(weight, start[name].bfloat16().float()))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_is_a_start_model(config, checkpoint, tmp_path, rank):
    """Its adapter is merged; then everything is trained, or a new adapter on top."""
    settings = dict(model=str(checkpoint), lora_rank=rank, name="next", mini_batch=0, eval_every=0)
    base = json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert not Path(base).is_absolute()  # a clone elsewhere finds the stand-in
    start = load_policy(str(checkpoint)).model.state_dict()
    train.train(config(**settings, updates=1))
    line = numbers(tmp_path / "next")[1]
    assert line["sampler_gap"] < 1e-5 and line["ref_kl"] < 1e-6  # starts at its reference
    end = load_policy(str(runs.Run(config(**settings)).checkpoint())).model.state_dict()
    changed = [name for name in end if not torch.equal(end[name], start[name])]
    assert len(changed) == (2 * 7 if rank else len(end))
    with session.open_session(config(**settings, updates=1), eval_only=True) as s:
        for name, weight in lora.full_weights(s.policy.model):
            torch.testing.assert_close(end[name], weight, atol=1e-6, rtol=0)
    train.train(config(**settings, updates=2))
    assert numbers(tmp_path / "next")[2]["ref_kl"] > 1e-6


def test_ppos_critic_has_the_learning_rate_of_the_adapters(config):
    """Without LoRA, it has ten times that of the policy (tests/method/test_ppo.py)."""
    with session.open_session(config(algo="ppo", lr=0.002, lora_rank=4)) as s:
        assert [group["lr"] for group in s.optimizer.param_groups] == [0.002, 0.002]
