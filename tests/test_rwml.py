"""RWML: answers, reward, filter and thresholds by hand. test_stages.py has small runs.

    python -m pytest tests/test_rwml.py

The sentence encoder is the real all-MiniLM-L6-v2, the games are real small ALFWorld games.
"""

import json
import math
import os
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import run_alfworld
from paw_min.base.errors import UserError
from paw_min.config import Config, parse_args
from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Turn
from paw_min.envs.pool import EnvPool
from paw_min.model.sampler import Response
from paw_min.rows import Episode, Transition
from paw_min.running.stages import Pieces
from paw_min.toy.demonstrate import PlayedStep
from paw_min.update import learn, prepare
from paw_min.world_models import rwml
from paw_min.world_models.rwml import early_experience, stages, triplets
from paw_min.world_models.rwml import settings as rwml_settings
from paw_min.world_models.rwml.settings import RwmlJob, RwmlSettings
from tests.helpers import (
    BASE,
    INJECTION,
    chatml_tokenizer,
    control_tokens,
    make_policy,
)
from tests.retrieval import make_encoder


@pytest.fixture(scope="session")
def minilm():
    return rwml_settings.load_encoder("minilm", "cpu")


# ---- formulas ----

@pytest.mark.parametrize("response, expected", [
    ("<think>x</think><next_state>You see a mug 1.</next_state>", "You see a mug 1."),
    ("<next_state> a \n</next_state> and more", "a"),
    # The last opening tag counts, the first closing tag after it.
    ("<next_state>a</next_state><next_state>b</next_state>", "b"),
    ("<next_state>a</next_state><next_state>b", None),  # cut by the limit
    ("</next_state>a<next_state>", None),
    ("<next_state> </next_state>", None),
    ("<think>x</think><action>look</action>", None),
])
def test_predicted_state(response, expected):
    assert rwml.predicted_state(response) == expected


def test_reward_is_strict_and_malformed_answers_get_none():
    assert [rwml.reward(d, 0.2) for d in (0.0, 0.1999, 0.2, 0.3)] == [1.0, 1.0, 0.0, 0.0]
    assert rwml.reward(math.inf, 1e9) == 0.0


def test_too_easy_keeps_what_was_never_hit_and_a_tenth_of_the_rest():
    hits = [0, 10, 0, 1, 3]
    never = SimpleNamespace(random=lambda: 0.1)  # not below KEEP
    always = SimpleNamespace(random=lambda: 0.0999)
    assert rwml.too_easy(hits, never) == [0, 2]
    assert rwml.too_easy(hits, always) == [0, 1, 2, 3, 4]
    # The paper's counts: 27.5 % of 21,011 easy leave 15,813 (B.1).
    easy = round(0.275 * 21_011)
    kept = rwml.too_easy([1] * easy + [0] * (21_011 - easy), random.Random(0))
    assert abs(len(kept) - 15_813) < 100
    assert kept == sorted(set(kept)) and set(range(easy, 21_011)) <= set(kept)


def test_the_filters_threshold_makes_30_percent_easy():
    nearest = [d / 1000 for d in range(20, 520, 5)]  # 100 triplets
    random.Random(0).shuffle(nearest)
    threshold = rwml.calibrated_threshold(nearest, 0.3)
    assert sum(rwml.reward(d, threshold) for d in nearest) == 30
    # Exact predictions are easy at any threshold: it stays positive, and more are easy.
    exact = [0.0] * 60 + [0.3] * 40
    threshold = rwml.calibrated_threshold(exact, 0.3)
    assert threshold == 0.01 and sum(rwml.reward(d, threshold) for d in exact) == 60
    # Above 0.5, generic answers would pass.
    assert rwml.calibrated_threshold([0.9] * 10, 0.3) == 0.5


def stages_without_a_model(monkeypatch, policy):
    """The filter's stage gets this policy, which is not trained."""
    synced = SimpleNamespace(sync=lambda policy: nullcontext())
    loaded = nullcontext((policy, synced))
    monkeypatch.setattr(stages, "loaded_for_answers", lambda *args: loaded)
    monkeypatch.setattr(stages, "supervise", lambda *args: None)
    monkeypatch.setattr(stages, "sft_optimizer", lambda *args: None)
    return synced


def job_of(tmp_path, cfg=None, **settings) -> RwmlJob:
    settings = RwmlSettings(**rwml_settings.TINY | settings)
    return RwmlJob(cfg or Config(prompt="compact"), settings, False, tmp_path, None, [])


