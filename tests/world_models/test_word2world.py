"""Word2World: every measure by hand, and broken world models get what they deserve.

The oracle answers with the real environment. With it, the dream is the environment.
"""

import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tokenizers import normalizers

from paw_min.base.errors import UserError
from paw_min.config import Config
from paw_min.envs.alfworld import AlfworldEnv, list_games
from paw_min.envs.interface import Context, Step
from paw_min.envs.pool import EnvPool
from paw_min.envs.webshop.env import make_agent
from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy
from paw_min.model.sampler import HFSampler
from paw_min.toy import default_data
from paw_min.toy.standins import make_model
from tests.helpers import (
    CHATML,
    INJECTION,
    ROOT,
    SMALL,
    chatml_tokenizer,
    control_tokens,
    one_sentence,
    publish,
)
from world_models import word2world
from world_models.supervised import fit
from world_models.word2world import commands, players, prompted, training, trajectories
from world_models.word2world.dream import DreamPool, VerifiedPool
from world_models.word2world.settings import COMMANDS, parse
from world_models.word2world.trajectories import Trajectory, said, to_step, to_text
from world_models.word2world.world_model import WorldModel, check_template, word_tokenizer

T = True
F = False
BUY = "click[buy now]"
FIRST = Step("A room. Your task is to: nap.", "nap.", "pick", ["look", "go to bed 1"])


def chat_of(*contents):
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [said(role, content) for role, content in zip(roles, contents)]


# --- measures, by hand -----------------------------------------------------------------------


@pytest.mark.parametrize("real, dream, replay, expected", [
    # Won in the dream and lost in the replay: WM counts the marker, W2R does not.
    ([T, F], [T, T], [F, F], dict(real=0.5, wm=1.0, w2r=0.0, cr=0.0, pairwise_cr=0.0)),
    # CR above 1: the dream's plans win more often. Pairwise, one of the two is still lost.
    ([T, T, F, F], [F, F, T, T], [T, F, T, T],
     dict(real=0.5, wm=0.5, w2r=0.75, cr=1.5, pairwise_cr=0.5)),
    # There is no ratio without a real win.
    ([F, F], [T, F], [T, F], dict(real=0.0, wm=0.5, w2r=0.5, cr=None, pairwise_cr=None)),
])
def test_rates_by_hand(real, dream, replay, expected):
    assert word2world.rates(real, dream, replay) == expected


def test_fidelity_pools_the_turns():
    # "a" is right at all 3 first turns, and at 1 of the 3 later ones: 4 of 6, not the mean of the
    # trajectories, (1 + 2/4) / 2.
    short = chat_of("s", "go", "a")
    last = "c\nAvailable actions: x [SUCCESS]"
    longer = chat_of("s", "go", "a", "go", "a", "go", "b", "go", last)
    data = [Trajectory(messages=chat) for chat in (short, short, longer)]
    found = word2world.measure_fidelity(lambda t: ["a"] * len(t.answers), data)
    assert found["em"] == 4 / 6 and found["n"] == 6
    # The marker counts, also without the list of actions; white space at the ends does not.
    found = word2world.measure_fidelity(lambda t: ["c [SUCCESS]"] * len(t.answers), data)
    assert found["em"] == 0 and found["em_observation"] == 1 / 6
    found = word2world.measure_fidelity(lambda t: [" a\n", None, "b [SUCCESS]", "c"], data[2:])
    assert found["em"] == found["em_observation"] == 1 / 4


# --- steps and chats as text -----------------------------------------------------------------


def test_a_step_as_text_and_back():
    step = Step("You see a bed.\n", "nap.", "pick", ["look", "sleep in bed 1"])
    text = "You see a bed.\nAvailable actions: look | sleep in bed 1"
    assert to_text(step) == text
    assert to_step(text, FIRST) == replace(step, observation="You see a bed.")
    won = Step("You sleep.", "nap.", "pick", ["look"], reward=10.0, done=True, won=True)
    assert to_text(won) == "You sleep. [SUCCESS]"
    read = to_step("You sleep. [SUCCESS] and so on", FIRST)
    assert (read.observation, read.done, read.won) == ("You sleep.", True, True)
    # A purchase of the wrong product: nothing is said, and there is no sign of the end.
    assert to_text(Step("", "buy", "pick", ["click[x]"], done=True)) == ""
    assert not to_step("", FIRST).done
    # A win that is taken back is none: WebShop's score of 1 counts at the purchase only.
    assert "[SUCCESS]" not in to_text(replace(won, won=False))


