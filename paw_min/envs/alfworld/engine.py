"""An engine for ALFWorld games, about 50 times faster per step, with identical texts.

ALFWorld games (`game.tw-pddl`) are played by TextWorld's `PddlEnv`, which drives the fast-downward
planner. Unmodified, a step of a small game takes 26 ms of CPU time and a reset 110 ms, nearly all
of it spent parsing the same texts again. Caching everything that cannot change reduces this to
0.5 ms and 2 ms (research/bench/results/engine.json):

    TextWorld 1.7.0                                             here
    translates PDDL to SAS twice per load, twice per reset      once per game text
    the second translation serves the planner only              made when a plan is requested
    parses and deep-copies the template of each command         once per text; shallow copies
    parses the grammar of a game at every load                  once per text
    builds all actions and commands again in every step         once per game
    copies 34 MB of libdownward.so for every environment        1 MB, without debug symbols

Operators, state and goal test are fast-downward's. `install` lists every name that it replaces.

Shared by all environments of a process: the replaced names, all caches, and thereby the parsed
grammar and the translation of a game that several of them play. Of its own, an environment has a
copy of fast-downward's library, which holds the state of the running game. The library is never
unloaded, so an environment that is dropped leaks its memory: create a FIXED number of environments
and `load` one game after another. Use one thread per process: the translator replaces `sys.stdout`
while it works, and shared symbols of a grammar are modified while a text is derived.

TextWorld passes the `{expressions}` of a game's grammar to `eval`. Here `load` refuses those that
could run code (`_expression`), and rules that call each other endlessly are stopped (`_replace`). A
hostile game can still be slow, which the pool's timeout ends.
"""

import ast
import copy
import importlib.metadata
import importlib.util
import os
import re
import struct
import sys
import tempfile
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

try:
    import fast_downward
    import textworld.envs
    from textworld.envs.pddl import PddlEnv, logic, textgen
    from textworld.generator.game import EntityInfo
    from textworld.logic import Action, Placeholder, Proposition, Rule, Type, Variable
except ImportError as error:
    raise ImportError(
        "ALFWorld games need TextWorld with its PDDL backend: "
        "pip install 'textworld[pddl]==1.7.0' 'alfworld==0.4.2'."
    ) from error

SUPPORTED_TEXTWORLD = "1.7.0"  # its private names are replaced here
GAME_CACHE = 160  # translated games of 0.2 MB (ALFRED's: 6 MB); enough for a panel and a rollout
TEXT_CACHE = 4096  # parsed templates and queries; ALFWorld's grammar has about 80
EXPRESSION_LENGTH = 500  # characters; keeps the nesting far from the limits of Python's compiler
EXPANSIONS = 10_000  # of the rules of a grammar for one text; published games need fewer than 100
NAME_LENGTH = 1000  # bytes; longer names overflow fast-downward's buffers of 1024

# What the expressions of a grammar may consist of; the published ones are like `r.name or r.id` and
# `o.indefinite + ' ' + o.name`. Nothing here calls, and only `+` makes a text longer.
ALLOWED = (
    ast.Expression, ast.Name, ast.Load, ast.Attribute, ast.Constant, ast.BinOp, ast.Add, ast.BoolOp,
    ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Compare, ast.Eq, ast.NotEq, ast.In, ast.NotIn,
    ast.IfExp,
)  # fmt: skip
NO_BUILTINS = {"__builtins__": {}}  # the globals of expressions


class GameError(ValueError):
    """A game file that cannot be played; the message has the file and the remedy."""


