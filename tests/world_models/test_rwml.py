"""RWML: answers, reward, filter and thresholds by hand. test_stages.py has small runs.

The sentence encoder is the real all-MiniLM-L6-v2, the games are real small ALFWorld games.
"""

import math
import os
import random
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context, Tasks, Turn
from paw_min.envs.pool import EnvPool
from paw_min.model.sampler import HFSampler, Response
from paw_min.rows import Episode, Transition
from tests.helpers import make_policy
from world_models import rwml
from world_models.rwml import early_experience, settings, stages, triplets
from world_models.teachers import TEACHERS
from world_models.teachers.demonstrate import PlayedStep

# ---- formulas ----

@pytest.mark.parametrize("response, expected", [
    ("<think>x</think><next_state>You see a mug 1.</next_state>", "You see a mug 1."),
    ("<next_state> a \n</next_state> and more", "a"),
    # The last opening tag counts.
    ("<next_state>a</next_state><next_state>b</next_state>", "b"),
    ("<next_state>a</next_state><next_state>b", None),  # cut by the limit
    ("<next_state> </next_state>", None),
])
def test_predicted_state(response, expected):
    assert rwml.predicted_state(response) == expected


def test_reward_is_strict_and_malformed_answers_get_none():
    rewards = [rwml.reward(distance, 0.2) for distance in (0.0, 0.1999, 0.2, 0.3)]
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    assert rwml.reward(math.inf, 1e9) == 0.0


@pytest.mark.parametrize("drawn, kept", [(0.1, [0, 2]), (0.0999, [0, 1, 2, 3, 4])])
def test_too_easy_keeps_what_was_never_hit_and_a_tenth_of_the_rest(drawn, kept):
    assert rwml.too_easy([0, 10, 0, 1, 3], SimpleNamespace(random=lambda: drawn)) == kept


@pytest.mark.parametrize("nearest, threshold, easy", [
    ([d / 1000 for d in range(20, 520, 5)], 0.17, 30),
    ([0.0] * 60 + [0.3] * 40, 0.01, 60),  # exact predictions are easy at any threshold
    ([0.9] * 10, 0.5, 0),  # above 0.5, generic answers would pass
])
def test_the_filters_threshold_makes_30_percent_easy(nearest, threshold, easy):
    random.Random(0).shuffle(nearest)
    found = rwml.calibrated_threshold(nearest, 0.3)
    assert found == pytest.approx(threshold)
    assert sum(rwml.reward(d, found) for d in nearest) == easy


@pytest.mark.parametrize("tau_d, trained", [
    (0.1, 0.2),  # ALFWorld
    (0.15, 0.4),  # tau2: 0.30 is halfway and rounds up
    (0.35, 0.6),
    (0.01, 0.2),
])
def test_training_threshold_has_the_papers_values(tau_d, trained):
    assert rwml.training_threshold(tau_d) == trained


@pytest.fixture(scope="module")
def minilm():
    return settings.load_encoder("minilm", "cpu")


def test_distance_is_one_minus_the_cosine(minilm):
    texts = ["You open the fridge 1.", "You close the fridge 1.", "Buy now"]
    a, b, c = minilm.passages(texts)
    found = rwml.distances(minilm, [texts[0], texts[1], None, texts[2]], [texts[0]] * 4)
    assert found == pytest.approx([0, 1 - a @ b, math.inf, 1 - a @ c], abs=1e-6)
    assert found[3] > found[1] > 0.01


def test_an_end_that_the_encoder_does_not_read_has_no_reward(minilm):
    """It reads 512 of its own tokens; a model's answer may be longer."""
    truth = "a mug " * 254 + "a"  # with two tokens of its own
    longer = truth + " mug"
    assert minilm.reads([truth, truth + " b", longer + " mug"]) == [True, True, False]
    wrong = longer + " and the fridge 1 is open"
    assert rwml.distances(minilm, [truth, wrong], [truth, longer]) == [
        pytest.approx(0, abs=1e-6), math.inf
    ]