@pytest.mark.parametrize("actions", [
    ["click[cork | leather]", "click[red]"],
    ["click[a | b [2 | 4]]", "click[a [b | c] d]", "click[red]"],
    ["search[<your query>]", "click[2] | [3]", "click[x [y]", "click[:] | z]", "click[< prev]"],
    ["look", "go to bed 1", "press[a | b]"],  # an environment of one's own
])
def test_actions_are_read_back_as_written(actions):
    """WebShop's options have bars and brackets of their own."""
    assert to_step(to_text(Step("x", "nap.", "pick", actions)), FIRST).admissible == actions


def test_hidden_state_is_what_the_places_hold(games_root, tmp_path):
    game = list_games(games_root, "train")[0]
    text = Path(game).read_text()
    fridge, lamp = (re.search(rf"\({kind}_[^ )]+|{kind}_bar[^ )]+", text)[0].strip("(")
                    for kind in ("Fridge", "DeskLamp"))
    changed = tmp_path / "game.tw-pddl"
    facts = f"(:init\\n(opened {fridge})\\n(isToggled {lamp})"
    changed.write_text(text.replace("(:init", facts))
    lines = trajectories.hidden_state(str(changed)).splitlines()
    assert any(line.startswith("The fridge 1 (open): ") for line in lines)
    assert "The desklamp 1 is on." in lines
    env = AlfworldEnv()
    first = env.reset(game)
    hidden, seen = trajectories.initial_context("alfworld", game, first).split(trajectories.SEEN)
    assert first.observation.strip() in seen
    lines = hidden.splitlines()
    places = [c.removeprefix("go to ") for c in first.admissible if c.startswith("go to ")]
    closed = 0
    for place in places:
        shown = env.step(f"go to {place}").observation
        state = ""
        if f"The {place} is closed" in shown:
            closed += 1
            state = " (closed)"
            shown = env.step(f"open {place}").observation
        things = shown.partition("you see ")[2].rstrip(".").replace(", and ", ", ")
        assert (f"The {place}{state}: {things}." in lines) == bool(state or things != "nothing")
    assert closed >= 2
    assert any("lamp" in line and line.endswith("is off.") for line in lines)


def test_recorded_decisions_are_what_the_agent_knew(games, monkeypatch):
    cfg, tasks, make_pool = games
    played = []
    really = players.play
    monkeypatch.setattr(players, "play", lambda *args: played.extend(really(*args)) or played)
    (trajectory,) = players.play_rules(cfg, "teacher", 0.3, make_pool(1), tasks[:1])
    (steps,) = played
    assert len(steps) > 3
    for (context, response), step in zip(trajectories.decisions(trajectory), steps, strict=True):
        known = step.context
        assert (context.admissible, response) == (known.admissible, step.response)
        assert context.observation == known.observation.strip()
        assert [t.command for t in context.history] == [t.command for t in known.history]


# --- the language model ----------------------------------------------------------------------

REWRITES = (  # like Qwen3's: a thought before the last answer only
    "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<agent>\n\n{% endif %}"
)

TRIMS = (  # like Llama 3's
    "{% for m in messages %}<user>{{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<agent>{% endif %}"
)


def language_model(template=None, context=500, tokenizer=None, answer_tokens=5):
    tokenizer = tokenizer or word_tokenizer(["go to bed 1", "You see: a mug, 2 cups.", "cups"])
    if template:
        tokenizer.chat_template = template
    return WorldModel(Policy(make_model(tokenizer, 0, 32), tokenizer), context, answer_tokens)


def test_an_answer_from_scratch_ends_before_the_next_turn():
    model = language_model()
    tokenizer = model.policy.tokenizer
    ids, (first, last) = model.tokens(chat_of("cups", "go to bed 1", "You see", "cups", "You"))
    assert [ids[first[-1]], ids[last[-1]]] == 2 * [tokenizer.eos_token_id]
    assert ids[first.stop] == tokenizer.convert_tokens_to_ids("<user>")


