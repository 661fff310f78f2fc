"""Faults of a sampler are found in the first seconds, and in every evaluation and update.

Each fault is planted in a sampler that is right otherwise. Faults of adapters: tests/test_lora.py.
"""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from paw_min import train
from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.model import probe
from paw_min.model.lora import full_weights
from paw_min.model.sampler import HFSampler
from paw_min.model.scoring import score_responses
from paw_min.rows import flatten
from paw_min.running import session
from tests.helpers import (
    EPISODES,
    FAMILIES,
    TOKEN_ROWS,
    make_policy,
    numbers,
    one_sentence,
    with_adapters,
)
from tests.model_kinds import make_kind


class Copy(HFSampler):
    """A sampler with weights of its own, as vLLM's: `sync` loads full_weights, changed by `fault`.

    fault: (name, weight) -> weight, or None for one that does not arrive.
    """

    def __init__(self, own, fault=lambda name, weight: weight):
        super().__init__()
        self.own = own
        self.fault = fault

    @contextmanager
    def sync(self, policy):
        weights = {n: self.fault(n, w.clone()) for n, w in full_weights(policy.model)}
        arrived = {name: weight for name, weight in weights.items() if weight is not None}
        self.own.model.load_state_dict(arrived, strict=False)
        with super().sync(self.own):
            yield


def generating(change):
    """A sampler of the trainer's own model. change: (sampler, batch, temperature) -> both."""

    class Changed(HFSampler):
        def _generate(self, batch, temperature, max_tokens):
            batch, temperature = change(self, batch, temperature)
            return super()._generate(batch, temperature, max_tokens)

    return lambda _: Changed()


def reporting(change):
    """A sampler whose log-probabilities are changed."""

    class Changed(HFSampler):
        def _generate(self, *args):
            return [replace(r, logps=change(r.logps)) for r in super()._generate(*args)]

    return lambda _: Changed()


def copied(fault=lambda name, weight: weight):
    """A Copy of the policy of this test, made before adapters."""
    return lambda plain: Copy(copy.deepcopy(plain), fault)


def perturbed(plain):
    """Weights of another step of training, which no sync replaces."""
    sampler = copied(lambda name, weight: None)(plain)
    with torch.no_grad():
        for p in sampler.own.model.parameters():
            p.mul_(1.05)
    return sampler


def without_mask(sampler, batch, temperature):
    """Padding is attended to: the shorter prompts have it as part of them."""
    width = max(len(r.prompt_ids) for r in batch)
    pad = [sampler.policy.pad_id]
    filled = [pad * (width - len(r.prompt_ids)) + r.prompt_ids for r in batch]
    return [replace(r, prompt_ids=ids) for r, ids in zip(batch, filled)], temperature


ANY = {  # of a model without adapters
    "old weights": perturbed,
    "one matrix did not arrive": copied(lambda n, w: w * 0.5 if "0.mlp.down" in n else w),
    "another temperature": generating(lambda s, batch, t: (batch, 0.9 * t)),
    "padding is attended to": generating(without_mask),
    "NaN": reporting(lambda logps: [float("nan") for _ in logps]),
}
WITH_LORA = {
    "no adapter": copied(lambda n, w: None if "proj" in n else w),
    "adapters of one layer are missing": copied(lambda n, w: None if ".1.mlp" in n else w),
}


@pytest.fixture
def untouched():
    """A function that runs check_start and makes sure that nothing else has changed."""

    def check(policy, sampler):
        before = copy.deepcopy(policy.state_dict())
        state = torch.get_rng_state()
        try:
            return probe.check_start(Config(max_prompt_tokens=64), policy, sampler)
        finally:
            assert torch.equal(state, torch.get_rng_state())
            after = policy.state_dict()
            assert all(torch.equal(after[name], weight) for name, weight in before.items())

    return check