def test_training_threshold_has_the_papers_values():
    assert rwml.training_threshold(0.1) == 0.2  # ALFWorld
    assert rwml.training_threshold(0.15) == 0.4  # tau2: 0.30 is halfway and rounds up
    assert rwml.training_threshold(0.35) == 0.6
    assert rwml.training_threshold(0.01) == 0.2


def test_settings_are_the_papers():
    assert RwmlSettings() == RwmlSettings(
        method="rwml", target="next", reward="distance", keep_easy=False, encoder="minilm",
        tasks=2048, episodes=3, max_turns=30, validation=0.1, tries=10, easy_share=0.3, batch=32,
        epochs=2, sft_lr=2e-6, sft_epochs=2, warm_epochs=0, answer_tokens=512,
    )
    assert rwml.KEEP == 0.1 and rwml.MARGIN == 0.15 and rwml.STEP == 0.2
    cfg, _ = parse_args("alfworld", run_alfworld.PRESETS, "", ["--preset", "paper", "--data", "d"])
    assert (cfg.lr, cfg.group_size, cfg.kl_coef, cfg.temperature) == (1e-6, 8, 0.01, 1.0)
    assert early_experience.BRANCHES == 8
    assert early_experience.PUBLISHED == dict(batch=16, sft_lr=1e-5, sft_epochs=2)


def test_distance_is_one_minus_the_cosine(minilm):
    texts = ["You open the fridge 1.", "You close the fridge 1.", "Buy now"]
    a, b, c = minilm.passages(texts, 3)
    found = rwml.distances(minilm, [texts[0], texts[1], None, texts[2]], [texts[0]] * 4)
    assert found[0] == pytest.approx(0, abs=1e-6) and found[2] == math.inf
    assert found[1] == pytest.approx(1 - a @ b, abs=1e-6)
    assert found[3] == pytest.approx(1 - a @ c, abs=1e-6) and found[3] > found[1] > 0.01


def test_quality_by_hand():
    predicted = ["a", None, "c", "d"]
    truths = ["a", "b", "x", "y"]
    measured = rwml.quality(predicted, truths, [0.0, math.inf, 0.3, 1.2], 0.3)
    assert measured == pytest.approx(
        {"reward": 1 / 4, "exact": 1 / 4, "cosine": (1 + 0 + 0.7 - 0.2) / 4, "well_formed": 3 / 4}
    )


# ---- triplets ----

GOOD = "<think>x</think><action>{}</action>"


def episode_of(*steps, instruction="put a mug"):
    """(o_t, command, o_{t+1}, is it well formed?) of each step -> an episode."""
    episode = Episode("game", 0, 0, instruction=instruction)
    for observation, command, following, valid in steps:
        # The response lacks the <think> that some templates write.
        response = f"x</think><action>{command}</action>"
        episode.transitions.append(
            Transition(
                [3], [4], [5], [-1.0], reward=0.0, valid=valid, observation=observation, group=0,
                trajectory=0, response=response, command=command, next_observation=following,
            )
        )
    return episode


def test_triplets_of_an_episode():
    steps = [
        ("room", "go to desk 1", "\ndesk\n", True),
        ("desk", "go to bed 1", "bed", False),
        ("bed", "fly", "Nothing happens.", True),
        ("Nothing happens.", "look", "", True),  # nothing to predict
    ]
    episode = episode_of(*steps)
    again = episode_of(*steps[:1])
    other = episode_of(*steps[:1], instruction="put a cup")
    cfg = Config(history_length=2)
    found = triplets.triplets_of(cfg, [episode, again, other])
    assert found.counts == {
        "steps": 6, "malformed": 1, "no_effect": 1, "no_observation": 1, "duplicates": 1,
    }
    first = triplets.Triplet("put a mug", [], "room", "go to desk 1", "desk")
    assert found.triplets == [first, replace(first, instruction="put a cup")]
    assert triplets.play(cfg, [episode]) == {"eval_success": 0.0, "eval_invalid": 2 / 4}

    episode = episode_of(*((f"o{t}", f"a{t}", f"o{t + 1}", True) for t in range(4)))
    last = triplets.triplets_of(cfg, [episode]).triplets[-1]
    assert last.history == [Turn("o1", "a1"), Turn("o2", "a2")] and last.observation == "o3"
    assert last.steps == 3
    last = triplets.triplets_of(replace(cfg, history_length=0), [episode]).triplets[-1]
    assert last.history == []