def learn(model, *contents):
    """Train on one chat until its answers are what the model says."""
    row = model.row(Trajectory(messages=chat_of(*contents)))
    optimizer = torch.optim.AdamW(model.policy.parameters(), lr=1e-2)
    fit(model.policy, optimizer, [row], epochs=60, batch=1, warm_up=5, micro_tokens=99,
        seed_key=(0,))


@pytest.mark.parametrize("template", [None, REWRITES, TRIMS])
def test_a_row_is_the_prompts_of_all_its_answers(template):
    model = language_model(template)
    chat = chat_of("You see: a mug", "go to bed 1", "a mug", "go to 2", "2 cups.", "go", "You see:")
    row = model.row(Trajectory(messages=chat))
    ids = row.prompt_ids + row.obs_ids
    first = len(row.prompt_ids)
    targets = []
    # Each answer, with its end token, follows the prompt that `predict` makes of its prefix.
    for k in (2, 4, 6):
        prompt, _ = model.tokens(chat[:k])
        answer = model.policy.encode(chat[k]["content"]) + [model.end]
        end = len(prompt) + len(answer)
        assert ids[:end] == prompt + answer
        targets += range(len(prompt) - first, end - first)
    assert not row.response_ids
    assert set(targets) == set(range(len(row.obs_ids))) - set(row.context_positions)