def make(family, temperature=0.8):
    policy = make_policy(family) if family in FAMILIES else make_kind(family)
    policy.temperature = temperature
    norm = policy.model.get_decoder().norm.weight
    torch.nn.init.uniform_(norm.data, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return policy


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_right_samplers_pass(untouched, family, precision, lora):
    policy = make(family)
    samplers = (HFSampler(), Copy(copy.deepcopy(policy)))
    for one in (policy, samplers[1].own):
        one.precision = precision
    if lora:
        with_adapters(policy, precision)
    for sampler in samplers:
        gap = untouched(policy.train(), sampler)
        assert gap < (1e-5 if precision == "fp32" else probe.MAX_GAP["bf16"])


def test_a_low_temperature_enlarges_rounding_and_the_limit(untouched):
    policy = make("qwen2", temperature=0.05)
    policy.precision = "bf16"
    assert untouched(policy, Copy(copy.deepcopy(policy))) > 0
    with pytest.raises(UserError, match="start: the sampler's .*rounding explains 0.737"):
        untouched(policy, ANY["old weights"](policy))


@pytest.mark.parametrize("fault", ANY)
def test_a_wrong_sampler_is_found_at_the_start(untouched, fault):
    policy = make("qwen2")
    with one_sentence("start: the sampler's .*: this model generates") as error:
        untouched(policy, ANY[fault](policy))
    assert "vLLM" not in str(error.value)


@pytest.mark.parametrize("fault", WITH_LORA)
def test_adapters_that_a_sampler_lacks_are_found(untouched, fault):
    """New ones too, whose B = 0 would not show it."""
    policy = make("qwen2")
    sampler = WITH_LORA[fault](policy)
    with_adapters(policy)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.zero_()
    with pytest.raises(UserError, match="start: the sampler's"):
        untouched(policy, sampler)


@pytest.mark.parametrize("error, reason", [
    (RuntimeError("no kernel for\nhead_dim=16"), "no kernel for head_dim=16"),
    (AssertionError(), "AssertionError"),  # Qwen3.5 on vLLM's CPU build in fp32
])
def test_a_sampler_that_cannot_run_the_model(untouched, error, reason):
    class Broken(HFSampler):
        def _generate(self, *_):
            raise error

    with one_sentence(rf"start: .* \({reason}\): .*--model"):
        untouched(make("qwen2"), Broken())


@pytest.fixture
def compared(monkeypatch):
    """What check_panel and check_sync compare: rows, log mu, temperature."""
    calls = []
    monkeypatch.setattr(probe, "compare", lambda cfg, policy, *args: calls.append(args))
    return calls


@pytest.mark.parametrize("eval_temperature, expected", [(0.0, 1.0), (0.3, 0.3)])
def test_responses_of_the_whole_panel_are_compared_at_its_temperature(
    compared, eval_temperature, expected
):
    """Greedy ones at 1, whatever the temperature of training."""
    cfg = Config(temperature=0.7, eval_temperature=eval_temperature)
    probe.check_panel(cfg, None, 4 * EPISODES, "")
    ((rows, _, temperature, _),) = compared
    places = [next(k for k, e in enumerate(EPISODES) if e.transitions[0] is t) for t in rows]
    assert temperature == expected and len(rows) <= probe.PANEL
    assert len(rows) == probe.PANEL - 4 and places[-1] == len(EPISODES) - 3


def test_an_update_compares_a_first_turn_of_each_group(compared):
    rows = flatten(EPISODES)
    probe.check_sync(Config(), make("qwen2"), rows, "")
    tokens, logps = compared[0][:2]
    chosen = [next(i for i, row in enumerate(rows.tokens) if row is token) for token in tokens]
    assert [rows.group[i] for i in chosen] == sorted(set(rows.group))
    assert all(rows.trajectory[i] != rows.trajectory[i - 1] for i in chosen)
    assert torch.equal(logps, rows.sampler_logp[chosen])


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_high_temperature_does_not_narrow_the_limit(temperature):
    policy = make("qwen2")
    row = replace(TOKEN_ROWS[0], obs_ids=[])
    policy.temperature = temperature
    ours = score_responses(policy, [row], 1000).logp
    probe.compare(Config(), policy, [row], ours + 9e-4, temperature, "")
    with pytest.raises(UserError, match="rounding explains 0.001"):
        probe.compare(Config(), policy, [row], ours + 1.1e-3, temperature, "")


# ---- in a run ----


@pytest.mark.parametrize("sync, when, lines, temperature", [
    (1, "start", 0, 0.3), (2, "evaluation after update 0", 0, 0.3), (3, "update 1", 1, 0.3),
    (4, "evaluation after update 1", 1, 0.0), (4, "evaluation after update 1", 1, 1.0),
])
def test_a_sampler_that_gets_out_of_step_stops_the_run(
    config, tmp_path, monkeypatch, sync, when, lines, temperature
):
    """From this sync on, it has weights that are scaled by 1.05; the run is right before."""
    wrong = late(monkeypatch, sync)
    with one_sentence(f"^{when}: the sampler's .* nats per token"):
        train.train(config(updates=1, eval_temperature=temperature))
    assert wrong and len(numbers(tmp_path / "r")) == lines  # no success rate of other weights


def late(monkeypatch, first: int) -> list:
    """From its `first` sync on, the run's sampler has wrong weights; a list of those syncs."""
    syncs = []
    wrong = []

    class Late(HFSampler):
        @contextmanager
        def sync(self, policy):
            syncs.append(policy)
            if len(syncs) < first:
                with super().sync(policy):
                    yield
                return
            wrong.append(len(syncs))
            with perturbed(policy).sync(policy):
                self.policy = perturbed(policy).own
                yield

    monkeypatch.setattr(session, "HFSampler", Late)
    return wrong


def test_rounding_is_no_fault(config, tmp_path, monkeypatch):
    """The limit in fp32 is 1e-3 nats per token."""
    make = reporting(lambda logps: [x + 5e-4 for x in logps])
    monkeypatch.setattr(session, "HFSampler", lambda: make(None))
    train.train(config(updates=1, eval_every=0))
    assert numbers(tmp_path / "r")[1]["sampler_gap"] == pytest.approx(5e-4, rel=1e-2)


def test_a_sampler_is_closed_where_the_start_fails(config, monkeypatch):
    """A vLLM that sleeps crashes at the end of the process otherwise."""
    closed = []
    sampler = reporting(lambda logps: [x + 1 for x in logps])(None)
    sampler.close = lambda: closed.append(True)
    monkeypatch.setattr(session, "HFSampler", lambda: sampler)
    with pytest.raises(UserError, match="start: "):
        train.train(config())
    assert closed
