"""Fixtures of all tests (small data of the benchmarks, small runs); torch gets one thread.

With the environment variable CI=true, as CI sets it, a skipped test fails the session. Tests that
need a browser are left out where there is none.
"""

import gc
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from paw_min import train, update
from paw_min.config import Config
from paw_min.running import plot
from paw_min.toy import GAMES
from tests.helpers import BROWSER, SMALL, make_policy

SIZES = {"train": 12, "valid_seen": 6, "valid_unseen": 6}
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM's CPU build has no sleep mode, which a GPU needs
torch.set_num_threads(1)  # two threads on a busy machine are far slower than one
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
# Some tests parse lists nested beyond the recursion limit. Should the collector run at that
# depth, the finalizer of an earlier test's socket fails there, and pytest fails the test for it.
gc.set_threshold(50_000, *gc.get_threshold()[1:])


@pytest.fixture(scope="session", autouse=True)
def empty_pictures():
    """A run would draw its curves for 2 s of CPU time. test_train.py has real ones."""

    def touch(folders: list[Path]) -> None:
        for name in plot.FIGURES:
            (folders[0] / name).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "draw", touch)
        yield


@pytest.fixture(scope="session")
def games_root(tmp_path_factory):
    """A data folder with the first games of each split. Shared: copy what you want to change."""
    root = tmp_path_factory.mktemp("alfworld")
    with tarfile.open(GAMES) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # as toy.unpack_games
        for file in archive:
            _, split, _, trial, _ = file.name.split("/")
            if int(trial.removeprefix("trial_T")) < SIZES[split]:
                archive.extract(file, root)
    return root


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("model")
    make_policy("qwen3").save(folder)
    return str(folder)


@pytest.fixture
def config(tmp_path, model, games_root):
    """A function from settings to the Config of a small ALFWorld run in tmp_path / "r"."""

    def make(**settings) -> Config:
        base = dict(data=str(games_root), model=model, out=str(tmp_path))
        return Config(**base | SMALL | settings)

    return make


@pytest.fixture(scope="session")
def one_update(tmp_path_factory, model, games_root) -> Path:
    """The folder of a small ALFWorld run after one update. Shared: `finished` is a copy."""
    out = str(tmp_path_factory.mktemp("one"))
    train.train(Config(data=str(games_root), model=model, out=out, **SMALL | {"updates": 1}))
    return Path(out) / "r"


@pytest.fixture
def finished(one_update, tmp_path) -> Path:
    """A copy of that run in tmp_path / "r", which config() resumes."""
    return Path(shutil.copytree(one_update, tmp_path / "r"))


@pytest.fixture
def without_gradient_clipping(monkeypatch):
    """A step of SGD is then the gradient, whatever its norm."""
    monkeypatch.setattr(update, "GRAD_CLIP", 1e9)


def pytest_collection_modifyitems(config, items):
    left_out = [] if BROWSER else [item for item in items if item.get_closest_marker("browser")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter):
    if not BROWSER:
        terminalreporter.write_line("no chromium: the test of the page in a browser is left out")


def pytest_sessionfinish(session, exitstatus):
    # Other codes say already that something failed. -rs, in pyproject.toml, names what was skipped.
    skipped = session.config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped")
    if os.environ.get("CI") == "true" and exitstatus == pytest.ExitCode.OK and skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