@pytest.mark.parametrize("before", ["", " "])  # Llama 2 writes a space before it
def test_an_answer_has_the_end_token_of_the_template_and_no_other(before):
    """A base model's tokenizer has another one. No text of a chat becomes a control token."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", f"{before}<|im_end|>")
    model = language_model(tokenizer=tokenizer)
    for texts in (["a", "go", "b", "go", "c"], [INJECTION] * 5):
        row = model.row(Trajectory(messages=chat_of(*texts)))
        found = control_tokens(model.policy, row.prompt_ids + row.obs_ids)
        assert found == ["<|im_start|>", "<|im_end|>"] * 5


def test_a_long_chat_is_cut_after_a_whole_answer_and_not_predicted():
    chat = chat_of("You", "go", "a mug", "go", "2 cups.", "go")
    lengths = [len(language_model().tokens(chat[:k])[0]) for k in (3, 5)]
    assert language_model().row(Trajectory(messages=chat)).obs_ids  # the last go has no answer
    cut = language_model(context=lengths[1] - 1).row(Trajectory(messages=chat))
    assert len(cut.prompt_ids) + len(cut.obs_ids) == lengths[0]
    tiny = language_model(context=lengths[0] - 1)
    assert tiny.row(Trajectory(messages=chat)) is None
    too_long, short = tiny.predict([chat[:4], chat[:2]])
    assert too_long is None and short is not None


def test_answers_in_one_pass_are_those_of_greedy_decoding():
    model = language_model()
    texts = ("You see a mug", "go", "You see a mug", "go to 2", "cups", "go to bed", "You", "go 1",
             "You see cups")
    learn(model, *texts)
    learned = chat_of(*texts)
    # The first two targets are what it says. The third is longer, the fourth ends too early.
    chat = [*learned[:6], said("assistant", "You see"), learned[7], said("assistant", "You see")]
    generated = [model.predict([chat[:k]])[0] for k in (2, 4, 6, 8)]
    assert model.answers(Trajectory(messages=chat)) == generated
    assert generated[:3] == ["You see a mug", "cups", "You"] and generated[3] != "You see"


GO = "\nAvailable actions: go"
RUN = "\nAvailable actions: run"


@pytest.mark.parametrize("says, truth, em, em_observation", [
    # Only the list of actions is wrong; then the answer also has a marker, which the truth lacks.
    (f"a mug{RUN}", f"a mug{GO}", 0.0, 1.0),
    (f"a mug{RUN} [SUCCESS]", f"a mug{GO}", 0.0, 0.0),
    # Qwen2.5's tokenizer writes all texts in NFC.
    (f"un caf\u00e9{GO}", f"un cafe\u0301{GO}", 1.0, 1.0),
    (f"un caf\u00e9{RUN}", f"un cafe\u0301{GO}", 0.0, 1.0),
    # No tokenizer writes words that it lacks.
    ("un caf\u00e9", "un cafe\u0301 zebra", 0.0, 0.0),
])
def test_an_answer_counts_as_the_model_can_write_it(says, truth, em, em_observation):
    tokenizer = word_tokenizer(["x", "go", "un caf\u00e9", f"a mug [SUCCESS]{GO} | run"])
    # Qwen's tokenizer has ".\n" as one token: the first wrong token begins as the truth.
    tokenizer.add_tokens([" mug\n"])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    model = language_model(tokenizer=tokenizer, answer_tokens=12)
    learn(model, "x", "go", says)
    assert model.predict([chat_of("x", "go")]) == [says]
    target = Trajectory(messages=chat_of("x", "go", truth))
    found = word2world.measure_fidelity(model.answers, [target])
    assert (found["em"], found["em_observation"]) == (em, em_observation)


# --- world models, good and broken -----------------------------------------------------------


def oracle_of(tasks):
    """Answers with the real environment, replayed from its start."""
    env = AlfworldEnv()
    starts = {trajectories.initial_context("alfworld", t, env.reset(t)): t for t in tasks}

    def answer(chat):
        step = env.reset(starts[chat[0]["content"]])
        for message in chat[1::2]:
            if not step.done:
                step = env.step(message["content"])
        return to_text(step)

    return lambda chats: [answer(chat) for chat in chats]


def success(chats):
    return ["Done. [SUCCESS]"] * len(chats)


def nothing(chats):
    return ["Nothing happens."] * len(chats)


@pytest.fixture(scope="module")
def games(games_root):
    """(settings, tasks, function from a number to a pool)."""
    cfg = Config(data=str(games_root), **SMALL | {"max_turns": 25})
    return cfg, list_games(games_root, "train")[:6], partial(EnvPool, AlfworldEnv)


def consistency(games, predict, agent="teacher"):
    cfg, tasks, make_pool = games

    def play(where, pool, tasks):
        return players.play_rules(cfg, agent, 0.0, pool, tasks)

    return word2world.measure_consistency("alfworld", predict, make_pool, tasks, play)


@pytest.fixture(scope="module")
def recorded(games):
    cfg, tasks, make_pool = games
    return players.play_rules(cfg, "teacher", 0.3, make_pool(3), tasks)


def test_the_oracle_is_perfect(games, recorded):
    oracle = oracle_of(games[1])

    def single_steps(trajectory):
        chat = trajectory.messages
        return oracle([chat[:k] for k in range(2, len(chat), 2)])

    found = word2world.measure_fidelity(single_steps, recorded)
    assert found["em"] == found["em_observation"] == 1.0
    assert found["n"] == sum(len(t.answers) for t in recorded) > 40
    cfg, tasks, make_pool = games
    assert recorded != players.play_rules(cfg, "teacher", 0.0, make_pool(3), tasks)  # slips
    found = consistency(games, oracle)
    assert found["real"] == found["wm"] == found["w2r"] == found["cr"] == 1.0
    assert all(e["real_steps"] == e["wm_steps"] for e in found["episodes"])


def test_a_dream_of_the_oracle_is_the_environment_for_a_language_model(games, model):
    cfg, tasks, make_pool = games
    cfg = replace(cfg, model=model, max_turns=4)
    play = partial(players.play_model, cfg, load_policy(model), HFSampler())
    real = play(make_pool(6), tasks)
    assert real == play(DreamPool("alfworld", oracle_of(tasks), make_pool(1), 2), tasks)
    assert len({tuple(t.responses) for t in real}) > 1


def test_cut_prompts_are_named(games, model, capsys):
    """A run script would stop."""
    cfg, tasks, make_pool = games
    cfg = replace(cfg, model=model, max_turns=1, max_prompt_tokens=9)
    players.play_model(cfg, load_policy(model), HFSampler(), make_pool(2), tasks[:2], "m, real")
    assert "m, real: 2 prompts lost their beginning" in capsys.readouterr().out


def test_a_thought_that_the_template_opens(games, model, tmp_path):
    """It belongs to an agent's response. A world model would tell its own to the agent."""
    policy = load_policy(model)
    publish(policy.tokenizer, "deepseek_r1_distill")
    cfg, tasks, make_pool = games
    cfg = replace(cfg, max_turns=1, max_prompt_tokens=999)
    (trajectory,) = players.play_model(cfg, policy, HFSampler(), make_pool(1), tasks[:1])
    assert trajectory.responses[0].startswith("<think>")
    policy.save(tmp_path)
    with pytest.raises(UserError, match="opens a thought before each answer"):
        prompted.load_prompted(str(tmp_path), cfg, 0, (), set(), 5)


