"""The fast engine plays like the original packages.

Another process plays generated games with unmodified TextWorld and ALFWorld, this one with
paw_min.envs.alfworld.engine; all steps must be equal. The other process runs this file as a script.
"""

import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from textworld import EnvInfos

from tests.helpers import ROOT

STEPS = 8  # random ones per game
INVALID = ["", "dance", "LOOK", "go to nowhere 1", "take {o} from {r}", "look\nlook", "  help  "]


def stock_env(request_infos):
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(PddlEnv(request_infos), shuffle=False)


def play(env, path, seed, steps, lines):
    """Load a game, take random steps, start again and win; append to `lines`."""

    def note(state, *result):
        facts = sorted(map(str, state.facts))  # TextWorld keeps them in sets, without an order
        lines.append([state.feedback, state.admissible_commands, facts, state.won, state.lost,
                      state.score, state.moves, state.last_command, sorted(state), *result])

    rng = random.Random(seed)
    env.load(path)
    state = env.reset()
    note(state)
    for step in range(steps):
        command = rng.choice(INVALID if step % 4 == 3 else state.admissible_commands)
        state, score, done = env.step(command)
        note(state, score, done)
    state = env.reset()
    for command in state["extra.walkthrough"]:
        state, score, done = env.step(command)
        note(state, score, done)
    assert state.won and done and score == 1, path


def transcript(make_env, paths):
    env = make_env(EnvInfos(won=True, admissible_commands=True, facts=True, moves=True,
                            extras=["walkthrough"]))
    lines = []
    for seed, path in enumerate([*paths, paths[0]]):  # ends with the first game, loaded again
        play(env, path, seed, STEPS, lines)
    return json.loads(json.dumps(lines))


@pytest.fixture(scope="session")
def paths(games_root):
    from paw_min.envs.alfworld import list_games

    return list_games(games_root, "valid_seen")  # one of each task type


@pytest.fixture(scope="session")
def engine():
    """Not imported above: the process of the original packages reads this file, too."""
    from paw_min.envs.alfworld import engine

    return engine


@pytest.fixture(scope="session")
def env(engine):
    return engine.make_env(EnvInfos(won=True, admissible_commands=True))


@pytest.fixture
def game(paths) -> dict:
    """The content of the first game, which a test may change."""
    return json.loads(Path(paths[0]).read_text())


def edited(game: dict, part: str, old: str, new: str, count: int = -1) -> dict:
    assert old in game[part]
    return game | {part: game[part].replace(old, new, count)}


@pytest.mark.slow
def test_plays_like_the_original_packages(engine, paths, game, tmp_path):
    """One of the games has an `examine` command that names what is in hand: it changes in play."""
    examine = 'template :: "examine {r} with [{o.name | holds(a:agent, o:object)}]"'
    tricky = tmp_path / "game.tw-pddl"
    tricky.write_text(json.dumps(edited(game, "grammar", 'template :: "examine {r}"', examine)))
    played = [paths[2], paths[5], str(tricky)]  # clean, two objects, a lamp
    out = tmp_path / "stock"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ALFWORLD_DATA": str(tmp_path)}
    subprocess.run([sys.executable, __file__, str(out), *played], check=True, env=environ,
                   stdout=subprocess.DEVNULL)
    stock = json.loads(out.read_text())
    fast = transcript(engine.make_env, played)
    assert len(stock) == len(fast) > 4 * 10
    for number, (theirs, ours) in enumerate(zip(stock, fast)):
        assert ours == theirs, f"entry {number} of the transcripts"
    commands = {c for line in stock if len(line) > 3 for c in line[1]}
    assert any(c.startswith("examine") and c.endswith(" with nothing") for c in commands)
    assert any(c.startswith("examine") and " with " in c and c[-1].isdigit() for c in commands)


def test_an_episode_builds_the_state_of_its_game_once(engine, env, paths, monkeypatch):
    """A state is most of what a reset costs. A second episode of a game needs another one."""
    built = []
    state = engine.logic.PddlState
    monkeypatch.setattr(
        engine.logic, "PddlState", lambda *args: built.append(args) or state(*args)
    )
    for path, resets, expected in ((paths[0], 1, 1), (paths[1], 2, 2), (paths[0], 3, 3)):
        built.clear()
        env.load(path)
        for _ in range(resets):
            begun = env.reset()
            admissible = begun.admissible_commands
            assert env.step(admissible[0])[0].admissible_commands
        assert len(built) == expected
    # The game before a broken one is not played in its place.
    env.load(paths[0])
    with pytest.raises(engine.GameError):
        env.load("nowhere")
    with pytest.raises(TypeError):
        env.reset()