def install():
    """Replace TextWorld's PDDL backend in this process; further calls have no effect.

    Affects all new environments (`textworld.start`, `AlfredTWEnv`, `make_env`). Raises RuntimeError
    if TextWorld's version is not the supported one.
    """
    found = importlib.metadata.version("textworld")
    if found != SUPPORTED_TEXTWORLD:
        raise RuntimeError(
            f"paw_min/envs/alfworld/engine.py replaces private names of textworld "
            f"{SUPPORTED_TEXTWORLD} but found textworld {found}: "
            f"pip install 'textworld[pddl]=={SUPPORTED_TEXTWORLD}'."
        )

    # The environment. textworld.start creates it by this name; without the replacement, each
    # environment copies 34 MB, and each step builds all commands again.
    textworld.envs.PddlEnv = FastPddlEnv

    # The state. PddlEnv.load and PddlEnv.reset create it by this name; without the replacement,
    # each of them translates the game from PDDL to SAS twice.
    logic.PddlState = _State

    # Domain and grammar. PddlEnv.load creates them by this name; without the replacement, each
    # load parses the grammar, and a forbidden expression is found in the middle of an episode.
    logic.GameLogic = _game_logic

    # The parser of texts with {expressions} and #rules#. Without the replacement, each command of
    # each step parses its template, and expressions are not checked.
    textgen._parse_and_convert = _symbols

    # The copies that each derivation makes of symbols and variables. Without the replacement,
    # these are deep copies of everything that they refer to.
    textgen.deepcopy = _copy

    # The evaluation of expressions. Without the replacement, `eval` has all builtins, and fails in
    # Python 3.13.
    textgen.EvalSymbol.derive = _evaluate

    # The expansion of rules, counted. Without the two replacements, a rule that calls itself
    # never returns.
    textgen.ContextSensitiveGrammar.derive = _derive
    textgen.ContextSensitiveGrammar.replace = _replace

    # The parser of conditions in a grammar, such as {text|in(o, r)}. Without the replacement, each
    # description parses its conditions again.
    Rule.parse_conjunctive_query = _query


def make_env(request_infos):
    """A fast TextWorld environment in ALFWorld's own wrappers, without a game.

    request_infos: textworld.EnvInfos, what states contain besides feedback, won and score.
    Returns an object with load(path), reset() -> state, step(command) -> (state, score, done). A
    state is a dict with attribute access; score is 1 while the game is won, else 0. `load` raises
    GameError. The wrappers are those of AlfredTWEnv: AlfredDemangler (readable names, the same in
    every copy of a game) and AlfredInfos (state["extra.gamefile"] after reset). There is no step
    limit, and the game continues after `done`.
    """
    install()
    demangler, infos = alfworld_wrappers()
    return infos(demangler(FastPddlEnv(request_infos), shuffle=False))


@lru_cache(maxsize=1)
def alfworld_wrappers():
    """ALFWorld's two wrapper classes, imported without side effects.

    If $ALFWORLD_DATA is not set, the first import of alfworld sets it and creates
    ~/.cache/alfworld. Pointing it at the package's own folder during the import avoids both.
    """
    spec = importlib.util.find_spec("alfworld")  # without importing it
    if spec is None:
        raise ImportError("ALFWorld games need ALFWorld: pip install 'alfworld==0.4.2'.")
    was_unset = "ALFWORLD_DATA" not in os.environ
    os.environ.setdefault("ALFWORLD_DATA", os.path.dirname(spec.origin))
    try:
        from alfworld.agents.environment import alfred_tw_env
    finally:
        if was_unset:
            del os.environ["ALFWORLD_DATA"]
    return alfred_tw_env.AlfredDemangler, alfred_tw_env.AlfredInfos


@contextmanager
def _restored(owner, name):
    """Restore owner.name on exit."""
    value = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)


# TextWorld's own functions, which the replacements call. They are read here, before `install`
# replaces them: read later, they would be the replacements, which would then call themselves.
_stock_parse = textgen._parse_and_convert
_stock_game_logic = logic.GameLogic
_stock_derive = textgen.ContextSensitiveGrammar.derive
_stock_replace = textgen.ContextSensitiveGrammar.replace

_query = lru_cache(maxsize=TEXT_CACHE)(Rule.parse_conjunctive_query)


@lru_cache(maxsize=TEXT_CACHE)
def _expression(text):
    """The compiled expression; ValueError for one that a grammar may not have."""
    with suppress(SyntaxError, ValueError):  # ValueError: a null character
        if len(text) <= EXPRESSION_LENGTH:
            tree = ast.parse(text.strip(), mode="eval")
            if _is_harmless(tree):
                return compile(tree, "<grammar>", "eval")
    raise ValueError(
        f"the grammar's expression {{{text.strip():.80}}} is refused: only names, attributes such "
        "as .name, texts, + and conditions are evaluated"
    )