def test_broken_world_models(games):
    found = consistency(games, success)  # at once
    assert found["wm"] == 1.0 and found["w2r"] == found["cr"] == found["pairwise_cr"] == 0.0
    assert all(episode["wm_steps"] == 1 for episode in found["episodes"])

    # The rules may raise anything on a dreamed page; the command is then a random one.
    player = players.RulePlayer(Mock(act=Mock(side_effect=IndexError)), 0.0, random.Random(0))
    assert player.act(Context("nap", "?", ["look"])).command == "look"

    found = consistency(games, lambda chats: [None] * len(chats))  # every chat is too long
    assert found["real"] == 1.0 and found["wm"] == found["w2r"] == 0.0 and found["n"] == 6
    assert all("longer than" in episode["failed"] for episode in found["episodes"])

    class Broken(AlfworldEnv):
        def step(self, command):
            raise RuntimeError("broken")

    dream = [Trajectory(task=games[1][0], messages=chat_of("s", "look", "x"))]
    assert word2world.replay_actions(EnvPool(Broken, 1), dream) == [False]


# --- WebShop: the verifier -----------------------------------------------------


@pytest.mark.parametrize("predict, budget, purchases, checks, vetoes", [
    (nothing, 0, [BUY], 0, 0),  # no budget: the purchase goes through, and is not simulated
    (nothing, 2, [f"{BUY} to finish", BUY, BUY], 2, 2),
    (success, 2, [BUY], 1, 0),  # always expects success
])
def test_the_verifier_vetoes_until_its_budget_is_spent(
    predict, budget, purchases, checks, vetoes
):
    make_env = partial(make_agent, default_data("webshop"), False, None)
    pool = VerifiedPool("webshop", EnvPool(make_env, 1), predict, budget)
    pool.reset(0, "0")
    pool.recv()

    def step(command):
        pool.step(0, command)
        return pool.recv().step

    step(BUY)  # finds no button, buys nothing, and is not checked
    product = next(c for c in step("search[lamp]").admissible if c.startswith("click[b0"))
    page = step(product)
    *vetoed, bought = map(step, purchases)
    # The same page again, and the real episode has not moved; then it goes through.
    assert vetoed == [page] * vetoes and bought.done and not page.done
    assert (pool.checks, pool.vetoes) == (checks, vetoes)
    assert pool.trajectories[0].commands == [BUY, "search[lamp]", product, BUY]


# --- prompted world models -------------------------------------------------------------------


def test_a_prompted_world_model_reads_instructions_before_the_chat(recorded):
    trajectory = recorded[0]
    texts = [message["content"] for message in trajectory.messages]
    instructions = f"{prompted.INSTRUCTIONS}\n\n=== Example 1 ==="
    tokenizer = word_tokenizer([instructions, "=== The episode ===\n\n", *texts])
    policy = Policy(make_model(tokenizer, 0, 32, positions=5000), tokenizer)
    model = prompted.PromptedWorldModel(policy, instructions, answer_tokens=4)
    assert model.context == 5000  # the paper's 12,288, or the positions of the model
    ids, spans = model.tokens(trajectory.messages)
    system = f"{instructions}\n\n=== The episode ===\n\n{texts[0]}"
    assert policy.tokenizer.decode(ids).startswith(f"{system}<user>{texts[1]}<agent>")
    answers = [policy.decode(ids[span.start : span.stop]) for span in spans]
    assert answers == trajectory.answers


