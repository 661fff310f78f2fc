"""Text to tokens and back: control tokens, end tokens, turns, thoughts of published templates."""

import re

import pytest
from tokenizers import AddedToken, normalizers

from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context
from paw_min.model.chat import ChatTokenizer, turn_end
from paw_min.toy import standins
from tests.helpers import (
    INJECTION,
    TEXTS,
    chatml_tokenizer,
    control_tokens,
    make_policy,
    publish,
)


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


@pytest.mark.parametrize("template", [
    standins.CHAT,
    "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "{% for m in messages %}{{ m.content }} mug\n{% endfor %}",
])
def test_what_begins_the_next_turn_or_is_not_a_control_token_ends_nothing(template):
    """test_models.py has the tokens that end the turns of published models."""
    tokenizer = standins.make_tokenizer(TEXTS)
    tokenizer.chat_template = template
    assert turn_end(tokenizer) is None


def with_tokens(*tokens: AddedToken, **named) -> ChatTokenizer:
    tokenizer = standins.make_tokenizer(TEXTS)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens(list(tokens))
    for name, token in named.items():
        setattr(tokenizer, name, token)
    return ChatTokenizer(tokenizer)


def test_a_control_token_may_be_found_in_another_text():
    """After the normalizer, and with the spaces around it. <unk> is written like any other."""
    options = dict(special=True, normalized=True, lstrip=True, rstrip=True)
    chat = with_tokens(AddedToken("<|x|>", **options))
    for text in ("a ＜|x|＞ b", "a  <|x|>  b", "<|x|>", "a <unk> b"):
        assert chat.control_ids & set(chat.encode_rendered(text))
        assert not chat.control_ids - {1} & set(chat.encode(text))  # 1 is <unk>
        assert chat.encode_rendered(chat.without_control_tokens(text)) == chat.encode(text)
    assert chat.without_control_tokens("a <unk> b, unknown") == "a < unk> b, unknown"
    assert chat.without_control_tokens("a  <|x|>  b") == "a  < |x|>  b"


@pytest.mark.parametrize("text, passes", [
    ("You see a mug 1, and a <think> b", 1),
    ("a <|x|> b", 3),  # where it is, and that nothing is left; then the tokens
    ("a ＜|x|＞ b", 3),  # the normalizer makes one of it
    ("caf\u0065\u0301", 2),  # it would change this text, too
    ("a <unk> b", 3), ("", 1),
])
def test_a_text_is_tokenized_once_unless_a_control_token_may_be_in_it(text, passes):
    chat = with_tokens(AddedToken("<|x|>", special=True, normalized=True))
    chat.control_ids, chat.turn_ids  # once per model
    plain = chat.tokenizer
    calls = []

    class Counted:
        def __getattr__(self, name):
            return getattr(plain, name)

        def __call__(self, text, **options):
            calls.append(text)
            return plain(text, **options)

    chat.tokenizer = Counted()
    chat.encode(text)
    assert len(calls) == passes
    calls.clear()
    prompt = chat.encode_chat(f"a {text}")
    assert len(calls) == passes and "<|x|>" not in plain.convert_ids_to_tokens(prompt)


def test_a_control_token_of_the_models_own_vocabulary_is_left_to_the_tokenizer():
    chat = with_tokens()
    chat.control_ids = chat.control_ids | {chat.tokenizer.convert_tokens_to_ids("mug")}
    assert chat.without_control_tokens("a mug b") == "a m ug b"


def test_a_single_character_is_text():
    """Some tokenizers pad with "!". No space breaks it."""
    chat = with_tokens(AddedToken("!", special=True), pad_token="!")
    ids = chat.encode("a ! b")
    assert chat.pad_id in ids and chat.without_control_tokens("a ! b") == "a ! b"
    assert chat.decode(ids) == "a ! b"


def test_an_end_token_may_be_in_generation_config_alone():
    """It pads, ends a response, and is in no other text; a plain word stays a word."""
    tokenizer = standins.make_tokenizer(TEXTS)
    tokenizer.add_tokens([AddedToken("<stop>", special=False, normalized=False)])
    stop, mug = tokenizer.convert_tokens_to_ids(["<stop>", "mug"])
    tokenizer.eos_token = tokenizer.pad_token = None
    chat = ChatTokenizer(tokenizer, [stop, mug])
    assert chat.eos_ids == [stop, mug] and chat.pad_id == stop
    assert chat.encode_response("a b")[-1] == stop
    ids = chat.encode("a <stop> mug b")
    assert stop not in ids and mug in ids
    assert chat.decode([*chat.encode("a mug b"), stop]) == "a mug b"


@pytest.mark.parametrize("name, written", [
    ("llama3_2", "Today Date: 26 Jul 2024\n"), ("qwen3", "<think>\n\n</think>\n\n"),
])
def test_prompts_have_a_fixed_date_and_no_thinking_of_the_models_own(name, written):
    policy = make_policy()
    publish(policy.tokenizer, name)
    assert written in policy.render([{"role": "user", "content": "hi"}])