def test_quality_by_hand():
    predicted = ["a", None, "c", "d"]
    truths = ["a", "b", "x", "y"]
    measured = rwml.quality(predicted, truths, [0.0, math.inf, 0.3, 1.2], 0.3)
    assert measured == pytest.approx(
        {"reward": 1 / 4, "exact": 1 / 4, "cosine": (1 + 0 + 0.7 - 0.2) / 4, "well_formed": 3 / 4}
    )


# ---- triplets ----

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
    assert stages.play(cfg, [episode]) == {"eval_success": 0.0, "eval_invalid": 2 / 4}
    again.won, other.failed = True, "no engine"
    assert stages.play(cfg, [again, other])["eval_success"] == 1.0
    # A triplet has the last turns.
    longer = episode_of(*((f"o{t}", f"a{t}", f"o{t + 1}", True) for t in range(4)))
    last = triplets.triplets_of(cfg, [longer]).triplets[-1]
    assert last.history == [Turn("o1", "a1"), Turn("o2", "a2")]
    assert (last.observation, last.steps) == ("o3", 3)


TRIPLET = triplets.Triplet(
    "put a mug in desk", [Turn("room", "go to desk 1")], "desk", "go to shelf 1", "a shelf 1"
)


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
    assert "already taken" not in triplets.prompt_text(cfg, replace(one, history=[], steps=0))


def test_labels_are_answers_and_the_tags_are_added_once():
    policy = make_policy()
    stages.add_tags(policy, seed=0)
    size = len(policy.tokenizer)
    assert policy.model.get_input_embeddings().num_embeddings == size
    row = triplets.sft_row(Config(prompt="compact"), policy, TRIPLET)
    # Asked as it is answered: without a thought.
    asked = triplets.prompt_text(Config(prompt="compact"), TRIPLET, reason=False)
    assert row.prompt_ids == policy.encode_chat(asked)
    text = policy.decode(row.response_ids)
    assert [rwml.predicted_state(text)] == rwml.truths_of(policy, [TRIPLET]) == ["a shelf 1"]
    assert text.startswith("<think> </think>") and row.response_ids[-1] in policy.eos_ids
    stages.add_tags(policy, seed=0)
    assert len(policy.tokenizer) == size


def test_what_cannot_be_answered_does_not_fit(minilm):
    policy = make_policy()
    limit = triplets.TAG_TOKENS + len(policy.encode("a shelf 1"))

    def fits(prompt_tokens: int, limit: int, triplet=TRIPLET) -> bool:
        cfg = Config(prompt="compact", max_prompt_tokens=prompt_tokens)
        return bool(triplets.fitting(cfg, policy, [triplet], limit, minilm))

    assert fits(60, limit)
    assert not fits(60, limit - 1)
    assert not fits(3, limit)
    assert not fits(60, 9999, replace(TRIPLET, next_observation=300 * "a mug "))  # not into E


def test_a_stage_has_room_for_actions_and_for_answers(model):
    """The longer of the two counts: this model has positions for neither."""
    for actions, answers in ((10**6, 9), (9, 10**6)):
        cfg = Config(prompt="compact", max_prompt_tokens=9, max_response_tokens=actions)
        with pytest.raises(UserError, match="has 32768 positions"):
            with stages.loaded_for_answers(cfg, model, answers):
                pass


def test_a_try_is_compared_with_its_own_triplet(minilm, monkeypatch):
    """The nearest of two tries counts; one of each is exact."""
    policy = make_policy()
    other = replace(TRIPLET, next_observation="desk")
    texts = [["go", "a shelf 1"], ["desk", "go"]]
    answers = [[Response(0, policy.encode(text), []) for text in tries] for tries in texts]
    monkeypatch.setattr(rwml, "predict", lambda *_, **__: answers)
    monkeypatch.setattr(rwml, "predicted_state", lambda text: text)
    found = rwml.tries(
        Config(prompt="compact"), policy, HFSampler(), minilm, [TRIPLET, other], 2, 9
    )
    assert found == pytest.approx([0, 0], abs=1e-6)