def test_examples_are_steps_of_training_trajectories(recorded):
    drawn = prompted.draw_examples(recorded, 3, seed=0)
    owners = set()
    for example in drawn:
        (owner,) = [t for t in recorded if f"===\n\n{t.messages[0]['content']}\n\n" in example]
        owners.add(owner.task)
        step = example.rpartition("\n\nCommand: ")[2]
        pairs = zip(owner.commands, owner.answers)
        assert step in [f"{asked}\n\nAnswer: {answer}" for asked, answer in pairs]
    assert len(owners) == 3
    with pytest.raises(UserError, match="has 2 episodes with an answer, --shots asks for 3"):
        prompted.draw_examples([*recorded[:2], Trajectory()], 3, seed=0)


def test_a_template_that_refuses_a_system_message():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(UserError, match=r"refuses the chat of a world model \(.*no system"):
        check_template(language_model(refuses))


# --- commands --------------------------------------------------------------------------------


def test_imitation_rows_are_the_first_wins_of_each_file(recorded, model, tmp_path, monkeypatch):
    wins = [t for t in recorded if t.won]
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    for file, first in zip(files, wins):
        trajectories.write_trajectories(Path(file), [first, wins[2]])
    words = ["imitate", "alfworld", "--trajectories", *files, "--model", model]
    words += ["--max-prompt-tokens", "30", "--wins", "1", "--out", str(tmp_path / "o")]
    monkeypatch.setattr(training, "fit_and_save", lambda job, policy, optimizer, rows, n: rows)
    rows = training.imitate(parse("", words))
    policy = load_policy(model)
    for row, response in zip(rows, [*wins[0].responses, *wins[1].responses], strict=True):
        assert row.response_ids == [*policy.encode(response), policy.eos_ids[0]]
        assert not row.obs_ids and len(row.prompt_ids) == 30  # cut as in a rollout


def test_the_defaults_are_the_papers():
    """Table 7 and the README of the released code; section 7.1 for the budgets."""
    words = ["alfworld", "--trajectories", "x", "--out", "o", "--preset", "paper", "--data", "d"]
    job = parse("", ["train", *words])
    chosen = job.settings
    assert (chosen.epochs, chosen.batch, chosen.lr, chosen.context) == (5, 128, 1e-5, 12_288)
    assert job.cfg.max_turns == 50 and job.cfg.temperature == 1.0
    assert chosen.answer_tokens == 512 and chosen.budgets == (0, 2, 4, 10)
    chosen = parse("", ["fidelity", *words, "--world-model", "x"]).settings
    assert chosen.answer_tokens == 2000 and training.WARM_UP == 10


WON = [{"won": True, "messages": [said("system", "s")], "responses": ["x"]}]
MEASURE = "consistency alfworld --world-model"


@pytest.mark.parametrize("words, message", [
    (f"{MEASURE} none", "or add --shots 0 to prompt a model"),
    (f"{MEASURE} shop", "give a world model of alfworld"),
    (f"{MEASURE} none --shots 3", "--shots 3 needs --examples"),
    # An example of an evaluated task would be a part of the answer.
    ("fidelity alfworld --world-model none --trajectories won --shots 3 --examples won",
     "has 1 tasks that are ev"),
    ("train alfworld --trajectories won --width 100", "--width 100 is not a multiple of 32 up to"),
    ("train alfworld --trajectories won --limit 2", "1 episodes, --limit asks"),
    ("train alfworld --trajectories won --world-model shop", "train asks none; omit it"),
    ("train alfworld --trajectories won --model x", "name what it starts from with --start"),
    ("imitate alfworld --trajectories won --wins 2", "1 won episodes, --wins"),
])
def test_errors_are_one_sentence(tmp_path, games_root, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("won").write_text(json.dumps(WON))
    Path("shop").mkdir()
    Path("shop/train.json").write_text('{"env": "webshop", "context": 9}')
    monkeypatch.setattr(commands, "open_agent", None)  # before an agent is loaded
    small = ["--preset", "tiny", "--groups", "2", "--eval-tasks", "2", "--data", str(games_root)]
    with one_sentence(message):
        word2world.main([*words.split(), *small, "--out", "o"])


def test_the_commands_of_the_script_parse():
    script = (ROOT / "research" / "word2world" / "run.sh").read_text().replace("\\\n", "")
    commands = re.findall("^    word2world (.*)", script.replace("$out", "out"), re.M)
    jobs = [parse("", command.split()) for command in commands]
    assert {job.command for job in jobs} | {"imitate"} == set(COMMANDS)
