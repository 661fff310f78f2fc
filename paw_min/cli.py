"""The command line: of the run scripts, of forks, and of commands that take the same flags."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paw_min.base.errors import INTERRUPTED, UserError, user_errors
from paw_min.base.files import expanded
from paw_min.base.flags import Parser, add_flags, flag
from paw_min.config import FREE_TO_CHANGE, METHOD_PRESETS, OF_PAW, Config, check
from paw_min.envs.benchmarks import BENCHMARKS, NAMES, presets_of

OF_ONE = {"human_goals": "webshop", "n_products": "webshop", "retriever": "search"}

# These presets of a size train on published data, with the settings of the paper.
PUBLISHED = ("paper", "24gb", "80gb")


def main(env: str, presets: dict[str, dict], doc: str, method=None, argv=None) -> None:
    """Parse the command line and train, evaluate or show the plan.

    method: a plain function, see train.train (default: paw); its name becomes a part of the run's.
    argv: default: the command line.
    """
    from paw_min.base import distributed
    from paw_min.running.plan import dry_run
    from paw_min.running.runs import interrupted
    from paw_min.train import paw, train

    if method:
        presets = {name: preset | {"method": method.__name__} for name, preset in presets.items()}
    with user_errors(distributed.with_rank):
        cfg, mode = parse_args(env, presets, doc, argv)
        if mode == "dry-run":
            dry_run(cfg)
        else:
            try:
                train(cfg, mode == "eval-only", method or paw)
            except KeyboardInterrupt:
                sys.exit(interrupted(cfg) if mode == "train" else INTERRUPTED)
        distributed.finish()


def fork(method: Callable, settings: dict, doc: str) -> None:
    """The command `python -m examples.NAME ENV [flags]`: ENV with another method.

    ENV is a benchmark, or a module with an environment of its own, such as examples.locks, that has
    PRESETS and a function run(presets, doc, method, argv). method: see train.train; its name is
    part of the names of its runs. settings: what it adds to every preset.
    """
    with user_errors():
        env, *argv = sys.argv[1:] or [""]
        first = f"one of {', '.join(NAMES)}, or a module such as examples.locks"
        if env in ("-h", "--help"):
            print(f"{doc}\nThe first word is {first}; with --help behind it, this lists its flags.")
            return
        # A path, such as ./examples/locks.py, is not the name of a module.
        if env not in NAMES and ("." not in env or env.startswith(".")):
            raise UserError(f"{env!r} is not a benchmark: the first word must be {first}; the "
                            "others are its flags.")
        # The name lets parse_args refuse what does not combine with a fork, before long work.
        own = settings | {"method": method.__name__}
        presets = {name: preset | own for name, preset in presets_of(env).items()}
        if env in NAMES:
            main(env, presets, doc, method, argv)
            return
        module = sys.modules[env]  # presets_of has imported it
        if not hasattr(module, "run"):
            raise UserError(f"{env} has no function run(presets, doc, method, argv): see "
                            "examples/locks.py.")
        module.run(presets, doc, method, argv)


def check_command(
    env: str, presets: dict[str, dict], doc: str, folder_of: Callable[[Config], Path | None],
    argv=None,
) -> Config:
    """Check the command line before minutes of preparing a folder -> Config.

    folder_of: from a Config to the folder that is prepared, or None if these settings need none.
        Where it is missing, model and data are checked unless they are in it; then --dry-run says
        so and exits. Where it is there, the run itself checks them.
    """
    from paw_min.running import session

    cfg, mode = parse_args(env, presets, doc, argv)
    folder = folder_of(cfg)
    if folder is None or folder.exists():
        return cfg
    session.check_machine(cfg)
    if cfg.data and not Path(cfg.data).is_relative_to(folder):
        session.find_tasks(cfg)
    if cfg.model and not Path(cfg.model).is_relative_to(folder):
        session.check_model(cfg, cfg.model)
    if mode == "dry-run":
        print(f"{folder} is not there: the first run makes it. Repeat --dry-run then.")
        sys.exit()
    return cfg


# ---- flags ----


def make_parser(
    env: str, presets: dict[str, dict], methods: dict[str, dict], doc: str, words: list[str]
) -> Parser:
    """The flags of a run script; of the settings, the parsed arguments have only those given.

    words: the command line. --help has the values of the presets in it, beside those of `paper`.
    """
    size, *_ = [*(word for word in words if word in presets), *presets]
    used = presets[size]
    for word in words:
        used = used | methods.get(word, {})
    parser = Parser(usage="%(prog)s [flags]", description=doc)
    parser.add_argument(
        "--preset", choices=[*presets, *methods], nargs="+", default=[*presets][:1],
        help=f"a size, a method, or both (default {[*presets][0]}); --help behind them shows their "
             "values",
    )
    parser.set_defaults(mode="train")
    for mode, text in (("eval-only", "evaluate --model or the checkpoint, and exit"),
                       ("dry-run", "check model, data and memory, print the plan, and exit")):
        parser.add_argument(
            f"--{mode}", dest="mode", action="store_const", const=mode, help=text,
        )
    skip = [key for key, only in OF_ONE.items() if only != env]
    add_flags(parser, Config, skip, used, paper=presets.get("paper", {}))
    return parser


def parse_args(env: str, presets: dict[str, dict], doc: str, argv=None) -> tuple[Config, str]:
    """Settings of a run script, and its mode: train, eval-only or dry-run."""
    first = next(iter(presets))
    # Presets from `fork` name their own method, so METHOD_PRESETS do not apply.
    methods = {} if "method" in presets[first] else METHOD_PRESETS
    words = sys.argv[1:] if argv is None else argv
    given = vars(make_parser(env, presets, methods, doc, words).parse_args(words))
    mode = given.pop("mode")
    chosen = given.pop("preset")

    sizes = [name for name in chosen if name in presets] or [first]
    losses = [name for name in chosen if name in methods] or ["paw"]
    if max(len(sizes), len(losses)) > 1:
        raise UserError(f"--preset {' '.join(chosen)}: choose one size, and at most one method.")
    (size,), (loss,) = sizes, losses
    base = Config(**{"env": env} | presets[size] | methods.get(loss, {}))
    if given.get("algo") == "ppo" and size in PUBLISHED:
        # PPO compares no episodes: each is of a task of its own. A.1: 128 tasks for ALFWorld and
        # WebShop. It has no PPO for search, whose 256 tasks stay.
        base = replace(base, group_size=1, groups=max(128, base.groups))

    cfg = replace(base, **given)
    check(cfg)
    benchmark = BENCHMARKS[cfg.env]
    for name, known in (("prompt", benchmark.prompts), ("eval_split", benchmark.splits)):
        value = getattr(cfg, name)
        if known and value not in known:
            raise UserError(f"{flag(name)} {value} is unknown: {cfg.env} has {', '.join(known)}.")
    if cfg.env == "alfworld" and size in PUBLISHED and not cfg.data:
        cfg.data = os.environ.get("ALFWORLD_DATA", "")  # where ALFWorld's own commands look, too
    # A command whose default is `paper` needs no data: it asks a server (prompting.py).
    if size in PUBLISHED and size != first and not cfg.data:
        raise UserError(f"--preset {size} is for published data: give their folder with --data, or "
                        f"use --preset {first} for small ones.")
    cfg.out = str(expanded(cfg.out))
    cfg.name = cfg.name or default_name(cfg, base, size, loss)
    return cfg, mode


def parse_config(env: str, presets: dict[str, dict], doc: str, argv: list[str]) -> Config:
    """parse_args for a command other than a run script; UserError for flags of run scripts only."""
    cfg, mode = parse_args(env, presets, doc, argv)
    if cfg.shard or mode != "train":
        name = "shard" if cfg.shard else mode
        raise UserError(f"--{name} is for the run scripts: omit it.")
    return cfg


def default_name(cfg: Config, base: Config, size: str, method: str) -> str:
    """ENV-MODEL-METHOD-CHANGES-SEED, for example alfworld-tiny-grpo-paw-rho=0.1-seed0.

    CHANGES are the settings that differ from the presets (base) and change the numbers of a run,
    except sources of data: a run folder refuses settings that are not its own anyway. Without PaW,
    its settings change none.
    """
    model = size  # the preset's stand-in is named by the preset
    if cfg.model != base.model or "/" in cfg.model:
        *parents, model = cfg.model.rstrip("/").split("/")
        if model.startswith("checkpoint-"):  # The name needs its run, too.
            model = "-".join([*parents[-1:], model])
    if size.endswith("gb"):
        model += f"-{size}"  # these presets share their models with `paper`
    if cfg.method != Config.method:
        method = cfg.method.replace("_", "-")
    # Where model and environment have the same name, it appears once.
    parts = [*dict.fromkeys([cfg.env, model]), cfg.algo]
    if cfg.paw:
        parts.append(method)
    elsewhere = {"model", "algo", "paw", "seed", "data", "retriever", *FREE_TO_CHANGE}
    if not cfg.paw:
        elsewhere |= OF_PAW
    parts += [f"{key}={value}".replace("_", "-") for key, value in vars(cfg).items()
              if key not in elsewhere and value != getattr(base, key)]
    return "-".join([*parts, f"seed{cfg.seed}"]).replace("/", "_")
