"""One forward pass for action and observation: isolation, padding, log-probs, sampling.

Tiny random models of three families. Where float sums may be ordered differently (another row
length, another batch), tolerances are a few float32 roundings of a log-probability of about -5.
"""

from collections import deque

import pytest
import torch

from paw_min import losses
from paw_min.model import policy as policy_module
from paw_min.model.batches import collate
from paw_min.model.head import token_scores
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler, Request
from paw_min.rows import TokenRow
from tests.helpers import FAMILIES, chatml_tokenizer, make_policy, plain_logp
from tests.helpers import TOKEN_ROWS as ROWS

ROUNDING = dict(atol=5e-6, rtol=0)


def sample(policy, prompts, seeds, temperature, max_tokens, batch_size=64) -> list:
    """Responses of the transformers sampler, in the order of the prompts."""
    sampler = HFSampler()
    queue = deque(Request(k, *request) for k, request in enumerate(zip(prompts, seeds)))
    with pytest.MonkeyPatch.context() as patch, sampler.sync(policy):
        patch.setattr("paw_min.model.sampler.CPU_ROWS", batch_size)
        parts = list(sampler.generate(queue, temperature, max_tokens))
    assert max(len(part) for part in parts) <= batch_size
    return sorted((r for part in parts for r in part), key=lambda r: r.slot)


def tokens(responses: list) -> list[list[int]]:
    return [r.ids for r in responses]


@pytest.fixture(params=FAMILIES)
def policy(request) -> Policy:
    return make_policy(request.param)


def plain_scores(policy, r: TokenRow) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each token after the prompt, and the entropies of those of the response."""
    ids = torch.tensor([r.prompt_ids + r.response_ids + r.obs_ids])
    full = policy.model(ids).logits[0, len(r.prompt_ids) - 1 : -1].log_softmax(-1)  # (S, V)
    h = -(full.exp() * full).sum(-1)
    return plain_logp(policy, r), h[: len(r.response_ids)]


def test_scores_equal_the_models_own_logits(policy):
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    logp, entropy = policy(batch)
    for i, r in enumerate(ROWS):
        expected, h = plain_scores(policy, r)
        torch.testing.assert_close(logp[i, : len(expected)], expected, **ROUNDING)
        torch.testing.assert_close(entropy[i, : len(h)], h, **ROUNDING)
        assert not logp[i, len(expected) :].any() and not entropy[i, len(h) :].any()
    assert batch.response_mask.sum(1).tolist() == [6, 2, 1]
    assert batch.obs_mask.sum(1).tolist() == [3, 7, 0]


def test_gradients_equal_those_of_the_plain_formula(policy):
    """Through the head by hand and the tied or untied embedding, entropy included."""
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    logp, entropy = policy(batch)
    (logp.sum() + 0.3 * entropy.pow(2).sum()).backward()
    ours = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    for r in ROWS:
        logp, h = plain_scores(policy, r)
        (logp.sum() + 0.3 * h.pow(2).sum()).backward()
    for (name, p), grad in zip(policy.named_parameters(), ours):
        torch.testing.assert_close(grad, p.grad, atol=2e-5, rtol=1e-4, msg=name)


def other_observations() -> list[TokenRow]:
    return [TokenRow(r.prompt_ids, r.response_ids, [18 - t for t in r.obs_ids]) for r in ROWS]


def test_changing_the_observation_changes_no_action_logprob_not_even_a_bit(policy):
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    logp, entropy = policy(batch)
    other, other_entropy = policy(collate(other_observations(), [True] * 3, policy.pad_id))
    assert torch.equal(logp[batch.response_mask], other[batch.response_mask])
    assert torch.equal(entropy, other_entropy)
    assert not torch.equal(logp[batch.obs_mask], other[batch.obs_mask])  # but its own it does


def test_changing_the_observation_changes_no_rl_gradient(policy):
    def gradients(rows):
        policy.model.zero_grad()
        batch = collate(rows, [True] * 3, policy.pad_id)
        logp, _ = policy(batch)
        advantage = torch.tensor([1.0, -2.0, 0.5])
        losses.clipped_surrogate(logp, logp.detach(), advantage, batch.response_mask)[0].backward()
        return [p.grad.clone() for p in policy.model.parameters()]

    for (name, _), a, b in zip(
        policy.model.named_parameters(), gradients(ROWS), gradients(other_observations())
    ):
        # The embedding rows of observation tokens get an exact 0 from either.
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)


def test_what_stands_in_the_padding_does_not_matter(policy):
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    logp, _ = policy(batch)
    batch.ids[batch.ids == policy.pad_id] = 7
    assert torch.equal(policy(batch)[0], logp)


def test_logprobs_of_the_sampler_are_those_of_the_trainer(policy):
    policy.temperature = 0.7
    prompts = [r.prompt_ids for r in ROWS] * 4
    responses = sample(policy, prompts, range(12), temperature=0.7, max_tokens=6, batch_size=5)
    rows = [TokenRow(prompt, r.ids, []) for prompt, r in zip(prompts, responses, strict=True)]
    logp, _ = policy(collate(rows, [False] * 12, policy.pad_id))
    for ours, response in zip(logp, responses):
        assert len(response.logps) == len(response.ids)
        theirs = torch.tensor(response.logps)
        torch.testing.assert_close(ours[: len(theirs)], theirs, atol=2e-5, rtol=0)


def test_temperature_acts_on_responses_and_not_on_observations():
    plain = make_policy()
    hot = make_policy(temperature=2.0)
    batch = collate(ROWS, [True] * 3, plain.pad_id)
    logits = plain.model(torch.tensor([ROWS[0].prompt_ids])).logits[0, -1]
    expected = (logits / 2.0).log_softmax(-1)[ROWS[0].response_ids[0]]
    torch.testing.assert_close(hot(batch)[0][0, 0], expected, **ROUNDING)
    a = plain(batch)[0]
    b = hot(batch)[0]
    assert torch.equal(a[batch.obs_mask], b[batch.obs_mask])


def test_the_temperature_is_not_rounded_where_hidden_states_are_bf16(monkeypatch):
    """FSDP's mixed precision returns them so; in bf16, 0.7 would be 0.69921875."""
    policy = make_policy(temperature=0.7)
    policy.precision = "bf16"
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    in_bf16 = policy_module.last_hidden(policy.model.get_decoder(), batch, "bf16").bfloat16()
    monkeypatch.setattr(policy_module, "last_hidden", lambda *_: in_bf16)
    given = []

    def scores(hidden, *rest):
        given.append(hidden)
        return token_scores(hidden, *rest)

    monkeypatch.setattr(policy_module, "token_scores", scores)
    policy(batch)
    of_responses = in_bf16[batch.at - 1][: batch.n_response]
    expected = (of_responses.float() / 0.7).bfloat16()
    assert torch.equal(given[0][: batch.n_response], expected)