# ---- GRPO on answers ----

def test_answers_to_a_triplet_are_a_group():
    prompts = [[3, 4, 5], [6, 7]]
    answers = [
        [Response(0, [8, 2], [-1.0, -1.0]), Response(1, [9, 2], [-1.0, -1.0])],
        [Response(2, [10, 11, 2], [-1.0] * 3), Response(3, [12, 2], [-1.0] * 2)],
    ]
    rows = rwml.answer_rows(prompts, answers, [1.0, 0.0, 1.0, 1.0])
    assert rows.group == [0, 0, 1, 1]
    assert [row.prompt_ids for row in rows.tokens] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert rows.tokens[2].response_ids == [10, 11, 2]
    assert [row.reward for row in rows.transitions] == [1.0, 0.0, 1.0, 1.0]


def test_an_epoch_has_every_triplet_once_in_an_order_of_its_own():
    epochs = [[rwml.batch_of_update(k, 7, 3, seed=0) for k in ks] for ks in ((1, 2, 3), (4, 5, 6))]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [3, 3, 1]
        assert sorted(sum(batches, [])) == list(range(7))
    assert epochs[0] != epochs[1]


# ---- the command line ----

def test_settings_are_the_papers(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "load_encoder", lambda name, device: None)
    monkeypatch.setattr(settings, "check_machine", lambda cfg: None)  # no vLLM is needed

    def asked(preset: str) -> settings.RwmlJob:
        words = ["alfworld", "--preset", preset, "--data", "d", "--out", str(tmp_path / "out")]
        return settings.parse("", words)

    job = asked("paper")
    assert asdict(job.settings) == dict(
        method="rwml", tasks=2048, episodes=3, max_turns=30, validation=0.1, tries=10,
        easy_share=0.3, batch=32, epochs=2, sft_lr=2e-6, sft_epochs=2, warm_epochs=0,
        answer_tokens=512, encoder="Qwen/Qwen3-Embedding-8B",  # the thresholds belong to it
    )
    assert (rwml.KEEP, rwml.MARGIN, rwml.STEP, early_experience.BRANCHES) == (0.1, 0.15, 0.2, 8)
    paper = dict(lr=1e-6, group_size=8, kl_coef=0.01, temperature=1.0)
    assert paper.items() <= vars(job.cfg).items()
    assert asked("24gb").settings.sft_lr == pytest.approx(2e-5)  # LoRA has ten times the rate


def test_another_name_is_another_run_on_the_same_triplets(tmp_path):
    """A run folder with another --lr asks for it."""
    words = ["alfworld", "--out", str(tmp_path), "--method", "wm-sft"]
    jobs = [settings.parse("", [*words, *more]) for more in ([], ["--name", "b"])]
    assert jobs[0].shared() == jobs[1].shared()
    for job, folder in zip(jobs, ("wm-sft", "wm-sft-b")):
        assert job.method_config().name == folder
        assert f"alfworld-tiny-grpo-seed0-after-{folder}" in stages.policy_rl(job, tmp_path)


# ---- stages ----


def job_of(cfg: Config) -> settings.RwmlJob:
    return settings.RwmlJob(cfg, settings.RwmlSettings(tasks=1), "rwml", Path("out"), None, [])


def test_the_filter_has_its_own_threshold(monkeypatch):
    """Table A2: 30 % are easy at the filter's tau_d of 0.13. At training's, 0.2, half would be."""
    nearest = [0.10, 0.11, 0.12, 0.13, 0.19, 0.2, 0.3, 0.3, 0.3, 0.3]
    policy = make_policy()
    monkeypatch.setattr(stages, "loaded_for_answers", lambda *_: nullcontext((policy, None)))
    monkeypatch.setattr(stages, "supervise", lambda *_: {})
    monkeypatch.setattr(rwml, "tries", lambda *_: nearest)
    monkeypatch.setattr(rwml, "KEEP", 0.0)
    found = stages.make_filter(job_of(Config()), [], [TRIPLET] * 10)
    assert found == {"threshold": 0.13, "easy": 0.3, "kept": [3, 4, 5, 6, 7, 8, 9]}


