"""Entry point of the run scripts."""

import sys
from collections.abc import Callable
from pathlib import Path

from paw_min.base.errors import UserError, user_errors
from paw_min.envs.benchmarks import NAMES, presets_of


def main(env: str, presets: dict[str, dict], doc: str, method=None, argv=None) -> None:
    """Parse the command line and train, evaluate or show the plan.

    method: a plain function, see train.train (default: paw); its name becomes a part of the run's.
    argv: default: the command line.
    """
    from paw_min.base import distributed
    from paw_min.config import parse_args
    from paw_min.running.plan import dry_run
    from paw_min.train import paw, train

    if method:
        presets = {name: preset | {"method": method.__name__} for name, preset in presets.items()}
    with user_errors(distributed.with_rank):
        cfg, mode = parse_args(env, presets, doc, argv)
        if mode == "dry-run":
            dry_run(cfg)
        else:
            train(cfg, mode == "eval-only", method or paw)
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


def checked(
    env: str, presets: dict[str, dict], doc: str, folder_of: Callable[..., Path | None], argv=None
):
    """Check the command line before minutes of preparing a folder -> Config.

    folder_of: from a Config to the folder that is prepared, or None if these settings need none.
        Where it is missing, model and data are checked unless they are in it; then --dry-run says
        so and exits. Where it is there, the run itself checks them.
    """
    from paw_min.config import parse_args
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