def half(text: str) -> str:
    return text[: len(text) // 2]


def with_expression(expression: str):
    """In a rule of the grammar."""
    rule = "You open the {r.name}."
    return lambda game: edited(game, "grammar", rule, "You open the [{%s}]." % expression)


def renamed(old: str, new: str):
    """In all of the PDDL."""
    parts = ("pddl_domain", "pddl_problem")
    return lambda game: game | {part: re.sub(rf"\b{old}\b", new, game[part]) for part in parts}


REFUSED = "the grammar's expression {"
BROKEN = {
    "truncated json": (lambda game: json.dumps(game)[:20_000], "JSONDecodeError"),
    "no grammar": (lambda game: {k: v for k, v in game.items() if k != "grammar"}, "KeyError"),
    "half of its PDDL": (lambda game: game | {"pddl_problem": half(game["pddl_problem"])}, ""),
    # fast-downward answers with SystemExit
    "arity": (lambda game: edited(game, "pddl_problem", "(objectType ?o ", "(objectType "), ""),
    "bad grammar": (lambda game: edited(game, "grammar", '"""', '"', 1), ""),
    # What a grammar has no use for could run code, or fill the memory.
    "call": (with_expression("__import__('os').system('touch MARKER')"), REFUSED),
    "attribute": (with_expression("r.__class__"), REFUSED),
    "underscore": (with_expression("r.\uff3f_class__"), REFUSED),  # Python reads it as a plain one
    "number": (with_expression("9 ** 9 ** 9"), REFUSED),
    "width": (with_expression("r:9999999999"), REFUSED),  # for str.format
    "brackets": (with_expression("[r]"), REFUSED),
    "length": (with_expression("not " * 200 + "r"), REFUSED),
    # The library would abort the process; str.format would fill the memory.
    "long name": (renamed("agent1", "a" * 100_000), "a name of"),
    "format": (renamed("agent1", "{x:99999999999}"), "the name {x:99999999999} or its type has a"),
    "brace": (renamed("receptacle", "receptacle}"), "or its type has a brace"),
    "template": (lambda game: edited(game, "grammar", '"open {r}"', '"open {open()}"'), REFUSED),
    "ignored": (lambda game: edited(game, "grammar", '"open {r}"', '"open {r} ; {f()}"'), REFUSED),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_game_is_refused_and_has_no_effect(
    name, engine, env, game, paths, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    argv = ["train.py", "--steps", "3"]
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "stdout", stdout)
    env.load(paths[1])
    intro = env.reset().feedback
    damage, words = BROKEN[name]
    content = damage(game)
    path = tmp_path / "game.tw-pddl"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(engine.GameError, match="generate or download it again") as error:
        env.load(str(path))
    sentence = str(error.value)
    assert sentence.startswith(f"{path} is not a playable game (")
    assert words in sentence and "\n" not in sentence
    assert sys.argv is argv and sys.stdout is stdout
    assert [file.name for file in tmp_path.iterdir()] == ["game.tw-pddl"]  # no MARKER
    with pytest.raises(TypeError):  # neither the previous game nor half of the broken one
        env.reset()
    env.load(paths[1])
    assert env.reset().feedback == intro


def test_expressions_have_no_builtins(env, game):
    def commands(expression):
        rule = "go to [{r.name |"
        env.load(edited(game, "grammar", rule, f"go to {{{expression}}} [{{r.name |"))
        return env.reset().admissible_commands

    assert "go to yes fridge 1" in commands("'yes' if r.name != '' and not r.desc else 'no'")
    with pytest.raises(NameError, match="'print' is not defined"):
        commands("print")


@pytest.mark.parametrize("rhs", ["#intro##intro#", "#long#" * 2000])
def test_a_text_without_an_end_stops(env, game, rhs):
    long = '"long": [{"rhs": "' + 1000 * "a" + '"}], '
    start = re.search(r'"intro" *: *\[.*?"rhs" *: *"', game["grammar"], re.S).end()
    grammar = game["grammar"][:start] + rhs + game["grammar"][start:]
    env.load(game | {"grammar": grammar.replace("{", "{" + long, 1)})
    with pytest.raises(ValueError, match="rule #(intro|long)# leads to a text without an end"):
        env.reset()


def test_the_library_is_stripped_where_binutils_is(engine, monkeypatch):
    assert len(engine._library.__wrapped__()) < 2_000_000
    monkeypatch.setenv("PATH", "/nowhere")
    whole = Path(engine.fast_downward.interface.DOWNWARD_LIB_PATH).read_bytes()
    assert engine._library.__wrapped__() == whole


def test_environments_are_independent(engine, paths):
    """Two copies of a game and another game in turns give the texts of each alone.

    The caches are cleared in between.
    """
    def walk(path, seed):
        env = engine.make_env(EnvInfos(won=True, admissible_commands=True, facts=True))
        env.load(path)
        state = env.reset()
        rng = random.Random(seed)
        for _ in range(12):
            yield state.feedback, state.admissible_commands, sorted(map(str, state.facts))
            state, _, _ = env.step(rng.choice(state.admissible_commands))

    walks = [(paths[2], 1), (paths[2], 2), (paths[3], 3)]
    alone = [list(walk(*w)) for w in walks]
    assert alone[0] != alone[1]
    in_turns = []
    for entries in zip(*(walk(*w) for w in walks)):
        in_turns.append(entries)
        engine._translate.cache_clear()
    assert [list(entries) for entries in zip(*in_turns)] == alone


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(transcript(stock_env, sys.argv[2:])))