def _is_harmless(tree):
    """Whether an expression consists of the ALLOWED nodes, texts, and attributes of an entity.

    An allow-list: a list of what is dangerous would miss something. Attributes are restricted
    because others, such as __class__, lead from any object to all of Python. Numbers are not
    allowed, since they have no use here.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            return False
        if isinstance(node, ast.Attribute) and node.attr not in EntityInfo.__slots__:
            return False
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            return False
    return True


@lru_cache(maxsize=TEXT_CACHE)
def _symbols(text, **options):
    """Replacement for textgen._parse_and_convert: checks all expressions of a text, and caches.

    The expressions are found by a pattern, not in the parsed text, since the parser ignores some
    parts: PddlState.replan passes whole templates to str.format. All callers share the returned
    symbols; `derive` sets their context anew before it reads it.
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
    before it is read, and the values of a dict are never modified.
    """
    if isinstance(value, list):
        return [copy.copy(symbol) for symbol in value]
    return copy.copy(value)


def _evaluate(self, context=None):
    """Replacement for textgen.EvalSymbol.derive: evaluates without builtins.

    TextWorld's passes the variables by writing to locals(), which has no effect in Python 3.13.
    """
    context = context or self.context
    value = eval(_expression(self.expression), NO_BUILTINS, context["variables"])
    return [textgen.TerminalSymbol(value)]


def _derive(self, start, context={}):
    """Replacement for ContextSensitiveGrammar.derive: starts the count of `_replace`."""
    self.expansions = 0
    return _stock_derive(self, start, context)


def _replace(self, start):
    """Replacement for ContextSensitiveGrammar.replace: ValueError for rules that never end."""
    self.expansions += 1
    if self.expansions > EXPANSIONS:
        raise ValueError(f"the grammar's rule #{start}# leads to over {EXPANSIONS} expansions")
    return _stock_replace(self, start)


def _pddl2sas(*source, **options):
    """fast_downward.pddl2sas, a command-line program in a function: errors are ValueErrors."""
    with _restored(sys, "argv"):  # pddl2sas overwrites it
        try:
            return fast_downward.pddl2sas(*source, **options)
        except SystemExit as error:
            # Not an Exception: without this, an error in a game's PDDL would end the process.
            raise ValueError(error) from error


class _Game:
    """A translated game, shared by all environments that play it."""

    def __init__(self, domain, problem):
        task, sas = _pddl2sas(domain, problem)
        self.domain = domain
        self.problem = problem
        self.sas = sas.encode("utf-8")
        # A longer name overflows a buffer of fast-downward, which would crash the process.
        longest = max(map(len, self.sas.splitlines()))
        if longest > NAME_LENGTH:
            raise ValueError(f"a name of {longest} bytes; fast-downward reads up to {NAME_LENGTH}")
        self.sas_replan = None  # the planner's translation, made on demand
        self.init = task.init  # of the PDDL; the first _State converts it to `facts`
        self.facts = None
        self.types = [(t.name, t.supertype_names) for t in task.types]
        self.name2type = {o.name: o.type_name for o in task.objects}
        self.schemas = {a.name: a for a in task.actions}
        self.changing = {"#"}  # rules, and the predicates that actions change; see _new_action
        for action in task.actions:
            self.changing.update(effect.literal.predicate for effect in action.effects)
        self.seen = {}  # grammar and displayed names -> _Known


_game = lru_cache(maxsize=GAME_CACHE)(_Game)


class _Bound(NamedTuple):
    """An operator of fast-downward as TextWorld needs it."""

    operator: str  # name: a schema and its arguments
    action: Action
    command: str


class _Known(NamedTuple):
    """What environments have built so far for a game with the same displayed names."""

    actions: dict[int, _Bound]  # operator id -> its Action and command
    facts: dict[Proposition, Proposition]  # fact -> with displayed names


class _State(logic.PddlState):
    """A PddlState that uses the cached translation instead of making it twice."""

    def __init__(self, downward_lib, pddl_problem, logic_):
        # The attributes that PddlState.__init__ sets. It is not called, since it translates the
        # game, nor is State.__init__, since it refuses the logic of PDDL games.
        self._facts = logic.defaultdict(set)
        self._vars_by_type = logic.defaultdict(set)
        self._vars_by_name = {}
        self._var_counts = logic.Counter()
        self._logic = logic_
        self.downward_lib = downward_lib
        self.game = _game(logic_.domain, pddl_problem)
        self.name2type = self.game.name2type
        self._actions = self.game.schemas
        self._can_plan = False  # the library has the planner's translation
        for name, supertypes in self.game.types:
            with suppress(ValueError):  # already there: logic_ is shared with other states
                logic_.types.add(Type(name, supertypes))
        downward_lib.load_sas(self.game.sas)  # also sets fast-downward to the initial state
        if self.game.facts is None:
            # Here and not in _Game, since only a library can list the atoms of the initial state.
            self.game.facts = list(self._initial_facts(self.game.init))
            self.game.init = None  # not needed again
        self.add_facts(self.game.facts)

    def _initial_facts(self, init):
        """Yield the facts of (:init ...) without numbers, then those of fast-downward's state."""
        for item in init:
            if isinstance(item, fast_downward.translate.pddl.conditions.Atom):
                name = item.predicate
                arguments = item.args
            else:  # an assignment, such as (= (distance a b) 3)
                name = str(item.expression.value)
                arguments = item.fluent.args
            if name == "=" or name.isdigit():
                continue
            yield Proposition(name, [Variable(a, self.name2type[a]) for a in arguments])
        # fast-downward's state has the predicates that actions change; (:init ...) repeats some.
        atoms = (logic.Atom * self.downward_lib.get_state_size())()  # a ctypes array, filled next
        self.downward_lib.get_state(atoms)
        for atom in atoms:
            fact = atom.get_fact(self.name2type)
            if not fact.is_negation:
                yield fact

    def applicable_operators(self):
        """The fast_downward.Operators that are applicable now."""
        count = self.downward_lib.get_applicable_operators_count()
        operators = (fast_downward.Operator * count)()  # a ctypes array, filled next
        self.downward_lib.get_applicable_operators(operators)
        self._operators = {operator.id: operator for operator in operators}  # read by `apply`
        return self._operators.values()

    def replan(self, infos):
        """As PddlState.replan, except that the first call makes the planner's translation."""
        if not self._can_plan:
            if self.game.sas_replan is None:
                _, sas = _pddl2sas(self.game.domain, self.game.problem, optimize=True)
                self.game.sas_replan = sas.encode("utf-8")
            self.downward_lib.load_sas_replan(self.game.sas_replan)
            self._can_plan = True
        return super().replan(infos)