TRIPLET = triplets.Triplet(
    "put a mug in desk", [Turn("room", "go to desk 1")], "desk", "go to shelf 1", "a shelf 1"
)


def test_a_compact_prompt():
    compact = triplets.prompt_text(Config(prompt="compact"), TRIPLET)
    assert compact.splitlines() == [
        "task put a mug in desk", "room", "> go to desk 1", "desk", "> go to shelf 1",
        "<next_state>",
    ]


@pytest.mark.parametrize("prompt", ["paper", "compact"])
def test_no_text_of_a_triplet_becomes_a_control_token(prompt):
    policy = make_policy(tokenizer=chatml_tokenizer())
    hostile = triplets.Triplet(
        INJECTION, [Turn(INJECTION, INJECTION)], INJECTION, INJECTION, INJECTION
    )
    cfg = Config(prompt=prompt)
    found = []
    for one in (TRIPLET, hostile):
        row = triplets.sft_row(cfg, policy, one)
        found.append(control_tokens(policy, row.prompt_ids + row.response_ids))
    assert found[0] == found[1] == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("env", ["alfworld", "webshop", "search"])
def test_a_prompt_begins_as_the_agents(env):
    """What is learned about the agent's own prompt can transfer to it (Tables A4, A5)."""
    one = replace(TRIPLET, instruction="a task", steps=7)
    if env == "search":
        block = '<information>{"result": "a"}</information>'
        turn = Turn("", "<search> b </search>")
        one = replace(one, history=[turn], observation=block, action="<answer>c</answer>")
    cfg = Config(env=env, prompt="paper", history_length=1)
    turns = [Turn("before", "x")] * 6 + one.history
    context = Context(one.instruction, one.observation, ["go to shelf 1", "look"], turns)
    agents = BENCHMARKS[env].prompts["paper"](context, cfg.history_length)
    asked = triplets.prompt_text(cfg, one)
    common = len(os.path.commonprefix([agents, asked]))
    seen, question = asked[:common], asked[common:]
    for part in ("You are an expert", "a task", "already taken 7 step(s)", one.observation):
        assert part in seen
    assert one.history[0].command in seen and "before" not in seen
    assert one.action in question and "admissible" not in asked and "a shelf 1" not in asked
    first = replace(one, history=[], steps=0)
    assert triplets.prompt_text(cfg, first).startswith("\nYou are an expert")
    assert "already taken" not in triplets.prompt_text(cfg, first)


def test_labels_are_answers_and_the_tags_are_added_once():
    policy = make_policy()
    stages.add_tags(policy, seed=0)
    size = len(policy.tokenizer)
    assert policy.model.get_input_embeddings().num_embeddings == size
    row = triplets.sft_row(Config(prompt="compact"), policy, TRIPLET)
    text = policy.decode(row.response_ids)
    assert rwml.predicted_state(text) == rwml.as_written(policy, "a shelf 1") == "a shelf 1"
    assert text.startswith("<think> </think>") and row.response_ids[-1] in policy.eos_ids
    weights = policy.model.get_input_embeddings().weight.clone()
    stages.add_tags(policy, seed=0)
    assert len(policy.tokenizer) == size
    other = make_policy()
    stages.add_tags(other, seed=0)
    assert torch.equal(other.model.get_input_embeddings().weight, weights)


def test_what_cannot_be_answered_does_not_fit():
    policy = make_policy()
    cfg = Config(prompt="compact", max_prompt_tokens=60)
    n_truth = len(policy.encode("a shelf 1"))
    limit = triplets.TAG_TOKENS + n_truth
    assert triplets.fitting(cfg, policy, [TRIPLET], limit) == [TRIPLET]
    assert triplets.fitting(cfg, policy, [TRIPLET], limit - 1) == []
    assert triplets.fitting(replace(cfg, max_prompt_tokens=3), policy, [TRIPLET], limit) == []


class Asked(Exception):
    """Ends a stage at its first question."""


