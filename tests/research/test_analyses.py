"""The share of the gradient that goes to noise: Fig. 2c."""

import json

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from paw_min import cmae
from paw_min.config import Config
from paw_min.rows import TokenRow
from research.paper import fig2c
from tests.helpers import make_policy

PAGE = "'Back to Search' [SEP] 'B09QKP7XQL' [SEP] 'WH1000 SONY Tea' [SEP] 'XBOX360 USB Café'"


def test_rules_of_noise():
    spans = fig2c.noisy_spans(PAGE)
    assert [PAGE[a:b] for a, b in spans] == ["B09QKP7XQL", "SONY", "XBOX360"]
    others = "XB09QKP7XQL b09qkp7xql SEP ABC1 ABCDe DOVENTA"
    assert [others[a:b] for a, b in fig2c.noisy_spans(others)] == ["DOVENTA"]


@pytest.mark.parametrize("trim", [False, True])
def test_each_subword_of_noise_is_noisy(trim):
    """A byte-level tokenizer as Qwen's (trim False: a leading space is part of the offsets)."""
    bpe = ByteLevelBPETokenizer(trim_offsets=trim)
    bpe.train_from_iterator(["'Back to Search' [SEP] 'Price Soft Silk So'"] * 3, vocab_size=280)
    policy = make_policy()
    policy.tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    ids = policy.encode(PAGE)
    one = fig2c.Step(TokenRow([1], [2], ids), PAGE)
    noisy = fig2c.observation_classes(policy, one)
    pieces = [policy.tokenizer.decode([i]) for i in ids]
    assert len(noisy) == len(ids) and 15 < sum(noisy) < len(ids) - 15
    letters = "".join(p.strip(" '") for p, n in zip(pieces, noisy) if n)
    assert letters == "B09QKP7XQLSONYXBOX360"
    assert all(p.strip(" '") for p, n in zip(pieces, noisy) if n)  # no quote beside it
    assert any(p.startswith(" ") and n for p, n in zip(pieces, noisy))  # " S"
    one.tokens.obs_ids = ids[:7]  # cut at --max-obs-tokens
    assert fig2c.observation_classes(policy, one) == noisy[:7]


def test_magnitudes_are_the_gradients_of_the_losses():
    logits = (2 * torch.randn(1, 50, 7, generator=torch.manual_seed(0))).requires_grad_()
    target = torch.arange(50)[None, :, None] % 7
    logp = logits.log_softmax(-1).gather(-1, target)[..., 0]  # (1, 50)
    mask = torch.ones(1, 50)
    expected = fig2c.gradients(logp[0].detach().exp(), rho=0.2)
    losses = {
        "CE": cmae.cross_entropy(logp, mask), "MAE": cmae.mae(logp, mask),
        "clipped MAE": cmae.clipped_mae(logp, mask, 0.2),
    }
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss.sum() * 50, logits, retain_graph=True)
        at_target = gradient.gather(-1, target)[0, :, 0].abs()  # (50,)
        assert torch.allclose(at_target, expected[name], atol=1e-6)
    assert 5 < (expected["clipped MAE"] == 0).sum() < 45
    policy = make_policy()  # where all tokens are easy, there is no share of nothing
    step = fig2c.Step(TokenRow([1], [2], policy.encode("a b")), "a b")
    found = fig2c.measure(Config(rho=1e-9), policy, [step])
    assert found["meaningful"]["clipped MAE"] is None


def test_fig2c_on_the_teacher(tmp_path, capsys):
    out = tmp_path / "out"
    fig2c.main(["webshop", "--teacher", "--episodes", "5", "--out", str(out)])
    result = json.loads((out / "fig2c-webshop.json").read_text())
    noisy, meaningful = result["noisy"], result["meaningful"]
    assert 3 <= result["steps"] <= 12 and noisy["tokens"] > 10 * result["steps"]
    for key in ("share", "CE", "MAE"):
        assert noisy[key] + meaningful[key] == pytest.approx(1)
    assert 0.05 < noisy["share"] < 0.1  # two of about thirty words per product are noise
    assert (out / "fig2c-webshop.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert f"| noisy | {noisy['tokens']} |" in shown and "'{{B0" in shown