class FastPddlEnv(PddlEnv):
    """A PddlEnv whose `load` reports errors and whose `_gather_infos` builds each action once."""

    def __init__(self, infos=None):
        # PddlEnv copies the file at DOWNWARD_LIB_PATH and loads the copy. Point it at a small one.
        interface = fast_downward.interface
        with _restored(interface, "DOWNWARD_LIB_PATH"), tempfile.NamedTemporaryFile() as file:
            file.write(_library())
            file.flush()  # it is read by name, not through this object
            interface.DOWNWARD_LIB_PATH = file.name
            super().__init__(infos)

    def load(self, filename_or_data):
        """As PddlEnv.load, but raises GameError, after which another game can be loaded."""
        try:
            super().load(filename_or_data)
        except Exception as error:  # FailedParse, ParseError, KeyError, JSONDecodeError, ...
            self._game_data = None  # a reset must not start the previous game, or half of this one
            name = filename_or_data
            if isinstance(filename_or_data, dict):
                name = "the given dict"
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:250]
            raise GameError(
                f"{name} is not a playable game ({reason}); generate or download it again."
            ) from error

    def reset(self):
        # The Demangler renames objects after a load, in the same way in all copies of a game. A
        # command contains these names, so its cache is for one grammar and one set of names.
        names = sorted((key, info.name) for key, info in self._entity_infos.items())
        texts = (self._game_data["grammar"], *names)
        known = self._pddl_state.game.seen.setdefault(texts, _Known(actions={}, facts={}))
        self._actions = known.actions
        self._named_facts = known.facts
        return super().reset()

    def _gather_infos(self):
        """Fill in self.state: PddlEnv's method with the same keys in the same order.

        Instead of building all actions, it looks up those of the applicable operators.
        """
        state = self.state
        infos = self._entity_infos
        state["command_templates"] = sorted({a.template for a in self._logic.actions.values()})
        state["won"] = self._pddl_state.check_goal()
        state["lost"] = False
        state["_entity_infos"] = dict(infos)
        state["_facts"] = list(self._pddl_state.facts)
        if self.request_infos.facts:
            state["facts"] = list(map(self._get_human_readable_fact, state["_facts"]))
        state["last_action"] = None
        state["_last_action"] = self._last_action
        applicable = {}  # operator name -> _Bound; the first of equal names counts
        for operator in self._pddl_state.applicable_operators():
            bound = self._actions.get(operator.id)
            if bound is None:
                bound = self._new_action(operator)
            applicable.setdefault(bound.operator, bound)
        state["_valid_actions"] = [bound.action for bound in applicable.values()]
        state["_valid_commands"] = [bound.command for bound in applicable.values()]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))
        if self.request_infos.moves:
            state["moves"] = self._moves
        if self.request_infos.policy_commands:
            state["policy_commands"] = self._pddl_state.replan(infos)

    def _new_action(self, operator):
        """The _Bound of an operator that is not in self._actions; cached there if possible."""
        infos = self._entity_infos
        game = self._pddl_state.game
        schema, *arguments = operator.name.split()
        action = Action(name=schema, preconditions=[], postconditions=[])
        action.id = operator.id
        action.mapping = {
            Placeholder(p.name.strip("?"), p.type_name): Variable(argument, p.type_name)
            for p, argument in zip(game.schemas[schema].parameters, arguments)
        }
        action.feedback_rule = self._logic.actions[schema].feedback_rule
        template = self._logic.actions[schema].template
        # No facts, unlike PddlEnv, which lists them all for each command: expressions cannot name
        # them, and conditions query `state`.
        context = {
            "state": self._pddl_state,
            "facts": [],
            "variables": {ph.name: infos[var.name] for ph, var in action.mapping.items()},
            "mapping": action.mapping,
            "entity_infos": infos,
        }
        # TextWorld also passes the command to str.format, which changes braces only. Not done here:
        # a name such as {x:99999999} would fill the memory.
        command = self._logic.grammar.derive(template, context)
        action.command_template = command
        bound = _Bound(operator.name, action, command)
        # The same operator gives the same command in every state, unless the template has a rule
        # (#), whose conditions may depend on the state, or a predicate that actions change.
        words = re.findall(r"#|\w+", template.replace("not_", ""))
        if game.changing.isdisjoint(words):
            self._actions[operator.id] = bound
        return bound

    def _get_human_readable_fact(self, fact):
        if fact not in self._named_facts:
            self._named_facts[fact] = super()._get_human_readable_fact(fact)
        return self._named_facts[fact]


@lru_cache(maxsize=1)
def _library():
    """The bytes of libdownward.so without its debug symbols, which are 97 % of the file.

    The library's state is global, so each environment loads its own copy. A copy is deleted but
    stays mapped, and takes up space in $TMPDIR (or memory) until the process ends.

    The file is in the ELF format: a header, segments, and sections. The loader maps the segments,
    which the program headers list. Debug symbols are sections after the last segment, and the
    loader does not read them: what is cut off here is not missed.
    """
    with open(fast_downward.interface.DOWNWARD_LIB_PATH, "rb") as file:
        library = file.read()
    is_elf_64_little_endian = library[:6] == b"\x7fELF\x02\x01"
    if not is_elf_64_little_endian:  # another system: use all of it
        return library
    # In the header, from byte 32 on: where the program headers are (8 bytes), 14 other bytes, the
    # size of one, their number (2 bytes each).
    first, size, count = struct.unpack_from("<Q14xHH", library, 32)
    end = 0  # of the last segment
    for k in range(count):
        # In a program header: 8 other bytes, offset (8), 16 other bytes, length in the file (8).
        offset, length = struct.unpack_from("<8xQ16xQ", library, first + k * size)
        end = max(end, offset + length)
    return library[:end]
