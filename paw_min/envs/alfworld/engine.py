"""An engine for ALFWorld games: TextWorld's own with caches, about 35 times faster per step.

ALFWorld games (`game.tw-pddl`) are played by TextWorld's `PddlEnv`, which drives the fast-downward
planner. Unmodified, it spends nearly all of its time parsing the same texts again. Here TextWorld's
classes play as they are, and five functions that they call are cached (`install`). All texts are
identical.

    CPU time for a small game          TextWorld 1.7.0    here
    load                               197 ms             71 ms, then 2 ms
    reset                              128 ms             3.4 ms
    step                               31 ms              0.9 ms

All environments of a process share the caches. Of its own, an environment has a copy of
fast-downward's library, which is never unloaded: create a FIXED number of environments and `load`
one game after another. Use one thread per process: the translator replaces `sys.stdout` while it
works, and shared symbols of a grammar are modified while a text is derived.

TextWorld passes the `{expressions}` of a game's grammar to `eval`, and commands to `str.format`.
Here `load` refuses a game that could run code or fill the memory with them, and rules that call
each other without an end are stopped. A hostile game can still be slow, which the timeout of the
pool's workers ends.
"""

import copy
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import fast_downward
from textworld.envs.pddl import PddlEnv, logic, textgen
from textworld.logic import Rule

from paw_min.base.files import parse_json

SUPPORTED_TEXTWORLD = "1.7.0"  # its private names are replaced here
GAME_CACHE = 160  # games of 0.3 MB (ALFRED's: 10 to 20); enough for a panel and a rollout
TEXT_CACHE = 4096  # parsed templates and queries; ALFWorld's grammar has about 80
# An expression of a grammar: names, attributes, texts, + and conditions. The published ones are
# like `r.name or r.id` and `o.indefinite + ' ' + o.name`. Without brackets, nothing is called.
# 500 characters keep the nesting far from the limits of Python's compiler.
HARMLESS = re.compile(r"[\w\s.+=!'\"]{1,500}", re.ASCII)
TEXT_LENGTH = 1_000_000  # characters and rules of a text; published games have a few thousand
NAME_LENGTH = 1000  # bytes; longer names overflow fast-downward's buffers of 1024


class GameError(ValueError):
    """A game file that cannot be played; the message has the file and the remedy."""


def make_env(request_infos):
    """A fast TextWorld environment in ALFWorld's own wrapper, without a game.

    request_infos: textworld.EnvInfos, what states contain besides feedback, won and score.
    Returns an object with load(path), reset() -> state, step(command) -> (state, score, done). A
    state is a dict with attribute access; score is 1 while the game is won, else 0. `load` raises
    GameError. The wrapper gives readable names, the same in every copy of a game. There is no step
    limit, and the game continues after `done`.
    """
    install()
    return alfworld_demangler()(_Env(request_infos), shuffle=False)


@lru_cache(maxsize=1)
def alfworld_demangler():
    """ALFWorld's wrapper class AlfredDemangler, imported without side effects.

    The first import of alfworld creates the folder $ALFWORLD_DATA (~/.cache/alfworld), which may
    not be possible, and is not needed. During the import, the variable names a folder that is
    there.
    """
    before = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = os.path.dirname(__file__)
    try:
        from alfworld.agents.environment import alfred_tw_env
    finally:
        del os.environ["ALFWORLD_DATA"]
        if before is not None:
            os.environ["ALFWORLD_DATA"] = before
    return alfred_tw_env.AlfredDemangler


def install():
    """Replace what is slow or unsafe in TextWorld's PDDL backend; further calls have no effect."""
    found = importlib.metadata.version("textworld")
    if found != SUPPORTED_TEXTWORLD:
        raise RuntimeError(
            f"paw_min/envs/alfworld/engine.py replaces private names of textworld "
            f"{SUPPORTED_TEXTWORLD} but found textworld {found}: "
            f"pip install 'textworld[pddl]=={SUPPORTED_TEXTWORLD}'."
        )
    # Five functions that TextWorld calls again and again; how often:
    fast_downward.pddl2sas = _pddl2sas  # PDDL to SAS: twice per state, of a load or a reset
    logic.GameLogic = _game_logic  # the grammar of a game: once per load
    textgen._parse_and_convert = _symbols  # a text such as "go to {r.name}": once per command
    Rule.parse_conjunctive_query = _query  # a condition such as {text|in(o, r)}: as the texts
    textgen.EvalSymbol.derive = _evaluate  # the expression of a text: as the texts

    textgen.deepcopy = _copy  # deep copies of all that a text refers to
    logic.ContextSensitiveGrammar = _Grammar  # a rule that calls itself never returns


# TextWorld's own functions, read before `install` replaces them.
_stock_pddl2sas = fast_downward.pddl2sas
_stock_parse = textgen._parse_and_convert
_stock_game_logic = logic.GameLogic
_query = lru_cache(maxsize=TEXT_CACHE)(Rule.parse_conjunctive_query)


def _pddl2sas(domain, problem, verbose=False, optimize=False):
    """Replacement for fast_downward.pddl2sas; no plan is requested, so none is translated for."""
    return _translate(domain, problem)


