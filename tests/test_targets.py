"""What the world model predicts: placebo, several steps, equal transitions; and the conflict.

    python -m pytest tests/test_targets.py
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from paw_min import cmae, tapo, targets
from paw_min.config import Config
from paw_min.conflict import gradient_conflict
from paw_min.metrics import describe_episodes
from paw_min.model.batches import collate
from paw_min.rows import Episode, TokenRow, Transition, flatten
from paw_min.update import (
    learn,
    mini_batches,
    prepare,
    select_transitions,
    world_model_candidates,
)
from tests.helpers import BASE, EPISODES, ROWS, make_policy, of_mini, run, start, step_of

pytestmark = pytest.mark.usefixtures("without_gradient_clipping")
THREE = [TokenRow([1], [10 * k, 10 * k + 1], [10 * k + 5]) for k in (1, 2, 3)]  # one trajectory


# ---- placebo ----


@pytest.mark.parametrize("seed", range(5))
def test_no_row_keeps_its_own_observation(seed):
    # Every third has none, the others have an action between.
    rows = [TokenRow([k], [k], [k] * (k % 3), given=[0] * (k % 3 > 1)) for k in range(3, 20)]
    mixed = targets.shuffled(rows, seed, 1)
    assert [(r.prompt_ids, r.response_ids) for r in mixed] == [
        (r.prompt_ids, r.response_ids) for r in rows
    ]
    for before, after in zip(rows, mixed):
        assert bool(before.obs_ids) == bool(after.obs_ids)
        assert not before.obs_ids or before.obs_ids != after.obs_ids
    for column in (mixed, rows):  # actions between stay with their observations
        column.sort(key=lambda row: row.obs_ids)
    assert [(r.obs_ids, r.given) for r in mixed] == [(r.obs_ids, r.given) for r in rows]


def test_the_placebo_is_drawn_per_update_and_a_lone_row_has_none():
    drawn = [targets.shuffled(ROWS, *key) for key in ((0, 1), (0, 1), (1, 1), (0, 2))]
    assert drawn[0] == drawn[1] and drawn.count(drawn[0]) == 2
    alone = targets.shuffled([TokenRow([1], [2], []), TokenRow([1], [2], [3])], 0, 1)
    assert [row.obs_ids for row in alone] == [[], []]


def test_the_placebo_changes_targets_and_nothing_else():
    cfg = Config(**BASE | dict(wm_target="shuffled"))
    plain = prepare(Config(**BASE), make_policy(), None, flatten(EPISODES))
    placebo = prepare(cfg, make_policy(), None, flatten(EPISODES), 3)
    assert placebo.tokens == targets.shuffled(ROWS, cfg.seed, 3) != plain.tokens == ROWS
    for name in ("selected", "row_weight", "advantage", "entropy"):
        assert torch.equal(getattr(placebo, name), getattr(plain, name)), name
    assert placebo.lambdas == plain.lambdas
    assert not torch.equal(run(wm_target="shuffled")[0], run()[0])
    assert torch.equal(run(wm_target="shuffled", paw=False)[0], run(paw=False)[0])


# ---- several steps ----


def test_the_next_observations_follow_with_the_actions_between_as_context():
    two = targets.multi_step(THREE, [0, 0, 0], 2)
    assert [r.obs_ids for r in two] == [[15, 20, 21, 25], [25, 30, 31, 35], [35]]
    assert [r.given for r in two] == [[1, 2], [1, 2], []]
    many = targets.multi_step(THREE, [0, 0, 0], 9)
    assert many[0].obs_ids == [15, 20, 21, 25, 30, 31, 35] and many[0].given == [1, 2, 4, 5]
    assert targets.multi_step(THREE, [0, 1, 0], 2)[0].obs_ids == [15, 30, 31, 35]  # interleaved
    assert targets.multi_step(THREE, [0, 0, 0], 1) == THREE
    empty = [THREE[0], TokenRow([1], [7], []), THREE[2]]  # as after an invalid search
    assert [r.obs_ids for r in targets.multi_step(empty, [0, 0, 0], 3)] == [[15], [], [35]]


def test_only_observations_are_scored():
    """The log-probabilities are those of the whole text; actions between have no part in |o|."""
    policy = make_policy()
    row = TokenRow([9, 10], [11, 12], [13, 14, 15, 16, 17], given=[2, 3])
    batch = collate([row], [True], policy.pad_id)
    assert batch.obs_mask.tolist() == [[False, False, True, True, False, False, True]]
    logp, _ = policy(batch)
    logits = policy.model(torch.tensor([[9, 10, 11, 12, 13, 14, 15, 16, 17]])).logits
    plain = logits.log_softmax(-1)[0, [3, 4, 7], [13, 14, 17]]
    torch.testing.assert_close(logp[0, [2, 3, 6]], plain, atol=5e-6, rtol=0)
    loss = cmae.mae(logp, batch.obs_mask)
    torch.testing.assert_close(loss[0], (1 - plain.exp()).mean(), atol=1e-6, rtol=0)


def test_several_steps_in_an_update():
    rows = prepare(Config(**BASE | dict(wm_steps=3)), make_policy(), None, flatten(EPISODES))
    assert max(len(r.given) for r in rows.tokens) > 0
    assert not torch.equal(run(wm_steps=2)[0], run()[0])
    assert run(wm_steps=2)[1]["tokens_trained"] > run()[1]["tokens_trained"]


# ---- equal transitions ----


def test_equal_transitions_count_once():
    other = [replace(THREE[0], prompt_ids=[2]), replace(THREE[0], response_ids=[99])]
    rows = [THREE[0], THREE[1], THREE[0], *other, replace(THREE[0], obs_ids=[99]), THREE[0]]
    expected = [True, True, False, True, True, True, False]
    assert targets.first_occurrences(rows) == expected
    cfg = Config(**BASE | dict(dedup=True, alpha=1.0))
    candidates = world_model_candidates(cfg, rows)
    assert candidates.tolist() == expected
    assert select_transitions(cfg, candidates, None).tolist() == candidates.tolist()
    entropy = torch.tensor([0.0, 2.0, 9.0, 0.1, 0.2, 1.0, 9.0])  # the copies do not compete
    cfg.alpha = 0.4
    selected = select_transitions(cfg, candidates, entropy)
    assert selected.tolist() == [False, True, False, False, False, True, False]


def test_their_share_is_logged():
    assert describe_episodes(EPISODES + EPISODES)["duplicates"] == pytest.approx(0.5)
    assert describe_episodes(EPISODES)["duplicates"] == 0.0


# ---- TAPO's rows ----

SMOLLM2 = Path(__file__).parent.parent / "paw_min" / "toy" / "weights" / "smollm2"
FIRST_TAPO_PROMPT = """\
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user

