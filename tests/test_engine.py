"""The fast engine plays like the original packages: pytest tests/test_engine.py

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

ROOT = Path(__file__).resolve().parents[1]
STEPS = 8  # random ones per game
INVALID = ["", "dance", "LOOK", "go to nowhere 1", "take {o} from {r}", "look\nlook", "  help  "]


def stock_env(request_infos):
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
    from textworld.envs import PddlEnv

    return AlfredInfos(AlfredDemangler(PddlEnv(request_infos), shuffle=False))


def play(env, path, seed, steps, lines):
    """Load a game, take random steps, request a plan, start again and win; append to `lines`."""

    def note(state, *result):
        facts = sorted(map(str, state.facts))  # TextWorld keeps them in sets, without an order
        lines.append([state.feedback, state.admissible_commands, facts, state.won, state.lost,
                      state.score, state.moves, state.last_command, sorted(state), *result])

    rng = random.Random(seed)
    env.load(path)
    state = env.reset()
    note(state, state["extra.gamefile"])
    for step in range(steps):
        command = rng.choice(INVALID if step % 4 == 3 else state.admissible_commands)
        state, score, done = env.step(command)
        note(state, score, done)
    game = env.unwrapped
    lines.append(game._pddl_state.replan(game._entity_infos))  # from the middle of a game
    state = env.reset()
    for command in state["extra.walkthrough"]:
        state, score, done = env.step(command)
        note(state, score, done)
    assert state.won and done and score == 1, path


def transcript(make_env, paths):
    import textworld

    env = make_env(textworld.EnvInfos(won=True, admissible_commands=True, facts=True, moves=True,
                                      extras=["walkthrough", "gamefile"]))
    lines = []
    for seed, path in enumerate([*paths, paths[0]]):  # ends with the first game, loaded again
        play(env, path, seed, STEPS, lines)
    return json.loads(json.dumps(lines))


@pytest.fixture(scope="session")
def paths(games_root):
    from paw_min.envs.alfworld import list_games

    return list_games(games_root, "valid_seen")  # one of each task type


@pytest.fixture(scope="session")
def tricky(paths, tmp_path_factory):
    """A game whose `examine` command names the object in hand, so it changes during the game."""
    game = json.loads(Path(paths[0]).read_text())
    before = 'template :: "examine {r}"'
    after = 'template :: "examine {r} with [{o.name | holds(a:agent, o:object)}]"'
    assert before in game["grammar"]
    game["grammar"] = game["grammar"].replace(before, after)
    path = tmp_path_factory.mktemp("tricky") / "game.tw-pddl"
    path.write_text(json.dumps(game))
    return str(path)


@pytest.fixture(scope="session")
def env():
    import textworld

    from paw_min.envs.alfworld.engine import make_env

    return make_env(textworld.EnvInfos(won=True, admissible_commands=True))


@pytest.mark.slow
def test_plays_like_the_original_packages(paths, tricky, tmp_path):
    from paw_min.envs.alfworld.engine import make_env

    played = [paths[2], paths[5], tricky]  # clean, two objects, a lamp
    out = tmp_path / "stock"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ALFWORLD_DATA": str(tmp_path)}
    subprocess.run([sys.executable, __file__, str(out), *played], check=True, env=environ,
                   stdout=subprocess.DEVNULL)
    stock, fast = json.loads(out.read_text()), transcript(make_env, played)
    assert len(stock) == len(fast) > 4 * 10
    for number, (theirs, ours) in enumerate(zip(stock, fast)):
        assert ours == theirs, f"entry {number} of the transcripts"
    commands = {c for line in stock if len(line) > 3 for c in line[1]}
    assert any(c.startswith("examine") and c.endswith(" with nothing") for c in commands)
    assert any(c.startswith("examine") and " with " in c and c[-1].isdigit() for c in commands)


def test_has_no_side_effects_on_the_process(paths, tmp_path):
    """On sys.argv, stdout, $ALFWORLD_DATA or the home folder; the original packages change all."""
    code = """if True:
        import os, sys
        import textworld
        from paw_min.envs.alfworld.engine import make_env
        stdout = sys.stdout
        env = make_env(textworld.EnvInfos(won=True))
        env.load(sys.argv[1])
        env.reset()
        assert sys.argv[1:] == [env._gamefile], sys.argv
        assert sys.stdout is stdout
        assert "ALFWORLD_DATA" not in os.environ
        assert not os.listdir(os.environ["HOME"]), os.listdir(os.environ["HOME"])
    """
    environ = {k: v for k, v in os.environ.items() if k != "ALFWORLD_DATA"}
    environ |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, paths[0]], check=True, env=environ)


@pytest.fixture
def game(paths) -> dict:
    """The content of the first game, which a test may change."""
    return json.loads(Path(paths[0]).read_text())


@pytest.fixture
def refusal(env, tmp_path):
    """A function: the sentence with which a game is refused, without the name of its file."""
    from paw_min.envs.alfworld.engine import GameError

    path = tmp_path / "game.tw-pddl"

    def load(game: dict | str) -> str:
        path.write_text(game if isinstance(game, str) else json.dumps(game))
        with pytest.raises(GameError) as error:
            env.load(str(path))
        start, end = f"{path} is not a playable game (", "generate or download it again."
        sentence = str(error.value)
        assert sentence.startswith(start) and sentence.endswith(end) and "\n" not in sentence
        return sentence.removeprefix(start)

    return load


def edited(game: dict, part: str, old: str, new: str, count: int = -1) -> dict:
    assert old in game[part]
    return game | {part: game[part].replace(old, new, count)}


def half(text: str) -> str:
    return text[: len(text) // 2]


BROKEN = {
    "truncated json": lambda game: json.dumps(game)[:20_000],
    "no grammar": lambda game: {k: v for k, v in game.items() if k != "grammar"},
    "truncated PDDL": lambda game: game | {"pddl_problem": half(game["pddl_problem"])},
    # fast-downward answers with SystemExit
    "wrong arity": lambda game: edited(game, "pddl_problem", "(objectType ?o ", "(objectType "),
    "bad grammar": lambda game: edited(game, "grammar", '"""', '"', 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_game_is_reported_and_has_no_effect(name, env, game, refusal, paths, monkeypatch):
    argv, stdout = ["train.py", "--steps", "3"], io.StringIO()
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "stdout", stdout)
    env.load(paths[1])
    intro = env.reset().feedback
    refusal(BROKEN[name](game))
    assert sys.argv is argv and sys.stdout is stdout
    with pytest.raises(TypeError):  # neither the previous game nor half of the broken one
        env.reset()
    env.load(paths[1])
    assert env.reset().feedback == intro