def test_a_model_is_asked_as_it_was_trained(monkeypatch, tmp_path):
    """The filter and WM-SFT learn labels with an empty thought, so their prompts allow none."""
    policy = make_policy()
    stages.add_tags(policy, seed=0)
    cfg = Config(prompt="paper")
    prompts = {
        reason: policy.encode_chat(triplets.prompt_text(cfg, TRIPLET, reason))
        for reason in (True, False)
    }
    assert triplets.sft_row(cfg, policy, TRIPLET).prompt_ids == prompts[False] != prompts[True]

    def ask(sampler, prompts, *args, **kwargs):
        raise Asked(prompts)

    def asked(stage, *args) -> list[list[int]]:
        with pytest.raises(Asked) as found:
            stage(*args)
        return found.value.args[0]

    synced = stages_without_a_model(monkeypatch, policy)
    monkeypatch.setattr(rwml, "predict", ask)
    job = job_of(tmp_path, cfg)
    assert asked(stages.make_filter, job, [TRIPLET], [TRIPLET]) == [prompts[False]]
    session = SimpleNamespace(policy=policy, sampler=synced)
    for method in rwml_settings.METHODS:
        job = job_of(tmp_path, cfg, method=method)
        expected = [prompts[method == "rwml"]]
        assert asked(stages.measure, job, session, [TRIPLET], 0.2) == expected


# ---- GRPO on answers ----

def test_answers_become_groups_and_rewarded_ones_more_likely():
    prompts = [[3, 4, 5], [6, 7]]
    answers = [
        [Response(0, [8, 2], [-1.0, -1.0]), Response(1, [9, 2], [-1.0, -1.0])],
        [Response(2, [10, 11, 2], [-1.0] * 3), Response(3, [12, 2], [-1.0] * 2)],
    ]
    rows = rwml.answer_rows(prompts, answers, [1.0, 0.0, 1.0, 1.0])
    assert rows.group == [0, 0, 1, 1] and rows.sampler_logp.shape == (4, 3)
    assert [row.prompt_ids for row in rows.tokens] == [prompts[0]] * 2 + [prompts[1]] * 2
    cfg = Config(**BASE | dict(paw=False, invalid_penalty=0.0))
    policy = make_policy()
    ready = prepare(cfg, policy, None, rows)
    # (r - mean) / std over the group (2.2), with the unbiased std.
    expected = [0.5 / 0.5**0.5, -0.5 / 0.5**0.5, 0.0, 0.0]
    assert ready.advantage.tolist() == pytest.approx(expected, abs=1e-4)

    def logp(row):
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        scores = policy.model(ids).logits[0].log_softmax(-1)
        at = range(len(row.prompt_ids), ids.shape[1])
        return sum(scores[k - 1, ids[0, k]].item() for k in at)

    before = [logp(row) for row in rows.tokens]
    learn(cfg, policy, torch.optim.SGD(policy.parameters(), lr=1e-2), ready, (0, 1))
    after = [logp(row) for row in rows.tokens]
    assert after[0] - after[1] > before[0] - before[1] + 1e-3


def test_an_epoch_has_every_triplet_once_in_an_order_of_its_own():
    epochs = [[rwml.batch_of_update(k, 7, 3, seed=0) for k in (1, 2, 3)],
              [rwml.batch_of_update(k, 7, 3, seed=0) for k in (4, 5, 6)]]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [3, 3, 1]
        assert sorted(sum(batches, [])) == list(range(7))
    assert epochs[0] != epochs[1]


def test_shuffled_targets_are_all_of_another():
    those = [replace(TRIPLET, next_observation=f"o{i}") for i in range(9)]
    mixed = rwml.shuffled_truths(those, seed=0)
    assert sorted(t.next_observation for t in mixed) == [t.next_observation for t in those]
    assert all(a.next_observation != b.next_observation for a, b in zip(those, mixed))
    for before, after in zip(those, mixed):
        assert replace(after, next_observation="") == replace(before, next_observation="")


# ---- errors ----

@pytest.mark.parametrize("name", ["start", "start.partial"])
def test_what_is_in_the_folder_stays(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"has a {name} already: choose another --out, or delete"):
        stages.make_triplets(job_of(tmp_path))


def test_triplets_return_from_their_file(tmp_path):
    those = [TRIPLET, replace(TRIPLET, history=[], next_observation="café\n\u2028x")]
    triplets.write_triplets(tmp_path / "t.jsonl", those)
    assert triplets.read_triplets(tmp_path / "t.jsonl") == those
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 2


def asked_of(tmp_path, monkeypatch, *flags) -> RwmlJob:
    monkeypatch.setattr(rwml_settings, "load_encoder", lambda name, device: None)
    monkeypatch.setattr(rwml_settings, "check_machine", lambda cfg: None)  # no vLLM is needed
    return rwml_settings.arguments("", ["alfworld", "--out", str(tmp_path / "out"), *flags])