You are modeling the transitions of an environment.
Its current observation is: You are in a {room}.
Its admissible actions are: ['go to shelf 1', 'look'].
The action that is executed now: go to shelf 1
Predict the next observation, and present it within <prediction> </prediction> tags.
<|im_end|>
<|im_start|>assistant
"""


def smollm2():
    """A policy with the tokenizer and the chat template of a published model."""
    policy = make_policy()
    policy.tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    policy.eos_ids = [policy.tokenizer.eos_token_id]
    return policy


def two_steps(policy) -> Episode:
    """A search through a room in braces; the second step has no observation."""
    episode = Episode("game", 0, 0, instruction="find a mug")
    for observation, command, following in (
        ("You are in a {room}.", "go to shelf 1", "A mug is on it."),
        ("A mug is on it.", "look", ""),
    ):
        episode.transitions.append(
            Transition(
                policy.encode_chat("Your task is to: find a mug"),
                policy.encode(f"<think>hm</think><action>{command}</action>"),
                policy.encode(following),
                response_logps=[], reward=0.0, valid=True, anchor=observation, group=0,
                trajectory=0, command=command, admissible=["go to shelf 1", "look"],
            )
        )
    return episode


def test_tapos_rows_token_by_token():
    policy = smollm2()
    rows = flatten([two_steps(policy)])
    first, second = tapo.transition_rows(Config(), policy, rows)
    tokens = policy.tokenizer.convert_ids_to_tokens
    assert first.prompt_ids == policy.encode_rendered(FIRST_TAPO_PROMPT)
    assert tokens(first.prompt_ids[:4]) == ["<|im_start|>", "system", "Ċ", "You"]
    assert tokens(first.obs_ids) == [
        "<", "prediction", ">", "A", "Ġm", "ug", "Ġis", "Ġon", "Ġit", ".", "</", "prediction", ">",
        "<|im_end|>",
    ]
    assert (first.response_ids, first.separator_ids, first.given) == ([], [], [])
    # No observation, no target; its state is the observation of the step before.
    assert second.obs_ids == []
    assert "Its current observation is: A mug is on it.\n" in policy.decode(second.prompt_ids)
    assert "executed now: look\n" in policy.decode(second.prompt_ids)

    # Every token of the answer is scored, after the prompt alone.
    batch = collate([first], [True], policy.pad_id)
    assert batch.ids[0].tolist() == first.prompt_ids + first.obs_ids
    assert batch.obs_mask.all() and not batch.response_mask.any()


def test_tapos_rows_of_search_and_of_the_stand_ins():
    policy = smollm2()
    rows = flatten([two_steps(policy)])
    free = replace(rows, admissible=[[], []])  # any text is accepted, so no commands are listed
    text = FIRST_TAPO_PROMPT.replace("Its admissible actions are: ['go to shelf 1', 'look'].\n", "")
    first = tapo.transition_rows(Config(), policy, free)[0]
    assert first.prompt_ids == policy.encode_rendered(text)
    compact = Config(prompt="compact")
    first = tapo.transition_rows(compact, policy, rows)[0]
    message = "You are in a {room}.\n| go to shelf 1 | look\n> go to shelf 1"
    assert first.prompt_ids == policy.encode_chat(message)
    assert first.obs_ids == [*policy.encode("A mug is on it."), policy.eos_ids[0]]
    first = tapo.transition_rows(compact, policy, free)[0]
    assert first.prompt_ids == policy.encode_chat("You are in a {room}.\n> go to shelf 1")


def test_limits_of_tapos_rows():
    """The prompt keeps its end, where the action is; together they fit into the positions."""
    policy = smollm2()
    rows = flatten([two_steps(policy)])
    whole = tapo.transition_rows(Config(), policy, rows)[0]
    policy.positions = 25
    cut = tapo.transition_rows(Config(max_prompt_tokens=20), policy, rows)[0]
    assert cut.prompt_ids == whole.prompt_ids[-20:] and cut.obs_ids == whole.obs_ids[:5]


# ---- scale, conflict ----


def test_the_scale_multiplies_the_world_model_term():
    once, twice, base = step_of(wm_scale=50.0), step_of(wm_scale=100.0), step_of(paw=False)
    torch.testing.assert_close(twice - base, 2 * (once - base), atol=1e-3, rtol=1e-3)
    assert (once - base).abs().max() > 0.1
    assert run(wm_scale=2.0)[1]["loss_wm"] == pytest.approx(2 * run()[1]["loss_wm"], rel=1e-5)


@pytest.mark.parametrize("mini_batch", [0, 8])
def test_conflict_is_that_of_the_two_gradients(mini_batch):
    """With one mini-batch, the two gradients are those of whole updates, from SGD's steps."""
    cfg, policy = Config(**BASE | dict(mini_batch=mini_batch, micro_tokens=60)), make_policy()
    rows = prepare(cfg, policy, None, flatten(EPISODES))
    measured = gradient_conflict(cfg, policy, rows, (0, 0))
    assert all(p.grad is None for p in policy.parameters())
    if mini_batch:  # those of its first mini-batch alone, the world model's scaled up
        mini = mini_batches(cfg, len(ROWS), (0, 0))[0]
        alone = gradient_conflict(Config(**BASE), policy, of_mini(rows, mini), (0, 0))
        alone["grad_norm_wm"] *= len(ROWS) / len(mini)
        assert measured == pytest.approx(alone, rel=1e-3) and len(mini) < len(ROWS)
        return
    rl = step_of(paw=False)
    wm = step_of() - rl
    cosine = torch.dot(rl, wm) / (rl.norm() * wm.norm())
    assert measured["grad_norm_rl"] == pytest.approx(rl.norm().item(), rel=1e-3)
    assert measured["grad_norm_wm"] == pytest.approx(wm.norm().item(), rel=1e-3)
    assert measured["grad_cosine"] == pytest.approx(cosine.item(), abs=1e-3)


def test_measuring_the_conflict_changes_nothing():
    cfg, policy = Config(**BASE), make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=cfg.lr)
    rows = prepare(cfg, policy, None, flatten(EPISODES))
    gradient_conflict(cfg, policy, rows, (0, 0))
    learn(cfg, policy, optimizer, rows, (0, 0))
    weights = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    assert torch.equal(weights, run()[0]) and not torch.equal(weights, start())


def test_without_a_world_model_the_cosine_is_zero():
    cfg, policy = Config(**BASE | dict(paw=False)), make_policy()
    rows = prepare(cfg, policy, None, flatten(EPISODES))
    measured = gradient_conflict(cfg, policy, rows, (0, 0))
    assert measured["grad_norm_wm"] == measured["grad_cosine"] == 0.0
    assert measured["grad_norm_rl"] > 0 and math.isfinite(measured["grad_norm_rl"])