# Nothing may run, and nothing may take memory or time; {marker} is a file that must not appear.
ATTACKS = [
    "__import__('os').system('touch {marker}')",
    "open('{marker}', 'w')",
    "().__class__.__bases__",
    "r.\uff3f_class__",  # Python reads a full-width underscore as an underscore
    "r.name.upper()",
    "'%999999999d' % r",
    "f'x'",
    "lambda: r",
    "9 ** 9 ** 9",
    "r.name" + " + r.name" * 100,
    "not " * 100_000 + "r",
    "r:9999999999",  # for str.format
    "",
]
PLACES = {
    "a rule": ("You open the {r.name}.", "You open the [{%s}]."),
    "a template": ('"open {r}"', '"open {%s}"'),
    "an ignored part": ('"open {r}"', '"open {r} ; {%s}"'),
}


@pytest.mark.parametrize(
    "place, attack",
    [("a rule", attack) for attack in ATTACKS] + [(place, ATTACKS[0]) for place in PLACES][1:],
    ids=lambda text: text[:20],
)
def test_a_grammar_cannot_run_code(place, attack, game, refusal, tmp_path):
    marker = tmp_path / "marker"
    before, after = PLACES[place]
    attack = attack.replace("{marker}", str(marker))
    sentence = refusal(edited(game, "grammar", before, after % attack))
    expression = " ".join(attack[:80].split())
    assert sentence.startswith(f"ValueError: the grammar's expression {{{expression}")
    assert not marker.exists()


def test_expressions_have_neither_builtins_nor_braces(env, game):
    from paw_min.envs.alfworld.engine import GameError

    def commands(expression):
        after = f"go to {{{expression}}} [{{r.name |"
        env.load(edited(game, "grammar", "go to [{r.name |", after))
        return env.reset().admissible_commands

    assert "go to yes fridge 1" in commands("'yes' if r.name != '' and not r.desc else 'no'")
    with pytest.raises(NameError, match="'print' is not defined"):
        commands("print")
    with pytest.raises(GameError, match="is refused"):  # str.format would fill 100 GB
        commands(r"'\x7b' + r.id + ':99999999999\x7d'")


@pytest.mark.parametrize(
    "rhs, reason",
    [
        ("#intro##intro#", "rule #intro# leads to over 10000 expansions"),
        ("#long#" * 2000, "writes a text of over 1000000 characters"),
    ],
)
def test_texts_without_end_stop(env, game, rhs, reason):
    long = '"long": [{"rhs": "' + 1000 * "a" + '"}], '
    start = re.search(r'"intro" *: *\[.*?"rhs" *: *"', game["grammar"], re.S)
    grammar = game["grammar"][: start.end()] + rhs + game["grammar"][start.end() :]
    env.load({**game, "grammar": grammar.replace("{", "{" + long, 1)})
    with pytest.raises(ValueError, match=reason):
        env.reset()


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("agent1", "a" * 100_000, "a name of"),  # the library would abort the process
        ("agent1", "{x:99999999999}", "the name {x:99999999999} or its type has a brace"),
        ("receptacle", "receptacle}", "the name .* or its type has a brace"),
    ],
    ids=lambda text: text[:20],
)
def test_names_that_cannot_be_handled_are_refused(old, new, reason, game, refusal):
    for part in ("pddl_domain", "pddl_problem"):
        game[part] = re.sub(rf"\b{old}\b", new, game[part])
    assert re.search(reason, refusal(game))


def test_another_version_of_textworld_is_refused(monkeypatch):
    from paw_min.envs.alfworld import engine

    monkeypatch.setattr(engine.importlib.metadata, "version", lambda package: "1.6.2")
    for call in (engine.install, lambda: engine.make_env(None)):
        with pytest.raises(RuntimeError, match="found textworld 1.6.2: pip install 'textworld"):
            call()


def test_environments_are_independent(paths):
    """Two copies of a game and another game in turns give the texts of each alone.

    The caches are cleared in between.
    """
    import textworld

    from paw_min.envs.alfworld import engine

    def walk(path, seed):
        env = engine.make_env(textworld.EnvInfos(won=True, admissible_commands=True, facts=True))
        env.load(path)
        state, rng = env.reset(), random.Random(seed)
        for _ in range(12):
            facts = sorted(map(str, state.facts))
            yield state.feedback, state.admissible_commands, facts
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