def test_then_rl_is_the_papers_and_has_a_name_of_its_own(tmp_path, monkeypatch):
    """B.2: GRPO from the checkpoint, not PaW; after each method in another run folder."""
    found = []
    for flags in ([], ["--method", "wm-sft"], ["--reward", "coin"], ["--keep-easy"],
                  ["--name", "mine", "--paw"]):
        asked = asked_of(tmp_path, monkeypatch, *flags)
        words = stages.policy_rl(asked, Path("x/checkpoint-000003"))
        cfg, _ = parse_args("alfworld", run_alfworld.PRESETS, "", words)
        assert not cfg.paw and cfg.algo == "grpo" and cfg.model == "x/checkpoint-000003"
        found.append(cfg.name)
    assert found == [
        "alfworld-tiny-grpo-seed0-after-rwml", "alfworld-tiny-grpo-seed0-after-wm-sft",
        "alfworld-tiny-grpo-seed0-after-rwml-coin", "alfworld-tiny-grpo-seed0-after-rwml-keep-easy",
        "mine-after-rwml",
    ]


@pytest.mark.parametrize("preset, encoder, turns, rate", [
    ("tiny", "minilm", 16, 5e-4),
    ("paper", "Qwen/Qwen3-Embedding-8B", 30, 2e-6),  # its thresholds belong to this encoder
    ("24gb", "Qwen/Qwen3-Embedding-0.6B", 30, 2e-5),  # LoRA: ten times the rate
])
def test_settings_of_a_preset(tmp_path, monkeypatch, preset, encoder, turns, rate):
    asked = asked_of(tmp_path, monkeypatch, "--preset", preset, "--data", "d")
    assert asked.settings.encoder == asked.shared()["rwml encoder"] == encoder
    assert asked.settings.max_turns == turns
    assert stages.sft_rate(asked) == pytest.approx(rate)
    asked = asked_of(tmp_path, monkeypatch, "--preset", preset, "--data", "d", "--max-turns", "12",
                     "--encoder", "mine")
    assert asked.settings.encoder == "mine"
    assert asked.settings.max_turns == asked.cfg.max_turns == 12
    assert asked.flags[-2:] == ["--max-turns", "12"]  # of the policy RL that is printed


def test_the_run_without_the_filter(tmp_path, monkeypatch):
    """All triplets, at the same threshold, in a folder of its own."""
    out = tmp_path / "out"
    (out / "start").mkdir(parents=True)
    everything = [replace(TRIPLET, observation=f"o{n}") for n in range(10)]  # 9 to train on
    triplets.write_triplets(out / "triplets.jsonl", everything)
    triplets.write_triplets(out / "held_out.jsonl", everything[:1])
    shared = asked_of(tmp_path, monkeypatch).shared()
    found = dict(triplets=10, counts=dict(steps=20), panel={"eval_success": 0})
    (out / "collected.json").write_text(json.dumps(shared | found))
    found = dict(threshold=0.1, easy=0.9, kept=[2])
    (out / "filter.json").write_text(json.dumps(shared | found))
    trained = []
    monkeypatch.setattr(stages, "train", lambda job, *args: trained.append((job, *args)))
    for flags, n_kept in (([], 1), (["--keep-easy"], 9)):
        stages.main(["alfworld", "--out", str(out), *flags])
        job, kept, _, tau, _ = trained.pop()
        assert len(kept) == n_kept and tau == 0.2
    assert job.method_config().name == "rwml-keep-easy"
    with pytest.raises(UserError, match="collected.json was made with seed 0: repeat that, or cho"):
        stages.main(["alfworld", "--out", str(out), "--seed", "1"])


