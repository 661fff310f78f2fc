"""--wm-separator: the chat template's own tokens between response and observation, in no loss.

tests/test_real_model.py has SmolLM2.
"""

from dataclasses import replace

import pytest

from paw_min.base.errors import UserError
from paw_min.model.batches import collate, micro_batches
from paw_min.model.chat import turn_text
from paw_min.rows import TokenRow
from tests.helpers import make_policy, publish

PLAIN = TokenRow([3, 4, 5], [6, 7, 1], [8, 9, 10, 11])
SEPARATED = replace(PLAIN, separator_ids=[12, 13])


@pytest.mark.parametrize("name, expected", [
    ("qwen2_5", "<|im_end|>\n<|im_start|>user\n"),
    ("qwen3", "<|im_end|>\n<|im_start|>user\n"),
    ("llama3_2", "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"),
])
def test_published_templates(name, expected):
    assert turn_text(publish(make_policy().tokenizer, name)) == expected


def test_the_end_token_appears_once():
    policy = make_policy()
    end = policy.eos_ids[0]
    policy.turn_ids = [end, 7, 8]
    assert policy.separator([5, end]) == [7, 8]
    assert policy.separator([5, 6]) == [end, 7, 8]  # at the token limit
    policy.turn_ids = [7, 8]  # a template without an end token
    assert policy.separator([5, end]) == [7, 8]
    policy.turn_ids = []
    assert policy.separator([5, end]) == []


@pytest.mark.parametrize("template, reason", [
    ("{% if messages[1:] %}{{ raise_exception('one turn only') }}{% endif %}", "one turn only"),
    ("{{ messages[2].content }}{{ messages[1].content }}", "leaves out messages"),
])
def test_a_template_without_a_second_turn_is_refused(template, reason):
    tokenizer = make_policy().tokenizer
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"{reason}.*--wm-separator none"):
        turn_text(tokenizer)


def test_separator_is_context_and_no_target():
    batch = collate([SEPARATED, PLAIN], [True, True], pad_id=0)
    assert batch.ids.tolist() == [
        [3, 4, 5, 6, 7, 1, 12, 13, 8, 9, 10, 11],
        [3, 4, 5, 6, 7, 1, 8, 9, 10, 11, 0, 0],
    ]
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 0]] * 2
    assert batch.obs_mask.int().tolist() == [[0] * 5 + [1] * 4, [0] * 3 + [1] * 4 + [0] * 2]
    # Without the observation, the separator is not appended either.
    assert collate([SEPARATED], [False], pad_id=0).ids.tolist() == [[3, 4, 5, 6, 7, 1]]


def test_given_positions_count_from_the_observation():
    batch = collate([replace(SEPARATED, given=[1, 2])], [True], pad_id=0)
    assert batch.obs_mask[0].int().tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1]


def test_separators_count_in_the_budget():
    rows = [replace(PLAIN, separator_ids=[12] * 90), PLAIN]
    batches = micro_batches(make_policy(), rows, [0, 1], [True, True], budget=100)
    assert [len(batch.index) for batch in batches] == [1, 1]
