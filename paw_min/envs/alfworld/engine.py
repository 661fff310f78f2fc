"""An engine for ALFWorld games, about 50 times faster per step, with identical texts.

ALFWorld games (`game.tw-pddl`) are played by TextWorld's `PddlEnv`, which drives the fast-downward
planner. Unmodified, a step of a small game takes 26 ms of CPU time and a reset 110 ms, nearly all
of it spent parsing the same texts again. Caching everything that cannot change reduces this to
0.5 ms and 2 ms (bench/engine.py):

    TextWorld 1.7.0                                             here
    translates PDDL to SAS twice per load, twice per reset      once per game text
    the second translation serves the planner only              made when a plan is requested
    parses and deep-copies the template of each command         once per text; shallow copies
    parses the grammar of a game at every load                  once per text
    builds all actions and commands again in every step         once per game
    copies 34 MB of libdownward.so for every environment        1 MB, without debug symbols

Operators, state and goal test are fast-downward's. `install` lists every name that it replaces.
Create a FIXED number of environments and `load` one game after another: fast-downward's library is
never unloaded, so an environment that is dropped leaks its memory. Use one thread per process: the
translator replaces `sys.stdout` while it works.

TextWorld passes the `{expressions}` of a game's grammar to `eval`. Here `load` refuses those that
could run code (`_expression`), and rules that call each other without end stop (`_replace`). A
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
GAME_CACHE = 160  # translated games of 0.2 MB (ALFRED's: 6 MB): of a panel and a rollout
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
    textworld.envs.PddlEnv = FastPddlEnv  # looked up by textworld.start
    logic.PddlState = _State  # looked up by PddlEnv.load and PddlEnv.reset
    logic.GameLogic = _game_logic  # looked up by PddlEnv.load
    textgen._parse_and_convert = _symbols
    textgen.deepcopy = _copy
    textgen.EvalSymbol.derive = _evaluate
    textgen.ContextSensitiveGrammar.derive = _derive
    textgen.ContextSensitiveGrammar.replace = _replace
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
    unset = "ALFWORLD_DATA" not in os.environ
    os.environ.setdefault("ALFWORLD_DATA", os.path.dirname(spec.origin))
    try:
        from alfworld.agents.environment import alfred_tw_env
    finally:
        if unset:
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


_query = lru_cache(maxsize=TEXT_CACHE)(Rule.parse_conjunctive_query)
_parse, _GameLogic = textgen._parse_and_convert, logic.GameLogic  # before `install`
_Grammar = textgen.ContextSensitiveGrammar
_grammar_derive, _grammar_replace = _Grammar.derive, _Grammar.replace


@lru_cache(maxsize=TEXT_CACHE)
def _expression(text):
    """The compiled expression; ValueError for one that a grammar may not have."""
    with suppress(SyntaxError, ValueError):  # ValueError: a null character
        tree = ast.parse(text.strip() if len(text) <= EXPRESSION_LENGTH else "", mode="eval")
        nodes = list(ast.walk(tree))
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
        if (all(isinstance(node, ALLOWED) for node in nodes)
                and attributes.issubset(EntityInfo.__slots__)
                and all(isinstance(constant, str) for constant in constants)):
            return compile(tree, "<grammar>", "eval")
    raise ValueError(
        f"the grammar's expression {{{text.strip():.80}}} is refused: only names, attributes such "
        "as .name, texts, + and conditions are evaluated"
    )


@lru_cache(maxsize=TEXT_CACHE)
def _symbols(text, **options):
    """Replacement for textgen._parse_and_convert, which checks all expressions of a text.

    Also those in a part that the parser ignores: PddlState.replan passes templates to str.format.
    """
    for expression in re.findall(r"{([^{|}]*)", text):
        if not expression.lstrip("\t").startswith("#"):  # a rule
            _expression(expression)
    return _parse(text, **options)


@lru_cache(maxsize=GAME_CACHE)
def _game_logic(domain, grammar):
    """Replacement for logic.GameLogic, which also parses the templates of the actions."""
    game_logic = _GameLogic(domain, grammar)
    for action in game_logic.actions.values():
        for text in (action.template, action.feedback_rule):
            _symbols(text, rule_name="symbols", trace=False)  # as `derive` calls it
    return game_logic


def _copy(value):
    """Replacement for textgen.deepcopy, which copies symbols and dicts.

    One level is enough: the only attribute of a symbol that is set is `context`, always right
    before it is read, and the values of a dict are never modified.
    """
    return [copy.copy(v) for v in value] if isinstance(value, list) else copy.copy(value)


def _evaluate(self, context=None):
    """Replacement for textgen.EvalSymbol.derive, which writes to locals(): fails in Python 3.13."""
    variables = (context or self.context)["variables"]
    return [textgen.TerminalSymbol(eval(_expression(self.expression), NO_BUILTINS, variables))]


def _derive(self, start, context={}):
    """Replacement for ContextSensitiveGrammar.derive, which starts the count of _replace."""
    self.expansions = 0
    return _grammar_derive(self, start, context)


def _replace(self, start):
    """Replacement for ContextSensitiveGrammar.replace; ValueError for rules that never end."""
    self.expansions += 1
    if self.expansions > EXPANSIONS:
        raise ValueError(f"the grammar's rule #{start}# leads to over {EXPANSIONS} expansions")
    return _grammar_replace(self, start)


def _pddl2sas(*source, **options):
    with _restored(sys, "argv"):  # pddl2sas overwrites it
        try:
            return fast_downward.pddl2sas(*source, **options)
        except SystemExit as error:  # fast-downward's way to report an error in the PDDL
            raise ValueError(error) from error


class _Game:
    """A translated game, shared by all environments that play it."""

    def __init__(self, *source):  # domain, problem
        task, sas = _pddl2sas(*source)
        self.source, self.sas = source, sas.encode("utf-8")
        if (longest := max(map(len, self.sas.splitlines()))) > NAME_LENGTH:
            raise ValueError(f"a name of {longest} bytes; fast-downward reads up to {NAME_LENGTH}")
        self.sas_replan = None  # the planner's translation, made on demand
        self.init, self.facts = task.init, None  # the first _State converts init to Propositions
        self.types = [(t.name, t.supertype_names) for t in task.types]
        self.name2type = {o.name: o.type_name for o in task.objects}
        self.schemas = {a.name: a for a in task.actions}
        self.changing = {"#"} | {e.literal.predicate for a in task.actions for e in a.effects}
        self.seen = {}  # grammar and displayed names -> (actions by operator id, named facts)


_game = lru_cache(maxsize=GAME_CACHE)(_Game)


class _State(logic.PddlState):
    """A PddlState that uses the cached translation instead of making it twice."""

    def __init__(self, downward_lib, pddl_problem, logic_):
        self._facts, self._vars_by_type = logic.defaultdict(set), logic.defaultdict(set)
        self._vars_by_name, self._var_counts = {}, logic.Counter()
        self._logic, self.downward_lib, self._can_plan = logic_, downward_lib, False
        self.game = game = _game(logic_.domain, pddl_problem)
        self.name2type, self._actions = game.name2type, game.schemas
        for name, supertypes in game.types:
            with suppress(ValueError):  # already there, from another state
                logic_.types.add(Type(name, supertypes))
        downward_lib.load_sas(game.sas)  # also sets fast-downward to the initial state
        if game.facts is None:
            game.facts, game.init = list(self._initial_facts(game.init)), None
        self.add_facts(game.facts)

    def _initial_facts(self, init):
        """Yield the facts of (:init ...) without numbers, then those of fast-downward's state."""
        for item in init:
            is_atom = isinstance(item, fast_downward.translate.pddl.conditions.Atom)
            name = item.predicate if is_atom else str(item.expression.value)
            if not (name == "=" or name.isdigit()):
                arguments = (item if is_atom else item.fluent).args
                yield Proposition(name, [Variable(a, self.name2type[a]) for a in arguments])
        atoms = (logic.Atom * self.downward_lib.get_state_size())()
        self.downward_lib.get_state(atoms)
        yield from (f for a in atoms if not (f := a.get_fact(self.name2type)).is_negation)

    def applicable_operators(self):
        """The fast_downward.Operators that are applicable now."""
        operators = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
        self.downward_lib.get_applicable_operators(operators)
        self._operators = {operator.id: operator for operator in operators}
        return self._operators.values()

    def replan(self, infos):
        """As PddlState.replan, except that the first call makes the planner's translation."""
        if not self._can_plan:
            if self.game.sas_replan is None:
                self.game.sas_replan = _pddl2sas(*self.game.source, optimize=True)[1].encode()
            self.downward_lib.load_sas_replan(self.game.sas_replan)
            self._can_plan = True
        return super().replan(infos)