def test_sampling_follows_the_policys_probabilities():
    policy = make_policy(temperature=0.7)
    prompt = ROWS[0].prompt_ids
    vocab = len(policy.tokenizer)
    rows = [TokenRow(prompt, [t], []) for t in range(vocab)]
    p = policy(collate(rows, [False] * vocab, policy.pad_id))[0][:, 0].exp()
    n = 4000
    samples = tokens(sample(policy, [prompt] * n, range(n), 0.7, max_tokens=1, batch_size=500))
    counts = torch.bincount(torch.tensor(samples)[:, 0], minlength=vocab)
    # 4 standard deviations of a binomial share
    assert ((counts / n - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_draws_belong_to_the_request():
    policy = make_policy()
    torch.manual_seed(1)
    a = tokens(sample(policy, [r.prompt_ids for r in ROWS], [1, 2, 3], 1.0, 5))
    torch.manual_seed(2)  # the global generator is nobody's business
    b = tokens(sample(policy, [r.prompt_ids for r in reversed(ROWS)], [3, 2, 1], 1.0, 5))
    assert a == b[::-1]
    same = tokens(sample(policy, [ROWS[0].prompt_ids] * 8, range(8), 1.0, 5))
    assert len({tuple(ids) for ids in same}) > 1
    assert all(len(ids) <= 5 for ids in same)


@pytest.mark.parametrize("make_tokenizer", [lambda: None, chatml_tokenizer])
def test_responses_end_at_the_first_end_token(make_tokenizer):
    """A ChatML model also ends with the template's end token, which its tokenizer does not list."""
    policy = make_policy(tokenizer=make_tokenizer())
    names = policy.tokenizer.convert_ids_to_tokens(policy.eos_ids)
    assert names == (["<|im_end|>", "<end>"] if make_tokenizer() else ["<end>"])
    # Some of many samples end early and carry their end token, which is trained like any other.
    out = sample(policy, [ROWS[0].prompt_ids] * 200, range(200), 1.0, 8)
    assert {r.ids[-1] for r in out if not r.cut} == set(policy.eos_ids)
    assert all(r.ids[-1] in policy.eos_ids for r in out if len(r.ids) < 8)
    assert not any(set(r.ids[:-1]) & set(policy.eos_ids) for r in out)
    assert all(len(r.logps) == len(r.ids) for r in out)
    # Where a tokenizer names no padding, rows that have ended are filled with an end token.
    policy.pad_id = policy.eos_ids[0]
    again = sample(policy, [ROWS[0].prompt_ids] * 200, range(200), 1.0, 8)
    assert tokens(again) == tokens(out)


def test_published_sampling_defaults_are_switched_off():
    policy = make_policy()
    policy.model.generation_config.repetition_penalty = 50.0
    policy.model.generation_config.top_k = 1
    clean = Policy(policy.model, policy.tokenizer)
    assert clean.model.generation_config.repetition_penalty in (None, 1.0)
    prompts = [ROWS[0].prompt_ids] * 20
    seeds = range(20)
    expected = tokens(sample(make_policy(), prompts, seeds, 1.0, 6))
    assert tokens(sample(clean, prompts, seeds, 1.0, 6)) == expected