def test_only_well_formed_responses_are_rehearsed(monkeypatch):
    episode = episode_of(*((f"o{t}", "look", f"o{t + 1}", t != 1) for t in range(12)))
    for t, step in enumerate(episode.transitions):
        step.response_ids = [t]
    played = SimpleNamespace(episodes=[episode])
    rehearsed = []
    loaded = nullcontext((make_policy(), HFSampler()))
    tasks = Tasks(["g"], ["g"], lambda n: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(stages, "find_tasks", lambda cfg: tasks)
    monkeypatch.setattr(stages, "loaded_for_answers", lambda *_: loaded)
    monkeypatch.setattr(stages, "rollout", lambda *_: played)
    monkeypatch.setattr(stages, "evaluate", lambda *_: played)
    monkeypatch.setattr(stages, "fitting", lambda cfg, policy, triplets, *_: triplets)
    monkeypatch.setattr(stages, "write_triplets", lambda *_: None)
    monkeypatch.setattr(stages, "make_start", lambda job, labels, acts: rehearsed.extend(acts))
    stages.make_triplets(job_of(Config(prompt="compact", groups=1)))
    assert [row.response_ids for row in rehearsed] == [[t] for t in range(12) if t != 1]


@pytest.mark.parametrize("flags, sentence", [
    (["search", "--method", "early-experience"], "search has none"),
    (["webshop", "--method", "early-experience", "--data", "d"], "omit --data"),
    (["webshop", "--method", "early-experience", "--n-products", "5"], "omit .*--n-products"),
    (["alfworld", "--sampler", "vllm", "--answer-tokens", "10", "--max-response-tokens", "20"],
     "--answer-tokens 10 with --sampler vllm would cut responses of 20 tokens"),
    (["alfworld", "--encoder", "no/such-folder/x"], "The encoder .* cannot be loaded"),
])
def test_impossible_flags(tmp_path, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        settings.parse("", [*flags[:1], "--out", str(tmp_path / "out"), *flags[1:]])
    assert not (tmp_path / "out").exists()


# ---- early experience ----


def test_a_search_of_nothing_is_no_branch(monkeypatch):
    """WebShop lists search[<your query>], which is not a command; click[< prev] is one."""
    monkeypatch.setattr(early_experience, "result_of", lambda pool, step, command: "a page")
    context = Context("buy", "o", ["search[<your query>]", "click[< prev]", "click[buy now]"])
    step = PlayedStep("0", context, "<think>x</think><action>click[buy now]</action>", "")
    found = early_experience.branches(Config(env="webshop"), None, [step])
    assert [triplet.action for triplet in found] == ["click[buy now]", "click[< prev]"]


def test_branches_are_what_the_environment_answers(games_root):
    cfg = Config(prompt="compact", history_length=1)
    games = list_games(games_root, "train")[:2]
    steps = TEACHERS["alfworld"].demonstrations(games, cfg.seed, haste=0.0, episodes=1)[:3]
    env = AlfworldEnv()
    with closing(EnvPool(AlfworldEnv, 1, 0)) as pool:
        found = early_experience.branches(cfg, pool, steps)
        # A game that is not the demonstrated one.
        with pytest.raises(UserError, match="does not repeat"):
            early_experience.result_of(pool, replace(steps[0], task=games[1]), "look")
    states = [list(those) for _, those in groupby(found, key=lambda one: one.observation)]
    for step, of_state in zip(steps, states, strict=True):
        commands = [t.action for t in of_state]
        # The expert's own command first, then K others that are admissible here, each once.
        assert f"<action>{commands[0]}</action>" in step.response
        assert 1 < len(commands) == len(set(commands)) <= 1 + early_experience.BRANCHES
        assert set(commands[1:]) <= set(step.context.admissible)
        for triplet in of_state:
            env.reset(step.task)
            for turn in step.context.history:
                env.step(turn.command)
            assert env.step(triplet.action).observation.strip() == triplet.next_observation