@pytest.mark.parametrize("flags, sentence", [
    (["alfworld", "--reward", "coin", "--method", "wm-sft"], "has no reward"),
    (["search", "--method", "early-experience"], "search has none"),
    (["alfworld", "--encoder", "no/such-folder/x"], "The encoder .* cannot be loaded"),
])
def test_impossible_flags(tmp_path, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        rwml_settings.arguments("", [*flags[:1], "--out", str(tmp_path / "out"), *flags[1:]])
    assert not (tmp_path / "out").exists()


def test_an_encoder_without_all_weights_is_refused(tmp_path):
    """transformers would fill in random ones."""
    folder = Path(make_encoder(tmp_path / "other"))
    weights = load_file(folder / "model.safetensors")
    first, *others = sorted(name for name in weights if "pooler" not in name)
    save_file({name: weights[name] for name in others}, folder / "model.safetensors",
              metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"no weights for {first}"):
        rwml_settings.load_encoder(str(folder), "cpu")


def collected(monkeypatch, found: triplets.Collected) -> None:
    """Collecting finds this."""
    monkeypatch.setattr(stages, "find_tasks", lambda cfg: None)
    monkeypatch.setattr(stages, "collect", lambda *args, **kwargs: found)
    monkeypatch.setattr(stages, "make_start", lambda *args: None)


def test_held_out_transitions_are_of_the_whole_panel(tmp_path, monkeypatch):
    """The panel is in the order of the task types: its first 200 steps are of some only."""
    panel = [replace(TRIPLET, observation=f"o{n}") for n in range(600)]
    collected(monkeypatch, triplets.Collected([TRIPLET] * 10, panel, {"steps": 10}, {}, []))
    stages.make_triplets(job_of(tmp_path))
    drawn = [int(t.observation[1:]) for t in triplets.read_triplets(tmp_path / "held_out.jsonl")]
    assert len(set(drawn)) == len(drawn) == 200
    assert all(sum(low <= n < low + 150 for n in drawn) > 25 for low in range(0, 600, 150))


def test_too_few_triplets_leave_no_pieces_for_other_tasks_to_meet(tmp_path, monkeypatch):
    counts = {"steps": 59, "too_long": 50}
    collected(monkeypatch, triplets.Collected([TRIPLET] * 9, [TRIPLET], counts, {}, []))
    job = job_of(tmp_path)
    with pytest.raises(UserError, match="9 triplets of 59 steps; dropped: too_long 50. These are"):
        stages.make_triplets(job)
    assert not job.pieces("collect").folder.exists()


def test_only_what_the_triplets_depend_on_needs_another_folder(tmp_path, monkeypatch):
    def shared(*flags):
        return asked_of(tmp_path, monkeypatch, *flags).shared()

    assert shared() == shared("--lr", "1e-3", "--kl-coef", "0", "--name", "x", "--no-paw")
    assert shared() == shared("--reward", "coin", "--target", "shuffled", "--epochs", "5")
    assert shared() != shared("--beta2", "0.9")
    assert shared() != shared("--max-turns", "3") != shared("--seed", "1")


# ---- early experience ----


def test_a_search_of_nothing_is_no_branch(monkeypatch, tmp_path):
    """WebShop lists search[<your query>], which is no command; click[< prev] is one."""
    monkeypatch.setattr(early_experience, "result_of", lambda pool, step, command: "a page")
    context = Context("buy", "o", ["search[<your query>]", "click[< prev]", "click[buy now]"])
    step = PlayedStep("0", context, GOOD.format("click[buy now]"), "")
    pieces = Pieces(tmp_path / "pieces", {})
    found = early_experience.branches(Config(env="webshop"), None, [step], pieces)
    assert [triplet.action for triplet in found] == ["click[buy now]", "click[< prev]"]


def test_branches_are_what_the_environment_answers(games_root, tmp_path):
    cfg = Config(prompt="compact", history_length=1)
    games = list_games(games_root, "train")[:2]
    steps = early_experience.demonstrated(cfg, games)[:3]
    pool = EnvPool(AlfworldEnv, 1, 0)
    pieces = Pieces(tmp_path / "pieces", {})
    found = early_experience.branches(cfg, pool, steps, pieces)
    assert len(found) > len(steps)
    env = AlfworldEnv()
    number = 0
    for step in steps:
        of_state = []
        while number < len(found) and found[number].observation == step.context.observation:
            of_state.append(found[number])
            number += 1
        commands = [t.action for t in of_state]
        # The expert's own command first, then K others that are admissible here, each once.
        assert f"<action>{commands[0]}</action>" in step.response
        assert len(commands) == len(set(commands)) <= 1 + early_experience.BRANCHES
        assert set(commands[1:]) <= set(step.context.admissible)
        for triplet in of_state:
            env.reset(step.task)
            for turn in step.context.history:
                env.step(turn.command)
            assert env.step(triplet.action).observation.strip() == triplet.next_observation
    assert number == len(found)
    # A game that is not the demonstrated one.
    with pytest.raises(UserError, match="does not repeat"):
        early_experience.result_of(pool, replace(steps[0], task=games[1]), "look")
    pool.close()