class FastPddlEnv(PddlEnv):
    """A PddlEnv whose `load` reports errors and whose `_gather_infos` builds each action once."""

    def __init__(self, infos=None):
        interface = fast_downward.interface
        with _restored(interface, "DOWNWARD_LIB_PATH"), tempfile.NamedTemporaryFile() as file:
            file.write(_library())
            file.flush()
            interface.DOWNWARD_LIB_PATH = file.name
            super().__init__(infos)  # loads a copy of this file

    def load(self, filename_or_data):
        """As PddlEnv.load, but raises GameError, after which another game can be loaded."""
        try:
            super().load(filename_or_data)
        except Exception as error:  # FailedParse, ParseError, KeyError, JSONDecodeError, ...
            self._game_data = None  # a reset must not start the previous game, or half of this one
            name = "the given dict" if isinstance(filename_or_data, dict) else filename_or_data
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:250]
            raise GameError(
                f"{name} is not a playable game ({reason}); generate or download it again."
            ) from error

    def reset(self):
        # The Demangler renames objects after a load, in the same way in all copies of a game.
        names = sorted((key, info.name) for key, info in self._entity_infos.items())
        texts, seen = (self._game_data["grammar"], *names), self._pddl_state.game.seen
        self._actions, self._named_facts = seen.setdefault(texts, ({}, {}))
        return super().reset()

    def _gather_infos(self):  # as PddlEnv's, in the same order
        state, infos = self.state, self._entity_infos
        state["command_templates"] = sorted({a.template for a in self._logic.actions.values()})
        state["won"] = self._pddl_state.check_goal()
        state["lost"] = False
        state["_entity_infos"] = dict(infos)
        state["_facts"] = list(self._pddl_state.facts)
        if self.request_infos.facts:
            state["facts"] = list(map(self._get_human_readable_fact, state["_facts"]))
        state["last_action"] = None
        state["_last_action"] = self._last_action
        actions = {}  # operator name -> (Action, command); the first of equal names counts
        for operator in self._pddl_state.applicable_operators():
            name, *known = self._actions.get(operator.id) or self._new_action(operator)
            actions.setdefault(name, known)
        state["_valid_actions"] = [action for action, _ in actions.values()]
        state["_valid_commands"] = [command for _, command in actions.values()]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))
        if self.request_infos.moves:
            state["moves"] = self._moves
        if self.request_infos.policy_commands:
            state["policy_commands"] = self._pddl_state.replan(infos)

    def _new_action(self, operator):
        """(operator name, Action, command) of an operator that is not in self._actions."""
        infos, game = self._entity_infos, self._pddl_state.game
        schema, *arguments = operator.name.split()
        action = Action(name=schema, preconditions=[], postconditions=[])
        action.id = operator.id
        action.mapping = {
            Placeholder(p.name.strip("?"), p.type_name): Variable(argument, p.type_name)
            for p, argument in zip(game.schemas[schema].parameters, arguments)
        }
        action.feedback_rule = self._logic.actions[schema].feedback_rule
        template = self._logic.actions[schema].template
        context = {"state": self._pddl_state, "facts": [], "entity_infos": infos}
        context["variables"] = {ph.name: infos[var.name] for ph, var in action.mapping.items()}
        context["mapping"] = action.mapping
        # TextWorld passes the command to str.format, which changes braces only: {x:99999999}.
        command = action.command_template = self._logic.grammar.derive(template, context)
        new = operator.name, action, command
        # Cache it, unless the template has a rule (#) or a predicate that actions change.
        if game.changing.isdisjoint(re.findall(r"#|\w+", template.replace("not_", ""))):
            self._actions[operator.id] = new
        return new

    def _get_human_readable_fact(self, fact):
        if fact not in self._named_facts:
            self._named_facts[fact] = super()._get_human_readable_fact(fact)
        return self._named_facts[fact]


@lru_cache(maxsize=1)
def _library():
    """The bytes of libdownward.so without its debug symbols, which are 97 % of the file.

    The library's state is global, so each environment loads its own copy. A copy is deleted but
    stays mapped, and takes up space in $TMPDIR (or memory) until the process ends. Loading needs
    the segments only, and the symbols come after them in the file.
    """
    with open(fast_downward.interface.DOWNWARD_LIB_PATH, "rb") as file:
        library = file.read()
    if library[:6] != b"\x7fELF\x02\x01":  # not a 64-bit little-endian ELF file: use all of it
        return library
    first, size, count = struct.unpack_from("<Q14xHH", library, 32)  # of the program headers
    segments = (struct.unpack_from("<8xQ16xQ", library, first + k * size) for k in range(count))
    return library[: max(offset + length for offset, length in segments)]
