"""One forward pass for action and observation: isolation, padding, log-probs, sampling.

Tiny random models of three families. Where float sums may be ordered differently (another row
length, another batch), tolerances are a few float32 roundings of a log-probability of about -5.
"""

import re
from collections import deque

import pytest
import torch
from safetensors.torch import load_file, save_file

from paw_min import losses
from paw_min.base.errors import UserError
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context
from paw_min.model import policy as policy_module
from paw_min.model.batches import collate
from paw_min.model.chat import turn_end
from paw_min.model.head import token_scores
from paw_min.model.policy import Policy, load_policy, load_tokenizer
from paw_min.model.sampler import HFSampler, Request
from paw_min.rows import TokenRow
from paw_min.toy import standins
from tests.helpers import (
    FAMILIES,
    INJECTION,
    ROUNDING,
    TEXTS,
    chatml_tokenizer,
    control_tokens,
    make_policy,
    one_sentence,
    plain_logp,
    publish,
)
from tests.helpers import TOKEN_ROWS as ROWS
from tests.model_kinds import write


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


def plain_scores(policy, r: TokenRow, obs_entropy=False) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each token after the prompt, and the entropies of those of the response, or all."""
    ids = torch.tensor([r.prompt_ids + r.response_ids + r.obs_ids])
    full = policy.model(ids).logits[0, len(r.prompt_ids) - 1 : -1].log_softmax(-1)  # (S, V)
    h = -(full.exp() * full).sum(-1)
    return plain_logp(policy, r), h if obs_entropy else h[: len(r.response_ids)]


@pytest.mark.parametrize("obs_entropy", [False, True])
def test_scores_equal_the_models_own_logits(policy, obs_entropy):
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    logp, entropy = policy(batch, obs_entropy)
    for i, r in enumerate(ROWS):
        expected, h = plain_scores(policy, r, obs_entropy)
        torch.testing.assert_close(logp[i, : len(expected)], expected, **ROUNDING)
        torch.testing.assert_close(entropy[i, : len(h)], h, **ROUNDING)
        assert not logp[i, len(expected) :].any() and not entropy[i, len(h) :].any()
    assert batch.response_mask.sum(1).tolist() == [6, 2, 1]
    assert batch.obs_mask.sum(1).tolist() == [3, 7, 0]


@pytest.mark.parametrize("obs_entropy", [False, True])
def test_gradients_equal_those_of_the_plain_formula(policy, obs_entropy):
    """Through the head by hand and the tied or untied embedding, entropy included."""
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    logp, entropy = policy(batch, obs_entropy)
    (logp.sum() + 0.3 * entropy.pow(2).sum()).backward()
    ours = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    for r in ROWS:
        logp, h = plain_scores(policy, r, obs_entropy)
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
    # Among many samples some end early and carry their end token, which is trained like any other.
    out = sample(policy, [ROWS[0].prompt_ids] * 200, range(200), 1.0, 8)
    assert {r.ids[-1] for r in out if not r.cut} == set(policy.eos_ids)
    assert all(r.ids[-1] in policy.eos_ids for r in out if len(r.ids) < 8)
    assert not any(set(r.ids[:-1]) & set(policy.eos_ids) for r in out)
    assert all(len(r.logps) == len(r.ids) for r in out)


@pytest.mark.parametrize("template", [
    standins.CHAT,
    "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "{% for m in messages %}{{ m.content }} mug\n{% endfor %}",
])
def test_what_begins_the_next_turn_or_is_not_a_control_token_ends_nothing(template):
    """test_published.py has the tokens that end the turns of published models."""
    tokenizer = standins.make_tokenizer(TEXTS)
    tokenizer.chat_template = template
    assert turn_end(tokenizer) is None


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


def test_no_text_becomes_a_control_token():
    policy = make_policy(tokenizer=chatml_tokenizer())
    assert not control_tokens(policy, policy.encode(INJECTION))
    message = policy.encode_chat("a b")
    assert control_tokens(policy, policy.encode_chat(INJECTION)) == control_tokens(policy, message)
    assert control_tokens(policy, message) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert policy.without_control_tokens("x<|im_end|>y <end") == "x< |im_end|>y <end"
    for text in (*TEXTS, "<think> < |im_end| >", ""):  # ordinary text keeps its ids
        assert policy.encode(text) == policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    overlapping = make_policy()
    overlapping.tokenizer.add_special_tokens({"extra_special_tokens": ["<a>", "a><b>"]})
    assert overlapping.without_control_tokens("<a><b> b") == "< a ><b> b"


@pytest.mark.parametrize("env, action", [
    ("alfworld", "<action>go to shelf 1</action>"), ("webshop", "<action>click[a]</action>"),
    ("search", "<search>mug</search>"), ("search", "<answer>mug</answer>"),
])
def test_tags_that_are_special_tokens_stay_text(env, action):
    """After a supervised stage: a response has its tags, a prompt its own; no text ends a turn."""
    tokenizer = chatml_tokenizer()
    tags = ["action", "think", "search", "answer", "information"]
    words = [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
    tokenizer.add_special_tokens({"extra_special_tokens": words})
    policy = make_policy(tokenizer=tokenizer)
    benchmark = BENCHMARKS[env]
    ids = policy.encode(f"<think>a b</think>{action}") + [policy.eos_ids[0], policy.pad_id]
    answered = policy.decode(ids)
    assert "<end>" not in answered and "<|im_end|>" not in answered and "<pad>" not in answered
    assert benchmark.parse(answered).valid
    ids, forged = [
        policy.encode_chat(benchmark.prompts["paper"](Context("a", text, ["look"]), 2))
        for text in ("a", INJECTION)
    ]
    assert set(tokenizer(re.search("<[a-z]+>", action)[0])["input_ids"]) <= set(ids)
    assert control_tokens(policy, forged) == control_tokens(policy, ids)


@pytest.mark.parametrize(
    "name, opened",
    [("deepseek_r1_distill", "<think>"), ("qwen3", ""), ("qwen2_5", ""), ("nemotron_3_nano", "")],
)
def test_labels_do_not_open_a_thought_twice(name, opened):
    policy = make_policy()
    publish(policy.tokenizer, name)
    assert policy.opened_thought == opened
    label = policy.encode_response(TEXTS[1])
    assert label == [*policy.encode(TEXTS[1].removeprefix(opened)), policy.eos_ids[0]]
    text = policy.render([{"role": "user", "content": "a"}]) + policy.decode(label)
    assert text.count("<think>") == text.count("</think>")


def without_config(policy, folder):
    (folder / "config.json").unlink()


def without_a_weight(policy, folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(policy, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50_000])


def no_numbers(policy, folder):
    policy.model.model.norm.weight.data[3] = torch.nan
    policy.save(folder)


def more_tokens(policy, folder):
    policy.tokenizer.add_tokens(["new1", "new2"])
    policy.tokenizer.save_pretrained(folder)


def fewer_layers(policy, folder):
    policy.model.config.num_hidden_layers = 1
    policy.model.config.layer_types = ["full_attention"]
    policy.model.config.save_pretrained(folder)


def end_token_of_another_model(policy, folder):
    policy.model.generation_config.eos_token_id = [2, 128009]
    policy.model.generation_config.save_pretrained(folder)


def template(text: str):
    return lambda policy, folder: (folder / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize("damage, reason", [
    (fewer_layers, "has weights for model.layers.1.*, which its config.json does not"),
    (end_token_of_another_model, "end tokens .*128009.*: one or more of 0 to 24"),
    (template("{% for"), "cannot be loaded .*unexpected"),
    (template("{{ messages[0].x.y }}"), "cannot be loaded .*no attribute"),
    (template("{{ raise_exception('tools only') }}"), "cannot be loaded .*tools only"),
    (template("<user>{{ messages[0].role }}"), "template that leaves out the user's message"),
    (without_config, "no config.json: give .* or checkpoint-... of a run"),
    (more_tokens, "27 tokens for 25 embeddings"),
    (cut_weights, "not fully covered"),
    (without_a_weight, "no weights for model.layers.1.mlp.up_proj.weight"),
    (no_numbers, "has weights that are NaN or infinite"),
])
def test_damaged_model_folders_are_one_sentence(tmp_path, damage, reason):
    policy = make_policy("qwen3")
    policy.save(tmp_path)
    load_policy(str(tmp_path))
    damage(policy, tmp_path)
    with one_sentence(reason) as error:
        load_policy(str(tmp_path))
    # A plan reads no weights. What it can know, it refuses in the same words.
    if damage not in (fewer_layers, cut_weights, without_a_weight, no_numbers):
        with pytest.raises(UserError) as planned:
            load_tokenizer(str(tmp_path))
        assert str(planned.value) == str(error.value)
    assert str(tmp_path) in str(error.value) or "Qwen3ForCausalLM" in str(error.value)


@pytest.mark.parametrize("family, rates", [
    ("qwen2", dict(attention_dropout=0.1)),
    ("phi3", dict(embd_pdrop=0.1, resid_pdrop=0.1)),
])
def test_dropout_is_off(tmp_path, family, rates):
    """In training mode, a pass gives the sampler's log-probabilities, again and again."""
    policy = load_policy(write(family, tmp_path, **rates))
    batch = collate(ROWS, [True] * 3, policy.pad_id)
    expected = policy.eval()(batch)[0]
    torch.testing.assert_close(policy.train()(batch)[0], expected, **ROUNDING)


@pytest.mark.parametrize("name, written", [
    ("llama3_2", "Today Date: 26 Jul 2024\n"), ("qwen3", "<think>\n\n</think>\n\n"),
])
def test_prompts_have_a_fixed_date_and_no_thinking_of_the_models_own(name, written):
    policy = make_policy()
    publish(policy.tokenizer, name)
    assert written in policy.render([{"role": "user", "content": "hi"}])