@lru_cache(maxsize=GAME_CACHE)
def _translate(domain, problem):
    """fast_downward.pddl2sas, with ValueErrors."""
    argv = sys.argv  # pddl2sas overwrites it
    try:
        task, sas = _stock_pddl2sas(domain, problem)
    except SystemExit as error:
        # The translator is a program: an error in PDDL exits, which would end this process.
        raise ValueError(error) from error
    finally:
        sys.argv = argv
    longest = max(map(len, sas.encode().splitlines()))
    if longest > NAME_LENGTH:
        raise ValueError(f"a name of {longest} bytes; fast-downward reads up to {NAME_LENGTH}")
    for entity in task.objects:
        # str.format reads the commands: {x:99999999} would fill the memory.
        if re.search("[{}]", entity.name + entity.type_name):
            raise ValueError(f"the name {entity.name:.80} or its type has a brace")
    return task, sas


@lru_cache(maxsize=TEXT_CACHE)
def _expression(text):
    """The compiled expression; ValueError for one that could do more than write a text."""
    # __ leads from any object to all of Python.
    if not HARMLESS.fullmatch(text) or "__" in text:
        raise ValueError(f"the grammar's expression {{{text:.80}}} is refused: only names, "
                         "attributes such as .name, texts, + and conditions are evaluated")
    return compile(text.strip(), "<grammar>", "eval")


@lru_cache(maxsize=TEXT_CACHE)
def _symbols(text, **options):
    """Replacement for textgen._parse_and_convert: checks all expressions of a text, and caches.

    The expressions are found by a pattern, not in the parsed text, since the parser ignores some
    parts: PddlState.replan passes whole templates to str.format.
    """
    for expression in re.findall(r"{([^{|}]*)", text):
        is_rule = expression.lstrip("\t").startswith("#")
        if not is_rule:
            _expression(expression)
    return _stock_parse(text, **options)


@lru_cache(maxsize=GAME_CACHE)
def _game_logic(domain, grammar):
    """Replacement for logic.GameLogic: also checks the templates of the actions, and caches.

    TextWorld parses the templates when they are first used. Here `load` does, so that it refuses a
    game with a forbidden expression as a whole. The arguments are those of `derive`, which thus
    finds the result in the cache.
    """
    game_logic = _stock_game_logic(domain, grammar)
    for action in game_logic.actions.values():
        for text in (action.template, action.feedback_rule):
            _symbols(text, rule_name="symbols", trace=False)
    return game_logic


def _copy(value):
    """Replacement for textgen.deepcopy, which copies symbols and dicts.

    One level is enough: the only attribute of a symbol that is set is `context`, always right
    before it is read, also in the cached symbols. The values of a dict are never modified.
    """
    if isinstance(value, list):
        return [copy.copy(symbol) for symbol in value]
    return copy.copy(value)


def _evaluate(self, context=None):
    """Replacement for textgen.EvalSymbol.derive: evaluates without builtins.

    TextWorld's passes the variables by writing to locals(), which has no effect in Python 3.13.
    """
    context = context or self.context
    value = eval(_expression(self.expression), {"__builtins__": {}}, context["variables"])
    return [textgen.TerminalSymbol(value)]


class _Grammar(textgen.ContextSensitiveGrammar):
    """A grammar whose texts end: ValueError for one of more than TEXT_LENGTH characters."""

    def derive(self, start, context=None):
        self.length = 0
        return super().derive(start, context or {})

    def replace(self, start):
        symbols = super().replace(start)
        self.length += 1 + sum(len(str(symbol)) for symbol in symbols)
        if self.length > TEXT_LENGTH:
            raise ValueError(f"the grammar's rule #{start}# leads to a text without an end")
        return symbols


class _Env(PddlEnv):
    """A PddlEnv with a small library, whose `load` reports errors."""

    _built = None  # the state of a game that was loaded and not played yet

    def __init__(self, infos=None):
        # PddlEnv copies the file at DOWNWARD_LIB_PATH and loads the copy. Point it at a small one.
        interface = fast_downward.interface
        path = interface.DOWNWARD_LIB_PATH
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(_library())
            interface.DOWNWARD_LIB_PATH = file.name
            try:
                super().__init__(infos)
            finally:
                interface.DOWNWARD_LIB_PATH = path

    def load(self, path):
        """PddlEnv.load, but with a GameError, after which another game can be loaded."""
        self._built = None
        try:
            # TextWorld would open the file in the locale's encoding.
            super().load(path if isinstance(path, dict) else parse_json(Path(path).read_bytes()))
            self._built = self._pddl_state
        except Exception as error:  # FailedParse, ParseError, KeyError, JSONDecodeError, ...
            self._game_data = None  # a reset must not start the previous game, or half of this one
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:250]
            raise GameError(
                f"{path} is not a playable game ({reason}); generate or download it again."
            ) from error

    def reset(self):
        """PddlEnv.reset, but the first one after `load` plays the state that `load` has built."""
        built, self._built = self._built, None
        if built is None:
            return super().reset()
        build = logic.PddlState
        logic.PddlState = lambda *args: built
        try:
            return super().reset()
        finally:
            logic.PddlState = build


@lru_cache(maxsize=1)
def _library():
    """The bytes of libdownward.so without its debug symbols: 1.3 MB of 34.

    The library's state is global, so each environment loads its own copy. A copy is deleted but
    stays mapped, and takes up space in $TMPDIR (or memory) until the process ends.
    """
    path = fast_downward.interface.DOWNWARD_LIB_PATH
    with tempfile.NamedTemporaryFile() as small:
        try:
            # binutils has it, which the compiler that built the library also needs.
            strip = ["strip", "--strip-debug", "-o", small.name, path]
            subprocess.run(strip, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return Path(path).read_bytes()  # All of it plays as well.
        return Path(small.name).read_bytes()
